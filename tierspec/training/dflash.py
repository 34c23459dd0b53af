"""DFlash in training: blocks behind anchors over rollouts, filled in one pass (arXiv 2602.06036). Legend as in
`trainee`; S slots of a block."""

import torch
from torch import Tensor

from tierspec.config import ObjectiveSettings
from tierspec.drafters.dflash import DFlash, DFlashConfig, DFlashDrafter
from tierspec.drafters.vocabulary import DraftVocabulary
from tierspec.models import Decoder
from tierspec.training.trainee import AnchorBatch, Trainee, Weights


class DFlashTrainee(Trainee):
    """The block drafter; its token head is the target's, which is not trained."""

    drafter: DFlash

    def __init__(
        self,
        config: DFlashConfig,
        vocabulary: DraftVocabulary,
        decoder: Decoder,
        objective: ObjectiveSettings,
        *,
        precision: str,
        seed: int,
    ) -> None:
        """Arguments as in `Trainee`."""
        depth = config.max_draft_tokens
        super().__init__(DFlash(config), config, vocabulary, decoder, objective, depth=depth, precision=precision)
        generator = torch.Generator().manual_seed(seed)
        self.drafter.initialize(generator)
        self.initialize_head(generator)
        self.to(decoder.device)

    @torch.no_grad()
    def initialize_from_target(self, decoder: Decoder) -> None:
        """Start from what the target knows (our choice): its last layers and final norm, and the deepest captured layer
        as the context."""
        drafter = self.drafter
        first = decoder.config.num_layers - len(drafter.layers)
        for index, layer in enumerate(drafter.layers):
            source = decoder.layer_weights(max(0, first + index))
            layer.load_state_dict({name: source[name] for name in layer.state_dict() if name in source}, strict=False)
        width = drafter.config.hidden_size
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:].fill_diagonal_(1.0)
        drafter.norm.weight.copy_(decoder.final_norm)

    def parameter_groups(self) -> list[dict]:
        return [{"name": "drafter", "params": list(self.drafter.parameters()), "rate": 1.0}, self.head_group()]

    def unroll(self, batch: AnchorBatch) -> Tensor:
        anchors_BA = batch.anchors_BA
        known_BA1 = batch.next_tokens_BT.gather(1, anchors_BA)[..., None]
        masks_BAK = known_BA1.new_full((*anchors_BA.shape, self.depth), self.drafter.config.mask_token_id)
        block_BASD = self._embedding[torch.cat((known_BA1, masks_BAK), -1)].to(self._compute)
        return self.drafter.unroll(batch.captured_BTF.to(self._compute), block_BASD, anchors_BA)

    def token_head(self) -> Tensor:
        return self._teacher_head

    def pack(self, weights: Weights, decoder: Decoder) -> DFlashDrafter:
        return DFlashDrafter(self.drafter.config, weights, self.vocabulary, decoder)
