"""Architectures of papers, written plainly: recurrent, spectral, of experts, contrastive, and more."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo.architecture import Batch, architecture


class Tagger(nn.Module):
    """A recurrent layer over sequences of different lengths, packed."""

    def __init__(self, layer: Any, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6, padding_idx=0)
        self.layer = layer(
            6, 8, layers, batch_first=True, bidirectional=True, dropout=0.2 if layers > 1 else 0.0
        )
        self.last = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        y, final = self.layer(packed)
        y, _ = pad_packed_sequence(y, batch_first=True)
        state = final[0] if isinstance(final, tuple) else final
        return self.last(torch.tanh(y)), state[-1].sum(-1)


def _sentences() -> list[Batch]:
    return [
        {"tokens": torch.randint(1, 20, (b, 7)), "lengths": torch.tensor([7, 3, 5, 1, 6][:b])} for b in (4, 5)
    ]


architecture("plain/PackedLSTM", partial(Tagger, nn.LSTM, 2), _sentences)
architecture("plain/PackedGRU", partial(Tagger, nn.GRU), _sentences)


class Conformer(nn.Module):
    """Speech: a convolution, a GRU, and connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(6, 8, 3, 2, 1)
        self.layer = nn.GRU(8, 8, bidirectional=True, batch_first=True)
        self.last = nn.Linear(16, 5)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> Any:
        y = self.layer(self.convolution(x).relu().transpose(1, 2))[0]
        scores = self.last(y).log_softmax(-1).transpose(0, 1)
        given = torch.full((len(x),), scores.shape[0], dtype=torch.long)
        return self.loss(scores, labels, given, lengths), scores


architecture(
    "plain/DeepSpeech-CTC",
    Conformer,
    lambda: [
        {
            "x": torch.randn(b, 6, 24),
            "labels": torch.randint(1, 5, (b, 4)),
            "lengths": torch.tensor([4, 2, 3][:b]),
        }
        for b in (2, 3)
    ],
)


class Recommender(nn.Module):
    """DLRM: bags of categories, their products, and a network on top."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(20, 6, mode=mode) for _ in range(2)])
        self.bottom = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(6 + 3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(
        self, dense: torch.Tensor, first: torch.Tensor, offsets: torch.Tensor, second: torch.Tensor
    ) -> Any:
        x = self.bottom(dense)
        parts = torch.stack([x, self.bags[0](first, offsets), self.bags[1](second)], 1)
        products = parts @ parts.transpose(1, 2)
        rows, columns = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


def _clicks() -> list[Batch]:
    return [
        {
            "dense": torch.randn(b, 4),
            "first": torch.randint(20, (3 * b,)),
            "offsets": torch.arange(b) * 2,
            "second": torch.randint(20, (b, 3)),
        }
        for b in (4, 5)
    ]


for _mode in ("sum", "mean", "max"):
    architecture(f"plain/DLRM-{_mode}", partial(Recommender, _mode), _clicks)


class Experts(nn.Module):
    """A mixture of experts as it is written most often: a loop over experts, and the tokens of each by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> Any:
        flat = x.reshape(-1, 6)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return out.view_as(x)


architecture("plain/MixtureOfExperts", Experts, lambda: [{"x": torch.randn(b, 5, 6)} for b in (2, 3)])


class MomentumContrast(nn.Module):
    """MoCo: a queue of keys from a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
        self.query, self.key = make(), make()
        for p, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
            p.data.copy_(q.data)
            p.requires_grad = False
        self.register_buffer("queue", functional.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        q = functional.normalize(self.query(first), dim=1)
        with torch.no_grad():
            for p, source in zip(self.key.parameters(), self.query.parameters(), strict=True):
                p.data = p.data * 0.9 + source.data * 0.1
            k = functional.normalize(self.key(second), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.1
        at = int(self.place)
        self.queue[:, at : at + len(k)] = k.T
        self.place[0] = (at + len(k)) % 16
        return functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


architecture(
    "plain/MoCo",
    MomentumContrast,
    lambda: [{"first": torch.randn(4, 6), "second": torch.randn(4, 6)} for _ in range(2)],
)


class Policy(nn.Module):
    """An actor and critic that sample their actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.body(x)
        chosen = torch.distributions.Categorical(logits=self.actor(h))
        action = chosen.sample()
        return chosen.log_prob(action), chosen.entropy(), self.critic(h)


architecture("plain/ActorCritic", Policy, lambda: [{"x": torch.randn(b, 4)} for b in (5, 6)])


class StateSpace(nn.Module):
    """S4D: a convolution with a kernel of a diagonal state space, by FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(4) * -2)
        self.log_decay, self.frequency = (
            nn.Parameter(torch.zeros(4, 3)),
            nn.Parameter(torch.arange(3.0).repeat(4, 1)),
        )
        self.output = nn.Parameter(torch.randn(4, 3, 2))
        self.skip = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        length = x.shape[-1]
        step = self.log_step.exp()[:, None]
        state = torch.complex(-self.log_decay.exp(), self.frequency)
        exponent = (state * step)[..., None] * torch.arange(length)
        weight = torch.view_as_complex(self.output) * (torch.exp(state * step) - 1) / state
        kernel = 2 * torch.einsum("hn,hnl->hl", weight, torch.exp(exponent)).real
        spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return torch.fft.irfft(spectrum, n=2 * length)[..., :length] + x * self.skip[:, None]


architecture("plain/S4D", StateSpace, lambda: [{"x": torch.randn(b, 4, 10)} for b in (2, 3)])


class Spectrogram(nn.Module):
    """Audio: a short-time Fourier transform in the network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(9, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2)
        )

    def forward(self, x: torch.Tensor) -> Any:
        spectrum = torch.stft(x, 16, 8, window=torch.hann_window(16, dtype=x.dtype), return_complex=True)
        return self.layers(torch.log1p(spectrum.abs()))


