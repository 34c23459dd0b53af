"""Where an output ends, and what of its text may be shown: checked inside every block, as if it came token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierspec.decoding.detokenizer import Decode, Detokenizer
from tierspec.errors import SettingError
from tierspec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Cut:
    """What stays of a block: its first `num_tokens` tokens and the new `text`, which lags behind them.

    `num_consumed` counts the token that ended the output, too: an end-of-sequence token is looked at, not kept.
    """

    num_tokens: int
    num_consumed: int
    text: str | None
    finish_reason: str | None


class OutputEnd:
    """The stop state of one sequence.

    Ends, in the order of the tokens: an end-of-sequence or stop token id (not kept, "stop"), a stop string (its tokens
    are kept, the text ends before it, "stop"), the last token that there is room for ("length"). Names and meaning are
    vLLM's. `end_ids` are the tokens of the first kind. Text that may be the beginning of a stop string is held back
    until it is not.
    """

    def __init__(self, sampling: SamplingParams, eos_ids: Iterable[int], decode: Decode | None) -> None:
        """`decode` makes text of token ids; without it there is no text.

        Raises SettingError if stop strings are asked for without it.
        """
        if sampling.stop and decode is None:
            raise SettingError("stop: stop strings need a tokenizer")
        self.end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))
        self._stop = sampling.stop
        self._detokenizer = None if decode is None else Detokenizer(decode)
        self._held_back = ""

    def take(self, block: Sequence[int], room: int) -> Cut:
        """Checks the next tokens; at most `room` may be kept (room >= 1)."""
        kept, consumed, reason = self._ends(block, room)
        if self._detokenizer is None:
            return Cut(kept, consumed, None, reason)
        text = self._held_back
        if not self._stop:
            text += self._detokenizer.push(block[:kept])
        else:
            for count, token in enumerate(block[:kept], start=1):
                text += self._detokenizer.push((token,))
                start = self._first_stop(text)
                if start is not None:
                    return Cut(count, count, text[:start], "stop")
        if reason is not None:
            return Cut(kept, consumed, text + self._detokenizer.flush(), reason)
        text, self._held_back = self._split(text)
        return Cut(kept, consumed, text, None)

    def _ends(self, block: Sequence[int], room: int) -> tuple[int, int, str | None]:
        if not self.end_ids.isdisjoint(block):
            index = next(i for i, token in enumerate(block) if token in self.end_ids)
            if index < room:
                return index, index + 1, "stop"
        if len(block) >= room:
            return room, room, "length"
        return len(block), len(block), None

    def _first_stop(self, text: str) -> int | None:
        found = [start for start in map(text.find, self._stop) if start >= 0]
        return min(found, default=None)

    def _split(self, text: str) -> tuple[str, str]:
        """Splits off the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return text[:-size], text[-size:]
        return text, ""
