"""What the engine and the tiers say to each other: plain values, one message per tier and tick, one reply to each.

A sequence of t committed tokens x[0] .. x[t-1] is held by the verifier up to some `base` <= t - 1; `prefix_hash` is
`PrefixHash.at(base)` of the committed tokens. The drafter holds *rows*: row p pairs the target's feature at position p
with token p + 1, so `base` rows depend on tokens 0 .. base, and its `prefix_hash` is that of base + 1 tokens.

Feature tensors are bf16 [n, d], d the drafter's hidden size, and travel once per message: the rows of all items that
have some, in the order of the items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from tierspec.sampling import RowSampling
from tierspec.verification import Allowance

TierName = Literal["drafter", "verifier"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """To the verifier: hold `token_ids` behind the first `base` tokens. No token is chosen."""

    sequence_id: str
    round_id: int
    base: int
    prefix_hash: int
    token_ids: list[int]
    want_features: bool


@dataclass(frozen=True, slots=True)
class Verify:
    """To the verifier: choose the token after every draft prefix, and accept the drafts up to the first that is not the
    choice and that `allowance` does not pay for (None: up to the first that is not the choice).

    `token_ids` are the committed tokens that are not held yet (at least the last one), then `num_drafts` drafts.
    """

    sequence_id: str
    round_id: int
    base: int
    prefix_hash: int
    token_ids: list[int]
    num_drafts: int
    sampling: RowSampling
    allowance: Allowance | None
    want_features: bool


@dataclass(frozen=True, slots=True)
class Propose:
    """To the drafter: take in the rows base .. base + n - 1, then draft up to `max_tokens` tokens, up to the first that
    is predicted to survive with less than `min_survival`.

    Row base + i pairs the i-th feature row of this item (the message's `features`) with `token_ids[i]`, which is token
    base + i + 1. `origin` is the first row the drafter ever saw of the sequence: 0, or later after a cold start. An
    item with base == origin starts anew.
    """

    sequence_id: str
    round_id: int
    origin: int
    base: int
    prefix_hash: int
    token_ids: list[int]
    max_tokens: int
    sampling: RowSampling
    min_survival: float = 0.0


Item = Prefill | Verify | Propose


@dataclass(frozen=True, slots=True)
class TierMessage:
    """One tick's work for one tier. `releases` names sequences to forget, before the items are looked at."""

    tier: TierName
    tick: int
    items: list[Item]
    releases: list[str]
    features: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The verifier now holds `held` tokens; `num_features` feature rows are in the reply."""

    sequence_id: str
    round_id: int
    held: int
    num_features: int


@dataclass(frozen=True, slots=True)
class Verified:
    """`accepted` of the drafts stay, `next_token` is the target's choice behind them and is not held yet.

    `exceptions` are those among the accepted that were not the choice: (index into the drafts, regret in nats).
    `num_features` rows are in the reply: those of the committed tokens that were sent, then of the accepted drafts.
    """

    sequence_id: str
    round_id: int
    accepted: int
    next_token: int
    num_features: int
    exceptions: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Proposed:
    """The drafter holds all rows that were sent; `draft_ids` are target token ids, possibly none."""

    sequence_id: str
    round_id: int
    draft_ids: list[int]


@dataclass(frozen=True, slots=True)
class UnknownPrefix:
    """The tier does not hold the prefix that an item named. It holds `held` tokens that may be built on."""

    sequence_id: str
    round_id: int
    held: int


@dataclass(frozen=True, slots=True)
class OutOfPages:
    """The tier's cache has no room for an item; the item changed nothing."""

    sequence_id: str
    round_id: int


ReplyItem = Prefilled | Verified | Proposed | UnknownPrefix | OutOfPages


@dataclass(frozen=True, slots=True)
class TierReply:
    """The answer to the message of the same tick, item by item in the same order. `seconds` is the tier's work."""

    tier: TierName
    tick: int
    items: list[ReplyItem]
    seconds: float
    features: torch.Tensor | None = None


class Tier(Protocol):
    """Answers a message; synchronous, one at a time."""

    def handle(self, message: TierMessage) -> TierReply: ...
