"""EAGLE-3 in training: anchored training-time test over rollouts (arXiv 2503.01840). Legend as in `trainee`."""

import torch
from torch import Tensor

from tierspec.config import ObjectiveSettings
from tierspec.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Drafter
from tierspec.drafters.vocabulary import DraftVocabulary
from tierspec.models import Decoder
from tierspec.training.trainee import AnchorBatch, Trainee, Weights

_EMBEDDING_HALF_STD = 0.002


class Eagle3Trainee(Trainee):
    """The one-layer drafter, unrolled K steps from every anchor."""

    drafter: Eagle3

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
        """`lm_head_rate`: learning rate of the token head as a share of the others'; the rest as in `Trainee`."""
        super().__init__(Eagle3(config), config, vocabulary, decoder, objective, depth=depth, precision=precision)
        generator = torch.Generator().manual_seed(seed)
        self.drafter.initialize(generator)
        self.initialize_head(generator)
        self._lm_head_rate = lm_head_rate
        self.to(decoder.device)

    @torch.no_grad()
    def initialize_from_target(self, decoder: Decoder) -> None:
        """Start from what the target knows (our choice): its head and final norm, its last layer for the part that
        reads the state, and the deepest captured layer as the state. The part that reads embeddings stays small."""
        drafter, source = self.drafter, decoder.layer_weights(decoder.config.num_layers - 1)
        layer, width = drafter.layer, drafter.config.hidden_size
        attention = layer.self_attn
        # without the norm by head that they were trained with, such queries and keys would be of any size
        known = ("v_proj",) if decoder.config.qk_norm else ("q_proj", "k_proj", "v_proj")
        for name in known:
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
        """A token head that starts from the target's learns answers by heart at the full rate (our choice)."""
        lm_head = self.drafter.lm_head.weight
        layers = [parameter for parameter in self.drafter.parameters() if parameter is not lm_head]
        return [
            {"name": "drafter", "params": layers, "rate": 1.0},
            {"name": "lm_head", "params": [lm_head], "rate": self._lm_head_rate},
            self.head_group(),
        ]

    def unroll(self, batch: AnchorBatch) -> Tensor:
        captured_BTF = batch.captured_BTF.to(self._compute)
        return self.drafter.unroll(captured_BTF, self._embedding[batch.next_tokens_BT], batch.anchors_BA, self.depth)

    def token_head(self) -> Tensor:
        return self.drafter.lm_head.weight

    def pack(self, weights: Weights, decoder: Decoder) -> Eagle3Drafter:
        return Eagle3Drafter(self.drafter.config, weights, self.vocabulary, decoder)
