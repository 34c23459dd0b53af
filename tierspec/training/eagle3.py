"""EAGLE-3 under the VAT objective: anchored training-time test over rollouts (arXiv 2503.01840 and 2608.30135).

An anchor is one row p of a sequence; its K steps are one verification block, scored against the target's predictions
at positions p + 1 .. p + K, that is tokens p + 2 .. p + K + 1.
Legend: B sequences, T rows, A anchors, K steps, F captured features, D and E hidden sizes, C draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tierspec.config import ObjectiveSettings
from tierspec.drafters.eagle3 import DraftVocabulary, Eagle3, Eagle3Config
from tierspec.errors import SettingError
from tierspec.models import Decoder
from tierspec.training.chunked_objective import TeacherRows, chunked_vat_loss
from tierspec.training.data import Sample
from tierspec.training.features import SequenceFeatures
from tierspec.training.monitors import Monitors

_HEAD_STD = 0.02
_EMBEDDING_HALF_STD = 0.002


@dataclass(frozen=True)
class Eagle3Batch:
    """Several sequences with their anchors. `valid` [B, A, K] marks supervised draft positions."""

    captured_BTF: Tensor
    embedded_BTD: Tensor
    anchors_BA: Tensor
    valid_BAK: Tensor
    teacher: TeacherRows

    @property
    def num_blocks(self) -> int:
        """Anchors that have a supervised draft position."""
        return int(self.valid_BAK[..., 0].sum())


class Eagle3Trainee(nn.Module):
    """The trained parameters, `drafter` and `verification_head`, and their loss. The target's embedding and head are
    plain tensors: frozen, unseen by optimizers and checkpoints."""

    def __init__(
        self,
        config: Eagle3Config,
        vocabulary: DraftVocabulary,
        decoder: Decoder,
        objective: ObjectiveSettings,
        *,
        depth: int,
        precision: str,
        seed: int,
        lm_head_rate: float = 1.0,
    ) -> None:
        """`precision`: "bf16" runs matrix products in bf16 over fp32 weights, "fp32" everything in fp32;
        `lm_head_rate`: learning rate of the token head as a share of the others'."""
        super().__init__()
        if objective.state and config.hidden_size != decoder.config.hidden_size:
            raise SettingError(
                f"training.objective.state is {objective.state}, but the drafter's states have {config.hidden_size} "
                f"dimensions and the target's {decoder.config.hidden_size}: set it to 0"
            )
        self.drafter = Eagle3(config)
        self.verification_head = nn.Linear(config.hidden_size, 1)
        generator = torch.Generator().manual_seed(seed)
        self.drafter.initialize(generator)
        with torch.no_grad():
            self.verification_head.weight.normal_(0.0, _HEAD_STD, generator=generator)
            self.verification_head.bias.zero_()
        self.vocabulary = vocabulary
        self._objective, self._depth, self._lm_head_rate = objective, depth, lm_head_rate
        self._compute = torch.bfloat16 if precision == "bf16" else torch.float32
        self._embedding = decoder.embedding
        self._columns = vocabulary.columns
        self._teacher_head = decoder.head_weight()[vocabulary.target_ids.to(decoder.device)].to(self._compute)
        self._gradient_squares: dict[str, Tensor] = {}
        self.to(decoder.device)

    @torch.no_grad()
    def initialize_from_target(self, decoder: Decoder) -> None:
        """Start from what the target knows (our choice): its head and final norm, its last layer for the part that
        reads the state, and the deepest captured layer as the state. The part that reads embeddings stays small."""
        drafter, source = self.drafter, decoder.layer_weights(decoder.config.num_layers - 1)
        layer, width = drafter.layer, drafter.config.hidden_size
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(attention, name).weight
            weight[:, :width] *= _EMBEDDING_HALF_STD / weight[:, :width].std()
            weight[:, width:] = source[f"self_attn.{name}.weight"]
        attention.o_proj.weight.copy_(source["self_attn.o_proj.weight"])
        layer.hidden_norm.weight.copy_(source["input_layernorm.weight"])
        layer.post_attention_layernorm.weight.copy_(source["post_attention_layernorm.weight"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(source[f"mlp.{name}.weight"])
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:].fill_diagonal_(1.0)
        drafter.norm.weight.copy_(decoder.final_norm)
        drafter.lm_head.weight.copy_(decoder.head_weight()[self.vocabulary.target_ids.to(decoder.device)])

    def parameter_groups(self) -> list[dict]:
        """Optimizer groups whose gradients are clipped apart: a fresh head must not starve the drafter. `rate` is the
        share of the learning rate; a token head that starts from the target's learns answers by heart at the full one
        (our choice)."""
        lm_head = self.drafter.lm_head.weight
        layers = [parameter for parameter in self.drafter.parameters() if parameter is not lm_head]
        head = list(self.verification_head.parameters())
        return [
            {"name": "drafter", "params": layers, "rate": 1.0},
            {"name": "lm_head", "params": [lm_head], "rate": self._lm_head_rate},
            {"name": "verification_head", "params": head, "rate": 1.0, "weight_decay": 0.0},
        ]

    def collate(
        self, samples: Sequence[Sample], features: Sequence[SequenceFeatures], anchors: Sequence[Tensor]
    ) -> Eagle3Batch:
        """One batch of sequences; `anchors` as `data.sample_anchors` draws them."""
        device = self._embedding.device
        tokens_BT = pad_sequence([torch.tensor(s.token_ids) for s in samples], batch_first=True)
        lengths_B11 = torch.tensor([len(s.token_ids) for s in samples])[:, None, None]
        anchors_BA = pad_sequence(list(anchors), batch_first=True, padding_value=tokens_BT.shape[1])
        positions_BAK = anchors_BA[..., None] + 1 + torch.arange(self._depth)
        valid_BAK = positions_BAK + 1 < lengths_B11
        anchors_BA, positions_BAK = anchors_BA.clamp_max(tokens_BT.shape[1] - 1), positions_BAK * valid_BAK

        starts_B11 = lengths_B11.cumsum(0) - lengths_B11
        flat_rows, flat_tokens = positions_BAK + starts_B11, torch.cat([torch.tensor(s.token_ids) for s in samples])
        top_ids = torch.cat([f.top_ids for f in features]).cpu()
        teacher = TeacherRows(
            hidden=torch.cat([f.last for f in features]).to(self._compute),
            rows=flat_rows.flatten(0, 1).to(device),
            top_columns=self._columns[top_ids[flat_rows]].flatten(0, 1).to(device),
            label_columns=self._columns[flat_tokens[flat_rows + valid_BAK]].flatten(0, 1).to(device),
            head=self._teacher_head,
        )
        next_tokens_BT = torch.cat((tokens_BT[:, 1:], tokens_BT[:, :1]), 1).to(device)
        return Eagle3Batch(
            captured_BTF=pad_sequence([f.captured for f in features], batch_first=True),
            embedded_BTD=self._embedding[next_tokens_BT],
            anchors_BA=anchors_BA.to(device),
            valid_BAK=valid_BAK.to(device),
            teacher=teacher,
        )

    def forward(self, batch: Eagle3Batch, divisor: float | None = None) -> tuple[Tensor, Monitors]:
        """Loss over the batch's blocks (see `chunked_vat_loss` for `divisor`) and its monitors."""
        with torch.autocast(batch.captured_BTF.device.type, torch.bfloat16, enabled=self._compute == torch.bfloat16):
            captured_BTF = batch.captured_BTF.to(self._compute)
            hidden_BAKD = self.drafter.unroll(captured_BTF, batch.embedded_BTD, batch.anchors_BA, self._depth)
        for_tokens, for_head = hidden_BAKD.flatten(0, 1), hidden_BAKD.flatten(0, 1)
        if hidden_BAKD.requires_grad:
            for name, tensor in (("token", for_tokens), ("head", for_head)):
                tensor.register_hook(lambda gradient, name=name: self._note_gradient(name, gradient))
        survival_logits = self.verification_head(for_head)[..., 0]
        return chunked_vat_loss(
            for_tokens,
            self.drafter.lm_head.weight,
            survival_logits,
            batch.teacher,
            batch.valid_BAK.flatten(0, 1),
            self._objective,
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
