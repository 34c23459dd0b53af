"""EAGLE-3 as a trainable module (arXiv 2503.01840): one decoder layer over the target's features and its own states.

Row p pairs the target's features at position p with the embedding of token p + 1, and predicts token p + 2. Unrolled
for training, row p at step i takes the embedding of token p + 1 + i, its own state of step i - 1 and position p + i;
it attends to the first-step keys of rows up to p and to its own keys of steps 1 .. i. Only anchor rows are
unrolled; all others contribute their keys and values alone.

Legend: B sequences, T rows, A anchors, K steps, F concatenated features, D hidden size, H heads, G key-value heads,
R = H / G heads per group, E head dim.
"""

from typing import cast

import torch
from torch import Tensor, nn

from tierspec.drafters.eagle3.config import Eagle3Config
from tierspec.drafters.layers import MLP, RMSNorm, initialize_normal, rotate
from tierspec.models.rope import rope_tables


class Attention(nn.Module):
    """Projections of an attention whose input is twice as wide as its output."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, A, 2D] → rotated queries [B, A, H, E]."""
        return rotate(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, 2D] → rotated keys and plain values [B, T, G, E]."""
        shape = (self.num_kv_heads, self.head_dim)
        return rotate(self.k_proj(x).unflatten(-1, shape), cos, sin), self.v_proj(x).unflatten(-1, shape)


class MidLayer(nn.Module):
    """The decoder layer: attention over concat(norm(embedding), norm(state)); the residual is the state itself."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)

    def finish(self, state: Tensor, mixed: Tensor) -> Tensor:
        """state [B, A, D] and attention output [B, A, H * E] → next state [B, A, D]."""
        state = state + self.self_attn.o_proj(mixed)
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3(nn.Module):
    """The drafter's parameters, named as in exported checkpoints, and its forward pass for training."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([MidLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @property
    def layer(self) -> MidLayer:
        """The only layer."""
        return cast(MidLayer, self.layers[0])

    def initialize(self, generator: torch.Generator) -> None:
        """Matrices normal(0, 0.02), norms one; the same values for the same generator state."""
        initialize_normal(self, generator)

    def unroll(self, features_BTF: Tensor, embedded_BTD: Tensor, anchors_BA: Tensor, depth: int) -> Tensor:
        """States before the heads (after the final norm) for every anchor and step: [B, A, K, D].

        features_BTF: target features of rows 0 .. T-1 of each sequence; embedded_BTD: embedding of token p + 1 at row
        p; anchors_BA: int64 row numbers. Rows past a sequence's end may hold anything: no anchor before them sees them.
        """
        layer, attention = self.layer, self.layer.self_attn
        rows = features_BTF.shape[1]
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, rows + depth, features_BTF.device)

        state_BTD = self.fc(features_BTF)
        token_BTD = layer.input_layernorm(embedded_BTD)
        x_BTC = torch.cat((token_BTD, layer.hidden_norm(state_BTD)), -1)
        keys, values = attention.keys_values(x_BTC, cos[:rows], sin[:rows])
        keys_BGET, values_BGTE = keys.permute(0, 2, 3, 1), values.transpose(1, 2)
        hidden_mask = torch.arange(rows, device=anchors_BA.device) > anchors_BA[..., None]
        bias_BAT = torch.zeros(hidden_mask.shape, dtype=keys.dtype, device=keys.device).masked_fill_(
            hidden_mask, float("-inf")
        )

        state = take_rows(state_BTD, anchors_BA)
        x = take_rows(x_BTC, anchors_BA)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(depth):
            positions = anchors_BA + step
            if step:
                token = take_rows(token_BTD, positions.clamp_max(rows - 1))
                x = torch.cat((token, layer.hidden_norm(state)), -1)
                key, value = attention.keys_values(x, cos[positions], sin[positions])
                own_keys.append(key)
                own_values.append(value)
            queries = attention.queries(x, cos[positions], sin[positions])
            mixed = attend(queries, keys_BGET, values_BGTE, bias_BAT, own_keys, own_values)
            state = layer.finish(state, mixed)
            outputs.append(self.norm(state))
        return torch.stack(outputs, 2)


def attend(
    q_BAHE: Tensor,
    keys_BGET: Tensor,
    values_BGTE: Tensor,
    bias_BAT: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """Attention of anchors over all first-step rows, masked by `bias_BAT`, and over their own later rows, each
    [B, A, G, E]. Returns [B, A, H * E]. Plain products: several times faster on CPU than a masked fused kernel."""
    batch, anchors, heads, width = q_BAHE.shape
    groups, rows = keys_BGET.shape[1], keys_BGET.shape[3]
    q_BAGRE = (q_BAHE * width**-0.5).unflatten(2, (groups, heads // groups))
    q_BGME = q_BAGRE.permute(0, 2, 1, 3, 4).reshape(batch, groups, -1, width)
    scores = (q_BGME @ keys_BGET).view(batch, groups, anchors, -1, rows) + bias_BAT[:, None, :, None]
    if not own_keys:
        mixed = scores.softmax(-1).flatten(2, 3) @ values_BGTE
        mixed = mixed.view(batch, groups, anchors, -1, width)
    else:
        own_k_BAGSE, own_v_BAGSE = torch.stack(own_keys, 3), torch.stack(own_values, 3)
        own_scores = (q_BAGRE @ own_k_BAGSE.transpose(-1, -2)).transpose(1, 2)
        weights = torch.cat((scores, own_scores.to(scores.dtype)), -1).softmax(-1)
        mixed = weights[..., :rows].flatten(2, 3) @ values_BGTE
        own_mixed = weights[..., rows:] @ own_v_BAGSE.transpose(1, 2)
        mixed = mixed.view(batch, groups, anchors, -1, width) + own_mixed
    return mixed.permute(0, 2, 1, 3, 4).reshape(batch, anchors, heads * width)


def take_rows(x_BTD: Tensor, rows_BA: Tensor) -> Tensor:
    """Rows of each sequence: [B, A, D]."""
    return x_BTD.gather(1, rows_BA[..., None].expand(-1, -1, x_BTD.shape[-1]))
