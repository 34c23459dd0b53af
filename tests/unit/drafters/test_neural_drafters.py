import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.drafters import DEPTH, FAMILIES, drafter_of, lone_anchor, random_trainee, tiny_decoder
from tierspec.drafters import Drafter, DraftRequest, UnknownPrefix
from tierspec.drafters.choice import DraftChoice
from tierspec.models import CacheFull, Decoder
from tierspec.sampling import RowSampling, target_choice
from tierspec.training.features import FeatureRequest, SequenceFeatures, TargetFeatures
from tierspec.training.trainee import Trainee

LENGTH = 90


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=FAMILIES)
def trainee(request: pytest.FixtureRequest, decoder: Decoder) -> Trainee:
    return random_trainee(decoder, family=request.param)


@pytest.fixture(scope="module")
def drafter(decoder: Decoder, trainee: Trainee) -> Drafter:
    return drafter_of(trainee, decoder)


class Text:
    """A random token sequence with its projected features (fp32, unlike on the wire)."""

    def __init__(self, decoder: Decoder, trainee: Trainee, seed: int = 0, length: int = LENGTH) -> None:
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, decoder.config.vocab_size, (length,), generator=g).tolist()
        self.features = features_of(decoder, trainee, self.ids)
        projected = trainee.drafter.fc(self.features.captured)  # type: ignore[operator]
        if hasattr(trainee.drafter, "hidden_norm"):
            projected = trainee.drafter.hidden_norm(projected)
        self.projected = projected.detach()

    def request(self, base: int, end: int, *, tokens: int = DEPTH, name: str = "a", **rest: object) -> DraftRequest:
        """Rows base .. end - 1."""
        return DraftRequest(name, base, self.ids[base + 1 : end + 1], self.projected[base:end], tokens, **rest)  # type: ignore[arg-type]


def features_of(decoder: Decoder, trainee: Trainee, ids: list[int]) -> SequenceFeatures:
    features = TargetFeatures(decoder, trainee.feature_layers, max_length=512)
    return features([FeatureRequest(0, ids, 0)])[0]


@pytest.fixture(scope="module")
def text(decoder: Decoder, trainee: Trainee) -> Text:
    return Text(decoder, trainee)


def unrolled_logits(trainee: Trainee, text: Text, row: int, drafts: list[int]) -> torch.Tensor:
    """The training forward's logits [K, C] at one anchor when the tokens after it are the given drafts."""
    batch = lone_anchor(text.features.captured[: row + 1], [*text.ids[1 : row + 2], *drafts], row)
    return (trainee.states(batch)[0, 0] @ trainee.token_head().T).detach()


@pytest.mark.parametrize("row", [0, 5, 63, 64, 80])
def test_training_forward_at_one_anchor_equals_inference(
    trainee: Trainee, drafter: Drafter, text: Text, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    choose = DraftChoice.__call__

    def spy(self: DraftChoice, logits: torch.Tensor, sampling: Any, positions: Sequence[int]) -> torch.Tensor:
        seen.append(logits[: len(set(positions))].clone())
        return choose(self, logits, sampling, positions)

    monkeypatch.setattr(DraftChoice, "__call__", spy)
    (drafts,) = drafter.new_state(512).propose([text.request(0, row + 1)])
    expected = unrolled_logits(trainee, text, row, drafts)
    assert len(drafts) == DEPTH
    torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-4, atol=1e-4)
    assert drafts == trainee.vocabulary.target_ids[expected.argmax(-1)].tolist()


def test_rows_taken_in_piecewise_give_the_drafts_of_one_pass(drafter: Drafter, text: Text) -> None:
    (expected,) = drafter.new_state(512).propose([text.request(0, 80)])
    state = drafter.new_state(512)
    for base, end in ((0, 30), (30, 31), (31, 36), (36, 70), (70, 80)):
        (drafts,) = state.propose([text.request(base, end)])
        assert state.held("a") == end
    assert drafts == expected


def test_a_batch_gives_each_sequence_its_own_drafts(decoder: Decoder, trainee: Trainee, drafter: Drafter) -> None:
    texts = [Text(decoder, trainee, seed) for seed in range(5)]
    ends, limits = (3, 70, 1, 64, 20), (2, 4, 0, 1, 3)
    requests = [
        t.request(0, end, tokens=limit, name=str(i))
        for i, (t, end, limit) in enumerate(zip(texts, ends, limits, strict=True))
    ]
    state = drafter.new_state(4096)
    together = state.propose(requests)
    assert [len(drafts) for drafts in together] == list(limits)
    for request, drafts in zip(requests, together, strict=True):
        assert drafter.new_state(512).propose([request]) == [drafts]
    following = [t.request(end, end + 2, name=str(i)) for i, (t, end) in enumerate(zip(texts, ends, strict=True))]
    alone = [drafter.new_state(512).propose([t.request(0, end + 2)])[0] for t, end in zip(texts, ends, strict=True)]
    assert state.propose(following) == alone


def test_an_earlier_base_forgets_the_rows_after_it(drafter: Drafter, text: Text) -> None:
    state = drafter.new_state(512)
    state.propose([text.request(0, 40)])
    (expected,) = drafter.new_state(512).propose([text.request(0, 25)])
    assert state.propose([text.request(20, 25)]) == [expected]
    assert state.held("a") == 25
    assert state.propose([text.request(0, 25)]) == [expected]


