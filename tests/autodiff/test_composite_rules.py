"""Rules of composite ops, which stand for standard ops in forward graphs: against torch and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from autodiff.test_attention import COMPOSITES as ATTENTION
from autodiff.test_attention import QKV
from autodiff.test_square_matrices import TWINS
from fusion.rewriting import with_gradients
from onnxtrain.autodiff._registry import RULES
from onnxtrain.emitter import Emitter
from onnxtrain.functions import (
    DOMAIN,
    LAYERS,
    CompositeOp,
    cumulative_product,
    extremum,
    floored_rms_normalization,
    group_normalization,
    hardtanh,
    instance_standardization,
    inverse_rms_normalization,
    reversible_instance_normalization,
    rotary,
    safe_softmax,
    silu,
    with_slope,
    with_slopes,
)
from slopes import assert_gradient
from tolerances import NORM_RELATIVE, norm_relative_error

FACTOR, FLOOR, EPSILON = 5**-0.5, 0.8, 0.3


@dataclass(frozen=True)
class Row:
    """A composite op that hands the driver a second output, which nothing differentiates.

    Attributes:
        numbers: its scalar inputs, after x and scale.
        twin: (x, scale) -> y, on torch tensors.
    """

    composite: CompositeOp
    numbers: tuple[float, ...]
    twin: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


ROWS = [
    Row(
        floored_rms_normalization,
        (FACTOR, FLOOR),
        lambda x, g: x / (torch.norm(x, dim=-1, keepdim=True) * FACTOR).clamp(min=FLOOR) * g,
    ),
    Row(
        inverse_rms_normalization,
        (EPSILON,),
        lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * g,
    ),
]
INSTANCE_NORMS = {
    reversible_instance_normalization: lambda x, mean, stdev, g, b: (x - mean) / stdev * g + b,
    instance_standardization: lambda x, mean, stdev: (x - mean) / stdev,
}
FUNCTIONS = {
    silu: ({}, torch.nn.functional.silu),
    safe_softmax: ({"axis": 1}, lambda x: torch.softmax(x, 1)),
    hardtanh: ({}, lambda x, low, high: torch.nn.functional.hardtanh(x, low.item(), high.item())),
    group_normalization: (
        {"epsilon": 0.25, "num_groups": 2},
        lambda x, scale, bias: torch.nn.functional.group_norm(x, 2, scale, bias, 0.25),
    ),
}


def rotary_twin(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


ANGLES = [(6,), (4, 6), (1, 4, 6), (2, 1, 1, 6), (2, 3, 4, 6)]
SHAPES = [(5,), (4, 5), (2, 3, 5), (2, 2, 3, 5), (0, 5)]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.composite.name)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def test_every_composite_rule_has_a_row():
    recurrent = [layer for layer, *_ in LAYERS.values()]  # in fusion/test_recurrent.py
    composites = [
        *(row.composite for row in ROWS),
        *INSTANCE_NORMS,
        *FUNCTIONS,
        rotary,
        *ATTENTION,
        *QKV,
        *TWINS,
        *recurrent,
        with_slope,  # in ortmodule/test_special_points.py
        with_slopes,
        cumulative_product,  # in ortmodule/aten_cases/cumulative.py
        extremum,  # in ortmodule/test_extrema.py
    ]
    tested = {name for composite in composites for name in composite.function_names}
    assert {op for domain, op in RULES if domain == DOMAIN} == tested


def session(row: Row, shape, dtype, symbolic: bool) -> ort.InferenceSession:
    """Outputs y, x_grad, g_grad of inputs x, g, ct."""
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    dims = [f"d{axis}" for axis in range(len(shape) - 1)] if symbolic else list(shape[:-1])
    x, g = (
        ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(dims_))
        for name, dims_ in (("x", [*dims, 5]), ("g", [5]))
    )
    graph = ir.Graph([x, g], [], nodes=[], opset_imports={"": 21}, name="row")
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    numbers = [op.const(number, kind) for number in row.numbers]
    y, saved = op.call(row.composite, x, g, *numbers, _outputs=2)
    y.name, y.shape = "y", x.shape
    saved.shape = ir.Shape([*x.shape[:-1], 1])
    graph.outputs.append(y)
    joint = with_gradients(model, ["x", "g"])
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(joint.SerializeToString(), options, providers=["CPUExecutionProvider"])


def sampled(shape):
    """Rows on both sides of the floor; the first one is zero."""
    rng = np.random.default_rng(len(shape))
    x = rng.normal(size=shape) * rng.choice([0.3, 3.0], (*shape[:-1], 1))
    if x.ndim > 1 and x.size:
        x[(0,) * (x.ndim - 1)] = 0
    return {"x": x, "g": rng.normal(size=5), "ct": rng.normal(size=shape)}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@each_shape
@each_row
def test_vjp_matches_torch(row, shape, dtype, symbolic):
    feeds = {name: value.astype(dtype) for name, value in sampled(shape).items()}
    x, g, ct = (torch.from_numpy(value.astype(np.float64)) for value in feeds.values())
    y = row.twin(x.requires_grad_(), g.requires_grad_())
    want = [y.detach(), *torch.autograd.grad(y, [x, g], ct)]
    got = session(row, shape, dtype, symbolic).run(None, feeds)
    for value, reference in zip(got, want, strict=True):
        assert value.dtype == dtype
        assert value.shape == tuple(reference.shape)
        assert norm_relative_error(value, reference.numpy()) <= NORM_RELATIVE[np.dtype(dtype)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("composite", FUNCTIONS, ids=lambda composite: composite.name)
def test_vjp_of_functions_matches_torch(composite, dtype):
    """Of all inputs but the bounds of hardtanh, some elements lying on these."""
    attributes, twin = FUNCTIONS[composite]
    rng, kind = np.random.default_rng(0), ir.DataType.from_numpy(np.dtype(dtype))
    feed = {
        "x": (rng.integers(-9, 10, (3, 4, 5)) / 4).astype(dtype),
        "ct": rng.normal(size=(3, 4, 5)).astype(dtype),
    }
    feed |= {name: rng.normal(size=4).astype(dtype) for name in ("scale", "bias") if name in composite.inputs}
    names = [name for name in composite.inputs if name in feed]
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="row")
    for name in names:
        shape = ir.Shape(feed[name].shape if feed[name].ndim == 1 else ["batch", *feed[name].shape[1:]])
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(kind), shape=shape))
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    bounds = {"low": -1.0, "high": 1.5}
    given = dict(zip(names, graph.inputs, strict=True))
    y = op.call(
        composite, *(given.get(n) or op.const(bounds[n], kind) for n in composite.inputs), **attributes
    )
    y.name, y.shape = "y", graph.inputs[0].shape
    graph.outputs.append(y)
    joint = with_gradients(model, names)
    proto = joint.SerializeToString()
    found = ort.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, feed)
    values = {name: torch.from_numpy(value.astype(float)) for name, value in feed.items()}
    leaves = [values[name].requires_grad_() for name in names]
    bound = [
        torch.tensor(value, dtype=torch.float64) for name, value in bounds.items() if name in composite.inputs
    ]
    result = twin(*leaves, *bound)
    want = [result.detach(), *torch.autograd.grad(result, leaves, values["ct"])]
    for value, reference in zip(found, want, strict=True):
        assert value.dtype == dtype
        assert norm_relative_error(value, reference.numpy()) <= NORM_RELATIVE[np.dtype(dtype)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("angles", ANGLES, ids=str)
def test_vjp_of_rotary_matches_torch(angles, dtype):
    """Of all inputs: learned angles too."""
    rng, kind = np.random.default_rng(0), ir.DataType.from_numpy(np.dtype(dtype))
    sizes = {"x": (2, 3, 4, 6), "cos": angles, "sin": angles}
    feed = {name: rng.normal(size=size).astype(dtype) for name, size in sizes.items()}
    feed["ct"] = rng.normal(size=sizes["x"]).astype(dtype)
    inputs = [ir.Value(name=n, type=ir.TensorType(kind), shape=ir.Shape(size)) for n, size in sizes.items()]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="row")
    model = ir.Model(graph, ir_version=10)
    y = Emitter(graph, functions=model.functions).call(rotary, *inputs)
    y.name, y.shape = "y", inputs[0].shape
    graph.outputs.append(y)
    proto = with_gradients(model, list(sizes)).SerializeToString()
    found = ort.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, feed)
    *leaves, ct = (torch.from_numpy(value.astype(float)) for value in feed.values())
    result = rotary_twin(*(leaf.requires_grad_() for leaf in leaves))
    want = [result.detach(), *torch.autograd.grad(result, leaves, ct)]
    for value, reference in zip(found, want, strict=True):
        assert value.dtype == dtype
        assert value.shape == tuple(reference.shape)
        assert norm_relative_error(value, reference.numpy()) <= NORM_RELATIVE[np.dtype(dtype)]


@each_row
def test_vjp_matches_finite_differences(row):
    step, feeds = session(row, (4, 5), np.float64, False), sampled((4, 5))
    feeds["x"][0] = 0.1  # a row of zeros is a kink of the norm
    _, *gradients = step.run(None, feeds)
    rng = np.random.default_rng(1)
    for name, gradient in zip(("x", "g"), gradients, strict=True):
        direction = rng.choice([-1.0, 1.0], feeds[name].shape)

        def loss(value, name=name):
            return (step.run(["y"], feeds | {name: value})[0] * feeds["ct"]).sum()

        assert_gradient(loss, feeds[name], gradient, direction)


def test_at_the_floor_the_gradient_is_that_of_the_norm():
    """As in torch.clamp, whose gradient at its bound is that of its input."""
    feeds = {"x": np.array([[3.0, 4.0, 0.0, 0.0, 0.0]]), "g": np.ones(5), "ct": np.array([[1.0, 0, 0, 0, 0]])}
    x = torch.tensor(feeds["x"], requires_grad=True)
    y = x / torch.norm(x, dim=-1, keepdim=True).clamp(min=5.0)
    (want,) = torch.autograd.grad(y, x, torch.from_numpy(feeds["ct"]))
    step = session(Row(floored_rms_normalization, (1.0, 5.0), ROWS[0].twin), (1, 5), np.float64, False)
    np.testing.assert_allclose(step.run(["x_grad"], feeds)[0], want.numpy(), atol=1e-15)
    assert abs(want[0, 0].item() - (1 / 5 - 9 / 125)) < 1e-15


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 3, 5), [1]), ((2, 3, 4, 5), [1, 2]), ((4, 5), [0, 1]), ((0, 3, 5), [1])], ids=str
)
@pytest.mark.parametrize("composite", INSTANCE_NORMS, ids=lambda composite: composite.name)
def test_vjp_of_instance_norms_matches_torch(composite, shape, axes, dtype, symbolic):
    """With mean and stdev detached."""
    rng, kind = np.random.default_rng(0), ir.DataType.from_numpy(np.dtype(dtype))
    names = [name for name in composite.inputs if name != "epsilon"]
    sizes = {"x": shape, "weight": (5,), "bias": (5,)}
    feed = {name: (rng.normal(size=sizes[name]) + 0.3).astype(dtype) for name in names}
    dims = {**sizes, "x": (*(f"d{axis}" for axis in range(len(shape) - 1)), 5)} if symbolic else sizes
    inputs = [ir.Value(name=n, type=ir.TensorType(kind), shape=ir.Shape(dims[n])) for n in names]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="row")
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    outputs = 4 if len(names) > 1 else 3
    y, *_ = op.call(composite, *inputs, op.const(EPSILON, kind), axes=axes, _outputs=outputs)
    y.name, y.shape = "y", inputs[0].shape
    graph.outputs.append(y)
    joint = with_gradients(model, names)
    ct = rng.normal(size=shape).astype(dtype)
    step = ort.InferenceSession(joint.SerializeToString(), providers=["CPUExecutionProvider"])

    leaves = [torch.from_numpy(feed[name].astype(np.float64)).requires_grad_() for name in names]
    x = leaves[0].detach()
    mean = x.mean(axes, keepdim=True)
    stdev = (((x - mean) ** 2).mean(axes, keepdim=True) + EPSILON).sqrt()
    y = INSTANCE_NORMS[composite](leaves[0], mean, stdev, *leaves[1:])
    want = [y.detach(), *torch.autograd.grad(y, leaves, torch.from_numpy(ct.astype(np.float64)))]
    for value, reference in zip(step.run(None, feed | {"ct": ct}), want, strict=True):
        assert value.dtype == dtype
        assert value.shape == tuple(reference.shape)
        assert norm_relative_error(value, reference.numpy()) <= NORM_RELATIVE[np.dtype(dtype)]
