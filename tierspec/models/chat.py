"""The chat template: conversations to token ids."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from tierspec.errors import SettingError


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of `messages` (each with a text `role` and `content`), opened for the assistant's turn.

    Raises:
        SettingError: no messages, a message without text, no template, or a conversation the template refuses.
    """
    if not messages:
        raise SettingError("messages: expected at least one message")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise SettingError(f"messages[{index}].{key}: expected text")
    if not tokenizer.chat_template:
        raise SettingError("messages: the target's tokenizer has no chat template; send a plain prompt instead")
    plain = [dict(message) for message in messages]
    try:
        # transformers 5 returns a BatchEncoding here, not a list.
        encoded = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=True)
    except TemplateError as error:
        raise SettingError(f"messages: the target's chat template refuses them: {error}") from error
    return list(encoded["input_ids"])


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template's text; of the empty text if there is none."""
    text = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    return hashlib.sha256(text.encode()).hexdigest()
