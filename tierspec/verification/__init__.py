"""Verification policies: how much of a block that the target has scored is kept."""

from tierspec.verification.budgeted import Allowance, budgeted_prefix
from tierspec.verification.policy import STRICT, Ledger, VerificationPolicy
from tierspec.verification.strict import greedy_prefix, rejection_sample, target_choice

__all__ = [
    "STRICT",
    "Allowance",
    "Ledger",
    "VerificationPolicy",
    "budgeted_prefix",
    "greedy_prefix",
    "rejection_sample",
    "target_choice",
]
