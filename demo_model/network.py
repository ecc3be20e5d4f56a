"""The network in PyTorch, weight for weight what mlx-lm runs as `qwen3`.

Parameters are named as in the safetensors files, without the leading `model.`, so an export is a
copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 64
ROPE_THETA = 100_000.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """The dimensions of a network."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 1536


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (wide * scale * self.weight).to(inputs.dtype)


def rotate(inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to [batch, heads, tokens, head_dim], pairing the two halves."""
    first, second = inputs.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(inputs.dtype)


def rope_tables(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 to tokens - 1."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)
    angles = torch.arange(tokens, device=device).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal grouped-query attention with normalized queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.repeats = shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(shape.heads * HEAD_DIM, shape.hidden, bias=False)
        self.q_norm = Norm(HEAD_DIM)
        self.k_norm = Norm(HEAD_DIM)

    def forward(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = inputs.shape
        queries = self.q_norm(self.q_proj(inputs).view(batch, tokens, -1, HEAD_DIM)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(inputs).view(batch, tokens, -1, HEAD_DIM)).transpose(1, 2)
        values = self.v_proj(inputs).view(batch, tokens, -1, HEAD_DIM).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(queries, cos, sin),
            rotate(keys, cos, sin).repeat_interleave(self.repeats, 1),
            values.repeat_interleave(self.repeats, 1),
            is_causal=True,
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(inputs)) * self.up_proj(inputs))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)

    def forward(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        middle = inputs + self.self_attn(self.input_layernorm(inputs), cos, sin)
        return middle + self.mlp(self.post_attention_layernorm(middle))


class Network(nn.Module):
    """A causal language model with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Logits for the chosen positions, which are indices into the flattened tokens."""
        hidden = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.bfloat16)
        cos, sin = rope_tables(tokens.shape[1], tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return F.linear(self.norm(hidden.flatten(0, 1)[chosen]), self.embed_tokens.weight)
