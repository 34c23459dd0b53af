"""What the configurations of all drafter families have in common, and their place in a checkpoint's ``config.json``."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from tierspec.errors import ArtifactError, SettingError
from tierspec.models import ModelConfig, RopeConfig


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter; `vocab_size` and `target_hidden_size` are the target's.

    `feature_layers`: indices into Hugging Face's `hidden_states` tuple. `max_draft_tokens`: depth it was trained to.
    `target`: where the target came from; `embedding_sha256`: identity of its embedding, which the drafter reads but
    does not store.
    """

    family: ClassVar[str]

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    max_draft_tokens: int
    target: str
    embedding_sha256: str

    @property
    def feature_size(self) -> int:
        """Width of the concatenated target features."""
        return len(self.feature_layers) * self.target_hidden_size

    def to_json(self) -> str:
        """The content of a checkpoint's ``config.json``."""
        return json.dumps({"family": self.family, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: Path) -> Self:
        """Reads what `to_json` wrote. ArtifactError names `path` and the field that is missing, unknown or wrong."""
        given = {name: value for name, value in values.items() if name != "family"}
        wanted = {field.name: field.type for field in dataclasses.fields(cls)}
        for name in wanted.keys() ^ given.keys():
            raise ArtifactError(f"{path}: field {name} is {'missing' if name in wanted else 'unknown'}")
        given["feature_layers"] = tuple(_checked(path, "feature_layers", given["feature_layers"], list))
        rope = _checked(path, "rope", given["rope"], dict)
        try:
            given["rope"] = RopeConfig(**rope)
        except TypeError:
            raise ArtifactError(f"{path}: field rope has unknown entries: {sorted(rope)}") from None
        for name, kind in wanted.items():
            if kind in (int, float, str):
                _checked(path, name, given[name], kind)
        config = cls(**given)
        if not 0 < config.draft_vocab_size <= config.vocab_size:
            raise ArtifactError(f"{path}: draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary")
        return config


def shape_like(target: ModelConfig) -> dict[str, Any]:
    """The fields of a drafter as wide as `target`, with its attention and MLP shapes."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "rms_norm_eps": target.rms_norm_eps,
        "rope": target.rope,
        "max_context": target.max_context,
    }


def check_feature_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers as a tuple. SettingError unless they rise strictly within 1 .. N-1: entry N of `hidden_states` is
    after the final norm, which engines do not hand out."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= num_layers:
        raise SettingError(
            f"drafter.feature_layers: {list(layers)} must rise strictly within 1 to {num_layers - 1} "
            f"(index into hidden_states of a target with {num_layers} layers; its last entry is not usable)"
        )
    return tuple(layers)


def _checked(path: Path, name: str, value: Any, kind: type) -> Any:
    good = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    least = 0 if name.endswith("_id") else 1
    if not good or (kind is int and value < least) or (kind is float and not 0 < value < math.inf):
        raise ArtifactError(f"{path}: field {name} should be a {kind.__name__}, found {value!r}")
    return value
