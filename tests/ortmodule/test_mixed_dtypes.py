"""Arguments of several dtypes: ORTModule computes what eager PyTorch computes, and refuses the rest in its words."""

from __future__ import annotations

import functools
import logging
import os
import random
import resource
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.capture.autograd._refused_calls import RefusedByPyTorch, refuse_call
from ortmodule.eager import strict
from ortmodule.test_numbers_given import UNINITIALISED

DRAWN = int(os.environ.get("ONNXTRAIN_FUZZ_DTYPES", "60"))
SEED = int(os.environ.get("ONNXTRAIN_FUZZ_SEED", "0"))


class Applied(nn.Module):
    """Applies a function to its input and a parameter of another dtype."""

    def __init__(self, function: Callable[..., Any], weight: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x.clone(), self.weight)


INDEX = torch.tensor([0, 2])
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x, w, w[0, 0].float()),
    "matmul": lambda x, w: x @ w,
    "mv": lambda x, w: x.mv(w[0]),
    "dot": lambda x, w: x[0].dot(w[0]),
    "bmm": lambda x, w: x[None].bmm(w[None]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "conv": lambda x, w: F.conv1d(x[None], w[:, :, None]),
    "index_add": lambda x, w: x.index_add(0, INDEX, w[:2]),
    "index_copy": lambda x, w: x.index_copy(0, INDEX, w[:2]),
    "index_put": lambda x, w: x.index_put((INDEX,), w[:2]),
    "scatter": lambda x, w: x.scatter(0, INDEX[:, None], w[:2]),
    "scatter_add": lambda x, w: x.scatter_add(0, INDEX[:, None], w[:2]),
    "masked_scatter": lambda x, w: x.masked_scatter(x > 0, w),
    "lerp": lambda x, w: x.lerp(w, 0.5),
    "prelu": lambda x, w: F.prelu(x, w[0, :1]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "solve": lambda x, w: torch.linalg.solve(x, w),
}
"""By name: what eager PyTorch refuses for x float32 [3, 3] and w of another floating-point dtype."""

COMPUTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, w: x + w,
    "where": lambda x, w: torch.where(x > 0, x, w),
    "cat": lambda x, w: torch.cat([x, w]),
    "stack": lambda x, w: torch.stack([x, w]),
    "pow": lambda x, w: (x.abs() + 1) ** w,
    "cast": lambda x, w: x @ w.to(x.dtype),
    "mse": lambda x, w: F.mse_loss(x, w.float()),
    "written": lambda x, w: x.copy_(w),
    "assigned": lambda x, w: torch.zeros_like(x).masked_fill(x > 0, w[0, 0]),
}


def _outcome(model: nn.Module, x: torch.Tensor) -> tuple[str, list[Any]]:
    """Returns the error's message, or what a step gives."""
    model.zero_grad()
    try:
        output = model(x)
        output.sum().backward()
    except Exception as error:
        return str(error), []
    return "", [output.detach(), *(parameter.grad for parameter in model.parameters())]


def _models(function: Callable[..., Any], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    weight = torch.linspace(-1, 1, 9).reshape(3, 3).to(dtype)
    ours = strict(Applied(function, weight))
    return Applied(function, weight), ours


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_eager_pytorch(name: str, dtype: torch.dtype) -> None:
    plain, ours = _models(REFUSED[name], dtype)
    x = torch.eye(3) + 1
    message, _ = _outcome(plain, x)
    assert message
    assert _outcome(ours, x)[0] == message
    assert _outcome(ours, x)[0] == message  # in the second call, too


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_as_by_eager_pytorch(name: str, dtype: torch.dtype) -> None:
    plain, ours = _models(COMPUTED[name], dtype)
    x = torch.eye(3) + 1
    message, expected = _outcome(plain, x)
    assert not message
    found_message, found = _outcome(ours, x)
    assert not found_message
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def _node(function: Callable[..., Any], *arguments: tuple[tuple[int, ...], torch.dtype]) -> fx.Node:
    """Returns a node of a Dynamo graph that calls a function with tensors of these shapes, which have no memory."""
    graph = fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(shape, dtype=dtype) for shape, dtype in arguments]
        sources = [graph.placeholder(f"x{index}") for index in range(len(values))]
        for source, value in zip(sources, values, strict=True):
            source.meta["example_value"] = value.requires_grad_(value.is_floating_point())
        node = graph.call_function(function, tuple(sources))
        node.meta["example_value"] = function(*values)
    return node


def test_tensors_that_no_memory_has_room_for() -> None:
    """Neither the product, of a terabyte, nor the logarithms of the scores, of half of one, are computed to ask."""
    rows, columns, words = 1 << 20, 1 << 18, 1 << 17
    product = _node(torch.matmul, ((rows, 64), torch.float32), ((64, columns), torch.float64))
    with pytest.raises(RefusedByPyTorch, match="same dtype"):
        refuse_call(product)
    loss = _node(F.cross_entropy, ((rows, words), torch.float32), ((rows,), torch.int64))
    table = _node(F.embedding, ((rows,), torch.int64), ((words, rows), torch.float32))
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse_call(loss)
    refuse_call(table)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started < 64 << 10  # KiB


