"""Random models of a few thousand weights, written as ordinary checkpoint directories."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
