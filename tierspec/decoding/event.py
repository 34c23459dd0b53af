"""What the engine tells about a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """What one round did to one sequence.

    `token_ids` are newly committed: the first `accepted` of them drafted by `source` (suffix, neural), the rest chosen
    by the target (`source` is none, or prefill behind a prompt, where nothing was drafted). `text_delta` lags behind
    them; it is None if the sequence wants no text.
    """

    sequence_id: str
    token_ids: list[int]
    text_delta: str | None
    finish_reason: str | None
    source: str
    accepted: int
