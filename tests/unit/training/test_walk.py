from collections.abc import Sequence

import pytest
import torch

from tests.support.drafters import tiny_decoder
from tierspec.drafters import DraftRequest
from tierspec.sampling import RowSampling
from tierspec.training.data import Sample
from tierspec.training.features import TargetFeatures
from tierspec.training.walk import walk


class ScriptedDrafter:
    """Drafts the text itself up to a position that its script says, then something else."""

    family, max_draft_tokens, feature_layers, predicts_survival = "scripted", 3, (1,), False

    def __init__(self, texts: dict[str, Sequence[int]], hits: dict[str, list[int]]) -> None:
        self.texts, self.hits = texts, hits
        self.requests: list[DraftRequest] = []

    def projection(self, features: dict[int, torch.Tensor]) -> torch.Tensor:
        return features[1]

    def new_state(self, token_budget: int) -> "ScriptedDrafter":
        return self

    def release(self, sequence_id: str) -> None:
        self.texts = {name: text for name, text in self.texts.items() if name != sequence_id}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.requests += requests
        drafts = []
        for request in requests:
            start = request.base + len(request.token_ids) + 1
            hits = self.hits[request.sequence_id].pop(0)
            text = self.texts[request.sequence_id][start : start + request.max_tokens]
            drafts.append([token if i < hits else token + 1 for i, token in enumerate(text)])
        return drafts


def test_rounds_follow_what_was_accepted(tmp_path_factory: pytest.TempPathFactory) -> None:
    decoder = tiny_decoder(tmp_path_factory.mktemp("target"))
    samples = [
        Sample("a", (5, 6), tuple(range(10, 22)), sampling=RowSampling(0.8, 20, 0.9, 7)),
        Sample("b", (7,), tuple(range(30, 34))),
        Sample("c", (8,), (1, 2)),
    ]
    drafter = ScriptedDrafter({str(i): s.token_ids for i, s in enumerate(samples)}, {"0": [2, 0, 3, 1], "1": [1]})
    result = walk(drafter, TargetFeatures(decoder, (1,), max_length=64), samples, 3)  # type: ignore[arg-type]

    assert result.rounds == 5
    assert result.accepted == (4, 2, 1)
    assert result.accept_len == 1 + 7 / 5
    assert result.by_sample == ((4, 6), (1, 1), (0, 0))
    assert result.per_position_acceptance == [4 / 5, 2 / 4, 1 / 2]
    rows = [(r.base, len(r.token_ids)) for r in drafter.requests if r.sequence_id == "0"]
    assert rows == [(0, 2), (2, 3), (5, 1), (6, 4)]
    assert {r.sampling for r in drafter.requests if r.sequence_id == "0"} == {RowSampling(0.8, 20, 0.9, 7)}
    assert all(r.sampling.greedy for r in drafter.requests if r.sequence_id == "1")
    assert all(r.features.shape == (len(r.token_ids), 48) for r in drafter.requests)
