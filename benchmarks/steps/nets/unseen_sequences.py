"""Six nets over sequences, written as in their papers: states, speech, forecasts, translation, adapters, experts."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from steps.nets import untuned
from steps.nets._net import CLASSES, Batch, Net, labels, normal, words

__all__ = ["NETS"]


def _segment_sums(x: torch.Tensor) -> torch.Tensor:
    """Returns the sums of x over positions (j, i] as [..., i, j], and -inf where j > i."""
    length = x.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
    below = x.unsqueeze(-1).expand(*x.shape, length).masked_fill(~torch.tril(ones, -1), 0)
    return torch.cumsum(below, -2).masked_fill(~torch.tril(ones), -torch.inf)


def _scan(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, block: int) -> torch.Tensor:
    """Mamba-2's state space dual form in blocks, as its paper's minimal code.

    Args:
        x: values, [batch, length, heads, width].
        a: logarithms of the decay, [batch, length, heads].
        b: input matrices, [batch, length, heads, states].
        c: output matrices, like `b`.
        block: positions in a block, a divisor of length.

    Returns:
        The outputs, like `x`.
    """
    x, a, b, c = (t.unflatten(1, (-1, block)) for t in (x, a, b, c))
    a = a.permute(0, 3, 1, 2)
    sums = torch.cumsum(a, -1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, torch.exp(_segment_sums(a)), x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(sums[..., -1:] - sums), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    decay = torch.exp(_segment_sums(functional.pad(sums[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", decay, states)[:, :-1]
    across = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(sums))
    return (within + across).flatten(1, 2)


class _Mamba(nn.Module):
    """A Mamba-2 block: projection, causal depthwise convolution, scan, gated norm."""

    def __init__(self, width: int, heads: int, states: int, block: int) -> None:
        super().__init__()
        self.inner, self.heads, self.states, self.block = 2 * width, heads, states, block
        self.norm = nn.LayerNorm(width)
        mixed = self.inner + 2 * states
        self.into = nn.Linear(width, self.inner + mixed + heads, bias=False)
        self.convolution = nn.Conv1d(mixed, mixed, 4, padding=3, groups=mixed)
        self.bias = nn.Parameter(torch.full((heads,), -2.0))
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, heads + 1)))
        self.skip = nn.Parameter(torch.ones(heads))
        self.gated = nn.LayerNorm(self.inner)
        self.out = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, sizes = x.shape[1], (self.inner, self.inner + 2 * self.states, self.heads)
        gate, mixed, step = self.into(self.norm(x)).split(sizes, -1)
        mixed = functional.silu(self.convolution(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        values, b, c = mixed.split((self.inner, self.states, self.states), -1)
        values = values.unflatten(-1, (self.heads, -1))
        # One group: all heads share b and c.
        b, c = (t.unsqueeze(2).expand(-1, -1, self.heads, -1) for t in (b, c))
        step = functional.softplus(step + self.bias)
        scanned = _scan(values * step.unsqueeze(-1), -torch.exp(self.log_a) * step, b, c, self.block)
        hidden = (scanned + self.skip.unsqueeze(-1) * values).flatten(2)
        return x + self.out(self.gated(hidden * functional.silu(gate)))


class Mamba(nn.Module):
    """Mamba-2 (arXiv:2405.21060): two blocks over 256 tokens."""

    WORDS, LENGTH = 1000, 256

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.WORDS, width)
        self.blocks = nn.Sequential(*(_Mamba(width, 8, 32, 64) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens)))).flatten(0, 1)


class _Convolution(nn.Module):
    """The Conformer's convolution module."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1), nn.GLU(1),
            nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width), nn.BatchNorm1d(width), nn.SiLU(),
            nn.Conv1d(width, width, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(x).transpose(1, 2)).transpose(1, 2)


