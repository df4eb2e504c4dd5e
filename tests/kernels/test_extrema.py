"""Maxima and minima with their indices, and their gradients, by kernels and bodies beside PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels

SHAPES: list[tuple[list[int], int]] = [
    ([1], 0),
    ([5], 0),
    ([100_000], -1),
    ([67, 3], 1),
    ([33, 127], -1),
    ([19, 128], 1),
    ([5, 1000], 1),
    ([3, 4097], -1),
    ([1000, 7], 0),
    ([1000, 7], 1),
    ([67, 300], 0),
    ([3, 5, 1], 2),
    ([3, 1, 5], 1),
    ([3, 129, 1], 1),
    ([300, 9, 2], 1),
    ([2, 3, 5, 7], 1),
    ([4, 3, 40, 75], -2),
    ([2, 300, 130], 1),
    ([2, 300, 512], 1),
    ([0, 3], 1),
    ([3, 0], 0),
    ([2, 3, 0], 1),
]


def check_both(x: np.ndarray, axis: int, largest: int) -> None:
    """Compares values, indices and gradients with PyTorch's, by kernel on one and two threads, and by body."""
    leaf = torch.from_numpy(x).requires_grad_()
    value, index = (torch.max if largest else torch.min)(leaf, axis, keepdim=True)
    ct = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    value.backward(ct)
    assert leaf.grad is not None
    backward = {"ct": ct.numpy(), "index": index.numpy(), "shape": np.array(x.shape)}
    for native, threads in ((True, 1), (True, 2), (False, 1)):
        forward = {"axis": axis, "largest": largest}
        found = run("Extremum", {"x": x}, forward, native=native, threads=threads)
        gradient = run("ExtremumGradient", backward, {"axis": axis}, native=native, threads=threads)
        arg = run("ArgMax" if largest else "ArgMin", {"x": x}, {"axis": axis}, native=native, threads=threads)
        expected = value.detach().numpy(), index.numpy(), index.numpy(), leaf.grad.numpy()
        for actual, reference in zip((*found, *arg, *gradient), expected, strict=True):
            assert actual.dtype == reference.dtype
            np.testing.assert_array_equal(actual.view(np.int32), reference.view(np.int32))


@pytest.mark.parametrize("largest", [1, 0])
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_extremum(shape: Sequence[int], axis: int, largest: int) -> None:
    rng = np.random.default_rng(0)
    check_both(rng.standard_normal(shape).astype(np.float32), axis, largest)
    check_both(rng.integers(-3, 4, shape).astype(np.float32), axis, largest)  # ties


@pytest.mark.parametrize("largest", [1, 0])
@pytest.mark.parametrize("rare", [2, 200])
@pytest.mark.parametrize(("shape", "axis"), [s for s in SHAPES if 0 not in s[0]], ids=str)
def test_special_values(shape: Sequence[int], axis: int, rare: int, largest: int) -> None:
    rng = np.random.default_rng(1)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    x = rng.choice(np.array([0.0, -0.0, 1.0, -1.0], np.float32), shape)
    check_both(np.where(rng.integers(rare, size=shape) == 0, rng.choice(special, shape), x), axis, largest)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(70, 9), (70, 200), (3, 1000)], ids=str)
def test_the_first_of_equal_elements(shape: tuple[int, int], number: float) -> None:
    x = np.full(shape, number, np.float32)
    for axis in (0, 1):
        for largest in (0, 1):
            check_both(x, axis, largest)


@pytest.mark.parametrize(("shape", "axis"), [([70, 9], 1), ([3, 5, 40], 1), ([3, 50, 40], -2)], ids=str)
def test_negative_indices_count_from_the_end(shape: list[int], axis: int) -> None:
    rng = np.random.default_rng(2)
    one = list(shape)
    one[axis] = 1
    index = rng.integers(-shape[axis], shape[axis], one)
    inputs = {"ct": rng.standard_normal(one), "index": index, "shape": np.array(shape)}
    check("ExtremumGradient", inputs, {"axis": axis})


@pytest.mark.parametrize(
    ("shape", "axis", "message"),
    [
        ([2, 3], 2, r"the axis must be one of the tensor \(inputs: \[2, 3\]\)"),
        ([2, 3], -3, "the axis must be one of the tensor"),
        ([], 0, "the axis must be one of the tensor"),
        ([2, 0], 1, "the axis must have elements"),
    ],
)
def test_refused(shape: Sequence[int], axis: int, message: str) -> None:
    with pytest.raises(Exception, match=f"Extremum_float: {message}"):
        run("Extremum", {"x": np.ones(shape)}, {"axis": axis, "largest": 1}, native=True)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (3, [3, 2], "an index is not one of the rows"),
        (-4, [3, 2], "an index is not one of the rows"),
        (0, [0, 2], "an index is not one of the rows"),
        (0, [3, 3], "one cotangent and index per extremum"),
        (0, [3], "one cotangent and index per extremum"),
        (0, [], "the axis must be one of the tensor"),
        (0, [-3, 2], "the shape must not be negative"),
    ],
)
def test_refused_gradients(index: int, shape: list[int], message: str) -> None:
    inputs = {"ct": np.ones((1, 2)), "index": np.array([[0, index]]), "shape": np.array(shape, np.int64)}
    with pytest.raises(Exception, match=f"ExtremumGradient_float: {message}"):
        run("ExtremumGradient", inputs, {"axis": 0}, native=True)
