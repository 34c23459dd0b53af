"""A rolling hash of token prefixes, by which the engine and a tier agree on what the tier holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

_MODULUS = (1 << 61) - 1
_BASE = 1_000_003_579_247


class PrefixHash:
    """61-bit polynomial hashes of every prefix of a token sequence (our choice).

    It may begin behind the first `start` tokens, given their hash. It tells apart what a tier should hold from what it
    holds; it is no protection against tokens chosen to collide.
    """

    __slots__ = ("_values", "start")

    def __init__(self, start: int = 0, value: int = 0) -> None:
        self.start = start
        self._values = [value]

    def __len__(self) -> int:
        """Tokens hashed so far, those before `start` included."""
        return self.start + len(self._values) - 1

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens."""
        steps = accumulate(token_ids, lambda h, t: (h * _BASE + t + 1) % _MODULUS, initial=self._values.pop())
        self._values.extend(steps)

    def at(self, length: int) -> int | None:
        """Hash of the first `length` tokens; None where this object does not reach."""
        index = length - self.start
        return self._values[index] if 0 <= index < len(self._values) else None

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens (start <= length <= len)."""
        if not self.start <= length <= len(self):
            raise ValueError(f"cannot truncate hashes of {self.start} .. {len(self)} tokens to {length}")
        del self._values[length - self.start + 1 :]
