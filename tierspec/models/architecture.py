"""The shape of a decoder, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierspec.errors import ArtifactError, SettingError
from tierspec.models.rope import RopeConfig

FAMILIES = ("llama", "qwen2", "qwen3")
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only model of the llama family; `max_context` in tokens.

    `qkv_bias`: query, key and value projections have biases (Qwen2); `qk_norm`: queries and keys are normalised by head
    (Qwen3).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    tie_embeddings: bool
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a ``config.json`` as transformers 4 or 5 writes it.

        Raises:
            SettingError: the architecture, or an option of it, is not supported.
            ArtifactError: a field is missing or contradictory.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise SettingError(
                f"target.source: architecture {family!r} is not supported (supported: {', '.join(FAMILIES)})"
            )
        for option, wanted in _FIXED.items():
            if config.get(option, wanted) != wanted:
                raise SettingError(
                    f"target.source: config.json has {option}={config[option]!r}; only {wanted!r} is supported"
                )
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            shape = cls(
                family=family,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=RopeConfig.from_hf(config),
                max_context=int(config.get("max_position_embeddings", 2048)),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                bos_id=config.get("bos_token_id"),
                eos_ids=token_ids(config.get("eos_token_id")),
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
            )
        except SettingError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"target.source: config.json is incomplete or malformed ({error})") from None
        if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2 or shape.head_dim > 512:
            raise ArtifactError(
                f"target.source: config.json has {heads} heads, {kv_heads} key-value heads and head_dim {head_dim}, "
                "which do not fit together"
            )
        return shape


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An end-of-sequence entry of a config (absent, one id or several) as a tuple."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
