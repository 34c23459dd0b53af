"""A target: the model to speed up, with its tokenizer and everything needed to talk to it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierspec.models import chat
from tierspec.models.architecture import ModelConfig
from tierspec.models.decoder import Decoder


@dataclass(frozen=True)
class Target:
    """A loaded target model.

    `path` is a local directory that transformers can load too; `source` is what the user named; `eos_ids` end a
    sequence (from generation_config.json, else config.json, else the tokenizer).
    """

    decoder: Decoder
    tokenizer: Any
    path: Path
    config: ModelConfig
    source: str
    eos_ids: tuple[int, ...]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, opened for the assistant's turn; SettingError if the template refuses it."""
        return chat.encode_chat(self.tokenizer, messages)

    @functools.cached_property
    def template_hash(self) -> str:
        """SHA-256 of the chat template's text; of the empty text if there is none."""
        return chat.template_hash(self.tokenizer)
