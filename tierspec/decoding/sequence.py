"""A sequence: the one owner of what is true about a request. Every cache of every tier can be rebuilt from it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from tierspec.config import DraftSettings, SuffixSettings
from tierspec.decoding.prefix_hash import PrefixHash
from tierspec.decoding.stats import DecodingStats
from tierspec.decoding.stopping import OutputEnd
from tierspec.drafters.routing import RouterName, RouterRule
from tierspec.errors import SettingError
from tierspec.sampling import SamplingParams, draw_seed
from tierspec.verification import STRICT, Allowance, Ledger, VerificationPolicy

DraftSourceName = Literal["auto", "suffix", "neural", "none"]
_DEFAULTS = DraftSettings()


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Where a sequence's drafts come from.

    `auto` lets the router choose between the suffix cache and the neural drafter by its `rule`. `max_tokens` is the
    neural drafter's limit, `suffix.max_tokens` the cache's. `min_survival` is the least predicted probability of
    survival with which the neural drafter goes on.
    """

    source: DraftSourceName = "auto"
    max_tokens: int = _DEFAULTS.max_tokens
    rule: RouterRule = field(default_factory=RouterRule)
    suffix: SuffixSettings = _DEFAULTS.suffix
    min_survival: float = _DEFAULTS.min_survival

    @classmethod
    def from_settings(cls, settings: DraftSettings) -> DraftOptions:
        rule = RouterRule(settings.router, settings.match_length, settings.min_score, settings.min_payoff)
        return cls(settings.source, settings.max_tokens, rule, settings.suffix, settings.min_survival)

    def validate(self) -> None:
        """Raises SettingError naming the field that is out of range."""
        if self.source not in get_args(DraftSourceName):
            raise SettingError(f"draft.source: must be one of auto, suffix, neural, none, not {self.source!r}")
        least = (
            ("max_tokens", self.max_tokens, 1),
            ("match_length", self.rule.match_length, 1),
            ("suffix.max_depth", self.suffix.max_depth, 2),
        )
        if self.rule.name not in (known := get_args(RouterName)):
            raise SettingError(f"draft.router: must be one of {', '.join(known)}, not {self.rule.name!r}")
        for name, value, minimum in least:
            if value < minimum:
                raise SettingError(f"draft.{name}: must be at least {minimum}, not {value}")
        if not 0 <= self.min_survival <= 1:
            raise SettingError(f"draft.min_survival: must be from 0 to 1, not {self.min_survival}")


class Sequence:
    """Prompt, output and sampling key of one request, and how far it is.

    `token_ids` are the committed tokens, prompt first; a position is an index into them. `provisional` holds tokens
    that a staged policy wrote ahead; strict verification leaves it empty. Only committed tokens are streamed,
    stop-matched, counted or shared. `ledger` is what a lossy policy has spent. `finish_reason` is None until the end:
    stop, length or abort.
    """

    __slots__ = (
        "_hash",
        "arrival",
        "draft",
        "end",
        "finish_reason",
        "id",
        "ledger",
        "policy",
        "prompt_length",
        "provisional",
        "row_sampling",
        "sampling",
        "stats",
        "token_ids",
        "wants_text",
    )

    def __init__(
        self,
        id: str,
        prompt_ids: Ids[int],
        sampling: SamplingParams,
        draft: DraftOptions | None = None,
        policy: VerificationPolicy = STRICT,
        arrival: float | None = None,
        *,
        wants_text: bool = True,
    ) -> None:
        """A missing seed is drawn here and kept. `wants_text` asks for text with every block, not only token ids.

        Raises:
            SettingError: a sampling, draft or verification field is out of range, or the prompt is empty.
        """
        sampling.validate()
        policy.validate(sampling.temperature)
        self.draft = draft or DraftOptions()
        self.draft.validate()
        if not prompt_ids:
            raise SettingError("prompt: holds no tokens")
        self.id = id
        self.sampling = sampling if sampling.seed is not None else replace(sampling, seed=draw_seed())
        self.row_sampling = self.sampling.row()
        self.policy = policy
        self.ledger = Ledger()
        self.arrival = time.monotonic() if arrival is None else arrival
        self.wants_text = wants_text or bool(sampling.stop)
        self.token_ids = list(prompt_ids)
        self.provisional: list[int] = []
        self.prompt_length = len(self.token_ids)
        self.finish_reason: str | None = None
        self.end: OutputEnd | None = None  # set by the engine that knows the tokenizer
        self.stats = DecodingStats()
        self._hash = PrefixHash()
        self._hash.extend(self.token_ids)

    def __len__(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        """The committed tokens behind the prompt."""
        return self.token_ids[self.prompt_length :]

    @property
    def room(self) -> int:
        """Tokens that `max_new_tokens` leaves."""
        return self.sampling.max_new_tokens - (len(self.token_ids) - self.prompt_length)

    def allowance(self, num_drafts: int) -> Allowance | None:
        """What the next block of that many drafts may cost; None: it is verified strictly."""
        assert self.end is not None
        return self.policy.allowance(self.ledger, len(self) - self.prompt_length, num_drafts, self.end.end_ids)

    def prefix_hash(self, length: int) -> int:
        """Hash of the first `length` committed tokens."""
        value = self._hash.at(length)
        assert value is not None
        return value

    def commit(self, token_ids: Ids[int]) -> None:
        """Appends tokens for good."""
        self.token_ids.extend(token_ids)
        self._hash.extend(token_ids)
