"""What the payoff predictor sees before a draft is verified (HVD, arXiv 2606.01019; the columns are our choice).

No hidden state, logit or text of a model is among it. Whether a draft holds white space, punctuation, brackets or
delimiters is looked up by token id, so that nothing is detokenised while decoding.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierspec.drafters.suffix import SuffixProposal

WINDOW = 16  # rounds that the history covers
CACHE_WINDOW = 4  # rounds with a draft of the cache that count for their own mean
FEATURES = (
    "score",
    "match_length",
    "draft_length",
    "log_prompt_length",
    "log_generated",
    "generated_share",
    "cache_share",
    "mean_accepted",
    "last_accepted",
    "mean_cache_accepted",
    "whitespace",
    "punctuation",
    "brackets",
    "delimiters",
)
_CLASSES: tuple[Callable[[str], bool], ...] = (
    str.isspace,
    frozenset(".,;:!?'\"").__contains__,
    frozenset("()[]{}<>").__contains__,
    frozenset("\n\t|=/\\#`").__contains__,
)

TokenClasses = NDArray[np.uint8]
"""Per token id one bit for each class of characters that its text holds."""


def token_classes(texts: Sequence[str]) -> TokenClasses:
    """Bit masks of a vocabulary, given the text of every token id."""
    masks = [sum(any(map(holds, text)) << bit for bit, holds in enumerate(_CLASSES)) for text in texts]
    return np.array(masks, dtype=np.uint8)


@dataclass(slots=True)
class History:
    """The last rounds of one sequence: whether the cache's draft was verified, and how much of the draft stayed."""

    rounds: deque[tuple[bool, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    cache: deque[int] = field(default_factory=lambda: deque(maxlen=CACHE_WINDOW))

    def record(self, from_cache: bool, accepted: int) -> None:
        self.rounds.append((from_cache, accepted))
        if from_cache:
            self.cache.append(accepted)

    def features(self) -> tuple[float, float, float, float]:
        """The columns cache_share to mean_cache_accepted; zeros where there is nothing yet."""
        if not self.rounds:
            return 0.0, 0.0, 0.0, 0.0
        count = len(self.rounds)
        return (
            sum(cached for cached, _ in self.rounds) / count,
            sum(accepted for _, accepted in self.rounds) / count,
            float(self.rounds[-1][1]),
            sum(self.cache) / len(self.cache) if self.cache else 0.0,
        )


def feature_row(
    proposal: SuffixProposal,
    prompt_length: int,
    generated: int,
    max_new_tokens: int,
    history: tuple[float, float, float, float],
    classes: TokenClasses,
) -> tuple[float, ...]:
    """One row, in the order of `FEATURES`. Lengths count tokens."""
    bits = int(np.bitwise_or.reduce(classes[proposal.tokens], initial=0))
    return (
        proposal.score,
        float(proposal.match_len),
        float(len(proposal.tokens)),
        math.log1p(prompt_length),
        math.log1p(generated),
        generated / max_new_tokens,
        *history,
        *(float(bits >> bit & 1) for bit in range(len(_CLASSES))),
    )


def true_payoff(draft: Sequence[int], continuation: Sequence[int]) -> int:
    """How many tokens of a draft the text that came confirms, from its first on."""
    pairs = zip(draft, continuation, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(continuation)))
