"""Settings of verification."""

from typing import Literal

from pydantic import Field

from tierspec.settings.group import CountOrZero, Group


class VerificationSettings(Group):
    """What a request gets that does not say how its drafts are to be verified (arXiv 2608.03447: B, g and M)."""

    policy: Literal["strict", "budgeted"] = Field(
        "strict",
        description="strict: lossless; budgeted: near-tied mismatches are kept and charged, in greedy requests (others "
        "are verified strictly)",
    )
    budget: float = Field(8.0, ge=0.0, description="nats that the exceptions of a request may cost in all")
    budget_per_token: float = Field(0.0, ge=0.0, description="nats added to the budget by every output token")
    gate: float = Field(0.25, ge=0.0, description="most nats per draft token left in the block, the token included")
    cap: CountOrZero = Field(2, description="exceptions per block")
    variant: Literal["paper", "core", "tensor"] = Field(
        "paper",
        description="which published form of the rule: paper; core: a gate of 0 is strict; tensor: the gate is per "
        "share of the block left, and ties are refused once the budget is spent",
    )
    relax_stops: bool = Field(False, description="also make exceptions of tokens that end the output")
