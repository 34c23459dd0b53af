"""One prompt: the user's turns of a conversation, and how each accepted row layout is read into it.

Layouts: `turns` (list of user texts), `messages` (OpenAI), `conversations` (ShareGPT, or OpenAI inside it) and `prompt`
(a text, or messages). Answers in the data are dropped: the target writes its own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LAYOUTS = ("turns", "messages", "conversations", "prompt")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}


@dataclass(frozen=True)
class Prompt:
    """`turns` are the user's messages in order; the target answers each with all before it in context."""

    sample_id: str
    source: str
    turns: tuple[str, ...]
    system: str = ""
    kind: str = ""

    @property
    def content_hash(self) -> str:
        """16 hex digits of what the target is asked, whatever the row was called."""
        return hashlib.blake2b(json.dumps([self.system, *self.turns]).encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """A row that `parse_row` reads back."""
        row: dict[str, Any] = {"id": self.sample_id, "source": self.source, "turns": list(self.turns)}
        if self.system:
            row["system"] = self.system
        if self.kind:
            row["kind"] = self.kind
        return row


def parse_row(row: object, source: str) -> Prompt:
    """Read one row; `source` names rows that do not say where they come from.

    Raises:
        ValueError: what is wrong with the row, without its place (the caller knows file and line).
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected a JSON object, got {_kind_of(row)}")
    layout = next((name for name in LAYOUTS if row.get(name) is not None), None)
    if layout is None:
        raise ValueError(f"no field of {', '.join(LAYOUTS)}; found {', '.join(map(str, row)) or 'none'}")
    value = row[layout]
    if layout == "prompt" and isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{layout}: expected a list, got {_kind_of(value)}")
    if layout == "turns" or (layout == "prompt" and all(isinstance(item, str) for item in value)):
        system, turns = "", tuple(_text(item, layout) for item in value)
    else:
        system, turns = _from_messages(value, layout)
    if row.get("system") is not None:
        system = _text(row["system"], "system")
    if not turns:
        raise ValueError(f"{layout}: no user turn")
    if any(not turn.strip() for turn in turns):
        raise ValueError(f"{layout}: empty user turn")
    prompt = Prompt("", _label(row, "source") or source, turns, system, _label(row, "kind"))
    given = next((name for name in ("id", "sample_id", "prompt_id") if row.get(name) not in (None, "")), None)
    return replace(prompt, sample_id=_label(row, given) if given else prompt.content_hash)


def _from_messages(messages: Sequence[object], layout: str) -> tuple[str, tuple[str, ...]]:
    system: list[str] = []
    turns: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"{layout}: expected messages, got {_kind_of(message)}")
        name = message.get("role") or message.get("from")
        role = _ROLES.get(str(name).lower())
        if role is None:
            raise ValueError(f"{layout}: unknown role {name!r}, expected one of {', '.join(_ROLES)}")
        if role != "assistant":
            content = message.get("content") if message.get("content") is not None else message.get("value")
            (system if role == "system" else turns).append(_text(content, layout))
    return "\n\n".join(system), tuple(turns)


def _text(value: object, field: str) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
        if parts and all(isinstance(part, str) for part in parts):
            return "\n".join(str(part) for part in parts)
    if not isinstance(value, str):
        raise ValueError(f"{field}: expected text, got {_kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{field}: text with a lone surrogate, which is not valid Unicode") from None
    return value


def _label(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{field}: expected text or a whole number, got {_kind_of(value)}")
    return _text(str(value), field)


def _kind_of(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
