"""Layer routes: which sublayers of the full model a pass skips."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """Sublayers to skip, by Hugging Face layer number; a skipped sublayer is the identity on the residual stream.

    `Route()` is the full model. Source: intra-model routing, VIA-SD (see docs); the sublayer granularity is our choice.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @property
    def id(self) -> str:
        """A stable name for file names and logs, such as ``full`` or ``a3.4-m7``."""
        parts = (("a", self.attention), ("m", self.mlp))
        return "-".join(k + ".".join(map(str, sorted(v))) for k, v in parts if v) or "full"

    def kept_attention(self, num_layers: int) -> tuple[int, ...]:
        """The layers that keep their attention, which are those that need a KV cache."""
        self.check(num_layers)
        return tuple(i for i in range(num_layers) if i not in self.attention)

    def check(self, num_layers: int) -> None:
        """Raises ValueError if the route names a layer that the model does not have."""
        unknown = sorted(i for i in self.attention | self.mlp if not 0 <= i < num_layers)
        if unknown:
            raise ValueError(f"route names layers {unknown}, but the model has {num_layers}")
