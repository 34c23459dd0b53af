"""Draft sources: neural drafters behind one protocol, and the suffix cache."""

from tierspec.drafters.checkpoint import DrafterCheckpoint, embedding_sha256, save_checkpoint
from tierspec.drafters.families import load_drafter, read_drafter
from tierspec.drafters.protocol import Drafter, DrafterState, DraftRequest, FeatureProjection, UnknownPrefix
from tierspec.drafters.vocabulary import DraftVocabulary

__all__ = [
    "DraftRequest",
    "DraftVocabulary",
    "Drafter",
    "DrafterCheckpoint",
    "DrafterState",
    "FeatureProjection",
    "UnknownPrefix",
    "embedding_sha256",
    "load_drafter",
    "read_drafter",
    "save_checkpoint",
]
