"""Random models of a few thousand weights, written as ordinary checkpoint directories."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_random_llama(directory: Path, *, seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    """Saves a random model in fp32 and returns it, with weights large enough that its logits differ visibly."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**TINY, "initializer_range": 0.2, **overrides})
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def write_random_model(directory: Path, family: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """`write_random_llama` for every supported family, with random biases and norms; in shards of `shard_size` if that
    is given."""
    torch.manual_seed(seed)
    shard_size = overrides.pop("shard_size", None)
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    model = AutoModelForCausalLM.from_config(kind(**{**TINY, "initializer_range": 0.2, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
    model.save_pretrained(directory, **({"max_shard_size": shard_size} if shard_size else {}))
    return model
