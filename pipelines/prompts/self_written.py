"""User turns that the target writes itself, for when no prompt set is at hand or its prompts have one turn only.

An instruction-tuned model that is given its chat template up to where the user speaks goes on with what a user would
say (the idea of arXiv 2406.08464; the filter is our choice).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.prompts.overlap import OverlapIndex, word_grams
from pipelines.prompts.prompt import Prompt
from tierspec.errors import SettingError
from tierspec.evaluation.metrics import loops

SOURCE = "self_written"
MAX_TURN_TOKENS = 96
MIN_WORDS, MAX_WORDS = 4, 120
MIN_PRINTABLE = 0.98
MIN_DISTINCT_GRAMS = 0.8

_SENTINEL = "tierspecopensthisturn"


@dataclass(frozen=True)
class TurnOpening:
    """`token_ids` of the template up to the user's first word; a turn is over at any of `stop_token_ids`."""

    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


def open_user_turn(
    tokenizer: Any, eos_ids: Sequence[int], messages: Sequence[Mapping[str, str]] = (), *, setting: str
) -> TurnOpening:
    """Cut the rendered chat template where the user's words after `messages` would begin.

    Args:
        setting: the one that asks for it, named in errors.

    Raises:
        SettingError: there is no chat template, or it does not render the user's words.
    """
    if not tokenizer.chat_template:
        raise SettingError(f"{setting}: the target's tokenizer has no chat template to open")
    rendered = tokenizer.apply_chat_template([*messages, {"role": "user", "content": _SENTINEL}], tokenize=False)
    before, found, after = str(rendered).partition(_SENTINEL)
    if not found:
        raise SettingError(f"{setting}: the target's chat template does not show the user's words")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    closing = encode(after.lstrip())[:1]
    special = set(tokenizer.all_special_ids)
    return TurnOpening(tuple(encode(before)), tuple({*eos_ids, *(token for token in closing if token in special)}))


def rejection(text: str, token_ids: Sequence[int], finish_reason: str) -> str | None:
    """Why a sampled turn is not used, as one word; None if it is."""
    words = text.split()
    if finish_reason != "stop":
        return "unfinished"
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return "length"
    printable = sum(letter.isprintable() or letter in "\n\t" for letter in text) - text.count("\ufffd")
    if printable < MIN_PRINTABLE * len(text):
        return "unprintable"
    grams = word_grams(text, 3)
    if loops(token_ids, max_period=12, span=24) or len(grams) < MIN_DISTINCT_GRAMS * (len(words) - 2):
        return "repetitive"
    return None


@dataclass
class TurnSelection:
    """Sampled turns in, usable and distinct prompts out; `rejected` counts the others by reason."""

    wanted: int
    prompts: list[Prompt] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    tried: int = 0
    _index: OverlapIndex = field(default_factory=OverlapIndex)

    def offer(self, turns: Iterable[tuple[str, Sequence[int], str]]) -> None:
        """Take (text, token ids, finish reason) in the order of their numbers, until there are `wanted` prompts."""
        for text, token_ids, finish_reason in turns:
            if self.full:
                return
            text = text.strip()
            reason = rejection(text, token_ids, finish_reason)
            if reason is None and self._index.overlaps(text):
                reason = "repeated"
            if reason is None:
                self._index.add(text)
                self.prompts.append(Prompt(f"{SOURCE}-{self.tried:06d}", SOURCE, (text,), kind=SOURCE))
            else:
                self.rejected[reason] += 1
            self.tried += 1

    @property
    def full(self) -> bool:
        return len(self.prompts) >= self.wanted

    def counts(self) -> dict[str, object]:
        return {"tried": self.tried, "kept": len(self.prompts), "rejected": dict(sorted(self.rejected.items()))}
