"""The four layers beside those of darts."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import onnxtrain.nn


def darts_layers() -> ModuleType:
    """darts' module; importing darts says on stderr which optional packages it misses."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytest.importorskip("darts.models.components.layer_norm_variants", exc_type=ImportError)
    finally:
        logging.disable(logging.NOTSET)


SIZE = 6


@dataclass(frozen=True)
class Layer:
    """One way to make a layer."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.kwargs.items())])

    def ours(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return drawn(getattr(onnxtrain.nn, self.name)(SIZE, **self.kwargs).to(dtype))

    def theirs(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return drawn(getattr(darts_layers(), self.name)(SIZE, **self.kwargs).to(dtype))


def drawn(module: nn.Module) -> nn.Module:
    """The module with parameters that are neither 0 nor 1, the same for the same names."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        values = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5
        parameter.data = values.to(parameter.dtype)
    return module


LAYERS = [
    Layer("LayerNorm"),
    Layer("LayerNorm", {"eps": 0.1, "bias": False}),
    Layer("LayerNorm", {"elementwise_affine": False}),
    Layer("LayerNormNoBias"),
    Layer("LayerNormNoBias", {"eps": 0.1}),
    Layer("RMSNorm"),
    Layer("RMSNorm", {"eps": 0.7}),
    Layer("RINorm"),
    Layer("RINorm", {"eps": 0.1}),
    Layer("RINorm", {"affine": False}),
]
SHAPES = [(3, SIZE), (3, 5, SIZE), (2, 3, 4, SIZE)]

each_layer = pytest.mark.parametrize("layer", LAYERS, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def sampled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of different sizes, one of them zero; every series has another mean."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * torch.rand(shape[:-1], generator=generator, dtype=torch.float64).unsqueeze(-1) * 2 + 0.3
    x[(0,) * (len(shape) - 1)] = 0
    return x.to(dtype)


def step(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The value, and the gradients of input and parameters for one cotangent."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    generator = torch.Generator().manual_seed(2)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def assert_same(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float | None = None
) -> None:
    """Equal up to the dtype's tolerance, in units of the largest element where that is above 1."""
    assert got.keys() == want.keys()
    for name, reference in want.items():
        assert got[name].shape == reference.shape
        assert got[name].dtype == reference.dtype
        allowed = (tolerance or TOLERANCE[reference.dtype]) * max(1.0, reference.abs().max().item())
        error = (got[name] - reference).abs().max().item()
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"
