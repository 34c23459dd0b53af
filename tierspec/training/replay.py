"""Trace replay: what suffix drafts would have been worth along recorded text (HVD, arXiv 2606.01019 section 3.4).

No model runs. At every position the cache holds the text up to there; the draft's payoff is how much of it the
recording confirms. The history that the features need is simulated (our choice): a cursor moves over the text by
rounds; where its policy takes the cache's draft it advances by that draft's payoff, elsewhere by a length drawn from
what the neural drafter is known to reach. Positions between two rounds inherit the history of the one before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierspec.config import SuffixSettings
from tierspec.drafters.payoff import FEATURES, History, TokenClasses, feature_row, true_payoff
from tierspec.drafters.suffix import SuffixCache

Policy = Callable[[tuple[float, ...], int], bool]
"""Feature row and true payoff of a draft → whether it is verified."""


@dataclass(frozen=True)
class ReplayRows:
    """Rows of one text or of many: features [N, 14], payoff [N], and whether a round began there [N]."""

    features: NDArray[np.float32]
    payoff: NDArray[np.int64]
    visited: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Sequence["ReplayRows"]) -> "ReplayRows":
        empty = cls(np.empty((0, len(FEATURES)), np.float32), np.empty(0, np.int64), np.empty(0, np.bool_))
        pieces = [empty, *parts]
        return cls(
            np.concatenate([p.features for p in pieces]),
            np.concatenate([p.payoff for p in pieces]),
            np.concatenate([p.visited for p in pieces]),
        )

    def __len__(self) -> int:
        return len(self.payoff)

    def where(self, mask: NDArray[np.bool_]) -> "ReplayRows":
        return ReplayRows(self.features[mask], self.payoff[mask], self.visited[mask])


def neural_lengths(per_position_acceptance: Sequence[float]) -> NDArray[np.float64]:
    """P(exactly k draft tokens of the neural drafter are accepted), k = 0, 1, ..., from P(k-th accepted | reached)."""
    reached = np.concatenate(([1.0], np.cumprod(np.asarray(per_position_acceptance, dtype=np.float64)), [0.0]))
    lengths: NDArray[np.float64] = -np.diff(reached)
    return lengths


def oracle(threshold: float) -> Policy:
    """Verifies the drafts that pay."""
    return lambda row, payoff: payoff >= threshold


def replay(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    suffix: SuffixSettings,
    classes: TokenClasses,
    max_new_tokens: int,
    neural: NDArray[np.float64],
    policy: Policy,
    seed: int,
) -> ReplayRows:
    """One row per position with a draft. `neural`: see `neural_lengths`, drawn from with `seed`.

    The first token comes with the prompt's own forward, and behind the last one nothing is drafted.
    """
    random = np.random.default_rng(seed)
    cache = SuffixCache(suffix.max_depth)
    cache.extend(prompt_ids)
    history = History()
    known = history.features()
    features: list[tuple[float, ...]] = []
    payoffs: list[int] = []
    visited: list[bool] = []
    boundary = 1
    for generated in range(1, len(response_ids)):
        cache.extend(response_ids[generated - 1 : generated])
        most = min(suffix.max_tokens, max_new_tokens - generated - 1)
        at_round = generated == boundary
        if at_round:
            known = history.features()
        proposal = cache.propose(max(0, most), suffix.min_probability, suffix.factor, suffix.offset)
        taken, payoff = False, 0
        if proposal.tokens:
            payoff = true_payoff(proposal.tokens, response_ids[generated : generated + len(proposal.tokens)])
            row = feature_row(proposal, len(prompt_ids), generated, max_new_tokens, known, classes)
            features.append(row)
            payoffs.append(payoff)
            visited.append(at_round)
            taken = at_round and policy(row, payoff)
        if at_round:
            accepted = payoff if taken else int(random.choice(len(neural), p=neural / neural.sum()))
            history.record(taken, accepted)
            boundary += accepted + 1
    return ReplayRows(
        np.array(features, dtype=np.float32).reshape(-1, len(FEATURES)),
        np.array(payoffs, dtype=np.int64),
        np.array(visited, dtype=np.bool_),
    )
