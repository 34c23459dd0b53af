"""What a neural drafter is to the rest of the system.

A drafter holds *rows*: row p pairs the target's feature at position p with token p + 1. Its state can be thrown away
and rebuilt from committed tokens and features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from tierspec.sampling import RowSampling


class UnknownPrefix(LookupError):
    """The drafter does not hold the rows that `sequence_ids` build on; no request of the call was applied."""

    def __init__(self, sequence_ids: Sequence[str]) -> None:
        super().__init__(f"unknown prefix of sequences {', '.join(sequence_ids)}")
        self.sequence_ids = tuple(sequence_ids)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Take in rows, then draft.

    `base`: the first row sent; rows origin .. base - 1 must be held, later ones are forgotten. `token_ids`: committed
    tokens base + 1 .. base + n, n >= 1; `features` [n, d]: projected target features of positions base .. base + n - 1.
    `origin`: the first row ever sent of this sequence (later than 0 after a cold start); base == origin starts anew.
    `max_tokens`: longest draft wanted, 0 to take in only. `min_survival`: the draft ends before the first token that
    is predicted to survive with a lower probability; 0 predicts nothing.
    """

    sequence_id: str
    base: int
    token_ids: Sequence[int]
    features: Tensor
    max_tokens: int
    sampling: RowSampling = field(default_factory=RowSampling)
    origin: int = 0
    min_survival: float = 0.0


class FeatureProjection(Protocol):
    """The drafter's part that runs where the target runs."""

    def __call__(self, features: Mapping[int, Tensor]) -> Tensor:
        """Target features by `hidden_states` index, each [R, D] → [R, d] in bf16."""


class DrafterState(Protocol):
    """Rows of many sequences, on one device."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Takes in every request's rows and drafts for all of them together: up to `max_tokens` target ids each.

        Raises:
            UnknownPrefix: a request builds on rows that are not held; nothing was changed.
            CacheFull: the rows do not fit; no row was added.
        """

    def held(self, sequence_id: str) -> int:
        """The first row of the sequence that is not held: a request may have this base, or any from its origin on."""

    def release(self, sequence_id: str) -> None:
        """Forgets a sequence; unknown ones are ignored."""


@runtime_checkable
class Drafter(Protocol):
    """A loaded drafter. `feature_layers`: the target features it needs; `max_draft_tokens`: its longest draft."""

    @property
    def family(self) -> str: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def predicts_survival(self) -> bool:
        """Whether `DraftRequest.min_survival` may be above 0."""

    @property
    def projection(self) -> FeatureProjection: ...

    def new_state(self, token_budget: int) -> DrafterState:
        """An empty state for `token_budget` rows in all."""
