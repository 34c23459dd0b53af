"""Tiers as Ray actors, and the loading that actors and colocated cells share.

The actors are synchronous: one message at a time, in order. They are plain classes; the cell makes actors of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tierspec.config import Settings
from tierspec.decoding import DrafterInfo, DrafterTier, TierMessage, TierReply, VerifierTier
from tierspec.drafters import Drafter, load_drafter
from tierspec.models.loading import load_target
from tierspec.models.target import Target
from tierspec.threads import use_threads


@dataclass(frozen=True)
class TierFacts:
    """What a tier that is ready tells about itself: its target's limits, its drafter, its process and torch threads."""

    max_context: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    drafter: DrafterInfo | None
    pid: int
    threads: int

    @classmethod
    def of(cls, models: Models, threads: int) -> TierFacts:
        own = models.target.config.max_context
        asked = models.settings.target.max_context
        drafter = models.drafter
        return cls(
            max_context=min(own, asked) if asked else own,
            vocab_size=models.target.config.vocab_size,
            eos_ids=models.target.eos_ids,
            drafter=None if drafter is None else DrafterInfo.of(drafter),
            pid=os.getpid(),
            threads=threads,
        )


class Models:
    """Target and neural drafter in this process, and new tiers around them.

    Both tiers need both models: the verifier applies the drafter's projection to its features, and the drafter shares
    the target's embedding.
    """

    def __init__(self, settings: Settings, drafter_path: str | None) -> None:
        self.settings = settings
        device = settings.target.device.partition(":")[0]  # Ray shows a process only the GPUs it was given
        self.target: Target = load_target(
            settings.target.source, dtype=settings.target.dtype, device=device, numerics=settings.target.numerics
        )
        self.drafter: Drafter | None = None if drafter_path is None else load_drafter(drafter_path, self.target)

    def verifier_tier(self) -> VerifierTier:
        budget = self.settings.decoding.token_budget
        if self.drafter is None:
            return VerifierTier(self.target, token_budget=budget)
        return VerifierTier(
            self.target,
            token_budget=budget,
            projection=self.drafter.projection,
            feature_layers=self.drafter.feature_layers,
        )

    def drafter_tier(self) -> DrafterTier:
        assert self.drafter is not None
        return DrafterTier(self.drafter, token_budget=self.settings.decoding.token_budget)


class FullVerifierActor:
    """The full model in a process of its own."""

    def __init__(self, settings: Settings, drafter_path: str | None, threads: int) -> None:
        threads = use_threads(threads)
        models = Models(settings, drafter_path)
        self._tier = models.verifier_tier()
        self._facts = TierFacts.of(models, threads)

    def ping(self) -> TierFacts:
        """Answers once everything is loaded."""
        return self._facts

    def handle(self, message: TierMessage) -> TierReply:
        return self._tier.handle(message)


class DrafterActor:
    """The neural drafter in a process of its own. Of the target it keeps what the drafter shares with it."""

    def __init__(self, settings: Settings, drafter_path: str, threads: int) -> None:
        threads = use_threads(threads)
        models = Models(settings, drafter_path)
        self._tier = models.drafter_tier()
        self._facts = TierFacts.of(models, threads)

    def ping(self) -> TierFacts:
        """Answers once everything is loaded."""
        return self._facts

    def handle(self, message: TierMessage) -> TierReply:
        return self._tier.handle(message)
