"""Numbers that a module reads from tensors: constants for the gradient, as in eager PyTorch, wherever they go."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain.ortmodule import ORTModule


class Reading(nn.Module):
    """Computes with numbers that it reads from its input, its weight and its buffer."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.register_buffer("scale", torch.tensor([2.0, 0.5, 1.0, 3.0]))
        self.kept = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x * self.weight)


def _kept(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.kept = 0.9 * self.kept + 0.1 * h.abs().max().item()
    return h / self.kept


def _read_without_gradients(self: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = h.abs().max().item()
    return h / scale


def _filled(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.scale.fill_(h.abs().max().item())
    return h * self.scale


def _quantized(self: Any, h: torch.Tensor) -> torch.Tensor:
    scale = h.abs().max().item() / 127
    return torch.fake_quantize_per_tensor_affine(h, scale, 0, -127, 127)


def _rounded_weight(self: Any, h: torch.Tensor) -> torch.Tensor:
    scale = self.weight.abs().max().item() / 7
    return h + (self.weight / scale).round() * scale + self.weight / scale


def _chosen(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.mean().item() > 0 else h.sin()


def _rounded_and_written(self: Any, h: torch.Tensor) -> torch.Tensor:
    result = h * round(h.mean().item(), 2)
    with torch.no_grad():
        result.mul_(2)
    return result


PROGRAMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "item": lambda self, h: h * h.max().item(),
    "rounded, and written to": _rounded_and_written,
    "float": lambda self, h: h * float(h.max()),
    "of a view": lambda self, h: h * h[1:2, 2].item(),
    "detached": lambda self, h: h * h.detach().max().item(),
    "data": lambda self, h: h * h.data.max().item(),
    "left operand": lambda self, h: h.max().item() / (h.abs() + 1),
    "power": lambda self, h: (h.abs() + 0.1) ** h.abs().max().item(),
    "base": lambda self, h: h.abs().max().item() ** h,
    "arithmetic": lambda self, h: h * (3 * h.max().item() - h.min().item() ** 2 + abs(h.sum().item())),
    "minimum": lambda self, h: h * min(1.0, 1.0 / (h.norm().item() + 1e-6)),
    "maximum": lambda self, h: h * max(0.1, h.norm().item()),
    "normalised loss": lambda self, h: (loss := h.square().mean()) / loss.item(),
    "parameter": lambda self, h: h.detach() * self.weight.sum().item() + h,
    "only a parameter": lambda self, h: (
        self.scale * self.weight.sum().item() + h.detach().sum() * self.weight * 0
    ),
    "buffer": lambda self, h: h * self.scale.sum().item(),
    "tensor": lambda self, h: torch.tensor(h.max().item()) * h,
    "tensor of several": lambda self, h: torch.tensor([h.max().item(), 2.0, h.min().item(), 1.0]) * h,
    "new_tensor": lambda self, h: h.new_tensor(h.max().item()) * h,
    "as_tensor": lambda self, h: torch.as_tensor(h.max().item()) * h,
    "scalar_tensor": lambda self, h: torch.scalar_tensor(h.max().item()) * h,
    "full": lambda self, h: torch.full((4,), h.max().item()) * h,
    "full_like": lambda self, h: torch.full_like(h, h.max().item()) * h,
    "new_full": lambda self, h: h.new_full((4,), h.max().item()) * h,
    "fill_": lambda self, h: torch.empty(4).fill_(h.max().item()) * h,
    "fill_ of a buffer": _filled,
    "assigned": lambda self, h: torch.zeros(4).index_fill(0, torch.tensor([1]), h.max().item()) * h,
    "add": lambda self, h: torch.add(h, h.cos(), alpha=h.max().item()),
    "sub": lambda self, h: torch.sub(h, h.cos(), alpha=h.max().item()),
    "rsub": lambda self, h: torch.rsub(h, h.max().item(), alpha=2),
    "add_": lambda self, h: h.sin().add_(h, alpha=h.max().item()),
    "lerp": lambda self, h: torch.lerp(h, h.cos(), h.abs().max().item()),
    "addcmul": lambda self, h: torch.addcmul(h, h, h.sin(), value=h.max().item()),
    "addcdiv": lambda self, h: torch.addcdiv(h, h, h.sin() + 2, value=h.max().item()),
    "addmm": lambda self, h: torch.addmm(h @ h.T, h, h.T, beta=h.max().item(), alpha=h.min().item()),
    "baddbmm": lambda self, h: torch.baddbmm(h[None] @ h.T, h[None], h.T[None], alpha=h.min().item()),
    "clamp": lambda self, h: h.clamp(min=h.mean().item() - 0.1, max=h.mean().item() + 0.2),
    "masked_fill": lambda self, h: h.masked_fill(h > 0, h.min().item()),
    "where": lambda self, h: torch.where(h > 0, h, h.min().item()),
    "leaky_relu": lambda self, h: F.leaky_relu(h, h.abs().mean().item()),
    "threshold": lambda self, h: F.threshold(h, h.mean().item(), h.min().item()),
    "hardtanh": lambda self, h: F.hardtanh(h, -h.abs().mean().item(), h.abs().mean().item()),
    "elu": lambda self, h: F.elu(h, h.abs().mean().item()),
    "softplus": lambda self, h: F.softplus(h, h.abs().mean().item() + 0.5),
    "huber": lambda self, h: F.huber_loss(h, self.scale.expand_as(h), delta=h.abs().mean().item()),
    "smooth l1": lambda self, h: F.smooth_l1_loss(h, self.scale.expand_as(h), beta=h.abs().mean().item()),
    "layer_norm": lambda self, h: F.layer_norm(h, (4,), self.weight, eps=h.abs().mean().item()),
    "scaled attention": lambda self, h: F.scaled_dot_product_attention(
        h[None], h[None], h[None], scale=h.abs().mean().item()
    ),
    "padding": lambda self, h: F.pad(h, (1, 1), value=h.max().item()),
    "linspace": lambda self, h: torch.linspace(0, h.max().item(), 4) * h,
    "compared": lambda self, h: torch.where(h > h.mean().item(), h, -h),
    "sqrt": lambda self, h: h * h.abs().max().item() ** 0.5,
    "kept in self": _kept,
    "read under no_grad": _read_without_gradients,
    "fake quantized": _quantized,
    "rounded weight": _rounded_weight,
    "branch": _chosen,
    "tolist": lambda self, h: h * sum(h[0].tolist()),
    "int": lambda self, h: h * int(h.abs().max() * 10),
    "bool": lambda self, h: h * bool(h.sum() > 0),
    "round": lambda self, h: h * round(h.max().item(), 2),
    "returned": lambda self, h: (h.sin(), h.max().item()),
    "formatted": lambda self, h: h * len(f"{h.max().item():.3f}"),
    "index": lambda self, h: h[h[:, 0].argmax().item()],
    "index in a tuple": lambda self, h: h[:, h[0].argmax().item()],
    "two indices": lambda self, h: h[h[:, 0].argmax().item(), h[0].argmax().item()],
    "index from the end": lambda self, h: h[..., -1 - h[0].argmax().item()],
    "index behind a new axis": lambda self, h: h[None, :, h[0].argmax().item()],
    "slice": lambda self, h: h[:, : h[0].argmax().item() + 1],
    "step": lambda self, h: h[:, :: h[0].argmax().item() + 1],
    "select": lambda self, h: h.select(1, h[0].argmax().item()),
    "narrow": lambda self, h: h.narrow(1, h[0].argmax().item(), 1),
    "roll": lambda self, h: h.roll(h[0].argmax().item(), 1),
    "repeat": lambda self, h: h.repeat(h[0].argmax().item() + 1, 1),
    "range": lambda self, h: sum(h[i % 3] for i in range(h[0].argmax().item() + 1)),
    "size of arange": lambda self, h: torch.arange(h[0].argmax().item() + 1) * h.sum(),
}
"""By what is done with a number: a function of the module and its input h, float [3, 4], which has a gradient."""


def _stepped(model: nn.Module, net: nn.Module) -> list[Any]:
    """Returns the results of two steps, the gradients of input and parameters, and the buffers."""
    seen: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net.zero_grad()
        x = torch.randn(3, 4, requires_grad=True)
        result = model(x)
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, torch.Tensor):
                part.square().sum().backward()
            seen.append(part)
        seen += [
            x.grad,
            *(parameter.grad for parameter in net.parameters()),
            *map(torch.clone, net.buffers()),
        ]
    return seen


def _assert_alike(got: list[Any], expected: list[Any]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        elif other is not None:
            assert one == pytest.approx(other, rel=1e-5)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # Some programs run in PyTorch in part, but not because ONNX Runtime refuses what it is given.
        warnings.filterwarnings("ignore", "ORTModule: (?!.*ONNX Runtime failed)")
        warnings.filterwarnings(
            "ignore", "Converting a tensor with requires_grad=True to a scalar"
        )  # float(tensor)
        yield


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_number_is_a_constant(name: str) -> None:
    plain = Reading(PROGRAMS[name])
    inner = copy.deepcopy(plain)
    ours = ORTModule(inner)
    with _without_warnings():
        expected = _stepped(plain, plain)
        _assert_alike(_stepped(ours, inner), expected)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "index" not in name and name != "two indices"])
def test_number_is_a_constant_in_a_compiled_graph(name: str) -> None:
    """`torch.compile(backend="onnxtrain")` with `capture_scalar_outputs` has the number in the graph."""
    plain = Reading(PROGRAMS[name])
    inner = copy.deepcopy(plain)
    torch._dynamo.reset()
    with _without_warnings(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        expected = _stepped(plain, plain)
        _assert_alike(_stepped(torch.compile(inner, backend="onnxtrain"), inner), expected)


class Catching(nn.Module):
    """Goes on after an operator has refused its arguments."""

    def __init__(self, refused: Callable[[torch.Tensor], torch.Tensor], error: type[Exception]) -> None:
        super().__init__()
        self.refused = refused
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        try:
            return self.refused(y)
        except self.error:
            return y.sin()


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (lambda y: y[5], IndexError),
        (lambda y: y @ y, RuntimeError),
        (lambda y: y.sum(dim=7), IndexError),
        (lambda y: torch.add(y, "text"), TypeError),
    ],
    ids=["index", "product", "axis", "type"],
)
def test_module_catches_the_error_of_an_operator(
    refused: Callable[[torch.Tensor], torch.Tensor], error: type[Exception]
) -> None:
    x = torch.randn(3, 4)
    with _without_warnings():
        torch.testing.assert_close(ORTModule(Catching(refused, error))(x), Catching(refused, error)(x))


def test_error_of_an_index_is_pytorchs() -> None:
    class Beyond(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, 7]

    with pytest.raises(IndexError, match=r"index 7 is out of bounds for dimension 1 with size 4$"):
        ORTModule(Beyond())(torch.randn(3, 4))