def test_an_unknown_prefix_changes_nothing(drafter: Drafter, text: Text) -> None:
    state = drafter.new_state(512)
    state.propose([text.request(0, 10)])
    with pytest.raises(UnknownPrefix) as raised:
        state.propose([text.request(10, 12), text.request(4, 6, name="b"), text.request(3, 5, name="c")])
    assert raised.value.sequence_ids == ("b", "c")
    assert (state.held("a"), state.held("b")) == (10, 0)
    with pytest.raises(UnknownPrefix):
        state.propose([text.request(11, 13)])
    state.release("a")
    state.release("never")
    with pytest.raises(UnknownPrefix):
        state.propose([text.request(10, 12)])


@pytest.mark.parametrize("least", [0.3, 0.5, 0.7])
def test_drafts_end_before_the_first_token_that_is_not_expected_to_survive(
    decoder: Decoder, trainee: Trainee, drafter: Drafter, least: float
) -> None:
    with torch.no_grad():
        trainee.verification_head.weight.mul_(3.0)
    texts = [Text(decoder, trainee, seed) for seed in range(6)]
    plain = [text.request(0, 20 + seed, name=str(seed)) for seed, text in enumerate(texts)]
    whole = drafter.new_state(4096).propose(plain)
    expected = []
    for seed, (text, drafts) in enumerate(zip(texts, whole, strict=True)):
        known = [*text.ids[1 : 21 + seed], *drafts]
        batch = lone_anchor(text.features.captured[: 20 + seed], known, 19 + seed)
        belief = torch.sigmoid(trainee.verification_head(trainee.states(batch))[0, 0, :, 0])
        expected.append(drafts[: int((belief >= least).int().cumprod(0).sum())])
    packed = drafter_of(trainee, decoder)
    asked = [dataclasses.replace(request, min_survival=least) for request in plain]
    assert packed.new_state(4096).propose(asked) == expected
    assert packed.new_state(4096).propose([*asked[:3], *plain[3:]]) == [*expected[:3], *whole[3:]]
    with torch.no_grad():
        trainee.verification_head.weight.div_(3.0)
    state = packed.new_state(512)
    state.propose([dataclasses.replace(plain[0], min_survival=1.0)])
    assert state.held("0") == 20


def test_a_cold_start_drafts_from_later_context_alone(drafter: Drafter, text: Text) -> None:
    state = drafter.new_state(512)
    state.propose([text.request(50, 55, origin=50)])
    assert state.held("a") == 55
    (drafts,) = state.propose([text.request(55, 60, origin=50)])
    assert drafts == drafter.new_state(512).propose([text.request(50, 60, origin=50)])[0]
    with pytest.raises(UnknownPrefix):
        state.propose([text.request(60, 61, origin=0)])


def test_a_full_cache_adds_no_row_and_pages_come_back(drafter: Drafter, text: Text) -> None:
    state = drafter.new_state(128)
    state.propose([text.request(0, 60)])
    with pytest.raises(CacheFull):
        state.propose([text.request(60, 62), text.request(0, 70, name="b")])
    assert (state.held("a"), state.held("b")) == (60, 0)
    state.release("a")
    for _ in range(5):
        state.propose([text.request(0, 80, name="b")])
        state.release("b")
    assert state._cache.free_tokens == 128


def test_drafts_end_at_the_context(decoder: Decoder, trainee: Trainee, drafter: Drafter) -> None:
    limit = decoder.config.max_context
    long = Text(decoder, trainee, 9, limit)
    state = drafter.new_state(1024)
    more = 2 if drafter.family == "eagle3" else 0  # its last draft and the token behind the last row take no row
    assert len(state.propose([long.request(0, limit - 2)])[0]) == 1 + more
    long.ids.append(5)
    assert len(state.propose([long.request(limit - 2, limit)])[0]) == more // 2
    with pytest.raises(ValueError, match="context"):
        state.propose([DraftRequest("a", limit, [1], long.projected[:1], 1)])


@pytest.mark.parametrize("features", [0, 1])
def test_rows_need_one_feature_per_token(drafter: Drafter, text: Text, features: int) -> None:
    with pytest.raises(ValueError, match="one feature row per token"):
        drafter.new_state(128).propose([DraftRequest("a", 0, [3] * (2 * features), text.projected[:features], 1)])


def test_sampled_drafts_use_the_targets_keyed_noise(
    decoder: Decoder, trainee: Trainee, drafter: Drafter, text: Text
) -> None:
    row = 12
    sampling = RowSampling(temperature=1.5, top_k=20, top_p=0.95, seed=77, stream=3)
    requests = [text.request(0, row + 1, sampling=sampling), text.request(0, row + 1, name="b")]
    drafts, greedy = drafter.new_state(512).propose(requests)
    logits = unrolled_logits(trainee, text, row, drafts)
    expected = target_choice(
        logits,
        [1.5] * DEPTH,
        [20] * DEPTH,
        [0.95] * DEPTH,
        [77] * DEPTH,
        [3] * DEPTH,
        [row + 2 + k for k in range(DEPTH)],
        ids=trainee.vocabulary.target_ids,
    )
    assert drafts == expected.tolist()
    assert drafts != greedy


def test_projection_is_the_modules_fc_in_bf16(decoder: Decoder, trainee: Trainee, drafter: Drafter, text: Text) -> None:
    width = decoder.config.hidden_size
    pieces = dict(zip(drafter.feature_layers, text.features.captured.split(width, -1), strict=True))
    for rows in (slice(0, 1), slice(0, 7)):
        projected = drafter.projection({layer: piece[rows] for layer, piece in pieces.items()})
        assert projected.dtype == torch.bfloat16
        torch.testing.assert_close(projected.float(), text.projected[rows], rtol=1e-2, atol=1e-2)
