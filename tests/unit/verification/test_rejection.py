"""The classical rule: the exact law of what it emits, by enumeration, and the sampler against that law."""

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from tierspec.errors import SettingError
from tierspec.verification.rejection import acceptance_probabilities, rejection_sample, residual

Prefix = tuple[int, ...]


class ToyModel:
    """Next-token distributions `[V]` drawn at random for each prefix; some tokens impossible."""

    def __init__(self, vocabulary: int, seed: int, sparse: bool) -> None:
        self.vocabulary, self.seed, self.sparse = vocabulary, seed, sparse

    def law(self, prefix: Prefix) -> torch.Tensor:
        number = sum((token + 1) * (self.vocabulary + 1) ** place for place, token in enumerate(prefix))
        generator = torch.Generator().manual_seed(self.seed * 100_003 + number)
        weights = torch.rand(self.vocabulary, dtype=torch.float64, generator=generator)
        if self.sparse:
            weights[torch.randint(self.vocabulary, (), generator=generator)] = 0.0
        return weights / weights.sum()

    def rows(self, prefixes: list[Prefix]) -> torch.Tensor:
        return torch.stack([self.law(prefix) for prefix in prefixes])


def emitted_law(drafter: ToyModel, target: ToyModel, depth: int) -> Counter:
    """P(accepted tokens + the next one), summed over all drafts and acceptance events."""
    law: Counter = Counter()
    for draft in product(range(target.vocabulary), repeat=depth):
        prefixes = [draft[:k] for k in range(depth + 1)]
        q, p = drafter.rows(prefixes[:-1]), target.rows(prefixes)
        ids = torch.tensor(draft)
        reached = float(q.gather(1, ids[:, None]).prod())
        if reached == 0.0:
            continue
        keep = acceptance_probabilities(ids, q, p[:-1]).tolist()
        replacements = residual(q, p[:-1]).tolist()
        for k in range(depth):
            for token, probability in enumerate(replacements[k]):
                law[(*draft[:k], token)] += reached * (1.0 - keep[k]) * probability
            reached *= keep[k]
        for token, probability in enumerate(p[-1].tolist()):
            law[(*draft, token)] += reached * probability
    return law


def continued(law: Counter, target: ToyModel, length: int) -> Counter:
    """The law after plain decoding has brought every sequence to one length."""
    full: Counter = Counter()
    for prefix, probability in law.items():
        for rest in product(range(target.vocabulary), repeat=length - len(prefix)):
            chance = probability
            for k in range(len(rest)):
                chance *= float(target.law(prefix + rest[:k])[rest[k]])
            full[prefix + rest] += chance
    return full


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([2, 3]),
    depth=st.integers(1, 2),
    sparse=st.tuples(st.booleans(), st.booleans()),
)
def test_the_output_has_exactly_the_targets_law(seed, vocabulary, depth, sparse):
    drafter, target = ToyModel(vocabulary, seed, sparse[0]), ToyModel(vocabulary, seed + 1, sparse[1])
    actual = continued(emitted_law(drafter, target, depth), target, depth + 1)
    expected = continued(Counter({(): 1.0}), target, depth + 1)
    for sequence, probability in expected.items():
        assert actual[sequence] == pytest.approx(probability, abs=1e-12)


def test_the_sampler_follows_the_enumerated_law():
    drafter, target = ToyModel(3, 7, False), ToyModel(3, 8, True)
    generator = torch.Generator().manual_seed(0)
    runs, observed = 10_000, Counter()
    for _ in range(runs):
        draft: Prefix = ()
        for _ in range(2):
            draft += (int(torch.multinomial(drafter.law(draft), 1, generator=generator)),)
        prefixes = [draft[:k] for k in range(3)]
        accepted, token = rejection_sample(
            torch.tensor(draft), drafter.rows(prefixes[:-1]), target.rows(prefixes), generator
        )
        observed[(*draft[:accepted], token)] += 1
    law = {sequence: chance for sequence, chance in emitted_law(drafter, target, 2).items() if chance > 1e-15}
    assert set(observed) <= set(law)
    statistic = sum((observed[sequence] - runs * chance) ** 2 / (runs * chance) for sequence, chance in law.items())
    assert chi2.sf(statistic, len(law) - 1) > 1e-3


def test_equal_distributions_accept_everything():
    probabilities = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.0, 1.0]])
    outcome = rejection_sample(torch.tensor([1, 0]), probabilities[:2], probabilities, torch.Generator().manual_seed(1))
    assert outcome == (2, 1)


def test_disjoint_distributions_reject_and_draw_from_the_target():
    draft, target = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert rejection_sample(torch.tensor([0]), draft, target) == (0, 1)


def test_an_empty_draft_draws_from_the_target():
    empty = torch.empty(0, dtype=torch.int64)
    assert rejection_sample(empty, torch.empty(0, 2), torch.tensor([[0.0, 1.0]])) == (0, 1)


def test_a_residual_without_mass_is_the_target():
    law = torch.tensor([0.3, 0.7], dtype=torch.float64)
    assert torch.equal(residual(law, law), law)


def test_one_generator_state_gives_one_outcome():
    draft, target = torch.full((4, 5), 0.2), torch.rand(5, 5, generator=torch.Generator().manual_seed(3)).softmax(-1)
    ids = torch.tensor([0, 1, 2, 3])
    outcomes = {rejection_sample(ids, draft, target, torch.Generator().manual_seed(9)) for _ in range(5)}
    assert len(outcomes) == 1


@pytest.mark.parametrize("shapes", [(2, (1, 3), (3, 3)), (2, (2, 3), (2, 3)), (2, (2, 4), (3, 3))])
def test_shapes_that_disagree_are_refused(shapes):
    depth, draft, target = shapes
    with pytest.raises(SettingError, match="draft_probs"):
        rejection_sample(torch.zeros(depth, dtype=torch.int64), torch.ones(draft), torch.ones(target))
