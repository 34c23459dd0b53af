"""Verification policies: how much of a block that the target has scored is kept."""

from tierspec.verification.protocol import VerificationPolicy, load_policy
from tierspec.verification.strict import StrictPolicy, greedy_prefix, rejection_sample, target_choice

__all__ = ["StrictPolicy", "VerificationPolicy", "greedy_prefix", "load_policy", "rejection_sample", "target_choice"]
