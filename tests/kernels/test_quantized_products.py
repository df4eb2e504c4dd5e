"""Kernels of products with quantized weights, beside their bodies and beside dequantized weights in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import Inputs, check, needs_kernels, run
from onnxtrain.functions import COMPOSITES

pytestmark = needs_kernels
SIZES = [
    ([1], 1, 16, 16),
    ([13], 40, 96, 32),
    ([2, 3, 4], 33, 48, 16),
    ([7], 300, 128, 64),
    ([100], 5, 1056, 32),
    ([300], 1024, 256, 256),
    ([0], 4, 32, 16),
    ([], 30, 144, 48),
]
"""Axes before the last one, N, K, size of a block. With N = 1024 the rows of ct are copied."""
ZEROS = ["codes", "floats"]


def weight(
    rng: np.random.Generator, bits: int, n: int, k: int, size: int, zeros: str
) -> tuple[np.ndarray, ...]:
    """Returns codes [N, blocks * size], scales and zero points [N, blocks], and the weight in float64 [N, K]."""
    blocks = math.ceil(k / size)
    codes = rng.integers(0, 2**bits, (n, blocks * size)).astype(np.uint8)
    scales = (rng.uniform(0.01, 0.05, (n, blocks)) * rng.choice([-1, 1], (n, blocks))).astype(np.float32)
    if zeros == "floats":
        zero_points = rng.uniform(0, 2**bits, (n, blocks)).astype(np.float32)
    elif zeros == "none":
        zero_points = np.full((n, blocks), 2 ** (bits - 1), np.uint8)
    else:
        zero_points = rng.integers(0, 2**bits, (n, blocks)).astype(np.uint8)
    centred = codes.reshape(n, blocks, size) - zero_points.astype(np.float64)[..., None]
    matrix = (centred * scales.astype(np.float64)[..., None]).reshape(n, -1)[:, :k]
    return codes, scales, zero_points, matrix


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs rows of integers into bytes, the lowest bits first; each row begins with a new byte."""
    per_byte = 8 // bits
    rows = np.pad(values, [(0, 0), (0, -values.shape[1] % per_byte)]).reshape(len(values), -1, per_byte)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(rows << shifts, axis=-1).astype(np.uint8)


def product_inputs(
    bits: int, sizes: tuple[Sequence[int], int, int, int], zeros: str
) -> tuple[str, Inputs, np.ndarray]:
    """Returns the name of a product ct·W, its inputs, and the product in float64."""
    (lead, n, k, size), rng = sizes, np.random.default_rng(5)
    codes, scales, zero_points, matrix = weight(rng, bits, n, k, size, zeros)
    x = rng.standard_normal((*lead, n), np.float32)
    name = f"Uint{bits}Product{'FloatZeros' * (zeros == 'floats')}"
    inputs = {"x": x, "codes": codes, "scales": scales, "zero_points": zero_points}
    assert list(inputs) == list(COMPOSITES[name].inputs)
    return name, inputs, x.astype(np.float64) @ matrix


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product(bits: int, sizes: tuple[Sequence[int], int, int, int], zeros: str) -> None:
    name, inputs, exact = product_inputs(bits, sizes, zeros)
    check(name, inputs, {"block_size": sizes[-1]}, exact=[exact])


def test_scales_may_lie_in_one_row() -> None:
    name, inputs, exact = product_inputs(4, ([5], 6, 64, 32), "codes")
    scales = inputs["scales"]
    assert scales is not None
    check(name, {**inputs, "scales": scales.reshape(-1)}, {"block_size": 32}, exact=[exact])


def test_a_product_with_the_identity_gives_the_weight_of_the_body() -> None:
    """Bit for bit: the weights are those of DequantizeLinear, and nothing is added to them."""
    for bits in (4, 8):
        name, inputs, _ = product_inputs(bits, ([40], 40, 96, 32), "codes")
        inputs = {**inputs, "x": np.eye(40)}
        native, body = (run(name, inputs, {"block_size": 32}, native=native)[0] for native in (True, False))
        np.testing.assert_array_equal(native, body)


PACKED_SIZES = [*SIZES[:-1], ([], 30, 144, 64), ([13], 40, 90, 32), ([3], 35, 250, 16), ([64], 17, 7, 16)]
"""As above, also with a K that ends within a block; ONNX Runtime takes powers of two only."""
KINDS = [
    (bits, zeros)
    for bits in (2, 4, 8)
    for zeros in ("codes", "none", "floats")
    if (bits, zeros) != (8, "floats")
]
"""Bits and zero points that ONNX Runtime has a kernel for, which is the body."""


def packed_inputs(
    bits: int, sizes: tuple[Sequence[int], int, int, int], zeros: str
) -> tuple[str, Inputs, dict[str, int], np.ndarray]:
    """Returns the name of a product X·Wᵀ, its inputs and attributes, and the product in float64."""
    (lead, n, k, size), rng = sizes, np.random.default_rng(6)
    codes, scales, zero_points, matrix = weight(rng, bits, n, k, size, zeros)
    x = rng.standard_normal((*lead, k), np.float32)
    name = f"PackedMatMul{'FloatZeros' * (zeros == 'floats')}"
    points = {
        "codes": packed(zero_points, bits) if zeros == "codes" else None,
        "floats": zero_points,
        "none": None,
    }
    inputs = {
        "x": x,
        "codes": packed(codes, bits).reshape(n, -1, size * bits // 8),
        "scales": scales,
        "zero_points": points[zeros],
    }
    assert list(inputs) == list(COMPOSITES[name].inputs)
    return name, inputs, {"K": k, "N": n, "bits": bits, "block_size": size}, x.astype(np.float64) @ matrix.T


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("bits", "zeros"), KINDS)
@pytest.mark.parametrize("sizes", PACKED_SIZES, ids=str)
def test_packed_matmul(bits: int, sizes: tuple[Sequence[int], int, int, int], zeros: str) -> None:
    name, inputs, attributes, exact = packed_inputs(bits, sizes, zeros)
    check(name, inputs, attributes, exact=[exact])


def test_what_is_no_number_stays_in_its_row() -> None:
    name, inputs, exact = product_inputs(4, ([30], 40, 64, 32), "codes")
    x = np.array(inputs["x"])
    x[7, 3], x[9, 5] = np.nan, np.inf
    y = run(name, {**inputs, "x": x}, {"block_size": 32}, native=True)[0]
    assert np.isnan(y[7]).all()
    assert not np.isfinite(y[9]).any()
    rest = np.delete(np.arange(30), [7, 9])
    np.testing.assert_allclose(y[rest], exact[rest], rtol=1e-4, atol=1e-4)
