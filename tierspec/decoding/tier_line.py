"""The engine's line to one tier: at most one message is out on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tierspec.decoding.messages import Item, TierMessage, TierName
from tierspec.decoding.scheduler import Group


@dataclass(slots=True, eq=False)
class TierLine:
    """`tick` and `group` are those of the message that is out (0 and None: none is); `releases` wait for the next."""

    name: TierName
    alive: bool = True
    tick: int = 0
    group: Group | None = None
    releases: list[str] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return self.alive and not self.tick

    def send(
        self, tick: int, items: list[Item], group: Group | None = None, features: torch.Tensor | None = None
    ) -> TierMessage:
        """Makes the message and counts it as out; whatever is to be released rides along."""
        self.tick, self.group = tick, group
        if group is not None:
            group.busy, group.last_tick = True, tick
        releases, self.releases = self.releases, []
        return TierMessage(self.name, tick, items, releases, features)

    def settle(self) -> None:
        """Nothing is out any more."""
        self.tick = 0
        if self.group is not None:
            self.group.busy = False
            self.group = None

    def lose(self) -> None:
        """The tier is gone, and with it all that it would have to answer or to release."""
        self.settle()
        self.alive = False
        self.releases.clear()
