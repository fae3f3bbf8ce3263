"""A small decoder-only transformer, written as plain matrix products, so that vmap can batch all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        per_head = (samples, length, self.heads, width // self.heads)
        query, key, value = (
            part.reshape(per_head).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-2, -1) * per_head[-1] ** -0.5
        # Not a buffer: a buffer would be stored, sent and averaged per worker.
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each with normalisation before it and a shortcut around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))


class Transformer(nn.Module):
    """Maps indices [samples, length] to logits of the next token [samples, length, vocabulary]."""

    def __init__(self, *, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        # GPT-2's initial scale: the first predictions are close to uniform.
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.token(indices) + self.position[: indices.shape[-1]]
        return self.head(self.norm(self.blocks(x)))
