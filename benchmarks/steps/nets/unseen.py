"""Nine nets of other kinds, written as in their papers: images, points, a large graph, tables, a policy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from steps.nets._net import CLASSES, Batch, Net, labels, normal, normals

__all__ = ["NETS"]


class _WindowAttention(nn.Module):
    """Attention within windows of 4 x 4 positions, with a learned bias for each relative position."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        offsets = places[:, None] - places[None] + window - 1
        self.register_buffer("index", offsets[..., 0] * (2 * window - 1) + offsets[..., 1])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        windows, count, width = x.shape
        qkv = self.qkv(x).view(windows, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.flatten()].view(count, count, self.heads).permute(2, 0, 1)
        if mask is not None:
            scores = scores.view(-1, len(mask), self.heads, count, count) + mask[:, None]
            scores = scores.view(windows, self.heads, count, count)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(windows, count, width))


class _SwinBlock(nn.Module):
    """Pre-norm attention in windows, in every other block shifted by half a window, and a dense net."""

    def __init__(self, width: int, heads: int, size: int, shift: int, window: int = 4) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _WindowAttention(width, heads, window)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", self._mask() if shift else None)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        count = self.size // self.window
        x = x.view(-1, count, self.window, count, self.window, x.shape[-1])
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, x.shape[-1])

    def _join(self, x: torch.Tensor) -> torch.Tensor:
        count = self.size // self.window
        x = x.view(-1, count, count, self.window, self.window, x.shape[-1])
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.size, self.size, x.shape[-1])

    def _mask(self) -> torch.Tensor:
        """Returns -100 between positions that only the cyclic shift has made neighbors."""
        bounds = torch.tensor([self.size - self.window, self.size - self.shift])
        region = torch.bucketize(torch.arange(self.size), bounds, right=True)
        regions = self._split((3 * region[:, None] + region)[None, :, :, None])[..., 0]
        return (regions[:, :, None] != regions[:, None]) * -100.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        if self.shift:
            normed = torch.roll(normed, (-self.shift, -self.shift), (1, 2))
        mixed = self._join(self.attention(self._split(normed), self.mask))
        if self.shift:
            mixed = torch.roll(mixed, (self.shift, self.shift), (1, 2))
        x = x + mixed
        return x + self.dense(self.norm2(x))


class _Merge(nn.Module):
    """Four neighbors become one position of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corners = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
        return self.reduce(self.norm(torch.cat(corners, -1)))


class Swin(nn.Module):
    """Swin transformer (arXiv:2103.14030): patches of 4 x 4, three stages of two blocks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.norm1 = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        blocks: list[nn.Module] = []
        for stage, size in enumerate((16, 8, 4)):
            if stage:
                blocks.append(_Merge(width << (stage - 1)))
            # A single window has nothing to shift to.
            shifts = (0, 2 if size > 4 else 0)
            blocks += [_SwinBlock(width << stage, 2 << stage, size, shift) for shift in shifts]
        self.blocks = nn.Sequential(*blocks)
        self.norm2, self.head = nn.LayerNorm(4 * width), nn.Linear(4 * width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.norm1(self.patches(x).permute(0, 2, 3, 1)))
        return self.head(self.norm2(hidden).mean((1, 2)))


def _convolution(source: int, target: int, kernel: int, **options: int) -> nn.Sequential:
    """A convolution that keeps the size, BatchNorm and ReLU."""
    padding = kernel // 2 * options.get("dilation", 1)
    convolution = nn.Conv2d(source, target, kernel, padding=padding, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(target), nn.ReLU())


def _depthwise(width: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False), nn.BatchNorm2d(width)]


