"""Drafters for any target: an untrained one, and one that knows the answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tierspec.config import Settings
from tierspec.drafters import DraftRequest
from tierspec.models import Target
from tierspec.training.data import Sample
from tierspec.training.families import build_trainee


def write_untrained_drafter(
    directory: Path,
    target: Target,
    *,
    depth: int = 3,
    draft_vocab_size: int = 8192,
    family: str = "eagle3",
    survival_bias: float | None = None,
) -> Path:
    """Saves one that has the target's last layers and head for its own, and returns `directory`.

    `survival_bias`: of a verification head that gives every token the same chance; None: no head.
    """
    shape = [f"drafter.family={family}", f"drafter.draft_vocab_size={draft_vocab_size}", f"training.depth={depth}"]
    samples = [Sample("most frequent first", (0,), tuple(range(min(draft_vocab_size, target.config.vocab_size))))]
    trainee, _ = build_trainee(Settings().override(*shape, "drafter.layers=2"), target, samples)
    directory.mkdir(parents=True, exist_ok=True)
    head = {"weight": torch.zeros(1, target.config.hidden_size), "bias": torch.tensor([survival_bias or 0.0])}
    trainee.save(directory, trainee.drafter.state_dict(), head if survival_bias is not None else {})
    return directory


class OracleDrafter:
    """Drafts what the target is known to write, but every fifth token wrong: most drafts are accepted, many in part.

    It obeys the protocol's book-keeping of rows strictly, so it also tests who feeds it.
    """

    family, max_draft_tokens, predicts_survival = "oracle", 4, False

    def __init__(self, target: Target, texts: Sequence[Sequence[int]]) -> None:
        """`texts`: prompts with their answers."""
        self.feature_layers = (1, target.config.num_layers - 1)
        self._texts = [list(text) for text in texts]
        self._size = target.config.hidden_size
        self._rows: dict[str, list[int]] = {}

    def projection(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return sum(features[layer] for layer in self.feature_layers).to(torch.bfloat16)

    def new_state(self, token_budget: int) -> "OracleDrafter":
        self._rows.clear()
        return self

    def held(self, sequence_id: str) -> int:
        return len(self._rows.get(sequence_id, ()))

    def release(self, sequence_id: str) -> None:
        self._rows.pop(sequence_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        assert request.features.shape == (len(request.token_ids), self._size)
        rows = self._rows.setdefault(request.sequence_id, [])
        assert request.base <= len(rows) and request.origin == 0
        rows[request.base :] = request.token_ids
        known = len(rows) + 1
        text = next(text for text in self._texts if text[1:known] == rows)
        draft = text[known : known + request.max_tokens]
        return [token + 1 if (known + index) % 5 == 0 else token for index, token in enumerate(draft)]
