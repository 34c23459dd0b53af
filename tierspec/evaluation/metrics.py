"""Numbers of a report, in the one meaning each has in the project's glossary.

accepted_draft_len  accepted draft tokens per round
accept_len          that + 1: the number vLLM, SGLang and the papers call acceptance length
acceptance_rate     accepted / drafted
per_position_acceptance[k]  P(draft position k accepted | the verifier reached it)
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

LOOP_PERIOD = 32
LOOP_SPAN = 64


def loops(token_ids: Sequence[int], *, max_period: int = LOOP_PERIOD, span: int = LOOP_SPAN) -> bool:
    """Whether some period of at most `max_period` tokens repeats over at least `span` consecutive tokens.

    Small models fall into such loops, and a loop flatters every draft that copies, so reports keep these outputs
    apart (our choice of 32 and 64).
    """
    if max_period < 1 or span <= max_period:
        raise ValueError(f"loops: need 1 <= max_period < span, got {max_period} and {span}")
    ids = np.asarray(token_ids, dtype=np.int64)
    for period in range(1, min(max_period, len(ids) - 1) + 1):
        equal = ids[period:] == ids[:-period]
        if _longest_run(equal) >= span - period:
            return True
    return False


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean of positive numbers; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def ratio(numerator: float, denominator: float) -> float | None:
    """A quotient for a report: None where the denominator is zero."""
    return numerator / denominator if denominator else None


def _longest_run(flags: np.ndarray) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
