"""Token ids to text, a few at a time, so that the pieces add up to the decoding of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # what decoding makes of half a code point
_WINDOW = 16


def text_decoder(tokenizer: Any) -> Decode:
    """Decoding by a transformers tokenizer, special tokens left out."""

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return decode


class Detokenizer:
    """Incremental decoding over a short window of tokens.

    Text appears once the tokens that spell it are complete: bytes that do not end a UTF-8 code point wait for the next
    token. The window keeps at least one earlier token, since tokenizers may treat the first one specially.
    """

    __slots__ = ("_clean", "_decode", "_text", "_window")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._clean = 0  # tokens of the window whose text is out
        self._text = ""  # their text

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes tokens and returns the text that they complete."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        delta = text[len(self._text) :]
        if len(self._window) > _WINDOW and self._clean:
            del self._window[: self._clean]
            text = self._decode(self._window)
        self._clean, self._text = len(self._window), text
        return delta

    def flush(self) -> str:
        """The text that still waits, incomplete code points as U+FFFD. For the end."""
        return self._decode(self._window)[len(self._text) :] if self._clean < len(self._window) else ""
