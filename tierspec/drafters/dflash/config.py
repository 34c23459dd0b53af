"""The shape of a DFlash drafter and what it was made for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tierspec.drafters.config import DrafterConfig, check_feature_layers, shape_like
from tierspec.errors import SettingError
from tierspec.models import ModelConfig

FAMILY = "dflash"


def default_feature_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` outputs of layers evenly from layer 1 to N-3 (arXiv 2602.06036) as indices into Hugging Face's
    `hidden_states`; small models take what they have, without repetition."""
    deepest = max(1, num_layers - 2)
    steps = max(1, count - 1)
    wanted = (2 + round(i * (deepest - 2) / steps) for i in range(count))
    return tuple(sorted({min(max(index, 1), num_layers - 1) for index in wanted}))


@dataclass(frozen=True)
class DFlashConfig(DrafterConfig):
    """`num_layers`: decoder layers of the drafter; `mask_token_id`: whose embedding stands for a token to be filled in.
    A block has max_draft_tokens + 1 slots."""

    family: ClassVar[str] = FAMILY

    num_layers: int
    mask_token_id: int

    @classmethod
    def for_target(
        cls,
        target: ModelConfig,
        *,
        feature_layers: Sequence[int],
        draft_vocab_size: int,
        max_draft_tokens: int,
        num_layers: int,
        mask_token_id: int,
        source: str,
        embedding_sha256: str,
    ) -> "DFlashConfig":
        """A drafter as wide as `target`, with its attention and MLP shapes; no `feature_layers`: as many as the drafter
        has layers, by depth.

        Raises:
            SettingError: layers that the target does not have; a mask token without an embedding.
        """
        layers = tuple(feature_layers) or default_feature_layers(target.num_layers, num_layers)
        if not 0 <= mask_token_id < target.vocab_size:
            raise SettingError(
                f"drafter.mask_token_id is {mask_token_id}, but the target has {target.vocab_size} token embeddings"
            )
        return cls(
            **shape_like(target),
            draft_vocab_size=min(draft_vocab_size, target.vocab_size),
            feature_layers=check_feature_layers(layers, target.num_layers),
            max_draft_tokens=max_draft_tokens,
            target=source,
            embedding_sha256=embedding_sha256,
            num_layers=num_layers,
            mask_token_id=mask_token_id,
        )
