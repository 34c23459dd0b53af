"""EAGLE-3 at inference: packed weights, a one-layer paged cache, and all sequences of a round in one pass per token.

The rows a round has committed and its first draft token share a pass; each further token is one pass of one row per
sequence. Rows of drafted tokens are written to the cache as they come and rolled back at the end.

Legend: R rows of a pass, N sequences (at least two rows, the last repeated), D hidden size, C draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tierspec.drafters.choice import DraftChoice
from tierspec.drafters.eagle3.config import Eagle3Config
from tierspec.drafters.projection import LinearProjection
from tierspec.drafters.protocol import DraftRequest
from tierspec.drafters.rows import DrafterRows, longest_draft
from tierspec.drafters.survival import SurvivalHead
from tierspec.drafters.vocabulary import DraftVocabulary
from tierspec.models import BatchLayout, CacheSequence, Decoder, Step
from tierspec.models.ops import PackedLinear, select_ops


class Eagle3Drafter:
    """The drafter's weights, packed for the device of the target whose embedding it shares."""

    def __init__(
        self,
        config: Eagle3Config,
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
        self.projection = LinearProjection(w["fc.weight"], config.feature_layers)
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
        self.choose = DraftChoice(vocabulary, decoder.device)
        self.survival = SurvivalHead(verification_head, decoder.device) if verification_head else None
        known = self.embedding[self.choose.target_ids]
        self.draft_tokens_CD = self.ops.rms_norm(known, self.token_norm, config.rms_norm_eps)

    @property
    def predicts_survival(self) -> bool:
        """Whether the verification head was trained."""
        return self.survival is not None

    def new_state(self, token_budget: int) -> "Eagle3State":
        """An empty state for `token_budget` rows over all sequences, drafted ones included."""
        return Eagle3State(self, token_budget)


class Eagle3State(DrafterRows):
    """Rows of many sequences; see `tierspec.drafters.protocol.DrafterState`."""

    def __init__(self, drafter: Eagle3Drafter, token_budget: int) -> None:
        c, dtype, device = drafter.config, drafter.dtype, drafter.device
        super().__init__(c, layers=(0,), token_budget=token_budget, dtype=dtype, device=device)
        self._drafter = drafter

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Takes in all rows and drafts; the result has one list of target ids per request, in their order."""
        if not requests:
            return []
        c = self._drafter.config
        longest = [longest_draft(request, c.max_draft_tokens, c.max_context, unwritten=1) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: -longest[i])
        ordered, wanted = [requests[i] for i in order], [longest[i] for i in order]
        rows = self.admit(ordered, [max(0, tokens - 1) for tokens in wanted])
        ends = [sequence.length + len(request.token_ids) for sequence, request in zip(rows, ordered, strict=True)]
        passes, alive = self._draft(ordered, wanted, rows)
        for sequence, end in zip(rows, ends, strict=True):
            sequence.truncate(end)
        drafted = self._drafter.choose.target_ids[torch.cat(passes)].tolist() if passes else []
        wanted_still = torch.cat(alive).tolist() if alive else [True] * len(drafted)
        result: list[list[int]] = [[] for _ in requests]
        start = 0
        for columns in passes:
            part = slice(start, start + len(columns))
            for i, token, kept in zip(order, drafted[part], wanted_still[part], strict=False):
                if kept:
                    result[i].append(token)
            start += len(columns)
        return result

    def _draft(
        self, requests: list[DraftRequest], wanted: list[int], rows: list[CacheSequence]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Draft columns of every pass, one per sequence that wants that many tokens, `requests` by falling length; and
        whether each is still part of its draft, nothing if all are."""
        d, eps = self._drafter, self._drafter.config.rms_norm_eps
        token_ids = [token for request in requests for token in request.token_ids]
        layout = self._cache.layout(
            [Step(sequence, request.token_ids) for sequence, request in zip(rows, requests, strict=True)]
        )
        features_RD = torch.cat([request.features.to(d.device, d.dtype) for request in requests])
        embedded_RD = d.embedding[torch.tensor(token_ids, device=d.device)]
        x = torch.cat(
            (d.ops.rms_norm(embedded_RD, d.token_norm, eps), d.ops.rms_norm(features_RD, d.state_norm, eps)), -1
        )
        queries = d.ops.rope_store(d.qkv(x), layout, d.rope, self._cache, 0, d.config.num_heads)
        count = sum(tokens > 0 for tokens in wanted)
        if not count:
            return [], []
        last = torch.tensor([end - 1 for end in _ends(layout.counts)][:count], device=d.device)
        layout = _rows_of(layout, last)
        state_ND, queries, chosen_N = features_RD[last], queries[last], last

        passes: list[Tensor] = []
        alive: list[Tensor] = []
        alive_N = last
        for step in range(max(wanted)):
            if step:
                count = sum(tokens > step for tokens in wanted)
                layout = self._cache.layout([Step(s, (0,)) for s in rows[:count]])
                state_ND = state_ND[:count]
                token_ND = d.draft_tokens_CD[chosen_N[:count]]
                x = torch.cat((token_ND, d.ops.rms_norm(state_ND, d.state_norm, eps)), -1)
                queries = d.ops.rope_store(d.qkv(x), layout, d.rope, self._cache, 0, d.config.num_heads)
            mixed = d.out(d.ops.attend(queries, layout, self._cache, 0, d.config.num_heads))
            normed = d.ops.add_rms_norm(state_ND, mixed, d.mlp_norm, eps)
            mlp = d.down(d.ops.silu_mul(d.gate_up(normed)))
            final_ND = d.ops.add_rms_norm(state_ND, mlp, d.final_norm, eps)
            live = requests[:count]
            if d.survival is not None and any(request.min_survival for request in requests):
                survives_N = d.survival.survives(final_ND, [r.min_survival for r in live])
                alive_N = survives_N if step == 0 else alive_N[:count] & survives_N
                if not alive_N.any():
                    break
                alive.append(alive_N)
            logits_NC = d.head(final_ND)
            positions = [request.base + len(request.token_ids) + 1 + step for request in live]
            chosen_N = d.choose(logits_NC, [request.sampling for request in live], positions)
            passes.append(chosen_N)
        return passes, alive


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
