"""Seventeen nets that no kernel or pass was tuned for: they say what a user's own net may expect."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from steps.nets._net import CLASSES, Batch, Net, labels, normal, normals, words

__all__ = ["NETS"]


def _convolution(
    source: int, target: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    """A convolution without bias, BatchNorm and an activation."""
    layers = [
        nn.Conv2d(source, target, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(target),
    ]
    return nn.Sequential(*layers, *([] if act is None else [act]))


def _classifier(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


class _Bottleneck(nn.Module):
    def __init__(self, source: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(source, width, act=nn.ReLU()),
            _convolution(width, width, 3, stride, act=nn.ReLU()),
            _convolution(width, 4 * width),
        )
        same = source == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(source, 4 * width, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    source = 64
    for index, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            layers.append(_Bottleneck(source, 64 << index, 2 if index and not block else 1))
            source = 256 << index
    return nn.Sequential(*layers, *_classifier(source))


class _SqueezeExcite(nn.Module):
    def __init__(self, width: int, hidden: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, hidden, 1), act, nn.Conv2d(hidden, width, 1), gate
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x)


class _MBConv(nn.Module):
    """Expand, depthwise, squeeze and excite, project."""

    def __init__(
        self,
        source: int,
        target: int,
        kernel: int,
        stride: int,
        expand: int,
        act: type[nn.Module],
        gate: nn.Module,
    ) -> None:
        super().__init__()
        hidden = source * expand
        self.layers = nn.Sequential(
            _convolution(source, hidden, act=act()) if expand > 1 else nn.Identity(),
            _convolution(hidden, hidden, kernel, stride, hidden, act()),
            _SqueezeExcite(hidden, max(8, source // 4), act(), gate),
            _convolution(hidden, target),
        )
        self.residual = stride == 1 and source == target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


# target, kernel, stride, expansion, repetitions
EFFICIENT = (
    (16, 3, 1, 1, 1), (24, 3, 2, 6, 2), (40, 5, 2, 6, 2), (80, 3, 2, 6, 3), (112, 5, 1, 6, 3), (192, 5, 2, 6, 4),
)  # fmt: skip
MOBILE = ((16, 3, 2, 1, 1), (24, 3, 2, 4, 2), (40, 5, 2, 4, 3), (48, 5, 1, 6, 2), (96, 5, 2, 6, 3))


def _inverted(
    plan: tuple[tuple[int, int, int, int, int], ...], act: type[nn.Module], gate: nn.Module, top: int
) -> list[nn.Module]:
    first = plan[0][0] * 2
    layers: list[nn.Module] = [_convolution(3, first, 3, 2, act=act())]
    source = first
    for target, kernel, stride, expand, count in plan:
        for index in range(count):
            layers.append(_MBConv(source, target, kernel, 1 if index else stride, expand, act, gate))
            source = target
    return [*layers, _convolution(source, top, act=act())]


def efficientnet() -> nn.Module:
    return nn.Sequential(*_inverted(EFFICIENT, nn.SiLU, nn.Sigmoid(), 1280), *_classifier(1280))


class FrozenMobileNet(nn.Module):
    """MobileNetV3-like: the convolutions are frozen, in evaluation mode; two dense layers are trained."""

    def __init__(self) -> None:
        super().__init__()
        layers = _inverted(MOBILE, nn.Hardswish, nn.Hardsigmoid(), 576)
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, CLASSES))

    def train(self, mode: bool = True) -> FrozenMobileNet:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class _ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.scale * self.dense(self.depthwise(x).permute(0, 2, 3, 1))
        return x + mixed.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    widths = (64, 128, 256, 512)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), _ChannelNorm(widths[0])]
    for index, count in enumerate((2, 2, 6, 2)):
        if index:
            layers += [_ChannelNorm(widths[index - 1]), nn.Conv2d(widths[index - 1], widths[index], 2, 2)]
        layers += [_ConvNeXtBlock(widths[index]) for _ in range(count)]
    return nn.Sequential(*layers, *_classifier(widths[-1]))


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class _LlamaLayer(nn.Module):
    """Grouped-query attention with rotary positions, then a gated dense net."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = _RMSNorm(width), _RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm1(x)
        q = self.q(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = (
            f(normed).view(batch, length, self.groups, self.size).transpose(1, 2) for f in (self.k, self.v)
        )
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (self._rotate(k, cos, sin), v))
        mixed = functional.scaled_dot_product_attention(self._rotate(q, cos, sin), k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """A decoder as Llama's, 4 layers of 320, and the loss over each position."""

    WORDS, LENGTH = 4000, 128

    def __init__(self, width: int = 320, heads: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.WORDS, width)
        self.layers = nn.ModuleList(_LlamaLayer(width, heads, heads // 2, 864) for _ in range(4))
        self.norm, self.head = _RMSNorm(width), nn.Linear(width, self.WORDS, bias=False)
        size = width // heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(self.LENGTH), torch.cat([rates, rates]))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.cos, self.sin)
        return self.head(self.norm(hidden)).flatten(0, 1)


class Bert(nn.Module):
    """PyTorch's own encoder layers, post-norm, with dropout."""

    WORDS, LENGTH = 5000, 128

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(self.WORDS, width), nn.Embedding(self.LENGTH, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.embedding(tokens) + self.position.weight))
        return self.head(self.dropout(torch.tanh(self.pooler(self.layers(hidden)[:, 0]))))


class ViT(nn.Module):
    """Patches of 8 x 8 and a class token, pre-norm layers without dropout."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.position
        return self.head(self.norm(self.layers(hidden)[:, 0]))


class _MixerBlock(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(count, 2 * count), nn.GELU(), nn.Linear(2 * count, count))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-mixer: patches of 8 x 8, six blocks."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(_MixerBlock(64, width) for _ in range(6)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(hidden).mean(1))


class Recurrent(nn.Module):
    """Recurrent layers over the sequence, classified from the mean of their states."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(layers.hidden_size * (2 if layers.bidirectional else 1), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0].mean(1))


class Dlrm(nn.Module):
    """Deep learning recommendation model: 13 counts and 26 categories, products of all pairs."""

    ROWS, WIDTH = 5000, 16

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(self.ROWS, self.WIDTH) for _ in range(26))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, self.WIDTH), nn.ReLU())
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1))
        self.top = nn.Sequential(
            nn.Linear(27 * 26 // 2 + self.WIDTH, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(torch.log1p(x[:, :13].float()))
        rows = [table(x[:, 13 + index]) for index, table in enumerate(self.tables)]
        features = torch.stack([dense, *rows], 1)
        products = (features @ features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], 1))


