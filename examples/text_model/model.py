"""A language model of characters, in the manner of GPT-2."""

from __future__ import annotations

import math

import torch
from torch import nn

WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.joint, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.merge(self.attention(self.attention_norm(x)))
        return x + self.down(nn.functional.gelu(self.up(self.feed_forward_norm(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.joint(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(self.later[:length, :length], -1e4)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class CharacterModel(nn.Module):
    """Returns, for each character, logits of the one that follows: [batch, sequence, characters]."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
