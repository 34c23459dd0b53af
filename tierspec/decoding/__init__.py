"""Decoding: sequences, the round, the continuous-batching engine, its tiers and drivers, and `generate`."""

from tierspec.decoding.detokenizer import text_decoder
from tierspec.decoding.draft_sources import DraftSources
from tierspec.decoding.drafter_tier import DrafterTier
from tierspec.decoding.drivers import AsyncDriver, Channel, ChannelLost, EventStream, SynchronousDriver
from tierspec.decoding.engine import Engine
from tierspec.decoding.event import Event
from tierspec.decoding.generation import Generation, LocalCell, generate
from tierspec.decoding.limits import DrafterInfo, EngineLimits
from tierspec.decoding.messages import (
    OutOfPages,
    Prefill,
    Prefilled,
    Propose,
    Proposed,
    Tier,
    TierMessage,
    TierName,
    TierReply,
    UnknownPrefix,
    Verified,
    Verify,
)
from tierspec.decoding.sequence import DraftOptions, Sequence
from tierspec.decoding.stats import DecodingStats
from tierspec.decoding.verifier_tier import VerifierTier
from tierspec.sampling import SamplingParams

__all__ = [
    "AsyncDriver",
    "Channel",
    "ChannelLost",
    "DecodingStats",
    "DraftOptions",
    "DraftSources",
    "DrafterInfo",
    "DrafterTier",
    "Engine",
    "EngineLimits",
    "Event",
    "EventStream",
    "Generation",
    "LocalCell",
    "OutOfPages",
    "Prefill",
    "Prefilled",
    "Propose",
    "Proposed",
    "SamplingParams",
    "Sequence",
    "SynchronousDriver",
    "Tier",
    "TierMessage",
    "TierName",
    "TierReply",
    "UnknownPrefix",
    "Verified",
    "VerifierTier",
    "Verify",
    "generate",
    "text_decoder",
]
