"""From what the user names (a directory, a Hugging Face id, `embedded:...`) to a loaded target."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch

from tierspec.artifacts import read_object
from tierspec.errors import ArtifactError, SettingError
from tierspec.models.architecture import token_ids
from tierspec.models.decoder import Decoder
from tierspec.models.embedded import PREFIX, embedded_directory
from tierspec.models.target import Target
from tierspec.paths import user_path

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)


def load_target(source: str, *, dtype: str = "bfloat16", device: str = "cpu", numerics: str = "auto") -> Target:
    """Load a target.

    `source`: a local directory (config.json, model.safetensors, tokenizer files), `embedded:smollm2-135m`,
    `embedded:tiny`, or a Hugging Face id, which is fetched unless it is cached. `dtype`: "bfloat16" or "float32".
    `numerics`: "auto", "invariant" or "fast" (see Decoder).

    Raises:
        SettingError: an unknown source, dtype or device, or an architecture that is not supported.
        ArtifactError: a file or tensor that is missing, corrupt or of the wrong shape.
    """
    if dtype not in _DTYPES:
        raise SettingError(f"target.dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"target.device is {device!r}, but this machine offers no CUDA device: use cpu")
    path = resolve_source(source)
    decoder = Decoder.from_directory(
        path, dtype=_DTYPES[dtype], device=device, numerics=None if numerics == "auto" else numerics
    )
    tokenizer = load_tokenizer(path)
    if len(tokenizer) > decoder.config.vocab_size:
        raise ArtifactError(
            f"target.source: {path}: the tokenizer has {len(tokenizer)} tokens, the model {decoder.config.vocab_size}"
        )
    eos_ids = _eos_ids(path) or decoder.config.eos_ids or token_ids(tokenizer.eos_token_id)
    return Target(decoder, tokenizer, path, decoder.config, source, eos_ids)


def resolve_source(source: str) -> Path:
    """The local directory of a target, fetched or built if need be; errors as in `load_target`."""
    if source.startswith(PREFIX):
        return embedded_directory(source.removeprefix(PREFIX))
    path = user_path(source, "target.source")
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise SettingError(f"target.source: {source} is a file; name the directory that holds config.json")
    if not _HUB_ID.match(source):
        raise SettingError(f"target.source: there is no directory {source}")
    return _hub_directory(source)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model directory. ArtifactError if it cannot be read."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception on a corrupt file
        raise ArtifactError(f"target.source: {path}: the tokenizer cannot be read: {_first_line(error)}") from error


def _hub_directory(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        cached = Path(snapshot_download(repository, allow_patterns=list(_HUB_FILES), local_files_only=True))
        if _is_complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    logging.getLogger(__name__).info("fetching %s", repository)
    try:
        return Path(snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
    except RepositoryNotFoundError as error:
        reason = "the hub has no such model, or it needs a token (HF_TOKEN)"
        raise SettingError(f"target.source: {repository} is no directory, and {reason}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f"the hub cannot be reached: {_first_line(error)}"
        raise SettingError(f"target.source: {repository} is no directory, it is not cached, and {reason}") from error


def _is_complete(directory: Path) -> bool:
    """Whether an earlier download of the weights into `directory` was finished."""
    index = directory / "model.safetensors.index.json"
    if not (directory / "config.json").is_file():
        return False
    if not index.is_file():
        return (directory / "model.safetensors").is_file()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((directory / shard).is_file() for shard in shards)


def _eos_ids(path: Path) -> tuple[int, ...]:
    file = path / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        return token_ids(read_object(file).get("eos_token_id"))
    except (AttributeError, TypeError, ValueError) as error:
        raise ArtifactError(f"target.source: {file} is malformed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The first line of a message that says something; libraries explain at length in the next ones."""
    lines = str(error).splitlines() or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].rstrip().endswith(":") else lines[0]
