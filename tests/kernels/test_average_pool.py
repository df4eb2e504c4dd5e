"""The gradient of AveragePool by kernel and by function body, beside PyTorch in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from kernels.against_body import best_level, needs_kernels
from kernels.test_convolutions import run
from kernels.test_malformed import _session
from onnxtrain.autodiff import differentiate

pytestmark = needs_kernels

# Sizes, windows, strides, padding of each axis, whether a last window may reach beyond the end, and padding counts.
POOLINGS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, bool]] = {
    "halves": ((8, 12), (2, 2), (2, 2), (0, 0), False, False),
    "halves of odd sizes": ((9, 7), (2, 2), (2, 2), (0, 0), False, False),
    "overlapping": ((9, 21), (3, 3), (2, 2), (1, 1), False, False),
    "padding counts": ((9, 21), (3, 3), (2, 2), (1, 1), False, True),
    "beyond the end": ((9, 8), (3, 2), (3, 3), (1, 0), True, False),
    "apart": ((9, 8), (2, 1), (4, 3), (0, 0), False, False),
    "one axis": ((40,), (3,), (1,), (1,), False, False),
    "three axes": ((4, 7, 33), (2, 3, 2), (1, 2, 2), (0, 1, 1), False, True),
    "halves of three axes": ((8, 8, 8), (2, 2, 2), (2, 2, 2), (0, 0, 0), False, False),
}
AVERAGES = {
    1: torch.nn.functional.avg_pool1d,
    2: torch.nn.functional.avg_pool2d,
    3: torch.nn.functional.avg_pool3d,
}


def _gradient_model(batch: int | str, name: str) -> onnx.ModelProto:
    size, kernel, strides, pads, ceil, include = POOLINGS[name]
    node = helper.make_node(
        "AveragePool",
        ["x"],
        ["y"],
        kernel_shape=kernel,
        strides=strides,
        pads=pads * 2,
        ceil_mode=int(ceil),
        count_include_pad=int(include),
    )
    graph = helper.make_graph(
        [node],
        "pooling",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 5, *size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 5, *[None] * len(size)])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ir.to_proto(ir.from_proto(differentiate(model, of="y", wrt=["x"], cotangent="ct")))


def _check(batch: int | str, name: str) -> None:
    size, kernel, strides, pads, ceil, include = POOLINGS[name]
    model = _gradient_model(batch, name)
    assert [node.op_type for node in model.graph.node if node.domain == "onnxtrain"] == [
        "WindowSpread0_float"
    ]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch if isinstance(batch, int) else 3, 5, *size), np.float32)
    leaf = torch.from_numpy(x).double().requires_grad_()
    y = AVERAGES[len(size)](leaf, kernel, strides, pads, ceil, include)
    ct = rng.standard_normal(y.shape).astype(np.float32)
    (expected,) = torch.autograd.grad(y, leaf, torch.from_numpy(ct).double())
    feeds = {"x": x, "ct": ct}
    body, kernels = run(model, feeds, native=False), run(model, feeds, native=True)
    np.testing.assert_array_equal(kernels[1], run(model, feeds, native=True, threads=1)[1])
    for computed in (body[1], kernels[1]):
        np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", POOLINGS)
def test_gradient(name: str) -> None:
    _check(2, name)
    _check("n", name)


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_at_every_level_of_the_processor(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS_LEVEL", best_level(level))
    _check(2, "three axes")


ATTRIBUTES = {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [1, 1], "pads": [0] * 4}


@pytest.mark.parametrize(
    ("shapes", "attributes", "message"),
    [
        (((1, 2, 3, 3), (1, 2, 6)), {}, "as many axes as kernel_shape"),
        (((1, 2, 3, 3), (1, 3, 6, 6)), {}, "batch and channels of x"),
        (((1, 2, 3), (1, 2, 6, 6)), {}, "batch and channels of x"),
        (((1, 2, 3, 3), (1, 2, 6, 6)), {"strides": [2, 0]}, "must be positive"),
        (((1, 2, 3, 3), (1, 2, 6, 6)), {"pads": [0, 0]}, "must fit kernel_shape"),
        (((1, 2, 3, 3), (1, 2, 6, 6)), {"dilations": [1 << 40, 1]}, "must be positive"),
    ],
    ids=str,
)
def test_refused(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], attributes: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(Exception, match=f"WindowSpread_float: .*{message}"):
        _spread(*shapes, {**ATTRIBUTES, **attributes})


def _spread(ct: Sequence[int], x: Sequence[int], attributes: dict[str, list[int]]) -> np.ndarray:
    """Returns what windows of ones give an input of this shape."""
    shapes = {"ct": tuple(ct), "x": tuple(x)}
    session = _session("WindowSpread0_float", shapes, ["dx"], attributes)
    (dx,) = session.run(None, {key: np.ones(shape, np.float32) for key, shape in shapes.items()})
    return dx


@pytest.mark.parametrize("ct", [(1, 2, 9, 1), (1, 2, 0, 3), (1, 2, 1, 1)], ids=str)
def test_windows_that_do_not_fit_write_nothing_outside(ct: Sequence[int]) -> None:
    """Whatever the number of windows: places outside of x are left out."""
    dx = _spread(ct, (1, 2, 6, 7), ATTRIBUTES)
    rows, columns = (min(2 * n, size) for n, size in zip(ct[2:], (6, 7), strict=True))
    expected = np.zeros((1, 2, 6, 7))
    expected[:, :, :rows, :columns] = 1
    np.testing.assert_array_equal(dx, expected)
