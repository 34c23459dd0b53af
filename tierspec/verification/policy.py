"""How a request wants its drafts verified, and what that has cost so far."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from tierspec.config import VerificationSettings
from tierspec.errors import SettingError
from tierspec.verification.budgeted import Allowance

PolicyName = Literal["strict", "budgeted"]
Variant = Literal["paper", "core", "tensor"]
LOSSY = frozenset({"budgeted"})
_DEFAULTS = VerificationSettings()
_CORE_TOLERANCE = 1e-9


@dataclass(slots=True)
class Ledger:
    """What a request's exceptions have cost: `spent` nats for `exceptions` tokens."""

    spent: float = 0.0
    exceptions: int = 0

    def debit(self, regrets: Iterable[float]) -> None:
        """Charges exceptions that were committed. Nothing is ever paid back."""
        for regret in regrets:
            self.spent += regret
            self.exceptions += 1


@dataclass(frozen=True, slots=True)
class VerificationPolicy:
    """Strict: a draft token stays iff it is the target's choice. Budgeted (arXiv 2608.03447, greedy requests only): one
    that is almost the choice stays, too, and its regret is charged.

    `budget` nats for the whole request and `budget_per_token` more for every output token; `gate` nats per draft token
    that is left in the block; `cap` exceptions per block. Tokens that end the output are neither kept nor replaced by
    exception unless `relax_stops`.

    `variant` names one of three published rules: `paper`; `core`, which is strict with a gate of 0 and forgives 1e-9
    nats; `tensor`, whose gate is per *share* of the block left, and which refuses ties once the budget is spent.
    """

    name: PolicyName = "strict"
    budget: float = _DEFAULTS.budget
    budget_per_token: float = _DEFAULTS.budget_per_token
    gate: float = _DEFAULTS.gate
    cap: int = _DEFAULTS.cap
    variant: Variant = _DEFAULTS.variant
    relax_stops: bool = _DEFAULTS.relax_stops

    @classmethod
    def from_settings(cls, settings: VerificationSettings) -> VerificationPolicy:
        values = settings.model_dump()
        return cls(values.pop("policy"), **values)

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from the target's own."""
        return self.name in LOSSY

    def validate(self, temperature: float = 0.0) -> None:
        """Raises SettingError naming the field that is out of range or does not fit a request at `temperature`."""
        for field, value, known in (("policy", self.name, PolicyName), ("variant", self.variant, Variant)):
            if value not in get_args(known):
                raise SettingError(f"verification.{field}: must be one of {', '.join(get_args(known))}, not {value!r}")
        for field in ("budget", "budget_per_token", "gate", "cap"):
            if not ((number := getattr(self, field)) >= 0 and math.isfinite(number)):
                raise SettingError(f"verification.{field}: must be finite and at least 0, not {number}")
        if self.name == "budgeted" and temperature > 0:
            raise SettingError("verification.policy: 'budgeted' is defined for greedy requests; set temperature to 0")

    def left(self, ledger: Ledger, output_tokens: int) -> float:
        """Nats that may still be spent behind `output_tokens` tokens."""
        return max(0.0, self.budget + self.budget_per_token * output_tokens - ledger.spent)

    def allowance(
        self, ledger: Ledger, output_tokens: int, num_drafts: int, end_ids: Iterable[int]
    ) -> Allowance | None:
        """For the next block; None asks for strict verification. `end_ids`: tokens that end the output."""
        if self.name == "strict" or not num_drafts or not self.cap or not (self.budget or self.budget_per_token):
            return None
        if self.variant == "core" and not self.gate:
            return None
        return Allowance(
            remaining=self.left(ledger, output_tokens) + (_CORE_TOLERANCE if self.variant == "core" else 0.0),
            gate=self.gate / num_drafts if self.variant == "tensor" else self.gate,
            cap=self.cap,
            ties_need_budget=self.variant == "tensor",
            protected_ids=() if self.relax_stops else tuple(sorted(end_ids)),
        )


STRICT = VerificationPolicy()
"""Lossless verification, what a request gets that asks for nothing else."""