class _ConformerBlock(nn.Module):
    """Half a dense net, attention, convolution, the other half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
            )
            for _ in range(2)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.convolution = _Convolution(width, 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.first(x)
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.convolution(x)
        return self.norm2(x + 0.5 * self.second(x))


class Conformer(nn.Module):
    """Conformer (arXiv:2005.08100): three blocks over a spectrogram subsampled four times, a label per frame."""

    BANDS, LENGTH, LABELS = 40, 256, 40

    def __init__(self, width: int = 144) -> None:
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU()
        )
        self.into = nn.Linear(32 * self.BANDS // 4, width)
        self.blocks = nn.Sequential(*(_ConformerBlock(width, 4) for _ in range(3)))
        self.head = nn.Linear(width, self.LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = self.subsample(x.unsqueeze(1)).transpose(1, 2).flatten(2)
        return self.head(self.blocks(self.into(frames))).flatten(0, 1)


def _speech(rng: np.random.Generator, batch: int) -> Batch:
    frames = normal(rng, batch, Conformer.LENGTH, Conformer.BANDS)
    return frames, labels(rng, batch * Conformer.LENGTH // 4, Conformer.LABELS)


class _GatedResidual(nn.Module):
    """The TFT's gated residual net."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(source, target), nn.Linear(target, target)
        self.gate, self.norm = nn.Linear(target, 2 * target), nn.LayerNorm(target)
        self.skip = nn.Identity() if source == target else nn.Linear(source, target)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(functional.elu(self.first(x)))
        return self.norm(self.skip(x) + functional.glu(self.gate(hidden), -1))


class _Selection(nn.Module):
    """Embeds each variable, and adds them up by weights that depend on all."""

    def __init__(self, variables: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Linear(1, width) for _ in range(variables))
        self.each = nn.ModuleList(_GatedResidual(width, width) for _ in range(variables))
        self.weights = _GatedResidual(variables * width, variables)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = [f(column) for f, column in zip(self.embeddings, x.split(1, -1), strict=True)]
        weights = self.weights(torch.cat(embedded, -1)).softmax(-1).unsqueeze(-2)
        each = torch.stack([f(e) for f, e in zip(self.each, embedded, strict=True)], -1)
        return (each * weights).sum(-1)


