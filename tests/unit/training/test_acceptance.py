import pytest
import torch

from tierspec.config import ObjectiveSettings
from tierspec.drafters import DraftVocabulary
from tierspec.errors import SettingError
from tierspec.sampling import RowSampling, target_choice
from tierspec.training.acceptance import AcceptanceRule, ScoredRows, acceptance_rule
from tierspec.training.data import Sample

DRAWS = 200_000
CPU = torch.device("cpu")
VOCABULARY = DraftVocabulary(torch.tensor([1, 4, 5, 9]), 12)


def rule_of(verification: str, seed: int = 5) -> AcceptanceRule:
    settings = ObjectiveSettings(verification=verification)  # type: ignore[arg-type]
    return acceptance_rule(settings, [], torch.zeros(0, 1, 1), seed, VOCABULARY, CPU)


def rows(draft: list[float], target: list[float], covered: float) -> ScoredRows:
    q, p = torch.tensor(draft), torch.tensor(target)
    return ScoredRows(
        draft_columns=q.argmax().expand(DRAWS),
        draft=q.expand(DRAWS, -1),
        target=p.expand(DRAWS, -1),
        covered=torch.tensor(covered).expand(DRAWS),
        top_columns=p.argmax().expand(DRAWS),
        label_columns=p.argmax().expand(DRAWS),
        first=0,
    )


@pytest.mark.parametrize("covered", [1.0, 0.7])
def test_rejection_accepts_as_often_as_the_two_laws_overlap(covered: float) -> None:
    draft, target = [0.6, 0.3, 0.1, 0.0], [0.2, 0.3, 0.0, 0.5]
    rule = rule_of("rejection")
    overlap = sum(min(q, covered * p) for q, p in zip(draft, target, strict=True))
    assert rule(rows(draft, target, covered)).float().mean().item() == pytest.approx(overlap, abs=0.005)


def test_equal_laws_are_always_accepted_and_disjoint_ones_never() -> None:
    rule = rule_of("rejection")
    assert rule(rows([0.5, 0.5], [0.5, 0.5], 1.0)).all()
    assert not rule(rows([1.0, 0.0], [0.0, 1.0], 1.0)).any()


def test_draws_follow_from_the_seed() -> None:
    case = rows([0.5, 0.5], [0.9, 0.1], 1.0)
    first, same, other = (rule_of("rejection", seed)(case) for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_greedy_compares_the_likeliest_tokens() -> None:
    rule = rule_of("greedy")
    assert rule(rows([0.6, 0.4], [0.9, 0.1], 1.0)).all()
    assert not rule(rows([0.4, 0.6], [0.9, 0.1], 1.0)).any()


@pytest.mark.parametrize("sampling", [RowSampling(0.9, 0, 1.0, 7), RowSampling(1.3, 3, 0.8, -2), RowSampling()])
def test_the_keyed_rule_accepts_what_serving_would(sampling: RowSampling) -> None:
    g = torch.Generator().manual_seed(1)
    blocks, depth = 40, 3
    target_logits = torch.randn(blocks * depth, VOCABULARY.vocab_size, generator=g)
    draft_logits = target_logits[:, VOCABULARY.target_ids] + 0.3 * torch.randn(blocks * depth, 4, generator=g)
    positions = 10 + torch.arange(blocks)[:, None] + torch.arange(depth)
    key = (torch.full((blocks * depth,), value) for value in (sampling.temperature, sampling.top_k, sampling.top_p))
    key = (*key, torch.full((blocks * depth,), sampling.seed), torch.zeros(blocks * depth, dtype=torch.int64))
    written = target_choice(target_logits, *key, positions.flatten())
    drafted = target_choice(draft_logits, *key, positions.flatten(), ids=VOCABULARY.target_ids)

    sample = Sample("a", (1,), (1, 1), sampling=sampling)
    settings = ObjectiveSettings(verification="keyed")
    rule = acceptance_rule(settings, [sample], positions[None], 0, VOCABULARY, CPU)
    accepted = []
    for part in torch.arange(blocks * depth).split(7 * depth):
        q = draft_logits[part].softmax(-1)
        columns = VOCABULARY.columns[written[part]]
        accepted.append(rule(ScoredRows(q.argmax(-1), q, q, q[:, 0], columns, columns, int(part[0]))))
    assert torch.equal(torch.cat(accepted), drafted == written)
    assert 0.2 < torch.cat(accepted).float().mean().item() < 0.98


def test_the_keyed_rule_needs_to_know_how_a_rollout_was_sampled() -> None:
    settings = ObjectiveSettings(verification="keyed")
    with pytest.raises(SettingError, match=r"^training\.objective\.verification is keyed, but the rollout a does not"):
        acceptance_rule(settings, [Sample("a", (1,), (1, 1))], torch.zeros(1, 1, 1), 0, VOCABULARY, CPU)
