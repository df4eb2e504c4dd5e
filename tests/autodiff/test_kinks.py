"""Gradients exactly at kinks, ties and poles, where finite differences say nothing: as torch has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as fn
from onnx import helper

from autodiff.cases.deform import deform_conv
from onnxtrain.autodiff import differentiate
from runtimes import has_deform_conv, newest_opset


@dataclass(frozen=True)
class Kink:
    """The sum of an op's output at given points; the twin gets one float64 tensor per floating-point input.

    Integer inputs are not differentiated.
    """

    op: str
    inputs: Sequence[Any]
    twin: Callable[..., torch.Tensor]
    attrs: dict[str, Any] = field(default_factory=dict)
    name: str = ""


INF = float("inf")
ZERO_AND_TWO_ZEROS = [[2.0, 0.0, 3.0], [0.0, 5.0, 0.0], [1.5, -2.0, 4.0]]

# Three blocks, one of them of rank 2, of which the last one stands in the first rows.
LARGE = np.zeros((9, 9))
LARGE[:3, :3] = [[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.0, 1.0]]
LARGE[3:6, 3:6] = [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]]
LARGE[6:, 6:] = [[1.0, 0.0, 2.0], [0.0, 2.0, 1.0], [1.0, 1.0, 1.0]]
LARGE = np.roll(LARGE, 3, 0)

# Elementwise functions.
KINKS = [
    Kink("Abs", [[-1.0, 0.0, 1.0]], torch.abs),
    Kink("Pow", [[0.0, 0.0, 0.0, -2.0, 0.0], [0.0, 1.0, 2.0, 3.0, 0.5]], lambda x, _: _fixed_exponent(x)),
    Kink("Pow", [[0.0, 0.0, 2.0, 1.0], [0.0, 1.5, 0.0, 0.0]], torch.pow, name="both"),
    Kink("Clip", [[-2.0, -1.0, 0.0, 1.0, 2.0], -1.0, 1.0], torch.clamp),
    Kink("Clip", [[-2.0, 0.5, 2.0], 0.5, 0.5], torch.clamp, name="equal-bounds"),
    Kink("Max", [[1.0, 2.0, 3.0], [1.0, 5.0, 0.0]], torch.maximum),
    Kink("Min", [[1.0, 2.0, 3.0], [1.0, 5.0, 0.0]], torch.minimum),
    Kink(
        "Max",
        [[1.0, 2.0, 2.0], [1.0, 2.0, 0.0], [1.0, 0.0, 0.0]],
        lambda *x: torch.stack(x).amax(0),
        name="3",
    ),
    # Not torch.linalg.det: what its LU decomposition makes of a singular matrix depends on the processor.
    Kink(
        "Det", [[[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]]], lambda x: _cofactors(x), name="rank-2"
    ),
    # The determinant overflows float32, the cofactors do not.
    Kink("Det", [np.diag([1e15, 2e15, -1e15]).tolist()], lambda x: _cofactors(x), name="overflow"),
    # Of large matrices, minors are computed only if one of them is singular.
    Kink("Det", [LARGE.tolist()], lambda x: _of_blocks(x), name="large-rank-8"),
    Kink(
        "Det",
        [[LARGE.tolist(), np.roll(np.eye(9), 3, 0).tolist()]],
        lambda x: torch.stack([_of_blocks(x[0]), _of_blocks(x[1])]),
        name="large-one-of-two",
    ),
    Kink("Det", [[[0.0, 0.0], [0.0, 0.0]]], lambda x: x[0, 0] * x[1, 1] - x[0, 1] * x[1, 0], name="rank-0"),
]

# Activations.
KINKS += [
    Kink("Relu", [[-1.0, 0.0, 1.0]], torch.relu),
    Kink("LeakyRelu", [[-1.0, 0.0, 1.0]], lambda x: fn.leaky_relu(x, 0.25), {"alpha": 0.25}),
    Kink("PRelu", [[-1.0, 0.0, 1.0], [0.25]], fn.prelu),
    Kink("Elu", [[-1.0, 0.0, 1.0]], lambda x: fn.elu(x, 0.5), {"alpha": 0.5}),
    Kink("Celu", [[-1.0, 0.0, 1.0]], lambda x: fn.celu(x, 0.5), {"alpha": 0.5}),
    Kink("Selu", [[-1.0, 0.0, 1.0]], fn.selu),
    Kink("Softsign", [[-1.0, 0.0, 1.0]], fn.softsign),
    Kink("HardSwish", [[-3.0, 0.0, 3.0]], fn.hardswish),
    Kink("HardSigmoid", [[-4.0, 0.0, 4.0]], lambda x: fn.hardsigmoid(0.75 * x), {"alpha": 0.125}),
    Kink("ThresholdedRelu", [[0.5, 1.0, 2.0]], lambda x: fn.threshold(x, 1.0, 0.0)),
    Kink("Shrink", [[-1.0, -0.5, 0.0, 0.5, 1.0]], fn.hardshrink),
    Kink("Softplus", [[-1000.0, 0.0, 1000.0]], fn.softplus),
    Kink("Mish", [[-200.0, 0.0, 200.0]], fn.mish),
    Kink("LogSoftmax", [[[1000.0, 0.0, -1000.0]]], lambda x: torch.log_softmax(x, -1)),
]

# Reductions.
KINKS += [
    Kink("ReduceMax", [[[1.0, 1.0, 0.0], [2.0, 3.0, 2.0]], [1]], lambda x: x.amax(1)),
    Kink("ReduceMin", [[[1.0, 1.0, 0.0], [2.0, 3.0, 2.0]], [1]], lambda x: x.amin(1)),
    Kink("ReduceProd", [ZERO_AND_TWO_ZEROS, [1]], lambda x: x.prod(1)),
    Kink("ReduceL1", [[-1.0, 0.0, 1.0]], lambda x: x.abs().sum()),
    Kink("ReduceL2", [[[0.0, 0.0], [3.0, 4.0]], [1]], lambda x: torch.linalg.vector_norm(x, dim=1)),
    Kink("ReduceLogSumExp", [[[-INF, -INF], [-INF, 1.0], [10.0, 9.0]], [1]], lambda x: x.logsumexp(1)),
    *[
        Kink("CumProd", [ZERO_AND_TWO_ZEROS, 1], twin, {"reverse": reverse}, f"reverse={reverse}")
        for reverse, twin in [(0, lambda x: x.cumprod(1)), (1, lambda x: x.flip(1).cumprod(1))]
    ],
]

# Pooling and normalisation.
ONE_CHANNEL = [[[1.0, 2.0, 2.0, 0.0, 2.0, 2.0]]]
KINKS += [
    Kink("MaxPool", [ONE_CHANNEL], lambda x: fn.max_pool1d(x, 2), {"kernel_shape": [2], "strides": [2]}),
    Kink("MaxPool", [ONE_CHANNEL], lambda x: fn.max_pool1d(x, 3, 1), {"kernel_shape": [3]}, "overlapping"),
    Kink("GlobalMaxPool", [ONE_CHANNEL], lambda x: fn.adaptive_max_pool1d(x, 1)),
    Kink(
        "LpPool",
        [[[[0.0, 0.0, 3.0, -4.0]]]],
        lambda x: torch.linalg.vector_norm(x.reshape(2, 2), dim=1),
        {"kernel_shape": [2], "strides": [2]},
    ),
    *[
        Kink(
            "GridSample",
            [[[[[1.0, 2.0, 4.0]]]], [[[[-1.0, 0.0], [-0.5, 0.0], [1.0, 0.0], [1.5, 0.0]]]]],
            lambda x, grid, padding=padding: fn.grid_sample(x, grid, "bilinear", padding, True),
            {"padding_mode": padding, "align_corners": 1},
            padding,
        )
        for padding in ("border", "reflection")
    ],
    # torch divides by at least 1e-12, which makes the gradient at zero 1e12 instead of the zero that we give.
    Kink("LpNormalization", [[[0.0, 0.0], [3.0, 4.0]]], lambda x: _zero_kept(fn.normalize, x)),
]


# What reads at positions that are data, and picks elements. Offsets are zeros where they begin to be learnt.
KINKS += [
    Kink(
        "DeformConv",
        [np.square(np.arange(16.0)).reshape(1, 1, 4, 4) / 7, [[[[2.0]]]], np.zeros((1, 2, 4, 4))],
        deform_conv,
    ),
    Kink("Unique", [[3.0, 1.0, 3.0, 2.0, 1.0]], lambda x: x[[1, 3, 0]]),
    Kink(
        "Unique", [[[1.0, 2.0, 1.0], [0.0, 5.0, 0.0]]], lambda x: x[:, :2], {"axis": 1, "sorted": 0}, "axis"
    ),
]


def _zero_kept(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The function of the rows that are not zero; zero rows stay zero, without a gradient."""
    return torch.where((x == 0).all(-1, keepdim=True), torch.zeros_like(x) * x.detach(), function(x))