def test_whole_numbers_are_refused_by_a_layer() -> None:
    layer, x = nn.Linear(3, 2, bias=False), torch.ones(2, 3, dtype=torch.int64)
    message, _ = _outcome(layer, x)
    assert "same dtype" in message
    assert _outcome(ORTModule(layer), x)[0] == message


def test_autocast_is_asked_for_nothing() -> None:
    """Under autocast the same product has one dtype; the layer without it is refused all the same."""
    layer = nn.Linear(3, 2, bias=False)
    ours, x = ORTModule(layer), torch.eye(3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(ours(x), layer(x))
    with pytest.raises(RuntimeError, match="same dtype"):
        ours(x)


def test_module_catches_the_refusal() -> None:
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        try:
            return x @ weight
        except RuntimeError:
            return x @ weight.float() + 1

    plain = Applied(product, torch.eye(3, dtype=torch.float64))
    x = torch.ones(3, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ORTModule: ")
        torch.testing.assert_close(ORTModule(Applied(product, plain.weight.detach()))(x), plain(x))


def test_compiled_function_refuses_too() -> None:
    compiled = torch.compile(lambda x, w: x @ w, backend="onnxtrain")
    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(torch.ones(3, 3), torch.ones(3, 3).double())


# Operators of PyTorch's own samples, one argument of which gets another dtype.

BEYOND = {
    "addcdiv": "its derivative of a whole number is refused, and only where eager PyTorch writes it into one",
    "masked.std": "its derivative subtracts truth values, in a function of its own that a capture takes apart",
    "nn.functional.ctc_loss": "the words differ: lengths that are no whole numbers, by the first check that finds them",
    "native_layer_norm": "the statistics of no elements are float32 in eager PyTorch, bfloat16 otherwise",
    "slice_scatter": "None, and not zero, is the gradient of what is written over as a whole",
    "masked.amax": "the gradient of an element that is NaN is zero under ORTModule",
    "masked.amin": "as masked.amax",
    "amax": "as masked.amax",
    "amin": "as masked.amax",
}
"""Operators that are not drawn, and what differs."""


@functools.cache
def _samples() -> list[Any]:
    """Returns operators whose arguments are several dense tensors, one of them at least float."""
    from torch.testing._internal.common_methods_invocations import op_db

    left_out = {*UNINITIALISED, *BEYOND}
    return [op for op in op_db if torch.float32 in op.dtypes and op.name not in left_out]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_mapped(part, function) for part in value])
    if isinstance(value, dict):
        return {key: _mapped(part, function) for key, part in value.items()}
    return function(value)


def _dense(values: Any) -> list[torch.Tensor]:
    return [v for v in _leaves(values) if isinstance(v, torch.Tensor) and v.layout == torch.strided]


class Called(nn.Module):
    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.op, self.args, self.kwargs = op, args, kwargs

    def forward(self) -> Any:
        return self.op(*self.args, **self.kwargs)


def _result(
    sample: Any, op: Any, place: int, dtype: torch.dtype, wrap: Callable[[Any], Any]
) -> tuple[str, list[Any]]:
    """Calls an operator with the dense tensor number `place` in another dtype; returns the error, or what it gives."""
    places = iter(range(1 << 20))

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        tensor = value.detach().clone()
        tensor = tensor.to(dtype) if next(places) == place else tensor
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    args, kwargs = _mapped([sample.input, *sample.args], given), _mapped(sample.kwargs, given)
    torch.manual_seed(0)
    try:
        outputs = _dense(wrap(Called(op.op, args, kwargs))())
        scores = [(part.abs() if part.is_complex() else part).sum() for part in outputs if part.requires_grad]
        if scores:
            sum(scores).backward()
    except Exception as error:
        return str(error), []
    return "", [*(part.detach() for part in outputs), *(tensor.grad for tensor in _dense([args, kwargs]))]


def _alike(got: Any, want: Any) -> bool:
    if got is None or want is None:
        return got is want
    wide = [tensor.to(torch.complex128) for tensor in (got, want)]
    # Of bfloat16 the last digits of a product of many numbers are rounding errors.
    return (got.dtype, got.shape) == (want.dtype, want.shape) and torch.allclose(
        *wide, 2e-2, 2e-2, equal_nan=True
    )


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("number", range(DRAWN))
def test_operator_of_mixed_dtypes(number: int) -> None:
    generator = random.Random(f"{SEED} {number}")
    candidates: list[Any] = []
    while not candidates:
        op = generator.choice(_samples())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:30]
            except Exception:  # operators of other devices
                continue
        arguments = [_dense([sample.input, sample.args, sample.kwargs]) for sample in samples]
        candidates = [(s, tensors) for s, tensors in zip(samples, arguments, strict=True) if len(tensors) > 1]
    sample, tensors = generator.choice(candidates)
    place = generator.randrange(len(tensors))
    dtype = generator.choice([torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool])
    torch._dynamo.reset()
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            message, expected = _result(sample, op, place, dtype, lambda module: module)
            found_message, found = _result(sample, op, place, dtype, ORTModule)
    finally:
        logger.setLevel(level)
    what = f"{op.name} {op.variant_test_name}, tensor {place} of {len(tensors)} as {dtype}"
    assert found_message == message, what
    assert all(map(_alike, found, expected)), f"{what}: {found} instead of {expected}"
