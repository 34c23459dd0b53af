"""`python -m benchmarks.gpu`: the decoder runtime on one device, against transformers and against memory bandwidth.

Needs torch, transformers and safetensors; no Ray, no hub, no download: a random llama of the chosen size is written to
a temporary folder. Under four minutes on one GPU with the default size. `--device cpu --size tiny` runs anywhere.
Exit status 1 if a parity check fails.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.timing import median_seconds, synchronize, write_result
from tierspec.models import Decoder, ModelConfig, Step


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool


SIZES = {
    "tiny": Size(64, 4, 4, 2, 128, 512, tied=True),
    "135m": Size(576, 30, 9, 3, 1536, 49152, tied=True),
    "1b": Size(2048, 16, 32, 8, 8192, 128256, tied=True),
    "8b": Size(4096, 32, 32, 8, 14336, 128256, tied=False),
}
BLOCKS = (1, 2, 4, 8, 16, 24, 32)
PROMPT_TOKENS = 64
CONTEXT_TOKENS = 512
FP32_TOLERANCE = 1e-4
CLEAR_GAP = 0.25
"""bf16 argmax is compared where the fp32 top-2 gap is larger: plain kernels disagree up to there."""
LEAST_AGREEMENT = 0.99


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="1b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves the choice to torch")
    parser.add_argument("--output", help="file for the result as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    began = time.perf_counter()
    device = torch.device(options.device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "size": options.size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory(prefix="tierspec-") as folder:
        directory = Path(folder)
        write_random_llama(directory, SIZES[options.size], device)
        result["parity"] = parity(directory, SIZES[options.size], device)
        result |= speed(directory, device, options.repeats)
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result, indent=2))
    write_result(options.output, result)
    return 0 if result["parity"]["passed"] else 1


def write_random_llama(directory: Path, size: Size, device: torch.device) -> None:
    """A checkpoint whose logits have a standard deviation of about 2, in bf16, so that both dtypes read it exactly."""
    hidden, intermediate, vocabulary = size.hidden, size.intermediate, size.vocabulary
    head_dim = hidden // size.heads
    generator = torch.Generator(device).manual_seed(0)

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(outputs, inputs, generator=generator, device=device)
        return (values * scale * inputs**-0.5).to("cpu", torch.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, hidden, 2.0)}
    for index in range(size.layers):
        layer = {
            "input_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
            "post_attention_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
            "self_attn.q_proj": matrix(hidden, hidden),
            "self_attn.k_proj": matrix(size.kv_heads * head_dim, hidden),
            "self_attn.v_proj": matrix(size.kv_heads * head_dim, hidden),
            "self_attn.o_proj": matrix(hidden, hidden),
            "mlp.gate_proj": matrix(intermediate, hidden),
            "mlp.up_proj": matrix(intermediate, hidden),
            "mlp.down_proj": matrix(hidden, intermediate),
        }
        weights |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    if not size.tied:
        weights["lm_head.weight"] = matrix(vocabulary, hidden, 2.0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": size.tied,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))


def parity(directory: Path, size: Size, device: torch.device) -> dict[str, Any]:
    """Logits of a prompt against transformers: largest difference in fp32, argmax agreement in bf16."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, size.vocabulary, (PROMPT_TOKENS,), generator=generator)
    exact = _transformers_logits(directory, device, torch.float32, ids)
    difference = float((_our_logits(directory, device, torch.float32, ids) - exact).abs().max())
    ours = _our_logits(directory, device, torch.bfloat16, ids).argmax(-1)
    theirs = _transformers_logits(directory, device, torch.bfloat16, ids).argmax(-1)
    best = exact.topk(2, dim=-1).values
    clear = (best[:, 0] - best[:, 1]) > CLEAR_GAP
    agreement = (ours == theirs).float()
    clear_agreement = float(agreement[clear].mean()) if bool(clear.any()) else None
    return {
        "positions": PROMPT_TOKENS,
        "fp32_max_logit_difference": difference,
        "bf16_argmax_agreement": float(agreement.mean()),
        "bf16_argmax_agreement_at_clear_positions": clear_agreement,
        "clear_positions": int(clear.sum()),
        "passed": difference <= FP32_TOLERANCE and (clear_agreement is None or clear_agreement >= LEAST_AGREEMENT),
    }


def _our_logits(directory: Path, device: torch.device, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    """Half of the prompt as one block, the rest token by token: prefill, cache and decode are all in it."""
    decoder = Decoder.from_directory(directory, dtype=dtype, device=device)
    cache = decoder.new_cache(len(ids))
    sequence, tokens, half = cache.sequence(), ids.tolist(), len(ids) // 2
    blocks = [tokens[:half], *([token] for token in tokens[half:])]
    hidden = [decoder.forward([Step(sequence, block)], cache).last for block in blocks]
    return torch.cat([decoder.logits(rows).float().cpu() for rows in hidden])


def _transformers_logits(directory: Path, device: torch.device, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM  # takes seconds to import

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    model = model.to(device).eval()
    with torch.inference_mode():
        return model(ids[None].to(device)).logits[0].float().cpu()


def speed(directory: Path, device: torch.device, repeats: int) -> dict[str, Any]:
    """Decode step against the time its bytes take at the measured bandwidth, and the cost of verifying n tokens."""
    decoder = Decoder.from_directory(directory, dtype=torch.bfloat16, device=device)
    cache = decoder.new_cache(CONTEXT_TOKENS + max(BLOCKS))
    sequence = cache.sequence()
    decoder.forward([Step(sequence, [3] * CONTEXT_TOKENS)], cache)

    def verify(tokens: int) -> list[int]:
        hidden = decoder.forward([Step(sequence, [5] * tokens)], cache)
        choices: list[int] = decoder.logits(hidden.last).argmax(-1).tolist()
        sequence.truncate(CONTEXT_TOKENS)
        return choices

    curve = {n: median_seconds(partial(verify, n), repeats=repeats, device=device) for n in BLOCKS}
    bandwidth = copy_bandwidth(device)
    step_bytes = bytes_per_step(decoder.config, CONTEXT_TOKENS)
    floor = step_bytes / bandwidth
    return {
        "dtype": "bfloat16",
        "numerics": decoder.numerics,
        "context_tokens": CONTEXT_TOKENS,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "step": {
            "bytes": step_bytes,
            "ms": curve[1] * 1e3,
            "ms_at_bandwidth": floor * 1e3,
            "share_of_bandwidth": floor / curve[1],
        },
        "verify_ms": {str(n): seconds * 1e3 for n, seconds in curve.items()},
        "verify_cost_in_steps": {str(n): seconds / curve[1] for n, seconds in curve.items()},
    }


def bytes_per_step(config: ModelConfig, context: int, itemsize: int = 2) -> int:
    """Bytes a single-token step must read: every layer's matrices, the head, and the keys and values of the context."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    cached = 2 * context * config.num_kv_heads * config.head_dim
    head = config.vocab_size * config.hidden_size
    return itemsize * (config.num_layers * (attention + mlp + cached) + head)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    synchronize(device)
    return 2 * size / median_seconds(partial(destination.copy_, source), repeats=10, device=device)


if __name__ == "__main__":
    sys.exit(main())
