"""The decoder runtime: models, layer routes, the paged KV cache, and loading."""

from tierspec.models.architecture import ModelConfig, RopeConfig
from tierspec.models.cache import PAGE_TOKENS, BatchLayout, CacheFull, CacheSequence, KVCache, Step
from tierspec.models.decoder import Decoder, Hidden
from tierspec.models.loading import load_target
from tierspec.models.route import Route
from tierspec.models.target import Target

__all__ = [
    "PAGE_TOKENS",
    "BatchLayout",
    "CacheFull",
    "CacheSequence",
    "Decoder",
    "Hidden",
    "KVCache",
    "ModelConfig",
    "RopeConfig",
    "Route",
    "Step",
    "Target",
    "load_target",
]