class _Shuffle(nn.Module):
    """One half of the channels passes a branch, then the halves are interleaved; both are if the block strides."""

    def __init__(self, source: int, target: int, stride: int) -> None:
        super().__init__()
        half = target // 2
        own = source if stride > 1 else half
        self.stride = stride
        self.right = nn.Sequential(
            _convolution(own, half, 1), *_depthwise(half, stride), _convolution(half, half, 1)
        )
        if stride > 1:
            self.left = nn.Sequential(*_depthwise(source, stride), _convolution(source, half, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride > 1:
            x = torch.cat([self.left(x), self.right(x)], 1)
        else:
            left, right = x.chunk(2, 1)
            x = torch.cat([left, self.right(right)], 1)
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(x.shape)


def shufflenet() -> nn.Module:
    """ShuffleNetV2 (arXiv:1807.11164) of half the blocks."""
    layers: list[nn.Module] = [_convolution(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1)]
    source = 24
    for target, count in ((116, 2), (232, 4), (464, 2)):
        for index in range(count):
            layers.append(_Shuffle(source, target, 1 if index else 2))
            source = target
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers, _convolution(source, 512, 1), *head)


class DeepLab(nn.Module):
    """DeepLab-like (arXiv:1706.05587): dilated convolutions, pooling pyramid, a class for each pixel."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, width, 3, stride=2), _convolution(width, 2 * width, 3, stride=2),
            _convolution(2 * width, 4 * width, 3, dilation=2), _convolution(4 * width, 4 * width, 3, dilation=4),
        )  # fmt: skip
        branches = [_convolution(4 * width, width, 1)]
        branches += [_convolution(4 * width, width, 3, dilation=rate) for rate in (2, 4, 6)]
        self.branches = nn.ModuleList(branches)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4 * width, width, 1), nn.ReLU())
        self.project = _convolution(5 * width, 2 * width, 1)
        self.head = nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        size = hidden.shape[-2:]
        whole = functional.interpolate(self.pool(hidden), size, mode="bilinear", align_corners=False)
        scores = self.head(self.project(torch.cat([*(f(hidden) for f in self.branches), whole], 1)))
        return functional.interpolate(scores, x.shape[-2:], mode="bilinear", align_corners=False)


def _pixels(rng: np.random.Generator, batch: int) -> Batch:
    return normal(rng, batch, 3, 64, 64), rng.integers(0, CLASSES, (batch, 64, 64))


class _GraphAttention(nn.Module):
    """Each node averages its neighbors, weighted by a softmax over its incoming edges."""

    def __init__(self, source: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.dense = nn.Linear(source, heads * width, bias=False)
        self.sent, self.received = (nn.Parameter(torch.randn(heads, width) * 0.1) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * width))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(x).view(-1, self.heads, self.width)
        sent, received = (hidden * self.sent).sum(-1), (hidden * self.received).sum(-1)
        scores = functional.leaky_relu(sent[source] + received[target], 0.2)
        index = target[:, None].expand_as(scores)
        largest = torch.zeros_like(sent).scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
        weights = torch.exp(scores - largest[target])
        total = torch.zeros_like(sent).index_add(0, target, weights)
        messages = hidden[source] * (weights / (total[target] + 1e-16)).unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, target, messages).flatten(1) + self.bias


class Gat(nn.Module):
    """Graph attention (arXiv:1710.10903) on a citation graph as large as Cora; every node loops to itself."""

    NODES, EDGES, WORDS, TOPICS = 2708, 10556, 256, 7

    def __init__(self) -> None:
        super().__init__()
        source, target = torch.from_numpy(np.random.default_rng(1).integers(0, self.NODES, (2, self.EDGES)))
        loops = torch.arange(self.NODES)
        self.register_buffer("source", torch.cat([source, loops]))
        self.register_buffer("target", torch.cat([target, loops]))
        self.first = _GraphAttention(self.WORDS, 8, 8)
        self.second = _GraphAttention(64, self.TOPICS, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.elu(self.first(x, self.source, self.target))
        return self.second(hidden, self.source, self.target)


def _shared(source: int, *widths: int) -> nn.Sequential:
    """The same dense layers for every point."""
    layers: list[nn.Module] = []
    for a, b in pairwise((source, *widths)):
        layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers)


class _Align(nn.Module):
    """PointNet's T-Net: a matrix by which the points of a cloud are multiplied."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.points = _shared(width, 64, 128, 256)
        self.cloud = nn.Sequential(nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU())
        self.matrix = nn.Linear(128, width * width)
        self.register_buffer("identity", torch.eye(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = len(self.identity)
        matrix = self.matrix(self.cloud(self.points(x).max(2).values)).view(-1, width, width)
        return (x.transpose(1, 2) @ (matrix + self.identity)).transpose(1, 2)


class PointNet(nn.Module):
    """PointNet (arXiv:1612.00593): two alignments, shared dense layers, the maximum over all points."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(_Align(3), _shared(3, 64), _Align(64), _shared(64, 128, 256))
        self.head = nn.Sequential(
            nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).max(2).values)


class Nerf(nn.Module):
    """NeRF (arXiv:2003.08934): colors and densities of the samples along each ray, then volume rendering."""

    FREQUENCIES, SAMPLES = 10, 32

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        encoded = 3 + 6 * self.FREQUENCIES
        self.register_buffer("frequencies", 2.0 ** torch.arange(self.FREQUENCIES))
        sources = (encoded, width, width, width + encoded, width, width)
        self.layers = nn.ModuleList(nn.Linear(source, width) for source in sources)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = (x.unsqueeze(-1) * self.frequencies).flatten(-2)
        encoded = torch.cat([x, angles.sin(), angles.cos()], -1)
        hidden = encoded
        for index, layer in enumerate(self.layers):
            hidden = functional.relu(layer(torch.cat([hidden, encoded], -1) if index == 3 else hidden))
        color, density = self.head(hidden).split([3, 1], -1)
        absorbed = functional.softplus(density.squeeze(-1)) / self.SAMPLES
        # Not cumprod(1 - opacity), which torch.onnx (PyTorch 2.13) does not export.
        passed = torch.exp(absorbed - torch.cumsum(absorbed, 1))
        weights = passed * (1 - torch.exp(-absorbed))
        return (weights.unsqueeze(-1) * torch.sigmoid(color)).sum(1)


def _rays(rng: np.random.Generator, batch: int) -> Batch:
    return rng.uniform(-1, 1, (batch, Nerf.SAMPLES, 3)).astype(np.float32), rng.random((batch, 3), np.float32)


class _KanLayer(nn.Module):
    """B-splines of every input, as in efficient-kan, beside a dense layer of SiLU."""

    def __init__(self, source: int, target: int, cells: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order = order
        knots = torch.arange(-order, cells + order + 1) * 2 / cells - 1
        self.register_buffer("grid", knots.expand(source, -1).contiguous())
        self.base = nn.Parameter(torch.randn(target, source) / math.sqrt(source))
        self.spline = nn.Parameter(torch.randn(target, source, cells + order) * 0.1)
        self.scale = nn.Parameter(torch.ones(target, source))

    def _bases(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the B-splines by de Boor's recursion, [batch, source, cells + order]."""
        x, grid = x.unsqueeze(-1), self.grid
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            rising = (x - grid[:, : -k - 1]) / (grid[:, k:-1] - grid[:, : -k - 1])
            falling = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k])
            bases = rising * bases[..., :-1] + falling * bases[..., 1:]
        return bases

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spline = (self.spline * self.scale.unsqueeze(-1)).flatten(1)
        bases = self._bases(x).flatten(1)
        return functional.linear(functional.silu(x), self.base) + functional.linear(bases, spline)


def kan() -> nn.Module:
    """Kolmogorov-Arnold net (arXiv:2404.19756) of three layers."""
    return nn.Sequential(_KanLayer(64, 64), _KanLayer(64, 64), _KanLayer(64, CLASSES))


class Ppo(nn.Module):
    """Actor and critic, and the loss of proximal policy optimization (arXiv:1707.06347) of each step.

    A row of the input holds an observation, the action, its old log-probability, its advantage and its return.
    """

    OBSERVED, ACTIONS = 24, 6

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(self.OBSERVED, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)
            )
            for out in (self.ACTIONS, 1)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        observed, action, before, advantage, returned = x.split([self.OBSERVED, 1, 1, 1, 1], 1)
        log_probabilities = functional.log_softmax(self.actor(observed), 1)
        ratio = torch.exp(log_probabilities.gather(1, action.long()) - before)
        gained = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(1, keepdim=True)
        return 0.5 * (self.critic(observed) - returned).square() - gained - 0.01 * entropy


