"""DFlash as a trainable module (arXiv 2602.06036): a block of draft positions filled in one pass.

The block behind row p holds the embedding of token p + 1, the last one known, and K mask embeddings. Every layer sees
the target's features of rows up to p, the same ones in all layers, and the whole block, in both directions; its state
at slot k predicts token p + 1 + k.

Legend: B sequences, T rows, A anchors, K draft positions, S = K + 1 slots, F concatenated features, D hidden size,
H heads, G key-value heads, R = H / G heads per group, E head dim.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from tierspec.drafters.dflash.config import DFlashConfig
from tierspec.drafters.layers import MLP, RMSNorm, initialize_normal, rotate
from tierspec.models.rope import rope_tables


class Attention(nn.Module):
    """Queries of the block; keys and values of block and context alike; queries and keys normalised by head."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., D] → rotated queries [..., H, E]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))), cos, sin).to(x.dtype)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., D] → rotated keys and plain values [..., G, E]."""
        shape = (self.num_kv_heads, self.head_dim)
        values = self.v_proj(x).unflatten(-1, shape)
        return rotate(self.k_norm(self.k_proj(x).unflatten(-1, shape)), cos, sin).to(values.dtype), values


class Layer(nn.Module):
    """A decoder layer over the block."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)


class DFlash(nn.Module):
    """The drafter's parameters, named as in published checkpoints, and its forward pass for training. Embedding and
    token head are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialize(self, generator: torch.Generator) -> None:
        """Matrices normal(0, 0.02), norms one; the same values for the same generator state."""
        initialize_normal(self, generator)

    def unroll(self, features_BTF: Tensor, block_BASD: Tensor, anchors_BA: Tensor) -> Tensor:
        """States before the heads (after the final norm) of every anchor's draft positions: [B, A, K, D].

        features_BTF: target features of rows 0 .. T-1 of each sequence; block_BASD: embeddings of the slots;
        anchors_BA: int64 row numbers. Rows past a sequence's end may hold anything: no anchor before them sees them.
        """
        rows, slots = features_BTF.shape[1], block_BASD.shape[2]
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, rows + slots, features_BTF.device)
        positions_BAS = anchors_BA[..., None] + 1 + torch.arange(slots, device=anchors_BA.device)
        own_cos, own_sin = cos[positions_BAS], sin[positions_BAS]
        context_BTD = self.hidden_norm(self.fc(features_BTF)).to(block_BASD.dtype)
        hidden_mask = torch.arange(rows, device=anchors_BA.device) > anchors_BA[..., None]
        bias_BAT = torch.zeros(hidden_mask.shape, device=hidden_mask.device).masked_fill_(hidden_mask, float("-inf"))

        state = block_BASD
        for layer in cast(Iterable[Layer], self.layers):
            attention = layer.self_attn
            x = layer.input_layernorm(state).to(block_BASD.dtype)
            mixed = attend_block(
                attention.queries(x, own_cos, own_sin),
                *attention.keys_values(context_BTD, cos[:rows], sin[:rows]),
                bias_BAT,
                *attention.keys_values(x, own_cos, own_sin),
            )
            state = state + attention.o_proj(mixed)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        return self.norm(state[:, :, 1:])


def attend_block(
    q_BASHE: Tensor,
    keys_BTGE: Tensor,
    values_BTGE: Tensor,
    bias_BAT: Tensor,
    own_keys_BASGE: Tensor,
    own_values_BASGE: Tensor,
) -> Tensor:
    """Attention of blocks over the context, masked by `bias_BAT`, and over all of their own slots: [B, A, S, H * E].
    Plain products: several times faster on CPU than a masked fused kernel."""
    batch, anchors, slots, _, width = q_BASHE.shape
    rows, groups = keys_BTGE.shape[1:3]
    q_BGASRE = (q_BASHE * width**-0.5).unflatten(3, (groups, -1)).permute(0, 3, 1, 2, 4, 5)
    scores = q_BGASRE.flatten(2, 4) @ keys_BTGE.permute(0, 2, 3, 1)
    scores = scores.view(batch, groups, anchors, -1, rows) + bias_BAT[:, None, :, None].to(scores.dtype)
    own_keys_BGAES, own_values_BGASE = own_keys_BASGE.permute(0, 3, 1, 4, 2), own_values_BASGE.permute(0, 3, 1, 2, 4)
    own_scores = q_BGASRE.flatten(3, 4) @ own_keys_BGAES
    weights = torch.cat((scores, own_scores.to(scores.dtype)), -1).softmax(-1)
    mixed = (weights[..., :rows].flatten(2, 3) @ values_BTGE.transpose(1, 2)).unflatten(2, (anchors, -1))
    mixed = mixed + weights[..., rows:] @ own_values_BGASE
    return mixed.view(batch, groups, anchors, slots, -1, width).permute(0, 2, 3, 1, 4, 5).flatten(3)
