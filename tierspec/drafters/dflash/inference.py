"""DFlash at inference: packed weights, a paged cache with as many layers as the drafter, and one pass for all drafts.

A pass takes in the rows that a round has committed, of which every layer keeps keys and values, and fills a block
behind them, which is rolled back at the end.

Legend: R rows of a pass, of which the N slots of all blocks are a part; D hidden size, C draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tierspec.drafters.choice import DraftChoice
from tierspec.drafters.dflash.config import DFlashConfig
from tierspec.drafters.projection import LinearProjection
from tierspec.drafters.protocol import DraftRequest
from tierspec.drafters.rows import DrafterRows, longest_draft
from tierspec.drafters.survival import SurvivalHead
from tierspec.drafters.vocabulary import DraftVocabulary
from tierspec.models import BatchLayout, CacheSequence, Decoder, Step
from tierspec.models.ops import PackedLinear, select_ops
from tierspec.sampling import RowSampling


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: PackedLinear
    head_norms: Tensor
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class DFlashDrafter:
    """The drafter's weights, packed for the device of the target whose embedding and token head it shares."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        vocabulary: DraftVocabulary,
        decoder: Decoder,
        verification_head: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`weights`: tensors named as in a checkpoint, of any float dtype; they run in the target's. No
        `verification_head`: none was trained."""
        w = {name: tensor.to(decoder.device, decoder.dtype) for name, tensor in weights.items()}
        self.config, self.family = config, config.family
        self.max_draft_tokens, self.feature_layers = config.max_draft_tokens, config.feature_layers
        self.dtype, self.device = decoder.dtype, decoder.device
        self.ops, self.rope = select_ops(decoder.device), decoder.rope
        norm = (self.ops, w["hidden_norm.weight"], config.rms_norm_eps)
        self.projection = LinearProjection(w["fc.weight"], config.feature_layers, norm)
        self.layers = [_packed(w, i, config) for i in range(config.num_layers)]
        self.final_norm = w["norm.weight"]
        self.embedding = decoder.embedding
        self.head = PackedLinear(decoder.head_weight()[vocabulary.target_ids.to(decoder.device)])
        self.choose = DraftChoice(vocabulary, decoder.device)
        self.survival = SurvivalHead(verification_head, decoder.device) if verification_head else None

    @property
    def predicts_survival(self) -> bool:
        """Whether the verification head was trained."""
        return self.survival is not None

    def new_state(self, token_budget: int) -> "DFlashState":
        """An empty state for `token_budget` rows over all sequences, blocks included."""
        return DFlashState(self, token_budget)


def _packed(w: Mapping[str, Tensor], index: int, c: DFlashConfig) -> _Layer:
    def of(name: str) -> Tensor:
        return w[f"layers.{index}.{name}.weight"]

    heads = [of("self_attn.q_norm")] * c.num_heads + [of("self_attn.k_norm")] * c.num_kv_heads
    return _Layer(
        attention_norm=of("input_layernorm"),
        qkv=PackedLinear(torch.cat([of(f"self_attn.{x}_proj") for x in "qkv"])),
        head_norms=torch.stack(heads),
        out=PackedLinear(of("self_attn.o_proj")),
        mlp_norm=of("post_attention_layernorm"),
        gate_up=PackedLinear(torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")])),
        down=PackedLinear(of("mlp.down_proj")),
    )


class DFlashState(DrafterRows):
    """Rows of many sequences; see `tierspec.drafters.protocol.DrafterState`."""

    def __init__(self, drafter: DFlashDrafter, token_budget: int) -> None:
        c, dtype, device = drafter.config, drafter.dtype, drafter.device
        super().__init__(c, layers=range(c.num_layers), token_budget=token_budget, dtype=dtype, device=device)
        self._drafter = drafter

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Takes in all rows and drafts; the result has one list of target ids per request, in their order.

        A block always has as many slots as in training, whatever is wanted of it, except at the end of the context.
        """
        if not requests:
            return []
        c = self._drafter.config
        wanted = [longest_draft(request, c.max_draft_tokens, c.max_context, unwritten=-1) for request in requests]
        slots = [self._slots(request, tokens) for request, tokens in zip(requests, wanted, strict=True)]
        sequences = self.admit(requests, slots)
        ends = [sequence.length + len(request.token_ids) for sequence, request in zip(sequences, requests, strict=True)]
        final_ND = self._fill(requests, sequences, slots)
        for sequence, end in zip(sequences, ends, strict=True):
            sequence.truncate(end)

        sampling: list[RowSampling] = []
        positions: list[int] = []
        rows: list[int] = []
        first = 0
        for request, count, tokens in zip(requests, slots, wanted, strict=True):
            end = request.base + len(request.token_ids)
            sampling += [request.sampling] * tokens
            positions += range(end + 1, end + 1 + tokens)
            rows += range(first, first + tokens)
            first += max(0, count - 1)
        if not rows:
            return [[] for _ in requests]
        d = self._drafter
        final_ND = final_ND[rows]
        chosen = d.choose(d.head(final_ND)[: len(rows)], sampling, positions)
        drafted = iter(d.choose.target_ids[chosen].tolist())
        drafts = [[next(drafted) for _ in range(tokens)] for tokens in wanted]
        if d.survival is None or not any(request.min_survival for request in requests):
            return drafts
        least = [request.min_survival for request, tokens in zip(requests, wanted, strict=True) for _ in range(tokens)]
        survives = iter(d.survival.survives(final_ND[: len(rows)], least).tolist())
        kept = [[next(survives) for _ in draft] for draft in drafts]
        return [draft[: [*alive, False].index(False)] for draft, alive in zip(drafts, kept, strict=True)]

    def _slots(self, request: DraftRequest, wanted: int) -> int:
        """Slots of the request's block: the last known token and what is to be filled in; 0 if nothing is wanted."""
        c = self._drafter.config
        end = request.base - request.origin + len(request.token_ids)
        return min(c.max_draft_tokens + 1, c.max_context - end) if wanted > 0 else 0

    def _fill(self, requests: Sequence[DraftRequest], sequences: list[CacheSequence], slots: list[int]) -> Tensor:
        """States [N, D] that the token head reads, of all draft positions, request by request."""
        d, c = self._drafter, self._drafter.config
        counts = [(len(request.token_ids), block) for request, block in zip(requests, slots, strict=True)]
        layout = self._cache.layout(
            [Step(sequence, range(sum(count))) for sequence, count in zip(sequences, counts, strict=True)]
        )
        taken: list[int] = []
        blocks: list[int] = []
        token_ids: list[int] = []
        limits: list[int] = []
        first = 0
        for request, (known, block), sequence in zip(requests, counts, sequences, strict=True):
            taken += range(first, first + known)
            blocks += range(first + known, first + known + block)
            token_ids += [request.token_ids[-1]] * (block > 0) + [c.mask_token_id] * max(0, block - 1)
            limits += [sequence.length - 1] * block
            first += known + block
        x_RD = torch.zeros(first, c.hidden_size, dtype=d.dtype, device=d.device)
        x_RD[taken] = torch.cat([request.features.to(d.device, d.dtype) for request in requests])
        state_ND = d.embedding[torch.tensor(token_ids, dtype=torch.int64, device=d.device)]
        seen = _block_layout(layout, blocks, limits, [block for _, block in counts if block])

        delta_ND: Tensor | None = None
        for index, layer in enumerate(d.layers):
            if blocks:
                x_RD[blocks] = self._normed(state_ND, delta_ND, layer.attention_norm)
            qkv = layer.qkv(x_RD)
            d.ops.norm_heads(qkv, layer.head_norms, c.rms_norm_eps)
            queries = d.ops.rope_store(qkv, layout, d.rope, self._cache, index, c.num_heads)
            if blocks:
                mixed = layer.out(d.ops.attend(queries[blocks], seen, self._cache, index, c.num_heads))
                normed = self._normed(state_ND, mixed, layer.mlp_norm)
                delta_ND = layer.down(d.ops.silu_mul(layer.gate_up(normed)))
        if not blocks:
            return state_ND
        drafts = [i for i, token in enumerate(blocks) if i and token == blocks[i - 1] + 1]
        return self._normed(state_ND, delta_ND, d.final_norm)[drafts]

    def _normed(self, state: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Norm of the state after adding `delta` to it, in place."""
        d = self._drafter
        if delta is None:
            return d.ops.rms_norm(state, weight, d.config.rms_norm_eps)
        return d.ops.add_rms_norm(state, delta, weight, d.config.rms_norm_eps)


def _block_layout(layout: BatchLayout, blocks: list[int], limits: list[int], counts: list[int]) -> BatchLayout:
    """The block rows of a batch, each of which sees its sequence up to the end of its block."""
    rows = torch.tensor(blocks, dtype=torch.int64, device=layout.slots.device)
    return replace(
        layout,
        positions=torch.tensor(limits, dtype=torch.int64, device=layout.slots.device),
        slots=layout.slots[rows],
        sequence=layout.sequence[rows],
        rows=len(blocks),
        counts=tuple(counts),
    )