def _experience(rng: np.random.Generator, batch: int) -> Batch:
    columns = [
        normal(rng, batch, Ppo.OBSERVED),
        rng.integers(0, Ppo.ACTIONS, (batch, 1)),
        normal(rng, batch, 1) * 0.2 - math.log(Ppo.ACTIONS),
        normal(rng, batch, 2),
    ]
    return np.concatenate(columns, 1).astype(np.float32), np.zeros((batch, 1), np.float32)


class TableAutoencoder(nn.Module):
    """Denoising autoencoder of rows with 24 numbers and 6 categories, which it codes by 16 numbers.

    A row of the input holds numbers, their noise and categories. The output is numbers and probabilities of categories.
    """

    NUMBERS, CATEGORIES, VALUES, CODE = 24, 6, 12, 16

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(self.VALUES, width) for _ in range(self.CATEGORIES))
        inputs = self.NUMBERS + self.CATEGORIES * width
        self.encoder = nn.Sequential(*self._dense(inputs, 128, 64), nn.Linear(64, self.CODE))
        self.decoder = nn.Sequential(*self._dense(self.CODE, 64, 128))
        self.numbers = nn.Linear(128, self.NUMBERS)
        self.categories = nn.ModuleList(nn.Linear(128, self.VALUES) for _ in range(self.CATEGORIES))

    def _dense(self, *widths: int) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for source, target in pairwise(widths):
            layers += [nn.Linear(source, target), nn.BatchNorm1d(target), nn.LeakyReLU(0.1)]
        return layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, noise, categories = x.split([self.NUMBERS, self.NUMBERS, self.CATEGORIES], 1)
        rows = [table(column.long()) for table, column in zip(self.tables, categories.unbind(1), strict=True)]
        hidden = self.decoder(self.encoder(torch.cat([numbers + noise, *rows], 1)))
        return torch.cat([self.numbers(hidden), *(f(hidden).softmax(1) for f in self.categories)], 1)


