"""EAGLE-3 at inference: packed weights, a one-layer paged cache, and all sequences of a round in one pass per token.

The rows a round has committed and its first draft token share a pass; each further token is one pass of one row per
sequence. Rows of drafted tokens are written to the cache as they come and rolled back at the end.

Legend: R rows of a pass, N sequences (at least two rows, the last repeated), D hidden size, C draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from tierspec.drafters.eagle3.config import FAMILY, Eagle3Config
from tierspec.drafters.eagle3.vocabulary import DraftVocabulary
from tierspec.drafters.protocol import DraftRequest, UnknownPrefix
from tierspec.models import BatchLayout, CacheFull, CacheSequence, Decoder, KVCache, Step
from tierspec.models.ops import PackedLinear, select_ops
from tierspec.sampling import greedy_choice, target_choice

_LEAST_ROWS = 2
T = TypeVar("T")


class Eagle3Projection:
    """The drafter's `fc`: concatenated target features to its state size."""

    def __init__(self, weight: Tensor, layers: tuple[int, ...]) -> None:
        self._linear = PackedLinear(weight)
        self._layers = layers
        self._dtype = weight.dtype

    @torch.no_grad()
    def __call__(self, features: Mapping[int, Tensor]) -> Tensor:
        """{hidden_states index: [R, D]} → [R, d] in bf16."""
        x = torch.cat([features[layer].to(self._dtype) for layer in self._layers], -1)
        rows = x.shape[0]
        if rows < _LEAST_ROWS:
            x = x.expand(_LEAST_ROWS, -1).contiguous()
        return self._linear(x)[:rows].to(torch.bfloat16)


class Eagle3Drafter:
    """The drafter's weights, packed for the device of the target whose embedding it shares."""

    family = FAMILY

    def __init__(
        self, config: Eagle3Config, weights: Mapping[str, Tensor], vocabulary: DraftVocabulary, decoder: Decoder
    ) -> None:
        """`weights`: tensors named as in a checkpoint, of any float dtype; they run in the target's."""
        w = {name: tensor.to(decoder.device, decoder.dtype) for name, tensor in weights.items()}
        self.config = config
        self.max_draft_tokens = config.max_draft_tokens
        self.feature_layers = config.feature_layers
        self.projection = Eagle3Projection(w["fc.weight"], config.feature_layers)
        self.dtype, self.device = decoder.dtype, decoder.device
        self.ops, self.rope = select_ops(decoder.device), decoder.rope

        attention, mlp = "layers.0.self_attn.{}_proj.weight", "layers.0.mlp.{}_proj.weight"
        self.qkv = PackedLinear(torch.cat([w[attention.format(x)] for x in "qkv"]))
        self.out = PackedLinear(w[attention.format("o")])
        self.gate_up = PackedLinear(torch.cat([w[mlp.format(x)] for x in ("gate", "up")]))
        self.down = PackedLinear(w[mlp.format("down")])
        self.head = PackedLinear(w["lm_head.weight"])
        self.token_norm = w["layers.0.input_layernorm.weight"]
        self.state_norm = w["layers.0.hidden_norm.weight"]
        self.mlp_norm = w["layers.0.post_attention_layernorm.weight"]
        self.final_norm = w["norm.weight"]

        self.embedding = decoder.embedding
        self.target_ids = vocabulary.target_ids.to(decoder.device)
        self.columns = vocabulary.columns.to(decoder.device)
        self.draft_tokens_CD = self.ops.rms_norm(self.embedding[self.target_ids], self.token_norm, config.rms_norm_eps)

    def new_state(self, token_budget: int) -> "Eagle3State":
        """An empty state for `token_budget` rows over all sequences, drafted ones included."""
        return Eagle3State(self, token_budget)


@dataclass(slots=True)
class _Held:
    origin: int
    rows: CacheSequence


