"""What a round costs here: the tiers' own seconds, as measured, by the size of what they were given.

Our choice throughout: sizes fall into buckets by powers of two, of each a moving average counts; between buckets
seconds are interpolated, beyond them they stay level: what was never tried is hoped to cost no more than the nearest
that was, and is known once it was tried.
"""

from bisect import bisect_left

_WEIGHT = 0.1  # of a new measurement, once a bucket has ten


class CostCurve:
    """Seconds by size."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, int]] = {}  # exponent -> mean size, mean seconds, measurements

    @property
    def known(self) -> bool:
        return bool(self._buckets)

    def record(self, size: int, seconds: float) -> None:
        """Takes in a measurement; size >= 1."""
        key = (size - 1).bit_length()
        mean_size, mean_seconds, count = self._buckets.get(key, (0.0, 0.0, 0))
        if count == 1 and seconds < mean_seconds / 2:
            count = 0  # the first of its kind may have paid for memory and caches
        weight = max(_WEIGHT, 1 / (count + 1))
        mean_size += weight * (size - mean_size) if count else size - mean_size
        mean_seconds += weight * (seconds - mean_seconds) if count else seconds - mean_seconds
        self._buckets[key] = (mean_size, mean_seconds, count + 1)

    def seconds(self, size: float) -> float:
        """Of `size`; never falling with it. Something must have been recorded."""
        points = [self._buckets[key][:2] for key in sorted(self._buckets)]
        sizes = [point[0] for point in points]
        levels = [max(seconds for _, seconds in points[: i + 1]) for i in range(len(points))]
        at = bisect_left(sizes, size)
        if at == 0:
            return levels[0]
        if at == len(sizes):
            return levels[-1]
        share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return levels[at - 1] + share * (levels[at] - levels[at - 1])


class RoundCosts:
    """`verify`: seconds of the verifier by rows; `draft`: seconds of the neural drafter by sequences."""

    def __init__(self) -> None:
        self.verify = CostCurve()
        self.draft = CostCurve()


class AcceptedEstimate:
    """How many draft tokens of the neural drafter stay per round: a moving average.

    `parent` is the estimate over all sequences, from which that of a sequence starts.
    """

    def __init__(self, parent: "AcceptedEstimate | None" = None, *, weight: float = 0.1, start: float = 1.0) -> None:
        self.value: float = start if parent is None else parent.value
        self.rounds_since = 0
        self._parent = parent
        self._weight = weight

    def record(self, neural: bool, accepted: int) -> None:
        """Counts one round of the sequence."""
        self.rounds_since = 0 if neural else self.rounds_since + 1
        if neural:
            self.value += self._weight * (accepted - self.value)
            if self._parent is not None:
                self._parent.record(neural, accepted)
