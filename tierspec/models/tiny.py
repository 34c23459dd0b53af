"""A random model of the llama family that is made in a second: for tests and for trying the line without a download."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tierspec.artifacts import atomic_write_json

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY, CONTEXT = 64, 4, 4, 2, 16, 128, 512, 2048
_EMBEDDING_SCALE, _ATTENTION_GAIN = 0.3, 2.0  # a small embedding and sharp attention: the greedy text does not loop
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_END = _SPECIALS.index("<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = """Speculative decoding lets a small model write a few tokens ahead while the large model only checks them.
The target reads the draft in one pass, keeps the longest prefix it agrees with, and adds one token of its own.
When the draft is good, several tokens come out of one step; when it is bad, nothing is lost but a little time.
What is the capital of France? The capital of France is Paris. How many legs does a spider have? A spider has eight.
Write a short story about a lighthouse keeper who finds a letter in a bottle, and explain why it made him smile.
def add(left, right): return left + right
for index in range(10): print(index, index * index)
Here is a list of things to remember: first, drink water; second, sleep enough; third, call your mother.
Once upon a time there was a miller who had three sons, and when he died he left them his mill, his donkey and his cat.
"""


def build_tiny(directory: Path) -> None:
    """Write the tiny model (same bytes on every run) into `directory`: config, weights, tokenizer, chat template."""
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    ends = {"bos_token_id": 1, "eos_token_id": _END, "pad_token_id": _END}
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }
    atomic_write_json(directory / "config.json", shape | ends)
    atomic_write_json(directory / "generation_config.json", ends)
    _write_tokenizer(directory)


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return normal(outputs, inputs, gain * inputs**-0.5)

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, _EMBEDDING_SCALE)}
    for index in range(LAYERS):
        layer = {
            "input_layernorm": torch.ones(HIDDEN),
            "self_attn.q_proj": linear(HEADS * HEAD_DIM, HIDDEN, _ATTENTION_GAIN),
            "self_attn.k_proj": linear(KV_HEADS * HEAD_DIM, HIDDEN, _ATTENTION_GAIN),
            "self_attn.v_proj": linear(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": linear(HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": torch.ones(HIDDEN),
            "mlp.gate_proj": linear(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": linear(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": linear(HIDDEN, INTERMEDIATE),
        }
        weights |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    return weights | {"model.norm.weight": torch.ones(HIDDEN)}


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        model_max_length=CONTEXT,
        chat_template=_TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
