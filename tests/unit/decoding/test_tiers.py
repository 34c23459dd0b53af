"""The tiers' side of the protocol, on a random decoder."""

from __future__ import annotations

import pytest
import torch

from tests.support.toy_tiers import hash_of
from tierspec.decoding import (
    DrafterTier,
    OutOfPages,
    Prefill,
    Prefilled,
    Propose,
    Proposed,
    TierMessage,
    UnknownPrefix,
    Verified,
    VerifierTier,
    Verify,
)
from tierspec.models import CacheFull
from tierspec.sampling import RowSampling

GREEDY = RowSampling()
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def verify(base, token_ids, num_drafts, *, name="s", features=False, prefix=PROMPT):
    return Verify(name, 1, base, hash_of(prefix[:base]), token_ids, num_drafts, GREEDY, None, features)


def prefill(base, token_ids, *, name="s", features=False):
    return Prefill(name, 1, base, hash_of(PROMPT[:base]), token_ids, features)


def ask(tier, *items, releases=(), features=None):
    name = "drafter" if isinstance(tier, DrafterTier) else "verifier"
    reply = tier.handle(TierMessage(name, 7, list(items), list(releases), features))
    assert reply.tick == 7 and reply.seconds >= 0
    return reply


def item(tier, question):
    (answer,) = ask(tier, question).items
    return answer


@pytest.fixture
def verifier(tiny_target):
    return VerifierTier(
        tiny_target,
        token_budget=4 * 64,
        projection=lambda features: torch.cat([features[1], features[3]], -1).bfloat16(),
        feature_layers=(1, 3),
    )


def continuation(tiny_target, count):
    """The greedy continuation of the prompt, every token verified from nothing."""
    tokens = list(PROMPT)
    for _ in range(count):
        tier = VerifierTier(tiny_target, token_budget=64)
        tokens.append(item(tier, verify(0, tokens, 0)).next_token)
    return tokens[len(PROMPT) :]


def test_drafts_are_accepted_up_to_the_first_wrong_one_and_the_rest_leaves_no_trace(tiny_target, verifier):
    right = continuation(tiny_target, 5)
    wrong = [(token + 1) % 512 for token in right]
    for accepted in range(4):
        drafts = right[:accepted] + wrong[accepted:3]
        answer = item(verifier, verify(0, PROMPT + drafts, 3))
        assert (answer.accepted, answer.next_token) == (accepted, right[accepted])
        known = PROMPT + right[: accepted + 1]
        answer = item(verifier, verify(len(known) - 1, [known[-1]], 0, prefix=known))
        assert answer.next_token == right[accepted + 1]


def test_items_of_one_message_do_not_meet(tiny_target, verifier):
    right = continuation(tiny_target, 3)
    items = [
        verify(0, PROMPT, 0, name="a"),
        prefill(0, PROMPT[:6], name="b", features=True),
        verify(0, [*PROMPT, *right[:2]], 2, name="c", features=True),
    ]
    reply = ask(verifier, *items)
    first, second, third = reply.items
    assert first == Verified("a", 1, 0, right[0], 0)
    assert second == Prefilled("b", 1, 6, 6)
    assert third == Verified("c", 1, 2, right[2], len(PROMPT) + 2)
    assert reply.features.shape == (6 + len(PROMPT) + 2, 2 * tiny_target.config.hidden_size)
    assert reply.features.dtype == torch.bfloat16
    assert torch.equal(reply.features[:6], reply.features[6:12])


def test_chunks_are_the_whole(tiny_target, verifier):
    assert item(verifier, prefill(0, PROMPT[:4])) == Prefilled("s", 1, 4, 0)
    assert item(verifier, prefill(4, PROMPT[4:9])) == Prefilled("s", 1, 9, 0)
    assert item(verifier, verify(9, PROMPT[9:], 0)).next_token == continuation(tiny_target, 1)[0]


def test_a_prefix_that_is_not_held_is_unknown(tiny_target, verifier):
    assert item(verifier, verify(4, PROMPT[4:], 0)) == UnknownPrefix("s", 1, 0)
    ask(verifier, prefill(0, PROMPT[:3]))
    assert item(verifier, verify(4, PROMPT[4:], 0)) == UnknownPrefix("s", 1, 3)
    assert item(verifier, prefill(3, PROMPT[3:4])) == Prefilled("s", 1, 4, 0)
    ask(verifier, prefill(0, [1, 2, 3, 4, 5]))
    assert item(verifier, verify(4, PROMPT[4:], 0)) == UnknownPrefix("s", 1, 0)
    assert item(verifier, verify(0, PROMPT, 0)).next_token == continuation(tiny_target, 1)[0]


def test_what_is_held_beyond_the_base_is_rolled_back(tiny_target, verifier):
    ask(verifier, prefill(0, [*PROMPT[:5], 1, 1, 1]))
    answer = item(verifier, verify(5, PROMPT[5:], 0))
    assert answer.next_token == continuation(tiny_target, 1)[0]


