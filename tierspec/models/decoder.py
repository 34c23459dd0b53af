"""The decoder runtime: a batched ragged forward pass of the llama family over a paged KV cache.

Shapes: R rows (tokens of all sequences of a call, in order), D hidden size, H heads, I intermediate size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tierspec.errors import SettingError
from tierspec.models.architecture import ModelConfig
from tierspec.models.cache import KVCache, Step
from tierspec.models.ops import ANY_ROWS, PackedLinear, invariant_rows, packing_available, select_ops
from tierspec.models.rope import rope_tables
from tierspec.models.route import Route
from tierspec.models.weights import WeightReader, read_config

FULL = Route()

# oneDNN's products of four rows are faster than those of one to three (fp32 step: a sixth).
_LEAST_ROWS = 4


@dataclass(frozen=True)
class Hidden:
    """Result of a forward pass over R real rows, in the order of its steps.

    `last` [R, D] is the hidden state after the final norm, the input of `Decoder.logits`. `features` maps a requested
    index to [R, D]: index j is entry j of Hugging Face's `hidden_states` tuple, the input of layer j.
    """

    last: torch.Tensor
    features: dict[int, torch.Tensor]


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: PackedLinear
    head_norms: torch.Tensor | None
    out: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Decoder:
    """A decoder-only model for inference; weights are packed once, at loading.

    With `numerics="invariant"` the result of a row does not depend, bitwise, on the other rows of the call: a token has
    the same logits in a block, alone, or in any batch. That pads calls of few rows, see `invariant_rows`. It needs the
    packed weights of oneDNN, so it is for CPU; `None` takes it where it can be had and "fast" elsewhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        numerics: str | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        invariant_possible = self.device.type == "cpu" and packing_available() and invariant_rows(dtype) is not None
        if numerics == "invariant" and not invariant_possible:
            raise SettingError("target.numerics: 'invariant' needs a CPU with oneDNN; use 'fast' on this device")
        self.numerics = numerics or ("invariant" if invariant_possible else "fast")
        self._linear = functools.partial(PackedLinear, rule=None if self.numerics == "invariant" else ANY_ROWS)
        self._ops = select_ops(self.device)
        self._reader = reader

        c = config
        self.embedding = self._read("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        self._layers = [self._layer(i) for i in range(c.num_layers)]
        self.final_norm = self._read("model.norm.weight", (c.hidden_size,))
        self._head = self._linear(self.head_weight())
        self.rope = rope_tables(c.rope, c.head_dim, c.max_context, self.device)

    @classmethod
    def from_directory(
        cls, directory: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", numerics: str | None = None
    ) -> Decoder:
        """Loads ``config.json`` and the weights, in one file or in shards.

        Raises:
            ArtifactError: a file or a tensor is missing, corrupt or of the wrong shape.
            SettingError: the architecture is not supported.
        """
        config = ModelConfig.from_hf(read_config(directory))
        return cls(config, WeightReader(directory), dtype=dtype, device=device, numerics=numerics)

    def new_cache(self, token_budget: int, route: Route = FULL) -> KVCache:
        """A cache for `token_budget` tokens, in whole pages of 64, of passes along `route`, which it belongs to."""
        return KVCache(
            layers=route.kept_attention(self.config.num_layers),
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            token_budget=token_budget,
            dtype=self.dtype,
            device=self.device,
        )

    def check_features(self, features: Sequence[int]) -> None:
        """Raises SettingError unless every index names a layer's input, 1 .. N-1 (entry N is after the final norm)."""
        for j in features:
            if not 1 <= j < self.config.num_layers:
                raise SettingError(
                    f"drafter.feature_layers: {j} is not a captured layer; use 1 to {self.config.num_layers - 1} "
                    "(index into Hugging Face's hidden_states)"
                )

    @torch.no_grad()
    def forward(
        self, steps: Sequence[Step], cache: KVCache, *, features: Sequence[int] = (), route: Route = FULL
    ) -> Hidden:
        """Runs the tokens of every step behind what its sequence holds, and adds them to the cache.

        Raises:
            CacheFull: the cache has no room; nothing was changed.
            ValueError: a position lies beyond the model's context, or the cache belongs to another route.
        """
        self.check_features(features)
        if route.kept_attention(self.config.num_layers) != tuple(cache.layer_index):
            raise ValueError(f"the cache was made for another route than {route.id}")
        for step in steps:
            if step.sequence.length + len(step.token_ids) > self.config.max_context:
                raise ValueError(f"position {self.config.max_context} is beyond the model's context")
        ids = [token for step in steps for token in step.token_ids]
        rows = self._bucket(len(ids))
        layout = cache.layout(steps, padded_rows=rows)
        token_ids = torch.tensor(ids + [0] * (rows - len(ids)), dtype=torch.int64).to(self.device, non_blocking=True)

        ops, eps, heads = self._ops, self.config.rms_norm_eps, self.config.num_heads
        residual = self.embedding[token_ids]
        delta: torch.Tensor | None = None
        captured: dict[int, torch.Tensor] = {}

        def normed(weight: torch.Tensor) -> torch.Tensor:
            if delta is None:
                return ops.rms_norm(residual, weight, eps)
            return ops.add_rms_norm(residual, delta, weight, eps)

        for index, layer in enumerate(self._layers):
            if index in features:
                if delta is not None:
                    residual, delta = residual.add_(delta), None
                captured[index] = residual[: len(ids)].clone()
            if index not in route.attention:
                slot = cache.layer_index[index]
                qkv = layer.qkv(normed(layer.attention_norm))
                if layer.head_norms is not None:
                    ops.norm_heads(qkv, layer.head_norms, eps)
                q = ops.rope_store(qkv, layout, self.rope, cache, slot, heads)
                delta = layer.out(ops.attend(q, layout, cache, slot, heads))
            if index not in route.mlp:
                delta = layer.down(ops.silu_mul(layer.gate_up(normed(layer.mlp_norm))))
        return Hidden(last=normed(self.final_norm)[: len(ids)], features=captured)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits [R, V] of final hidden states [R, D], in the model's dtype."""
        rows = hidden.shape[0]
        padded = self._bucket(rows)
        if padded != rows:
            hidden = torch.cat((hidden, hidden.new_zeros(padded - rows, hidden.shape[1])))
        return self._head(hidden.contiguous())[:rows]

    def head_weight(self) -> torch.Tensor:
        """The output head [V, D]: the embedding if tied, else read from the checkpoint."""
        if self.config.tie_embeddings:
            return self.embedding
        return self._read("lm_head.weight", (self.config.vocab_size, self.config.hidden_size))

    def layer_weights(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of one layer by their Hugging Face names without the prefix, read afresh from the checkpoint."""
        return {name: self._read(f"model.layers.{index}.{name}", shape) for name, shape in self._layer_shapes().items()}

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        options: dict[str, tuple[int, ...]] = {}
        if c.qkv_bias:
            options |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
        if c.qk_norm:
            options |= {f"self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
        return options | {
            "input_layernorm.weight": (c.hidden_size,),
            "self_attn.q_proj.weight": (q, c.hidden_size),
            "self_attn.k_proj.weight": (kv, c.hidden_size),
            "self_attn.v_proj.weight": (kv, c.hidden_size),
            "self_attn.o_proj.weight": (c.hidden_size, q),
            "post_attention_layernorm.weight": (c.hidden_size,),
            "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }

    def _layer(self, index: int) -> _Layer:
        w, c = self.layer_weights(index), self.config
        bias = torch.cat([w[f"self_attn.{x}_proj.bias"] for x in "qkv"]) if c.qkv_bias else None
        norms = [("q", c.num_heads), ("k", c.num_kv_heads)] if c.qk_norm else []
        heads = [w[f"self_attn.{name}_norm.weight"].expand(count, -1) for name, count in norms]
        return _Layer(
            attention_norm=w["input_layernorm.weight"],
            qkv=self._linear(torch.cat([w[f"self_attn.{x}_proj.weight"] for x in "qkv"]), bias),
            head_norms=torch.cat(heads) if heads else None,
            out=self._linear(w["self_attn.o_proj.weight"]),
            mlp_norm=w["post_attention_layernorm.weight"],
            gate_up=self._linear(torch.cat([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]])),
            down=self._linear(w["mlp.down_proj.weight"]),
        )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._reader.read(name, shape).to(device=self.device, dtype=self.dtype)

    def _bucket(self, rows: int) -> int:
        """Rows after padding, at most an eighth more: few distinct shapes, so that kernels (and later CUDA graphs) are
        made once per shape."""
        least = _LEAST_ROWS if self.numerics == "invariant" else 1
        if rows <= 32:
            return max(rows, least)
        step = max(8, 1 << (rows.bit_length() - 4))
        return -(-rows // step) * step