class Tft(nn.Module):
    """Temporal fusion transformer (arXiv:1912.09363): 48 hours and the next 12 of them, three quantiles."""

    PAST, FUTURE, VARIABLES = 48, 12, 6

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.past, self.future = _Selection(self.VARIABLES, width), _Selection(self.VARIABLES // 2, width)
        self.encoder, self.decoder = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.enrich, self.dense = _GatedResidual(width, width), _GatedResidual(width, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        length = self.PAST + self.FUTURE
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))
        self.head = nn.Linear(width, 3)

    def _add(self, index: int, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.norms[index](skip + functional.glu(self.gates[index](x), -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = self.past(x[:, : self.PAST])
        # Only the first variables are known ahead.
        future = self.future(x[:, self.PAST :, : self.VARIABLES // 2])
        encoded, state = self.encoder(past)
        decoded, _ = self.decoder(future, state)
        local = self._add(0, torch.cat([encoded, decoded], 1), torch.cat([past, future], 1))
        enriched = self.enrich(local)
        mixed, _ = self.attention(enriched, enriched, enriched, attn_mask=self.mask, need_weights=False)
        hidden = self.dense(self._add(1, mixed, enriched))
        return self.head(self._add(2, hidden, local)[:, self.PAST :])


def _series(rng: np.random.Generator, batch: int) -> Batch:
    return normal(rng, batch, Tft.PAST + Tft.FUTURE, Tft.VARIABLES), normal(rng, batch, Tft.FUTURE, 3)


class Translator(nn.Module):
    """Translation by GRUs with additive attention (arXiv:1409.0473), taught by the right words.

    A row of the input holds the words of the source and those before each word of the target.
    """

    WORDS, SOURCE, TARGET = 2000, 24, 20

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(self.WORDS, width) for _ in range(2))
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.start = nn.Linear(width, width)
        self.key, self.query = nn.Linear(2 * width, width), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.cell = nn.GRUCell(3 * width, width)
        self.head = nn.Linear(3 * width, self.WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        source, target = tokens.split([self.SOURCE, self.TARGET], 1)
        encoded, last = self.encoder(self.source(source))
        keys, state = self.key(encoded), torch.tanh(self.start(last[1]))
        outputs = []
        for word in self.target(target).unbind(1):
            scores = self.score(torch.tanh(keys + self.query(state).unsqueeze(1)))
            context = (scores.softmax(1) * encoded).sum(1)
            state = self.cell(torch.cat([word, context], 1), state)
            outputs.append(torch.cat([state, context], 1))
        return self.head(torch.stack(outputs, 1)).flatten(0, 1)


def _sentences(rng: np.random.Generator, batch: int) -> Batch:
    tokens = rng.integers(0, Translator.WORDS, (batch, Translator.SOURCE + Translator.TARGET))
    return tokens, labels(rng, batch * Translator.TARGET, Translator.WORDS)


class _Lora(nn.Module):
    """A frozen dense layer, and two of rank 8 that adapt it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


def lora() -> nn.Module:
    """The decoder of `untuned`, frozen, with adapters of its queries and values."""
    decoder = untuned.Llama().requires_grad_(False)
    for layer in decoder.layers:
        layer.q, layer.v = _Lora(layer.q), _Lora(layer.v)
    return decoder


class _Experts(nn.Module):
    """Each token goes to two of eight dense nets; what exceeds an expert's capacity is dropped (arXiv:2006.16668)."""

    CHOSEN = 2

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        # A quarter more than the average.
        capacity = 5 * self.CHOSEN * tokens.shape[0] // (4 * self.count)
        shares, experts = self.router(tokens).softmax(-1).topk(self.CHOSEN, -1)
        shares, experts = (shares / shares.sum(-1, keepdim=True)).flatten(), experts.flatten()
        places = functional.one_hot(experts, self.count)
        place = (places.cumsum(0) * places).sum(1) - 1
        kept = place < capacity
        # The last row takes what is dropped.
        row = torch.where(kept, experts * capacity + place, self.count * capacity)
        rows = x.new_zeros(self.count * capacity + 1, x.shape[-1])
        rows = rows.index_add(0, row, tokens.repeat_interleave(self.CHOSEN, 0))
        hidden = functional.gelu(rows[:-1].view(self.count, capacity, -1) @ self.up) @ self.down
        taken = functional.pad(hidden.flatten(0, 1), (0, 0, 0, 1)).index_select(0, row)
        weighted = taken * (shares * kept).unsqueeze(-1)
        return weighted.view(-1, self.CHOSEN, x.shape[-1]).sum(1).view(x.shape)


class _ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.experts = _Experts(width, 2 * width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.experts(self.norm2(x))


class Experts(nn.Module):
    """Two layers of attention and a mixture of eight experts."""

    WORDS, LENGTH = 1000, 64

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(self.WORDS, width), nn.Embedding(self.LENGTH, width)
        self.blocks = nn.Sequential(*(_ExpertBlock(width) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embedding(tokens) + self.position.weight)
        return self.head(self.norm(hidden).mean(1))


NETS = {
    "mamba2": Net("Mamba-2, 2 blocks of 128, 256 tokens", Mamba, words(Mamba.WORDS, Mamba.LENGTH, True), (4,)),
    "conformer": Net("Conformer, 3 blocks of 144, 256 frames", Conformer, _speech, (4,)),
    "tft": Net("temporal fusion transformer, 6 variables, 48 + 12 hours", Tft, _series, (32,), loss="mse"),
    "seq2seq": Net("GRU translation with attention, 24 to 20 words", Translator, _sentences, (32,)),
    "lora": Net(
        "adapters of rank 8 on a frozen Llama-like decoder", lora,
        words(untuned.Llama.WORDS, untuned.Llama.LENGTH, True), (4,),
    ),
    "moe": Net(
        "2 layers of attention and top-2 of 8 experts", Experts, words(Experts.WORDS, Experts.LENGTH), (16,)
    ),
}  # fmt: skip