def _clicks(rng: np.random.Generator, batch: int) -> Batch:
    counts = rng.integers(0, 100, (batch, 13))
    return np.concatenate([counts, rng.integers(0, Dlrm.ROWS, (batch, 26))], 1), labels(rng, batch, 2)


class _NBeatsBlock(nn.Module):
    def __init__(self, past: int, future: int, width: int, last: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for source in (past, width, width, width):
            layers += [nn.Linear(source, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        # Nothing is left to explain behind the last block.
        self.backcast = nn.Identity() if last else nn.Linear(width, past)
        self.forecast = nn.Linear(width, future)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layers(x)
        return self.backcast(hidden), self.forecast(hidden)


class NBeats(nn.Module):
    """Blocks that each explain a part of the past and forecast from it."""

    def __init__(self, past: int = 96, future: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_NBeatsBlock(past, future, 256, index == 5) for index in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forecast = torch.zeros(())
        for index, block in enumerate(self.blocks):
            explained, part = block(x)
            forecast = forecast + part
            if index + 1 < len(self.blocks):
                x = x - explained
        return forecast


class GraphNet(nn.Module):
    """Three layers of messages along the edges of a fixed graph, then one class per graph."""

    NODES, EDGES = 200, 1600

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        source, target = np.random.default_rng(1).integers(0, self.NODES, (2, self.EDGES))
        self.register_buffer("source", torch.from_numpy(source))
        self.register_buffer("target", torch.from_numpy(target))
        widths = (16, width, width, width)
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.message = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for own, message in zip(self.own, self.message, strict=True):
            sent = message(x).index_select(1, self.source)
            received = torch.zeros_like(own(x)).index_add(1, self.target, sent)
            x = functional.relu(own(x) + received / 8)
        return self.head(x.mean(1))


class _Causal(nn.Module):
    """A residual block of two causal dilated convolutions."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.past = 2 * dilation
        self.first, self.second = (nn.Conv1d(width, width, 3, dilation=dilation) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first(functional.pad(x, (self.past, 0))))
        return functional.relu(x + functional.relu(self.second(functional.pad(hidden, (self.past, 0)))))


def tcn() -> nn.Module:
    """Temporal convolutional net: dilations 1 to 32."""
    blocks = (_Causal(64, 1 << level) for level in range(6))
    return nn.Sequential(
        nn.Conv1d(8, 64, 1), *blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    )


class Vae(nn.Module):
    """Convolutional variational autoencoder.

    The last plane of the input is its noise. The output is the image, means and deviations; against the image, zeros
    and ones, the squared error is that of the image plus the Wasserstein distance of the code from a normal one.
    """

    CODE = 64

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        for source, target in pairwise(widths):
            down += [nn.Conv2d(source, target, 4, 2, 1), nn.ReLU()]
            up = [nn.ConvTranspose2d(target, source, 4, 2, 1), *([nn.ReLU()] if source > 3 else []), *up]
        self.down = nn.Sequential(*down, nn.Flatten())
        self.latent = nn.Linear(16 * widths[-1], 2 * self.CODE)
        self.into, self.up = nn.Linear(self.CODE, 16 * widths[-1]), nn.Sequential(*up)
        self.top = widths[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image, noise = x[:, :3], x[:, 3].flatten(1)[:, : self.CODE]
        mean, spread = self.latent(self.down(image)).chunk(2, 1)
        deviation = torch.exp(0.5 * spread)
        hidden = self.into(mean + deviation * noise).view(-1, self.top, 4, 4)
        return torch.cat([self.up(functional.relu(hidden)).flatten(1), mean, deviation], 1)


def _noisy_images(rng: np.random.Generator, batch: int) -> Batch:
    x = normal(rng, batch, 4, 32, 32)
    code = np.repeat(np.array([0.0, 1.0], np.float32), Vae.CODE)
    return x, np.concatenate([x[:, :3].reshape(batch, -1), np.tile(code, (batch, 1))], 1)


def cnn3d() -> nn.Module:
    """Three blocks of conv 3x3x3, BatchNorm, ReLU, max-pool over volumes."""
    layers: list[nn.Module] = []
    for source, target in ((1, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv3d(source, target, 3, padding=1),
            nn.BatchNorm3d(target),
            nn.ReLU(),
            nn.MaxPool3d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8, CLASSES))


NETS = {
    "resnet50": Net("ResNet-50, 3x64x64", resnet50, normals(3, 64, 64), (8,), images=True, rate=1e-6),
    "llama": Net("Llama-like, 4 layers of 320, 128 tokens", Llama, words(Llama.WORDS, Llama.LENGTH, True), (4,)),
    "bert": Net(
        "BERT-like with dropout, 4 layers of 256, 128 tokens", Bert, words(Bert.WORDS, Bert.LENGTH), (8, 1), draws=True
    ),
    "vit": Net("vision transformer, 6 layers of 256, 65 tokens", ViT, normals(3, 64, 64), (16,)),
    "convnext": Net("ConvNeXt-like, 3x64x64", convnext, normals(3, 64, 64), (8,), images=True),
    "efficientnet": Net("EfficientNet-like, 3x64x64", efficientnet, normals(3, 64, 64), (8,), images=True),
    "bilstm": Net(
        "bidirectional LSTM, two layers, 64 to 128 over 64 steps",
        lambda: Recurrent(nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True)), normals(64, 64), (16,),
    ),
    "mobilenetv3-frozen": Net(
        "MobileNetV3-like, frozen but for its head, 3x96x96", FrozenMobileNet, normals(3, 96, 96), (1,), images=True
    ),
    "dlrm": Net("DLRM-like, 26 tables of 5,000 rows", Dlrm, _clicks, (128,)),
    "gru200": Net(
        "GRU 32 to 64 over 200 steps", lambda: Recurrent(nn.GRU(32, 64, batch_first=True)), normals(200, 32), (16,)
    ),
    "nbeats": Net(
        "N-BEATS-like, 6 blocks of 256", NBeats,
        lambda rng, batch: (normal(rng, batch, 96), normal(rng, batch, 24)), (64,), loss="mse",
    ),
    "graph": Net("graph net, 200 nodes, 1,600 edges", GraphNet, normals(GraphNet.NODES, 16), (8,)),
    "tcn": Net("dilated TCN, 12 convolutions of 64 over 256 steps", tcn, normals(8, 256), (16,)),
    "vae": Net("convolutional VAE, 3x32x32", Vae, _noisy_images, (32,), loss="mse", images=True),
    "mixer": Net("MLP-mixer, 6 blocks of 256, 64 patches", Mixer, normals(3, 64, 64), (8,)),
    "cnn3d": Net("3-d CNN: 3 x [conv 3x3x3, BN, ReLU, max-pool], 16x16x16", cnn3d, normals(1, 16, 16, 16), (8,)),
    "mlp-tiny": Net(
        "MLP 8-32-10", lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, CLASSES)), normals(8), (1,)
    ),
}  # fmt: skip
