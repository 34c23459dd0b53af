"""The shape of an EAGLE-3 drafter and what it was made for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tierspec.drafters.config import DrafterConfig, check_feature_layers, shape_like
from tierspec.models import ModelConfig

FAMILY = "eagle3"


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """[2, N/2, N-3] as indices into Hugging Face's `hidden_states` (arXiv 2503.01840's triple); small models take
    what they have, without repetition."""
    deepest = num_layers - 1
    wanted = (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(max(index, 1), deepest) for index in wanted}))


@dataclass(frozen=True)
class Eagle3Config(DrafterConfig):
    """Sizes of the one-layer drafter."""

    family: ClassVar[str] = FAMILY

    @classmethod
    def for_target(
        cls,
        target: ModelConfig,
        *,
        feature_layers: Sequence[int],
        draft_vocab_size: int,
        max_draft_tokens: int,
        source: str,
        embedding_sha256: str,
    ) -> "Eagle3Config":
        """A drafter as wide as `target`, with its attention and MLP shapes; no `feature_layers`: three by depth."""
        layers = tuple(feature_layers) or default_feature_layers(target.num_layers)
        return cls(
            **shape_like(target),
            draft_vocab_size=min(draft_vocab_size, target.vocab_size),
            feature_layers=check_feature_layers(layers, target.num_layers),
            max_draft_tokens=max_draft_tokens,
            target=source,
            embedding_sha256=embedding_sha256,
        )
