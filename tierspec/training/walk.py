"""Accept length on held-out rollouts, walked round by round along the target's own text.

Drafting as at inference: take in what the last round committed, draft K tokens with the sampling and the seed that the
text was made with, keep the prefix that the text has, go on behind it. That is what strict verification accepts;
averaging over all positions instead overstates it, because hard positions are visited more often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tierspec.drafters.protocol import Drafter, DraftRequest
from tierspec.models import PAGE_TOKENS
from tierspec.sampling import RowSampling
from tierspec.training.data import Sample
from tierspec.training.features import FeatureRequest, TargetFeatures

_ROWS_IN_FLIGHT = 8192


@dataclass(frozen=True)
class Walk:
    """`accepted[k]`: rounds in which draft position k + 1 was accepted; a round drafts K = len(accepted) tokens.
    `by_sample`: (rounds, accepted tokens) of every sample, in their order."""

    rounds: int
    accepted: tuple[int, ...]
    by_sample: tuple[tuple[int, int], ...] = ()

    @property
    def accept_len(self) -> float:
        """Accepted tokens per round, plus one."""
        return 1.0 + sum(self.accepted) / max(1, self.rounds)

    @property
    def per_position_acceptance(self) -> list[float]:
        """P(position k accepted | reached)."""
        reached = [self.rounds, *self.accepted[:-1]]
        return [hit / max(1, count) for hit, count in zip(self.accepted, reached, strict=True)]


def walk(drafter: Drafter, features: TargetFeatures, samples: Sequence[Sample], max_tokens: int) -> Walk:
    """Drafts `max_tokens` a round along each sample's response, as long as the response covers a whole round."""
    accepted = [0] * max_tokens
    by_sample = [(0, 0)] * len(samples)
    pending = list(enumerate(samples))
    while pending:
        group: list[_Text] = []
        rows = 0
        while pending and (not group or rows + len(pending[0][1].token_ids) <= _ROWS_IN_FLIGHT):
            number, sample = pending.pop(0)
            rows += len(sample.token_ids) + PAGE_TOKENS + max_tokens
            group.append(_Text(drafter, features, number, sample))
        state = drafter.new_state(rows)
        live = [text for text in group if text.has_round(max_tokens)]
        while live:
            proposals = state.propose([text.request(max_tokens) for text in live])
            for text, drafts in zip(live, proposals, strict=True):
                length = text.advance(drafts)
                rounds, tokens = by_sample[text.number]
                by_sample[text.number] = rounds + 1, tokens + length
                for k in range(length):
                    accepted[k] += 1
            for text in live:
                if not text.has_round(max_tokens):
                    state.release(text.name)
            live = [text for text in live if text.has_round(max_tokens)]
    return Walk(sum(rounds for rounds, _ in by_sample), tuple(accepted), tuple(by_sample))


class _Text:
    """A response being walked: the first `committed` tokens are known, the first `held` rows are with the drafter."""

    def __init__(self, drafter: Drafter, features: TargetFeatures, number: int, sample: Sample) -> None:
        self.number, self.name = number, str(number)
        self._sampling = sample.sampling or RowSampling()
        self._ids = sample.token_ids
        (found,) = features([FeatureRequest(number, self._ids, len(self._ids))])
        pieces = found.captured.chunk(len(drafter.feature_layers), -1)
        self._projected = drafter.projection(dict(zip(drafter.feature_layers, pieces, strict=True)))
        self._committed = len(sample.prompt_ids) + 1
        self._held = 0

    def has_round(self, max_tokens: int) -> bool:
        return self._committed + max_tokens <= len(self._ids)

    def request(self, max_tokens: int) -> DraftRequest:
        base, end = self._held, self._committed - 1
        self._held = end
        tokens, features = self._ids[base + 1 : end + 1], self._projected[base:end]
        return DraftRequest(self.name, base, tokens, features, max_tokens, self._sampling)

    def advance(self, drafts: Sequence[int]) -> int:
        text = torch.tensor(self._ids[self._committed : self._committed + len(drafts)])
        length = int((text == torch.tensor(drafts)).int().cumprod(0).sum())
        self._committed += length + 1
        return length