def _rows(rng: np.random.Generator, batch: int) -> Batch:
    numbers, noise = normal(rng, 2, batch, TableAutoencoder.NUMBERS)
    categories = rng.integers(0, TableAutoencoder.VALUES, (batch, TableAutoencoder.CATEGORIES))
    one_hot = np.eye(TableAutoencoder.VALUES)[categories].reshape(batch, -1)
    inputs = np.concatenate([numbers, 0.1 * noise, categories], 1)
    return inputs.astype(np.float32), np.concatenate([numbers, one_hot], 1).astype(np.float32)


NETS = {
    "swin": Net("Swin transformer, 3 stages of 2 blocks, 3x64x64", Swin, normals(3, 64, 64), (16,)),
    "shufflenet": Net("ShuffleNetV2-like, 3x64x64", shufflenet, normals(3, 64, 64), (16,), images=True),
    "deeplab": Net("DeepLab-like, a class for each of 64x64 pixels", DeepLab, _pixels, (8,), images=True),
    "gat": Net(
        "graph attention, 2,708 nodes, 10,556 edges", Gat,
        lambda rng, batch: (normal(rng, batch, Gat.WORDS), labels(rng, batch, Gat.TOPICS)), (Gat.NODES,),
    ),
    "pointnet": Net("PointNet, clouds of 512 points", PointNet, normals(3, 512), (8,)),
    "nerf": Net("NeRF, 6 layers of 128, 32 samples along each ray", Nerf, _rays, (128,), loss="mse"),
    "kan": Net("Kolmogorov-Arnold net, 3 layers of B-splines", kan, normals(64), (256,)),
    "ppo": Net("PPO update of an actor and a critic of 64", Ppo, _experience, (256,), loss="mean"),
    "autoencoder": Net(
        "denoising autoencoder of a table, 24 numbers and 6 categories", TableAutoencoder, _rows, (256,), loss="mse"
    ),
}  # fmt: skip
