"""The two networks in PyTorch, weight for weight what mlx-lm runs as `qwen3` and as `gemma3_text`.

Parameter names equal those in the safetensors files, less the leading `model.`, so exporting is a
copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Everything that defines one network; `window` is 0 for Qwen3, the sliding window for Gemma 3."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    head_dim: int = 64
    rope_theta: float = 100_000.0
    rope_local: float = 10_000.0
    window: int = 0
    pattern: int = 1
    norm_eps: float = 1e-6

    @property
    def is_gemma(self) -> bool:
        """Gemma 3 scales its embeddings, norms after each part as well and adds one to norm
        weights.
        """
        return self.family == "gemma3_text"

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer only looks back over the window (every `pattern`-th layer looks back over
        all).
        """
        return self.is_gemma and (layer + 1) % self.pattern != 0


class Norm(nn.Module):
    """RMS norm; with `offset` 1 its stored weight is the distance from one, as Gemma stores it."""

    def __init__(self, size: int, shape: Shape) -> None:
        super().__init__()
        self.offset = 1.0 if shape.is_gemma else 0.0
        self.weight = nn.Parameter(torch.full((size,), 1.0 - self.offset))
        self.eps = shape.norm_eps

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (self.weight + self.offset)).to(inputs.dtype)


def rotate(inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (batch, heads, tokens, head_dim), halves paired (not neighbours)."""
    first, second = inputs.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(inputs.dtype)


def rope_tables(
    tokens: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0..tokens-1."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.arange(tokens, device=device).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def attend(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Causal attention, with a window only to the last `window` tokens.

    Queries come as (batch, heads, tokens, head_dim), keys and values with fewer heads.
    """
    repeats = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(repeats, 1)
    values = values.repeat_interleave(repeats, 1)
    if not window:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    tokens = queries.shape[2]
    near = torch.ones(tokens, tokens, dtype=torch.bool, device=queries.device)
    near = near.tril().triu(1 - window)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=near)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.window = shape.window if shape.is_sliding(layer) else 0
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape)
        self.k_norm = Norm(shape.head_dim, shape)

    def forward(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = inputs.shape
        head_dim = self.shape.head_dim
        queries = self.q_norm(self.q_proj(inputs).view(batch, tokens, -1, head_dim)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(inputs).view(batch, tokens, -1, head_dim)).transpose(1, 2)
        values = self.v_proj(inputs).view(batch, tokens, -1, head_dim).transpose(1, 2)
        out = attend(rotate(queries, cos, sin), rotate(keys, cos, sin), values, self.window)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    """Gated feed-forward part: SiLU for Qwen3, tanh-approximated GELU for Gemma 3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_gemma = shape.is_gemma
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        gate = self.gate_proj(inputs)
        gate = F.gelu(gate, approximate="tanh") if self.is_gemma else F.silu(gate)
        return self.down_proj(gate * self.up_proj(inputs))


class Block(nn.Module):
    """One layer; Gemma 3 also norms what each part adds."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.is_gemma = shape.is_gemma
        self.self_attn = Attention(shape, layer)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape)
        if self.is_gemma:
            self.pre_feedforward_layernorm = Norm(shape.hidden, shape)
            self.post_feedforward_layernorm = Norm(shape.hidden, shape)

    def forward(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(inputs), cos, sin)
        if not self.is_gemma:
            middle = inputs + attended
            return middle + self.mlp(self.post_attention_layernorm(middle))
        middle = inputs + self.post_attention_layernorm(attended)
        return middle + self.post_feedforward_layernorm(
            self.mlp(self.pre_feedforward_layernorm(middle))
        )


class Network(nn.Module):
    """A causal language model with tied embeddings; `forward` returns logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = Norm(shape.hidden, shape)
        self.reset()

    def reset(self) -> None:
        """Small embeddings; what the parts add starts at zero, so learning starts from plain
        embeddings.
        """
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        for layer in self.layers:
            if not self.shape.is_gemma:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)

    def forward(self, tokens: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Logits for every token, or for the `chosen` ones only (indices into the flattened
        tokens).
        """
        shape = self.shape
        hidden = self.embed_tokens(tokens)
        if shape.is_gemma:
            hidden = hidden * float(torch.tensor(shape.hidden**0.5).bfloat16())
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.bfloat16)
        everywhere = rope_tables(tokens.shape[1], shape.head_dim, shape.rope_theta, tokens.device)
        nearby = rope_tables(tokens.shape[1], shape.head_dim, shape.rope_local, tokens.device)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, *(nearby if shape.is_sliding(index) else everywhere))
        if chosen is not None:
            hidden = hidden.flatten(0, 1)[chosen]
        return F.linear(self.norm(hidden), self.embed_tokens.weight)
