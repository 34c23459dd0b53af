"""Acceptance rules of the simulated verification (arXiv 2608.30135 section 4.1): whether a draft position, by itself,
would be accepted.

Legend: M rows, V and C target and draft vocabulary, B sequences, A anchors, K draft positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from tierspec.config import ObjectiveSettings
from tierspec.drafters import DraftVocabulary
from tierspec.errors import SettingError
from tierspec.sampling import GREEDY_TEMPERATURE, RowSampling, target_choice
from tierspec.training.data import Sample


@dataclass(frozen=True)
class ScoredRows:
    """Both models' views of M rows, for the time of a call.

    draft_columns int64 [M], the drafter's likeliest; draft, target float [M, C], the distributions, the target's
    renormalised on the draft vocabulary; covered [M], the share of the target's whole distribution that lies in it;
    top_columns and label_columns int64 [M], the target's likeliest of all tokens and the corpus token, -1 if it lies
    outside. `first`: number of the first row in its batch.
    """

    draft_columns: Tensor
    draft: Tensor
    target: Tensor
    covered: Tensor
    top_columns: Tensor
    label_columns: Tensor
    first: int


class AcceptanceRule(Protocol):
    """Whether each row's draft is accepted: bool [M], without gradient."""

    def __call__(self, rows: ScoredRows) -> Tensor: ...


def greedy_acceptance(rows: ScoredRows) -> Tensor:
    """The drafter's likeliest token is the target's."""
    return rows.draft_columns == rows.top_columns


class RejectionAcceptance:
    """Speculative sampling (arXiv 2211.17192): a token x drawn from the drafter is accepted with probability
    min(1, p(x) / q(x)).

    Both distributions are those of temperature 1, untruncated, whatever the rollouts were sampled with. Every call
    draws from `generator`, which lives on the rows' device.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, rows: ScoredRows) -> Tensor:
        drawn = torch.multinomial(rows.draft, 1, generator=self._generator)
        p, q = (rows.target.gather(-1, drawn)[:, 0] * rows.covered, rows.draft.gather(-1, drawn)[:, 0])
        return torch.rand(p.shape, generator=self._generator, device=p.device, dtype=p.dtype) * q < p


@dataclass(frozen=True)
class SamplingKeys:
    """How the token of each row of a batch was chosen, one value per row: `tierspec.sampling.target_choice`'s."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], positions_BAK: Tensor) -> Self:
        """One key per element of `positions_BAK`, the indices of the drafted tokens in their sequences.

        Raises:
            SettingError: see `check_sampling_known`.
        """
        check_sampling_known(samples)
        drawn = [sample.sampling or RowSampling() for sample in samples]
        repeats = positions_BAK[0].numel()

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(repeats)

        return cls(
            temperature=column([row.temperature for row in drawn], torch.float64),
            top_k=column([row.top_k for row in drawn], torch.int64),
            top_p=column([row.top_p for row in drawn], torch.float64),
            seed=column([row.seed for row in drawn], torch.int64),
            position=positions_BAK.flatten(),
        )


def check_sampling_known(samples: Iterable[Sample]) -> None:
    """SettingError if a sample does not say how it was sampled, which keyed verification follows."""
    for sample in samples:
        if sample.sampling is None:
            raise SettingError(
                f"training.objective.verification is keyed, but the rollout {sample.sample_id} does not say how it was "
                "sampled (columns top_p, top_k and seed): use greedy or rejection"
            )


class KeyedAcceptance:
    """Drafter-invariant sampling (arXiv 2408.07978), as in serving: what the drafter chooses with the noise that the
    rollout was sampled with is what the target chose, which is the corpus token."""

    def __init__(self, keys: SamplingKeys, target_ids: Tensor, columns: Tensor) -> None:
        """`target_ids` [C] and `columns` [V]: the draft vocabulary."""
        self._keys, self._target_ids, self._columns = keys, target_ids, columns

    def __call__(self, rows: ScoredRows) -> Tensor:
        part = slice(rows.first, rows.first + rows.draft.shape[0])
        keys = self._keys
        chosen = target_choice(
            rows.draft.log(),
            keys.temperature[part],
            keys.top_k[part],
            keys.top_p[part],
            keys.seed[part],
            torch.zeros_like(keys.seed[part]),
            keys.position[part],
            ids=self._target_ids,
        )
        greedy = keys.temperature[part] < GREEDY_TEMPERATURE
        wanted = torch.where(greedy.to(chosen.device), rows.top_columns, rows.label_columns)
        return self._columns[chosen] == wanted


def acceptance_rule(
    settings: ObjectiveSettings,
    samples: Sequence[Sample],
    positions_BAK: Tensor,
    seed: int,
    vocabulary: DraftVocabulary,
    device: torch.device,
) -> AcceptanceRule:
    """The rule of `settings.verification` for a batch; see `SamplingKeys.of`. What it draws follows from `seed`.

    Raises:
        SettingError: the rule needs to know how the samples were sampled, and they do not say.
    """
    match settings.verification:
        case "greedy":
            return greedy_acceptance
        case "rejection":
            return RejectionAcceptance(torch.Generator(device).manual_seed(seed))
        case "keyed":
            keys = SamplingKeys.of(samples, positions_BAK)
            return KeyedAcceptance(keys, vocabulary.target_ids.to(device), vocabulary.columns.to(device))