def _cofactors(x: torch.Tensor) -> torch.Tensor:
    """The determinant of a matrix of three rows, by its first row."""
    return (x[0] * torch.linalg.cross(x[1], x[2])).sum()


def _of_blocks(x: torch.Tensor) -> torch.Tensor:
    """Returns the determinant of `LARGE`, whose gradient is zero outside of the blocks."""
    blocks = x.roll(-3, 0)
    first, second, third = (_cofactors(blocks[k : k + 3, k : k + 3]) for k in (0, 3, 6))
    return first * second * third


def _fixed_exponent(x: torch.Tensor) -> torch.Tensor:
    """torch.pow with the exponents as constants."""
    return x ** torch.tensor([0.0, 1.0, 2.0, 3.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("kink", KINKS, ids=lambda kink: "-".join(filter(None, [kink.op, kink.name])))
def test_gradient_at_the_point_is_that_of_torch(kink: Kink) -> None:
    if kink.op == "DeformConv" and not has_deform_conv():
        pytest.skip(f"onnxruntime {ort.__version__} has no DeformConv")
    arrays = [np.asarray(value) for value in kink.inputs]
    floats = [index for index, array in enumerate(arrays) if array.dtype.kind == "f"]
    tensors = [torch.tensor(arrays[i], dtype=torch.float64, requires_grad=True) for i in floats]
    expected = torch.autograd.grad(kink.twin(*tensors).sum(), tensors, allow_unused=True)
    differentiated = [i for i, gradient in zip(floats, expected, strict=True) if gradient is not None]
    got = _gradients(kink, arrays, differentiated)
    for value, want in zip(got, [g for g in expected if g is not None], strict=True):
        np.testing.assert_allclose(value, want.numpy(), rtol=2e-6, atol=1e-12)


def _gradients(kink: Kink, arrays: list[np.ndarray], wrt: list[int]) -> list[np.ndarray]:
    """Gradients of the sum of the output by ONNX Runtime in float32."""
    arrays = [a.astype(np.float32) if a.dtype.kind == "f" else a.astype(np.int64) for a in arrays]
    names = [f"x{i}" for i in range(len(arrays))]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, arrays, strict=True)
    ]
    nodes = [
        helper.make_node(kink.op, names, ["y"], **kink.attrs),
        helper.make_node("ReduceSum", ["y"], ["loss"], keepdims=0),
    ]
    loss = helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "kink", inputs, [loss])
    opset = newest_opset(26)
    if onnx.defs.get_schema(kink.op).since_version > opset:
        try:
            onnx.defs.get_schema(kink.op, opset)
        except onnx.defs.SchemaError:
            pytest.skip(f"onnxruntime {ort.__version__} loads no model of an opset that has {kink.op}")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    step = differentiate(model, of="loss", wrt=[names[i] for i in wrt])
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([f"x{i}_grad" for i in wrt], dict(zip(names, arrays, strict=True)))
