"""What the trainer knows of a drafter in training, whatever its family: batches of anchors, a loss, weights to keep.

An anchor is one row p of a sequence; its K draft positions are one verification block, tokens p + 2 .. p + K + 1,
scored against the target's predictions at positions p + 1 .. p + K. Of the sequence the drafter sees the target's
features up to row p and token p + 1.
Legend: B sequences, T rows, A anchors, K positions, F captured features, D and E hidden sizes, C draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tierspec.config import ObjectiveSettings
from tierspec.drafters.checkpoint import save_checkpoint
from tierspec.drafters.config import DrafterConfig
from tierspec.drafters.protocol import Drafter
from tierspec.drafters.vocabulary import DraftVocabulary
from tierspec.errors import SettingError
from tierspec.models import Decoder
from tierspec.training.acceptance import AcceptanceRule, acceptance_rule
from tierspec.training.chunked_objective import TeacherRows, chunked_vat_loss
from tierspec.training.data import Sample
from tierspec.training.features import SequenceFeatures
from tierspec.training.monitors import Monitors

_HEAD_STD = 0.02

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class AnchorBatch:
    """Several sequences with their anchors. `next_tokens` [B, T] has token p + 1 at row p; `valid` [B, A, K] marks
    supervised draft positions; `rule` is the acceptance rule of this batch."""

    captured_BTF: Tensor
    next_tokens_BT: Tensor
    anchors_BA: Tensor
    valid_BAK: Tensor
    teacher: TeacherRows
    rule: AcceptanceRule

    @property
    def num_blocks(self) -> int:
        """Anchors that have a supervised draft position."""
        return int(self.valid_BAK[..., 0].sum())


class Trainee(nn.Module, ABC):
    """The trained parameters, `drafter` and `verification_head`, and their loss. The target's embedding and head are
    plain tensors: frozen, unseen by optimizers and checkpoints."""

    drafter: nn.Module

    def __init__(
        self,
        drafter: nn.Module,
        config: DrafterConfig,
        vocabulary: DraftVocabulary,
        decoder: Decoder,
        objective: ObjectiveSettings,
        *,
        depth: int,
        precision: str,
    ) -> None:
        """`drafter`: with the parameters that a checkpoint of `config` holds; `precision`: "bf16" runs matrix products
        in bf16 over fp32 weights, "fp32" everything in fp32."""
        super().__init__()
        width = config.hidden_size
        if objective.state and width != decoder.config.hidden_size:
            raise SettingError(
                f"training.objective.state is {objective.state}, but the drafter's states have {width} "
                f"dimensions and the target's {decoder.config.hidden_size}: set it to 0"
            )
        self.drafter = drafter
        self.verification_head = nn.Linear(width, 1)
        self._config = config
        self.feature_layers = config.feature_layers
        self.depth = depth
        self.vocabulary = vocabulary
        self._objective = objective
        self._compute = torch.bfloat16 if precision == "bf16" else torch.float32
        self._embedding = decoder.embedding
        self._columns = vocabulary.columns
        self._teacher_head = decoder.head_weight()[vocabulary.target_ids.to(decoder.device)].to(self._compute)
        self._gradient_squares: dict[str, Tensor] = {}

    @property
    def trains_head(self) -> bool:
        """Whether the verification head is part of the loss."""
        return self._objective.head and self._objective.head_beta > 0

    @abstractmethod
    def unroll(self, batch: AnchorBatch) -> Tensor:
        """States before the heads (after the final norm) of every draft position, [B, A, K, D]; see `states`."""

    @abstractmethod
    def token_head(self) -> Tensor:
        """The drafter's token head [C, D]."""

    @abstractmethod
    def parameter_groups(self) -> list[dict]:
        """Optimizer groups, whose gradients are clipped apart: name, params, and `rate`, the share of the learning
        rate."""

    @abstractmethod
    def initialize_from_target(self, decoder: Decoder) -> None:
        """Start from what the target knows."""

    @abstractmethod
    def pack(self, weights: Weights, decoder: Decoder) -> Drafter:
        """The drafter with these `weights`, ready to draft."""

    def save(self, directory: Path, weights: Weights, head: Weights) -> None:
        """Writes a drafter checkpoint with these weights of the drafter and, if it is trained, of the verification
        head."""
        save_checkpoint(directory, self._config, weights, self.vocabulary, head if self.trains_head else None)

    def initialize_head(self, generator: torch.Generator) -> None:
        """A verification head that predicts evens but lets gradients through (our choice)."""
        with torch.no_grad():
            self.verification_head.weight.normal_(0.0, _HEAD_STD, generator=generator)
            self.verification_head.bias.zero_()

    def head_group(self) -> dict:
        """The verification head's optimizer group."""
        params = list(self.verification_head.parameters())
        return {"name": "verification_head", "params": params, "rate": 1.0, "weight_decay": 0.0}

    def collate(
        self,
        samples: Sequence[Sample],
        features: Sequence[SequenceFeatures],
        anchors: Sequence[Tensor],
        seed: int = 0,
    ) -> AnchorBatch:
        """One batch of sequences; `anchors` as `data.sample_anchors` draws them; what the acceptance rule draws follows
        from `seed`.

        Raises:
            SettingError: the acceptance rule needs to know how the samples were sampled, and they do not say.
        """
        device = self._embedding.device
        tokens_BT = pad_sequence([torch.tensor(s.token_ids) for s in samples], batch_first=True)
        lengths_B11 = torch.tensor([len(s.token_ids) for s in samples])[:, None, None]
        anchors_BA = pad_sequence(list(anchors), batch_first=True, padding_value=tokens_BT.shape[1])
        positions_BAK = anchors_BA[..., None] + 1 + torch.arange(self.depth)
        valid_BAK = positions_BAK + 1 < lengths_B11
        anchors_BA, positions_BAK = anchors_BA.clamp_max(tokens_BT.shape[1] - 1), positions_BAK * valid_BAK

        starts_B11 = lengths_B11.cumsum(0) - lengths_B11
        flat_rows, flat_tokens = positions_BAK + starts_B11, torch.cat([torch.tensor(s.token_ids) for s in samples])
        top_ids = torch.cat([f.top_ids for f in features]).cpu()
        normalisers = [f.log_normaliser for f in features if f.log_normaliser is not None]
        teacher = TeacherRows(
            hidden=torch.cat([f.last for f in features]).to(device, self._compute),
            rows=flat_rows.flatten(0, 1).to(device),
            top_columns=self._columns[top_ids[flat_rows]].flatten(0, 1).to(device),
            label_columns=self._columns[flat_tokens[flat_rows + valid_BAK]].flatten(0, 1).to(device),
            head=self._teacher_head,
            log_normaliser=torch.cat(normalisers).to(device) if normalisers else None,
        )
        return AnchorBatch(
            captured_BTF=pad_sequence([f.captured for f in features], batch_first=True).to(device),
            next_tokens_BT=torch.cat((tokens_BT[:, 1:], tokens_BT[:, :1]), 1).to(device),
            anchors_BA=anchors_BA.to(device),
            valid_BAK=valid_BAK.to(device),
            teacher=teacher,
            rule=acceptance_rule(self._objective, samples, positions_BAK + 1, seed, self.vocabulary, device),
        )

    def states(self, batch: AnchorBatch) -> Tensor:
        """`unroll` with matrix products in the precision of the training."""
        with torch.autocast(batch.captured_BTF.device.type, torch.bfloat16, enabled=self._compute == torch.bfloat16):
            return self.unroll(batch)

    def forward(self, batch: AnchorBatch, divisor: float | None = None) -> tuple[Tensor, Monitors]:
        """Loss over the batch's blocks (see `chunked_vat_loss` for `divisor`) and its monitors."""
        hidden_BAKD = self.states(batch)
        for_tokens, for_head = hidden_BAKD.flatten(0, 1), hidden_BAKD.flatten(0, 1)
        if hidden_BAKD.requires_grad:
            for name, tensor in (("token", for_tokens), ("head", for_head)):
                tensor.register_hook(lambda gradient, name=name: self._note_gradient(name, gradient))
        survival_logits = self.verification_head(for_head)[..., 0]
        return chunked_vat_loss(
            for_tokens,
            self.token_head(),
            survival_logits,
            batch.teacher,
            batch.valid_BAK.flatten(0, 1),
            self._objective,
            rule=batch.rule,
            divisor=divisor,
        )

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self._gradient_squares[name] = self._gradient_squares.get(name, 0) + gradient.detach().float().pow(2).sum()

    def take_gradient_norms(self) -> dict[str, float]:
        """Norms of the gradients of the token losses (`objective.state` with them) and of the head loss where they
        meet, at the states before the two heads, over all backward passes since the last call."""
        norms = {name: float(square) ** 0.5 for name, square in self._gradient_squares.items()}
        self._gradient_squares = {}
        return norms
