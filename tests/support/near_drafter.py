"""A drafter whose drafts depend on the text alone and often miss the target's choice by little."""

from collections.abc import Mapping, Sequence

import torch

from tierspec.drafters import DraftRequest
from tierspec.models import Decoder, Step


class NearDrafter:
    """Continues a text by the target's best token, but by its second best wherever the text says so.

    It sees the text from the second token on, as rows give it, so a test can ask for the same draft by `draft`.
    """

    family, predicts_survival = "near", False

    def __init__(self, decoder: Decoder, max_draft_tokens: int = 4) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.feature_layers = (1,)
        self._decoder = decoder
        self._rows: dict[str, list[int]] = {}

    def projection(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return features[1].to(torch.bfloat16)

    def new_state(self, token_budget: int) -> "NearDrafter":
        self._rows.clear()
        return self

    def held(self, sequence_id: str) -> int:
        return len(self._rows.get(sequence_id, ()))

    def release(self, sequence_id: str) -> None:
        self._rows.pop(sequence_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = []
        for request in requests:
            rows = self._rows.setdefault(request.sequence_id, [])
            rows[request.base :] = request.token_ids
            drafts.append(self.draft(rows, request.max_tokens))
        return drafts

    def draft(self, tail: Sequence[int], max_tokens: int) -> list[int]:
        """For the text whose tokens from the second on are `tail`."""
        text = list(tail)
        for _ in range(max_tokens):
            cache = self._decoder.new_cache(len(text) + 64)
            hidden = self._decoder.forward([Step(cache.sequence(), text)], cache)
            best = self._decoder.logits(hidden.last[-1:])[0].topk(2).indices.tolist()
            text.append(best[(sum(text[-3:]) + len(text)) % 3 == 0])
        return text[len(tail) :]
