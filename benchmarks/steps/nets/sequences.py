"""Transformers and recurrent nets."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from steps.nets._net import CLASSES, Net, labels, normal

__all__ = ["NETS"]

ENCODER_WORDS, DECODER_WORDS, LENGTH = 1000, 8192, 128


class _Attention(nn.Module):
    """Multi-head self-attention from PyTorch's fused scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class _Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, causal: bool = False, approximate: str = "none") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate=self.approximate)
        return x + self.down(hidden)


class Encoder(nn.Module):
    """Token embedding, encoder layers, mean over the sequence."""

    def __init__(self, words: int = ENCODER_WORDS, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)).mean(1))


class Decoder(nn.Module):
    """GPT-2-like: causal layers, learned positions, a head tied to the embedding."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DECODER_WORDS, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.Sequential(*(_Layer(width, heads, True, "tanh") for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layers(self.embedding(tokens) + self.positions))
        return functional.linear(hidden, self.embedding.weight).flatten(0, 1)


class Recurrent(nn.Module):
    """A recurrent layer over the sequence, classified from its last state."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(64, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(x)
        return self.head(states[:, -1])


NETS = {
    "encoder": Net(
        "transformer encoder, 4 layers of 256, 128 tokens", Encoder, lambda rng,
        batch: (rng.integers(0, ENCODER_WORDS, (batch, LENGTH)), labels(rng, batch)), (8, 1),
    ),
    "gpt2": Net(
        "GPT-2-like decoder, 4 layers of 256, 128 tokens, 8,192 words, tied head", Decoder, lambda rng,
        batch: (rng.integers(0, DECODER_WORDS, (batch, LENGTH)), labels(rng, batch * LENGTH, DECODER_WORDS)),
        (4, 1),
    ),
    "lstm": Net(
        "LSTM 64 to 128 over 64 steps", lambda: Recurrent(nn.LSTM), lambda rng,
        batch: (normal(rng, batch, 64, 64), labels(rng, batch)), (16, 1),
    ),
    "gru": Net(
        "GRU 64 to 128 over 64 steps", lambda: Recurrent(nn.GRU), lambda rng,
        batch: (normal(rng, batch, 64, 64), labels(rng, batch)), (16, 1),
    ),
}  # fmt: skip