class Eagle3State:
    """Rows of many sequences; see `tierspec.drafters.protocol.DrafterState`."""

    def __init__(self, drafter: Eagle3Drafter, token_budget: int) -> None:
        c = drafter.config
        self._drafter = drafter
        self._cache = KVCache(
            layers=(0,),
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            token_budget=token_budget,
            dtype=drafter.dtype,
            device=drafter.device,
        )
        self._held: dict[str, _Held] = {}

    def held(self, sequence_id: str) -> int:
        """The first row of the sequence that is not held, 0 for an unknown one."""
        entry = self._held.get(sequence_id)
        return entry.origin + entry.rows.length if entry else 0

    def release(self, sequence_id: str) -> None:
        """Forgets a sequence; unknown ones are ignored."""
        if entry := self._held.pop(sequence_id, None):
            entry.rows.release()

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Takes in all rows and drafts; the result has one list of target ids per request, in their order."""
        if not requests:
            return []
        longest = [self._longest_draft(request) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: -longest[i])
        ordered, wanted = [requests[i] for i in order], [longest[i] for i in order]
        rows = self._admit(ordered, wanted)
        ends = [sequence.length + len(request.token_ids) for sequence, request in zip(rows, ordered, strict=True)]
        passes = self._draft(ordered, wanted, rows)
        for sequence, end in zip(rows, ends, strict=True):
            sequence.truncate(end)
        drafted = self._drafter.target_ids[torch.cat(passes)].tolist() if passes else []
        result: list[list[int]] = [[] for _ in requests]
        start = 0
        for columns in passes:
            for i, token in zip(order, drafted[start : start + len(columns)], strict=False):
                result[i].append(token)
            start += len(columns)
        return result

    def _longest_draft(self, request: DraftRequest) -> int:
        """Drafts that are wanted, that the drafter was trained for, and whose rows have a position in the context."""
        end = request.base - request.origin + len(request.token_ids)
        room = self._drafter.config.max_context - end
        if room < 0:
            raise ValueError(f"sequence {request.sequence_id}: {end} rows exceed the context of the drafter")
        return min(request.max_tokens, self._drafter.max_draft_tokens, room + 1)

    def _admit(self, requests: list[DraftRequest], wanted: list[int]) -> list[CacheSequence]:
        """Each request's rows cut back to its base, with room for what the round will write."""
        unknown = [r.sequence_id for r in requests if r.base != r.origin and not self._is_held(r)]
        if unknown:
            raise UnknownPrefix(unknown)
        fresh: list[str] = []
        rows = []
        try:
            for request, tokens in zip(requests, wanted, strict=True):
                if not request.token_ids or request.features.shape[0] != len(request.token_ids):
                    raise ValueError(f"sequence {request.sequence_id}: one feature row per token, and at least one")
                entry = self._held.get(request.sequence_id)
                if entry is None:
                    entry = self._held[request.sequence_id] = _Held(request.origin, self._cache.sequence())
                    fresh.append(request.sequence_id)
                entry.origin = request.origin
                entry.rows.truncate(request.base - request.origin)
                rows.append(entry.rows)
                entry.rows.reserve(len(request.token_ids) + max(0, tokens - 1))
        except (CacheFull, ValueError):
            for sequence in rows:
                sequence.truncate(sequence.length)
            for sequence_id in fresh:
                self.release(sequence_id)
            raise
        return rows

    def _is_held(self, request: DraftRequest) -> bool:
        entry = self._held.get(request.sequence_id)
        return entry is not None and entry.origin == request.origin and request.base <= self.held(request.sequence_id)

    def _draft(self, requests: list[DraftRequest], wanted: list[int], rows: list[CacheSequence]) -> list[Tensor]:
        """Draft columns of every pass, one per sequence that wants that many tokens; `requests` by falling length."""
        d, eps = self._drafter, self._drafter.config.rms_norm_eps
        token_ids = [token for request in requests for token in request.token_ids]
        layout = self._cache.layout(
            [Step(sequence, request.token_ids) for sequence, request in zip(rows, requests, strict=True)],
            padded_rows=max(_LEAST_ROWS, len(token_ids)),
        )
        padding = layout.positions.shape[0] - len(token_ids)
        features_RD = torch.cat([request.features.to(d.device, d.dtype) for request in requests])
        if padding:
            token_ids += [0] * padding
            features_RD = torch.cat((features_RD, features_RD.new_zeros(padding, features_RD.shape[1])))
        embedded_RD = d.embedding[torch.tensor(token_ids, device=d.device)]
        x = torch.cat(
            (d.ops.rms_norm(embedded_RD, d.token_norm, eps), d.ops.rms_norm(features_RD, d.state_norm, eps)), -1
        )
        queries = d.ops.rope_store(d.qkv(x), layout, d.rope, self._cache, 0, d.config.num_heads)
        count = sum(tokens > 0 for tokens in wanted)
        if not count:
            return []
        last = torch.tensor(_padded([end - 1 for end in _ends(layout.counts)][:count]), device=d.device)
        layout = _rows_of(layout, last)
        state_ND, queries, chosen_N = features_RD[last], queries[last], last

        passes: list[Tensor] = []
        for step in range(max(wanted)):
            if step:
                count = sum(tokens > step for tokens in wanted)
                width = max(_LEAST_ROWS, count)
                layout = self._cache.layout([Step(s, (0,)) for s in rows[:count]], padded_rows=width)
                state_ND = state_ND[:width]
                token_ND = d.draft_tokens_CD[chosen_N[:width]]
                x = torch.cat((token_ND, d.ops.rms_norm(state_ND, d.state_norm, eps)), -1)
                queries = d.ops.rope_store(d.qkv(x), layout, d.rope, self._cache, 0, d.config.num_heads)
            mixed = d.out(d.ops.attend(queries, layout, self._cache, 0, d.config.num_heads))
            normed = d.ops.add_rms_norm(state_ND, mixed, d.mlp_norm, eps)
            mlp = d.down(d.ops.silu_mul(d.gate_up(normed)))
            logits_NC = d.head(d.ops.add_rms_norm(state_ND, mlp, d.final_norm, eps))
            chosen_N = self._choose(logits_NC, _padded(requests[:count]), step)
            passes.append(chosen_N[:count])
        return passes

    def _choose(self, logits_NC: Tensor, requests: list[DraftRequest], step: int) -> Tensor:
        """The keyed choice the target would make from these logits, as draft columns [N]."""
        sampling = [request.sampling for request in requests]
        if all(row.greedy for row in sampling):
            return greedy_choice(logits_NC)
        chosen = target_choice(
            logits_NC,
            [row.temperature for row in sampling],
            [row.top_k for row in sampling],
            [row.top_p for row in sampling],
            [row.seed for row in sampling],
            [row.stream for row in sampling],
            [request.base + len(request.token_ids) + 1 + step for request in requests],
            ids=self._drafter.target_ids,
        )
        return self._drafter.columns[chosen]


def _padded(items: list[T]) -> list[T]:
    return items + items[-1:] * max(0, _LEAST_ROWS - len(items))


def _ends(counts: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for count in counts:
        total += count
        ends.append(total)
    return ends


def _rows_of(layout: BatchLayout, rows: Tensor) -> BatchLayout:
    """The layout of some rows of a batch, each as if it were alone."""
    return replace(
        layout,
        positions=layout.positions[rows],
        slots=layout.slots[rows],
        sequence=layout.sequence[rows],
        rows=rows.shape[0],
        counts=(1,) * rows.shape[0],
    )
