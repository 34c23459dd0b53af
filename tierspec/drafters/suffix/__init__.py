"""The suffix cache: drafts copied from the text so far, or from past outputs, with no model."""

from tierspec.drafters.suffix.cache import SharedSuffixCache, SuffixCache
from tierspec.drafters.suffix.proposal import SuffixLimits, SuffixProposal

__all__ = ["SharedSuffixCache", "SuffixCache", "SuffixLimits", "SuffixProposal"]
