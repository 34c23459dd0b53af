"""What one request asks of sampling: `SamplingParams`, and the part of it that travels to the tiers, `RowSampling`."""

import secrets
import sys
from dataclasses import dataclass

from tierspec.errors import SettingError

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy (the same threshold as vLLM's)."""

_SEEDS = range(-(2**63), 2**63)
_STREAMS = range(2**32)
_MAX_STOP_STRINGS = 4


def draw_seed() -> int:
    """A fresh seed for a request that came without one, in 0 .. 2**63 - 1, so that it fits an int64 column."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What turns one row of logits and a position into a token.

    `temperature` divides the logits; below 1e-5 the row is greedy. `top_k` 0 and `top_p` 1.0 truncate nothing. `seed`
    and `stream` key the noise (`tierspec.sampling.noise`) and are not read when greedy.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stream: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class SamplingParams:
    """One request's limits and sampling, with the names and ranges of vLLM's `SamplingParams`.

    `top_k` 0 or -1 means all. `seed` None asks whoever admits the request to draw one (`draw_seed`); every int64 is an
    ordinary seed, -1 included. `stream` tells apart the choices of one request that share a seed. `stop` holds at
    most four strings (OpenAI's limit); `ignore_eos` goes on past an end-of-sequence token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: int = 0

    def validate(self) -> None:
        """Raise `SettingError` naming the first field that is out of range."""
        stop, stop_ids = self.stop, self.stop_token_ids
        for field, expected, holds in (
            ("max_new_tokens", "an integer >= 1", _is_int(self.max_new_tokens) and self.max_new_tokens >= 1),
            ("temperature", "a finite number >= 0", _is_finite(self.temperature) and self.temperature >= 0),
            ("top_p", "a number above 0, at most 1", _is_finite(self.top_p) and 0 < self.top_p <= 1),
            ("top_k", "an integer >= -1 (0 and -1: all)", _is_int(self.top_k) and self.top_k >= -1),
            ("seed", "a signed 64-bit integer", self.seed is None or (_is_int(self.seed) and self.seed in _SEEDS)),
            (
                "stop",
                f"at most {_MAX_STOP_STRINGS} non-empty strings",
                isinstance(stop, tuple)
                and len(stop) <= _MAX_STOP_STRINGS
                and all(isinstance(text, str) and text for text in stop),
            ),
            (
                "stop_token_ids",
                "token ids >= 0",
                isinstance(stop_ids, tuple) and all(_is_int(token) and token >= 0 for token in stop_ids),
            ),
            ("ignore_eos", "true or false", isinstance(self.ignore_eos, bool)),
            ("stream", "an integer in 0 .. 2**32 - 1", _is_int(self.stream) and self.stream in _STREAMS),
        ):
            if not holds:
                found = getattr(self, field)
                raise SettingError(
                    f"{field}: must be {expected}, not {list(found) if isinstance(found, tuple) else found!r}"
                )

    def row(self) -> RowSampling:
        """The part the tiers need. Raises `SettingError` if the request samples and its seed was never drawn."""
        if self.seed is None and self.temperature >= GREEDY_TEMPERATURE:
            raise SettingError("seed: a sampled request needs one; draw it at admission (draw_seed)")
        return RowSampling(self.temperature, max(self.top_k, 0), self.top_p, self.seed or 0, self.stream)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
