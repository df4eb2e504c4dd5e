"""Layers of the networks of `torch_nets.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]


class Fn(nn.Module):
    """Layers, and a function that uses them."""

    def __init__(self, forward: Callable[..., torch.Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._forward = forward

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return self._forward(self, *inputs)


def images(channels: int = 3, size: int = 12) -> Tensors:
    return (torch.randn(2, channels, size, size),)


def rows(width: int = 8) -> Tensors:
    return (torch.randn(4, width),)


def sequences(length: int = 6, width: int = 8) -> Tensors:
    return (torch.randn(2, length, width),)


def tokens(length: int = 7, words: int = 30) -> Tensors:
    return (torch.randint(0, words, (2, length)),)


def p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.5)


def recurrent(kind: type[nn.RNNBase], **settings: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = kind(8, 6, batch_first=True, **settings)  # type: ignore[arg-type]
        width = 12 if settings.get("bidirectional") else 6
        return Fn(lambda m, x: m.head(m.rnn(x)[0]), rnn=layer, head=nn.Linear(width, 3))

    return make


def transformer(norm_first: bool = False, activation: str = "relu") -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, norm_first=norm_first, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Fn(
        lambda m, t: m.head(m.encoder(m.embedding(t))),
        embedding=nn.Embedding(30, 8),
        encoder=encoder,
        head=nn.Linear(8, 5),
    )


def causal() -> nn.Module:
    def forward(m: nn.Module, t: torch.Tensor) -> torch.Tensor:
        x = m.words(t) + m.places.weight[: t.shape[1]]
        q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
        x = x + m.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return functional.linear(x, m.words.weight)

    return Fn(
        forward, words=nn.Embedding(30, 8), places=nn.Embedding(16, 8), qkv=nn.Linear(8, 24), out=nn.Linear(8, 8),
        norm=nn.LayerNorm(8),
    )  # fmt: skip


class Residual(nn.Module):
    """A block with BatchNorm and a shortcut."""

    def __init__(self, source: int, target: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Sequential(
            nn.Conv2d(source, target, 3, stride, 1, bias=False), nn.BatchNorm2d(target), nn.ReLU(),
            nn.Conv2d(target, target, 3, 1, 1, bias=False), nn.BatchNorm2d(target),
        )  # fmt: skip
        self.b = nn.Sequential(nn.Conv2d(source, target, 1, stride, bias=False), nn.BatchNorm2d(target))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float [N, source, H, W]."""
        return torch.relu(self.a(x) + self.b(x))


class SqueezeExcite(nn.Module):
    """Channels weighed by what they hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float [N, width, H, W]."""
        return x * torch.sigmoid(self.up(functional.silu(self.down(x.mean((2, 3), keepdim=True)))))


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)]


def unet() -> nn.Module:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        a = functional.relu(m.a(x))
        b = functional.relu(m.b(functional.max_pool2d(a, 2)))
        return m.c(torch.cat([a, functional.interpolate(b, scale_factor=2, mode="bilinear")], 1))

    return Fn(
        forward, a=nn.Conv2d(3, 4, 3, padding=1), b=nn.Conv2d(4, 6, 3, padding=1), c=nn.Conv2d(10, 2, 1)
    )


def dense(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def resized(**settings: object) -> Callable[[], nn.Module]:
    return lambda: Fn(
        lambda m, x: m.b(functional.interpolate(m.a(x), **settings)),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(4, 2, 3),
    )


def spectrum(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    filtered = m.filter(x.unsqueeze(1)).squeeze(1)
    parts = torch.stft(filtered, 16, 8, window=m.window, return_complex=False, center=False)
    return m.head(torch.log(parts.pow(2).sum(-1) + 1e-3).transpose(1, 2))


def patches(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    t = m.cut(x).flatten(2).transpose(1, 2)
    t = torch.cat([m.first.expand(t.shape[0], -1, -1), t], 1) + m.places
    t = t + m.attention(t, t, t, need_weights=False)[0]
    return m.head(m.norm(t)[:, 0])


def split(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a, b = m.a(x).chunk(2, -1)
    c, d, e = m.b(a * torch.sigmoid(b)).split([2, 3, 1], -1)
    return torch.cat([c.sum(-1, keepdim=True) * d, e], -1) + torch.stack(x.unbind(1)[:4], -1)


def decoder_only(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return m.head(m.decoder(m.words(y), m.lift(x)))


def experts(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weights, which = m.gate(x).softmax(-1).topk(2)
    all_of_them = torch.einsum("bi,eio->beo", x, m.experts)
    return (
        all_of_them.gather(1, which.unsqueeze(-1).expand(-1, -1, all_of_them.shape[-1]))
        * weights.unsqueeze(-1)
    ).sum(1)


def graph(m: nn.Module, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    messages = functional.relu(m.a(x))[edges[0]]
    summed = torch.zeros(x.shape[0], messages.shape[1]).index_add(0, edges[1], messages)
    return m.b(torch.cat([x, summed], -1))


def vae(m: nn.Module, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    mean, log = m.a(x).chunk(2, -1)
    return m.b(mean + noise * torch.exp(0.5 * log))


def warped(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    theta = m.where(x.mean((2, 3))).view(-1, 2, 3)
    return m.b(
        functional.grid_sample(
            x, functional.affine_grid(theta, x.shape, align_corners=False), align_corners=False
        )
    )


def rotary(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = m.q(x)
    a, b = q[..., ::2], q[..., 1::2]
    angle = torch.arange(x.shape[1]).unsqueeze(-1) / torch.pow(100.0, torch.arange(4) / 4)
    turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(
        -2
    )
    return (
        torch.softmax(turned @ m.k(x).transpose(1, 2) / 8**0.5, -1)
        @ x
        * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6)
    )


def state_space(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(m.gate(x))
    return m.out(torch.cumsum(gate * m.inner(x), 1) * functional.softplus(m.scale))