architecture("plain/SpectrogramCNN", Spectrogram, lambda: [{"x": torch.randn(b, 64)} for b in (2, 3)])


class Glow(nn.Module):
    """An invertible 1x1 convolution with its log determinant, and a matrix exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0].contiguous())
        self.generator = nn.Parameter(torch.randn(4, 4) * 0.3)

    def forward(self, x: torch.Tensor) -> Any:
        volume = torch.linalg.slogdet(self.weight)[1] * x.shape[2] * x.shape[3]
        y = functional.conv2d(x, self.weight[:, :, None, None])
        turned = torch.linalg.matrix_exp(self.generator - self.generator.T)
        return torch.einsum("oc,bchw->bohw", turned, y), volume


architecture("plain/Glow", Glow, lambda: [{"x": torch.randn(b, 4, 3, 3)} for b in (2, 3)])


class GaussianProcess(nn.Module):
    """Deep kernel learning: a marginal likelihood by a Cholesky factor."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.log_noise = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = self.features(x)
        kernel = torch.exp(-(torch.cdist(z, z) ** 2)) + self.log_noise.exp() * torch.eye(
            len(x), dtype=x.dtype
        )
        factor = torch.linalg.cholesky(kernel)
        alpha = torch.cholesky_solve(y[:, None], factor)
        return 0.5 * (y[:, None] * alpha).sum() + factor.diagonal().log().sum()


architecture(
    "plain/DeepKernelGP",
    GaussianProcess,
    lambda: [{"x": torch.randn(n, 3), "y": torch.randn(n)} for n in (6, 7)],
)


class PointTransformer(nn.Module):
    """Points and their nearest neighbours, as of DGCNN."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        near = torch.cdist(x, x).topk(3, largest=False).indices
        neighbours = torch.stack([points[places] for points, places in zip(x, near, strict=True)])
        centre = x[:, :, None].expand_as(neighbours)
        return self.last(self.edge(torch.cat([neighbours - centre, centre], -1)).amax(2).amax(1))


architecture("plain/DGCNN", PointTransformer, lambda: [{"x": torch.randn(b, 8, 3)} for b in (2, 2)])


class Varied(nn.Module):
    """Sequences of different lengths: rows repeated, masked, joined and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(12, 6), nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> Any:
        x = torch.repeat_interleave(self.embed(tokens), counts, 0)
        kept = x[x.sum(1) > 0]
        kinds, inverse = torch.unique(tokens, return_inverse=True)
        sums = torch.zeros(len(kinds), 6, dtype=x.dtype).index_add_(0, inverse, self.embed(tokens))
        return self.last(kept).mean(), self.last(sums).pow(2).mean(), self.last(x).cummax(0)[0].mean()


architecture(
    "plain/RepeatedRows",
    Varied,
    lambda: [{"tokens": torch.randint(12, (n,)), "counts": torch.randint(0, 3, (n,))} for n in (8, 9)],
)


class SpectralConv(nn.Module):
    """Of the Fourier neural operator: a product in the lowest frequencies."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, modes, dtype=torch.cfloat) * 0.1)
        self.past = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        low = spectrum[:, :, : self.modes, : self.modes]
        out[:, :, : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        return torch.fft.irfft2(out, s=x.shape[-2:]) + self.past(x)


class FourierOperator(nn.Module):
    """The Fourier neural operator, in two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(2, 6, 1)
        self.layers = nn.ModuleList([SpectralConv(6, 3) for _ in range(2)])
        self.last = nn.Conv2d(6, 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.lift(x)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.last(x)


architecture(
    "plain/FourierNeuralOperator", FourierOperator, lambda: [{"x": torch.randn(b, 2, 8, 10)} for b in (2, 3)]
)


class GlobalFilter(nn.Module):
    """The block of GFNet: a learned filter in the frequencies of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.filter = nn.Parameter(torch.randn(8, 8, 5, 2) * 0.1)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        spectrum = torch.fft.rfft2(x, dim=(2, 3), norm="ortho") * torch.view_as_complex(self.filter)
        y = torch.fft.irfft2(spectrum, s=x.shape[2:], dim=(2, 3), norm="ortho")
        return self.head(self.norm((x + y).flatten(2).mean(2)))


architecture(
    "plain/GlobalFilterNetwork", GlobalFilter, lambda: [{"x": torch.randn(b, 3, 32, 32)} for b in (2, 3)]
)


class ContinuousFlow(nn.Module):
    """A continuous normalising flow: with the trace of the Jacobian in closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        total = torch.zeros_like(x[:, 0])
        for _ in range(3):
            hidden = torch.tanh(self.first(x))
            trace = (1 - hidden**2) @ (self.first.weight * self.second.weight.T).sum(1)
            total = total + trace / 3
            x = x + self.second(hidden) / 3
        return x, total


architecture("plain/ContinuousFlow", ContinuousFlow, lambda: [{"x": torch.randn(b, 4)} for b in (5, 6)])
