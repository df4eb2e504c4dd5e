"""Thirty chains of elementwise ops in PyTorch: activations, losses, norms, encodings, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["CHAINS", "Chain"]

_ROOT = math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class Chain:
    """A function and its inputs.

    Attributes:
        function: takes float32 tensors, returns one.
        inputs: of each input the axes that it has, and the kind of its numbers: "" normal, "+" positive, "u" uniform
            in [0, 1), "i" 0, 1, 2, ... E.g. "rc", "c+", "" for a scalar.
        axes: the axes of the result, or of the values before the reduction: "rc", "nchw" or "rfk".
    """

    function: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]
    axes: str

    def sizes(self, elements: int) -> dict[str, int]:
        """Returns the size of each axis, e.g. {"r": 200, "c": 500}; their product is `elements`."""
        inner = {"rc": {"c": 200 if elements < 100_000 else 500}, "rfk": {"f": 10, "k": 10}}
        image = {"c": 10, "h": 10, "w": 10} if elements < 10_000 else {"c": 25, "h": 20, "w": 20}
        found = inner.get(self.axes, image)
        return {self.axes[0]: elements // math.prod(found.values()), **found}

    def arrays(self, elements: int) -> list[np.ndarray]:
        """Returns the inputs."""
        rng, sizes = np.random.default_rng(0), self.sizes(elements)
        made = []
        for text in self.inputs:
            kind = text[-1] if text[-1:] in ("+", "u", "i") else ""
            axes = text.removesuffix(kind)
            first = min((self.axes.index(axis) for axis in axes), default=len(self.axes))
            shape = [sizes[axis] if axis in axes else 1 for axis in self.axes[first:]]
            if kind == "i":
                array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
            elif kind == "u":
                array = rng.random(shape, np.float32)
            else:
                array = rng.standard_normal(shape, np.float32)
            made.append(np.abs(array) + np.float32(0.1) if kind == "+" else array)
        return made


CHAINS: dict[str, Chain] = {}


def _chain(axes: str, *inputs: str) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    def add(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        CHAINS[function.__name__] = Chain(function, inputs, axes)
        return function

    return add


@_chain("rc", "rc", "c", "c")
def scale_shift(x, scale, shift):
    return x * scale + shift


@_chain("rc", "rc")
def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@_chain("rc", "rc", "c")
def bias_gelu_tanh(x, bias):
    h = x + bias
    return 0.5 * h * (1 + torch.tanh(_ROOT * (h + 0.044715 * h * h * h)))


@_chain("rc", "rc", "rcu")
def dropout(x, drawn):
    return torch.where(drawn > 0.1, x / 0.9, 0.0)


@_chain("rc", "rc")
def softplus(x):
    return torch.where(x > 20, x, torch.log(1 + torch.exp(x)))


@_chain("rc", "rc")
def mish(x):
    return x * torch.tanh(torch.nn.functional.softplus(x))


@_chain("rc", "rc", "rc")
def swiglu(gate, x):
    return gate * torch.sigmoid(gate) * x


@_chain("rc", "rc", "c", "rc", "c")
def quick_gelu_gate(x, bias, y, other):
    h = x + bias
    return h * torch.sigmoid(1.702 * h) * (y + other)


@_chain("rc", "rc")
def selu(x):
    return 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * (torch.exp(x) - 1))


@_chain("rc", "rc", "rc")
def huber(x, target):
    e = torch.abs(x - target)
    return torch.where(e < 1, 0.5 * e * e, e - 0.5).mean(-1)


@_chain("rc", "rc", "rcu")
def focal(x, drawn):
    target = (drawn > 0.5).float()
    p = torch.sigmoid(x)
    entropy = torch.relu(x) - x * target + torch.log(1 + torch.exp(-torch.abs(x)))
    right = p * target + (1 - p) * (1 - target)
    weight = 0.25 * target + 0.75 * (1 - target)
    return (weight * (1 - right) ** 2 * entropy).sum(-1)


@_chain("rc", "rc", "rc")
def log_cosh(x, target):
    e = x - target
    return (e + torch.nn.functional.softplus(-2 * e) - math.log(2)).mean(-1)


@_chain("rc", "rc", "rcu", "c+")
def cross_entropy_weighted(x, target, weight):
    left = torch.clamp(-x, min=0)
    many = 1 + (weight - 1) * target
    return ((1 - target) * x + many * (torch.log(torch.exp(-left) + torch.exp(-x - left)) + left)).sum(0)


@_chain("rc", "rc", "rc", "rc+")
def gaussian_nll(mean, target, variance):
    variance = torch.clamp(variance, min=1e-6)
    return 0.5 * (torch.log(variance) + (mean - target) ** 2 / variance)


@_chain("rc", "rc", "rc")
def kl_of_vae(mean, logarithm):
    return -0.5 * (1 + logarithm - mean**2 - torch.exp(logarithm)).sum(-1)


@_chain("rc", "rc", "r", "r+", "c", "c")
def normalize(x, mean, variance, scale, bias):
    return (x - mean) * torch.rsqrt(variance + 1e-5) * scale + bias


@_chain("nchw", "nchw", "c", "c+", "c", "c")
def batch_norm_relu(x, mean, variance, scale, bias):
    return torch.relu((x - mean) / torch.sqrt(variance + 1e-5) * scale + bias)


@_chain("rc", "rc", "rc", "c", "r", "r", "r+")
def layer_norm_gradient(ct, normal, scale, one, other, deviation):
    return (ct * scale - one - normal * other) * deviation


@_chain("rc", "rc", "rc", "r", "r+")
def layer_norm_scale_gradient(ct, x, mean, deviation):
    return (ct * (x - mean) * deviation).sum(0)


@_chain("rc", "rc", "rc")
def gelu_gradient(ct, x):
    probability = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return ct * (probability + x * density)


@_chain("rc", "rc", "rc")
def silu_gradient(ct, x):
    s = torch.sigmoid(x)
    return ct * (s * (1 + x * (1 - s)))


@_chain("rc", "rc", "rc", "c")
def gelu_tanh_gradient(ct, x, bias):
    h = x + bias
    t = torch.tanh(_ROOT * (h + 0.044715 * h * h * h))
    return ct * (0.5 * (1 + t) + 0.5 * h * (1 - t * t) * _ROOT * (1 + 3 * 0.044715 * h * h))


@_chain("rfk", "rf", "fk", "f+")
def b_spline(x, knots, width):
    t = torch.abs((x - knots) / width)
    near = 2 / 3 - t * t + 0.5 * t * t * t
    far = (2 - t) ** 3 / 6
    return torch.where(t < 1, near, torch.where(t < 2, far, 0.0))


@_chain("rfk", "rf", "k", "fk")
def radial_basis(x, centers, weight):
    return (torch.exp(-(((x - centers) / 0.4) ** 2)) * weight).sum(-1)


@_chain("rc", "rc", "ri", "ci")
def positional_encoding(x, position, place):
    half = torch.floor(place / 2)
    angle = position * torch.exp(half * (-2 * math.log(10000.0) / 500))
    return x + torch.where(place - 2 * half > 0.5, torch.cos(angle), torch.sin(angle))


@_chain("nchw", "nchw", "nchw", "hw", "hw")
def rotary(x, turned, cosine, sine):
    return x * cosine + turned * sine


@_chain("rc", "rc", "ri", "ci", "")
def masked_scores(x, row, column, slope):
    biased = x * 0.125 - torch.abs(slope) * (row - column)
    return torch.where(column <= row, biased, -1e9).amax(-1)


@_chain("rc", "rcu")
def polynomial(x):
    y = torch.full_like(x, 1 / 479001600)
    for n in range(11, -1, -1):
        y = y * x + 1 / math.factorial(n)
    return y


@_chain("rc", "rci")
def schedule(step):
    whole, warm = 1_000_000.0, 1_000.0
    part = torch.clamp((step - warm) / (whole - warm), 0, 1)
    return torch.where(step < warm, step / warm, 0.05 + 0.475 * (1 + torch.cos(math.pi * part)))


@_chain("rc", "rc", "rc", "c")
def quadratic_map(x, y, shift):
    for _ in range(8):
        x, y = 0.5 * (x * x - y * y) + shift, torch.clamp(x * y, -2, 2)
    return torch.clamp(x, -4, 4) + y