def test_released_is_forgotten(verifier):
    ask(verifier, prefill(0, PROMPT))
    assert ask(verifier, releases=["s", "unheard of"]).items == []
    assert item(verifier, verify(9, PROMPT[9:], 0)) == UnknownPrefix("s", 1, 0)


def test_an_item_that_does_not_fit_changes_nothing_and_the_others_go_on(verifier):
    long = [3] * 128
    ask(verifier, prefill(0, long, name="a"))
    answers = ask(verifier, prefill(0, long + long, name="b"), prefill(0, PROMPT, name="c")).items
    assert answers == [OutOfPages("b", 1), Prefilled("c", 1, 10, 0)]
    answers = ask(verifier, prefill(0, long, name="b"), prefill(0, [4] * 64, name="d")).items
    assert answers == [OutOfPages("b", 1), Prefilled("d", 1, 64, 0)]
    assert ask(verifier, prefill(0, long, name="b"), releases=["a"]).items == [Prefilled("b", 1, 128, 0)]


def test_a_batch_with_many_rows_to_choose_at(tiny_target):
    tier = VerifierTier(tiny_target, token_budget=16 * 128)
    right = continuation(tiny_target, 3)
    drafts = [*right[:2], *[1] * 60]
    reply = ask(tier, *(verify(0, PROMPT + drafts, 62, name=str(i)) for i in range(12)))
    assert {(answer.accepted, answer.next_token) for answer in reply.items} == {(2, right[2])}


def test_a_message_sampled_and_greedy(tiny_target, verifier):
    hot = RowSampling(temperature=1.5, seed=4)
    warm = RowSampling(temperature=0.8, top_k=5, top_p=0.9, seed=4, stream=2)
    questions = [
        Verify(str(i), 1, 0, 0, PROMPT, 0, sampling, None, False)
        for i, sampling in enumerate([GREEDY, hot, warm, GREEDY])
    ]
    together = [answer.next_token for answer in ask(verifier, *questions).items]
    ask(verifier, releases=["0", "1", "2", "3"])
    assert together == [item(verifier, question).next_token for question in questions]


class RecordingDrafter:
    """Drafts 1, 2, 3, ... and remembers what it was asked."""

    def __init__(self):
        self.requests, self.released, self.full = [], [], False

    def new_state(self, token_budget):
        return self

    def propose(self, requests):
        if self.full:
            raise CacheFull
        self.requests = requests
        return [list(range(1, request.max_tokens + 1)) for request in requests]

    def release(self, sequence_id):
        self.released.append(sequence_id)


def propose(base, token_ids, *, name="s", origin=0):
    return Propose(name, 1, origin, base, hash_of(PROMPT[: base + 1]), token_ids, 2, GREEDY)


def rows(count):
    return torch.arange(count, dtype=torch.bfloat16)[:, None]


def test_each_proposal_gets_its_own_rows():
    drafter = RecordingDrafter()
    tier = DrafterTier(drafter, token_budget=64)
    reply = ask(tier, propose(0, PROMPT[1:4]), propose(4, PROMPT[5:7], name="late", origin=4), features=rows(5))
    assert reply.items == [Proposed("s", 1, [1, 2]), Proposed("late", 1, [1, 2])]
    first, second = drafter.requests
    assert first.features.flatten().tolist() == [0, 1, 2] and second.features.flatten().tolist() == [3, 4]
    assert (second.base, second.origin, second.token_ids) == (4, 4, PROMPT[5:7])
    answers = ask(tier, propose(3, PROMPT[4:5]), propose(6, PROMPT[7:8], name="late", origin=4), features=rows(2))
    assert [type(answer) for answer in answers.items] == [Proposed, Proposed]
    again = ask(tier, propose(2, PROMPT[3:5]), features=rows(2))
    assert [type(answer) for answer in again.items] == [Proposed]


def test_rows_that_are_not_held_are_unknown():
    drafter = RecordingDrafter()
    tier = DrafterTier(drafter, token_budget=64)
    assert ask(tier, propose(3, PROMPT[4:6]), features=rows(2)).items == [UnknownPrefix("s", 1, 0)]
    ask(tier, propose(0, PROMPT[1:3]), features=rows(2))
    mixed = ask(tier, propose(5, [1]), propose(0, [3], name="t"), features=rows(2))
    assert mixed.items == [UnknownPrefix("s", 1, 0), Proposed("t", 1, [1, 2])]
    ask(tier, propose(0, [1, 1]), features=rows(2))
    assert ask(tier, propose(2, PROMPT[3:4]), features=rows(1)).items == [UnknownPrefix("s", 1, 0)]
    ask(tier, propose(0, PROMPT[1:3]), features=rows(2))
    assert ask(tier, propose(2, PROMPT[3:4], origin=1), features=rows(1)).items == [UnknownPrefix("s", 1, 0)]
    ask(tier, releases=["t"])
    assert drafter.released.count("t") == 1


def test_a_full_drafter_says_so():
    drafter = RecordingDrafter()
    drafter.full = True
    tier = DrafterTier(drafter, token_budget=64)
    assert ask(tier, propose(0, PROMPT[1:3]), features=rows(2)).items == [OutOfPages("s", 1)]
