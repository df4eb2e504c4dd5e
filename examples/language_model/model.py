"""A small decoder: 2.6 million parameters, with the names of layers that Llama's have."""

from __future__ import annotations

import math

import torch
from corpus import LENGTH, VOCABULARY
from torch import nn

WIDTH, HEADS, LAYERS = 192, 6, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            layer(x).reshape(-1, length, HEADS, WIDTH // HEADS).transpose(1, 2) for layer in projections
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(self.later[:length, :length], -1e4)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, length, WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = Attention()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.attention_norm(x))
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Returns, for each token, logits of the one that follows: [batch, sequence, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.embed_tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
