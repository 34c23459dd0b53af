"""What an engine must know before its first sequence."""

from __future__ import annotations

from dataclasses import dataclass

from tierspec.drafters.protocol import Drafter
from tierspec.models import PAGE_TOKENS


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of one engine.

    `max_running` sequences at once; `token_budget` tokens of KV cache, in pages; `prefill_tokens` rows per tick, of
    which prompts get what decoding leaves, but one page at least; `max_draft_tokens` per round; `max_context` tokens of
    a sequence; `groups` of sequences that take turns; `vocab_size` to check prompts against, 0 for no check.
    """

    max_running: int
    token_budget: int
    prefill_tokens: int
    max_draft_tokens: int

    max_context: int
    groups: int = 1
    vocab_size: int = 0
    page_tokens: int = PAGE_TOKENS

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True)
class DrafterInfo:
    """What the engine must know of a neural drafter."""

    family: str
    max_draft_tokens: int
    predicts_survival: bool = False

    @classmethod
    def of(cls, drafter: Drafter) -> DrafterInfo:
        return cls(drafter.family, drafter.max_draft_tokens, drafter.predicts_survival)
