"""Every kernel beside its body on random shapes and attributes: what the other modules check, on cases they don't name.

`ONNXTRAIN_KERNEL_CASES` is the number of cases; `ONNXTRAIN_KERNEL_SEED` the first one's seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import (
    against_body,
    test_activations,
    test_attention,
    test_batch_norm,
    test_bfloat16_products,
    test_convolutions,
    test_extrema,
    test_indexing,
    test_losses,
    test_norms,
    test_optimizers,
    test_products,
    test_quantized_products,
    test_recurrent,
    test_running_sums,
)
from kernels.against_body import needs_kernels

pytestmark = needs_kernels

CASES = int(os.environ.get("ONNXTRAIN_KERNEL_CASES", "60"))
SEED = int(os.environ.get("ONNXTRAIN_KERNEL_SEED", "0"))
Arguments = tuple[Any, ...]


def sizes(rng: np.random.Generator, least: int, most: int, *, empty: bool = False) -> list[int]:
    """A shape of `least` to `most` axes and at most some 20,000 elements; with `empty` an axis may be 0."""
    rank = int(rng.integers(least, most + 1))
    limits = rng.choice([1, 2, 5, 19, 70], rank, p=[0.1, 0.2, 0.3, 0.25, 0.15])
    shape = [int(rng.integers(1, limit + 1)) for limit in limits]
    while np.prod(shape) > 20_000:
        shape[int(np.argmax(shape))] //= 2
    if empty and shape and rng.random() < 0.05:
        shape[int(rng.integers(rank))] = 0
    return shape


def _along_an_axis(rng: np.random.Generator) -> Arguments:
    shape = sizes(rng, 1, 4, empty=True)
    if 0 in shape:  # not the axis itself: of nothing there is no softmax
        shape.append(1 + len(shape))
        return _softmax(rng), shape, -1
    return _softmax(rng), shape, int(rng.integers(-len(shape), len(shape)))


def _softmax(rng: np.random.Generator) -> str:
    return str(rng.choice(["SoftmaxGradient", "LogSoftmaxGradient"]))


def _running_sum(rng: np.random.Generator) -> Arguments:
    shape = sizes(rng, 1, 4, empty=True)
    axis = int(rng.integers(-len(shape), len(shape)))
    return shape, axis, rng.integers(0, 2, 2).tolist()


def _extremum(rng: np.random.Generator) -> Arguments:
    shape = sizes(rng, 1, 4)
    return shape, int(rng.integers(-len(shape), len(shape))), int(rng.integers(2))


def _pooling(rng: np.random.Generator) -> Arguments:
    """A shape, and windows that pass over it, half of them of 2 x 2 in steps of 2."""
    rank = int(rng.choice([1, 2, 2, 3]))
    batch, channels, *axes = [1 + size for size in (sizes(rng, rank + 2, rank + 2))]
    halves = rng.random() < 0.5
    kernel = [2] * rank if halves else rng.integers(1, 5, rank).tolist()
    strides = [2] * rank if halves else rng.integers(1, 4, rank).tolist()
    pads = [int(rng.integers(size)) for size in kernel * 2]
    axes = [max(axis, size) for axis, size in zip(axes, kernel, strict=True)]
    return [batch, channels, *axes], kernel, strides, pads


def _series(rng: np.random.Generator) -> list[int]:
    """Batch, at least two steps in time, perhaps further axes, channels."""
    first, *rest = sizes(rng, 3, 4)
    return [first, rest[0] + 1, *rest[1:]]


def _rows(rng: np.random.Generator) -> Arguments:
    *axes, width = sizes(rng, 2, 4, empty=True)
    return ([*axes, max(width, 1)],)


def _rows_and_axis(rng: np.random.Generator) -> Arguments:
    (shape,) = _rows(rng)
    return shape, -1 if 0 in shape else int(rng.choice([-1, 1]))  # of a row of nothing there is no mean


def _groups(rng: np.random.Generator) -> Arguments:
    batch, *axes = sizes(rng, 2, 4)
    return [batch, 6, *axes], int(rng.choice([0, 1, 2, 3]))


def _series_of_channels(rng: np.random.Generator) -> list[int]:
    """Batch, six channels, and enough behind them for a deviation."""
    batch, first, *axes = sizes(rng, 2, 4)
    return [batch, 6, first + 7, *axes]


def _classes(rng: np.random.Generator) -> Arguments:
    batch, classes, *axes = sizes(rng, 2, 4, empty=True)
    if axes:  # the reference evaluator takes no more
        classes = min(classes, 60)
    return ([batch, max(classes, 1), *axes],)


def _embedding(rng: np.random.Generator) -> Arguments:
    rows, *axes = sizes(rng, 1, 3, empty=True)
    return [max(rows, 1), *axes], tuple(sizes(rng, 0, 3, empty=True))


def _heads(rng: np.random.Generator) -> list[int]:
    """Batch, heads, queries, keys, size of queries and keys, size of values."""
    return [
        *rng.integers(1, 4, 2).tolist(),
        *rng.integers(1, 150, 2).tolist(),
        *rng.integers(1, 40, 2).tolist(),
    ]


def _matrices(rng: np.random.Generator) -> Arguments:
    """Rows, depth and columns, and which of the two matrices lies transposed."""
    return rng.integers(0, 130, 3).tolist(), rng.integers(0, 2, 2).tolist()


def _quantized(rng: np.random.Generator) -> Arguments:
    """Bits, the axes before the last one, N, K and the size of a block, and the kind of zero points."""
    size, axes = int(rng.choice([16, 32, 64, 128, 256])), int(rng.integers(0, 3))
    n, k = int(rng.integers(1, 400)), size * int(rng.integers(1, 1 + 700 // size))
    sizes_ = rng.integers(0, 30, axes).tolist(), n, k, size
    return int(rng.choice([4, 8])), sizes_, str(rng.choice(test_quantized_products.ZEROS))


def _packed(rng: np.random.Generator) -> Arguments:
    """The same for a product whose K may end within a block."""
    _, (lead, n, k, size), _ = _quantized(rng)
    bits, zeros = test_quantized_products.KINDS[int(rng.integers(len(test_quantized_products.KINDS)))]
    return bits, (lead, n, max(1, k - int(rng.integers(size))), size), zeros


def _factors(rng: np.random.Generator) -> Arguments:
    """Matrices or batches of them, of which one may serve all, up to where the depth is cut."""
    m, k, n = (int(rng.choice([0, 1, 2, 7, 16, 33, limit])) for limit in (150, 2600, 150))
    batch = [int(size) for size in rng.integers(1, 4, int(rng.integers(0, 3)))]
    sides = [[size if rng.random() < 0.7 else 1 for size in batch] for _ in range(2)]
    a, b = [*sides[0], m, k], [*sides[1][int(rng.integers(len(batch) + 1)) :], k, n]
    return a, b, str(rng.choice(["", "Left", "Right", "Both"]))


def _gemm(rng: np.random.Generator) -> Arguments:
    sizes_ = tuple(int(rng.choice([1, 5, 13, 64, limit])) for limit in (300, 2100, 300))
    transposed = tuple(int(flag) for flag in rng.integers(0, 2, 2))
    summands = (None, [], ["n"], ["m", 1], ["m", "n"])
    return sizes_, transposed, summands[int(rng.integers(5))]


def _direction_and_sizes(rng: np.random.Generator) -> Arguments:
    return str(rng.choice(["", "Reverse"])), rng.integers(1, 40, 4).tolist()


def _convolution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = test_convolutions._random_of_three_taps if seed % 2 else test_convolutions._random_geometry
    geometry = replace(draw(rng), transposed=seed % 5 > 2)
    test_convolutions.check(geometry, seed, bfloat16=seed % 5 < 2)


CHECKS: list[tuple[Callable[..., None], Callable[[np.random.Generator], Arguments]]] = [
    (
        test_activations.test_pointwise_gradient,
        lambda rng: (str(rng.choice(test_activations.POINTWISE)), sizes(rng, 0, 4, empty=True)),
    ),
    (test_activations.test_silu, lambda rng: (sizes(rng, 0, 4, empty=True),)),
    (
        test_activations.test_bounded_gradient,
        lambda rng: (str(rng.choice(test_activations.BOUNDED)), sizes(rng, 0, 4, empty=True)),
    ),
    (test_activations.test_gradient_along_an_axis, _along_an_axis),
    (
        test_attention.test_attention,
        lambda rng: (str(rng.choice(["Attention", "CausalAttention"])), _heads(rng)),
    ),
    (test_batch_norm.test_against_bodies, lambda rng: (_with_two(sizes(rng, 2, 5)),)),
    (test_batch_norm.test_max_pool, _pooling),
    (_convolution, lambda rng: (int(rng.integers(1 << 40)),)),
    (test_indexing.test_embedding_gradient, _embedding),
    (test_extrema.test_extremum, _extremum),
    (test_products.test_matrix_product, _matrices),
    (test_quantized_products.test_product, _quantized),
    (test_quantized_products.test_packed_matmul, _packed),
    (test_losses.test_cross_entropy_gradient, _classes),
    (test_losses.test_mean, lambda rng: (*_classes(rng), float(rng.choice([0.0, 0.3, 1.0])))),
    (test_norms.test_layer_normalization, _rows_and_axis),
    (test_norms.test_layer_normalization_gradient, _rows),
    (test_norms.test_rms_normalization, _rows),
    (test_norms.test_floored_rms_normalization, _rows),
    (test_norms.test_group_normalization_gradient, _groups),
    (test_norms.test_group_normalization, lambda rng: (_series_of_channels(rng), int(rng.choice([1, 2, 3])))),
    (test_norms.test_reversible_instance_normalization, lambda rng: (_series(rng),)),
    (test_bfloat16_products.check_matmul, _factors),
    (test_bfloat16_products.test_gemm, _gemm),
    (
        test_optimizers.test_step,
        lambda rng: (str(rng.choice(test_optimizers.NATIVE)), tuple(sizes(rng, 0, 4, empty=True))),
    ),
    *(
        (check, _direction_and_sizes)
        for check in (
            test_recurrent.test_lstm,
            test_recurrent.test_lstm_gradient,
            test_recurrent.test_gru,
            test_recurrent.test_gru_gradient,
            test_recurrent.test_weight_gradient,
        )
    ),
    (test_running_sums.test_running_sum, _running_sum),
]


def _with_two(shape: list[int]) -> list[int]:
    """The shape with a second sample: a channel of one value has no deviation."""
    return [shape[0] + 1, *shape[1:]]


def test_random_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of thousands of sums some cancel; an error in a kernel is larger by far.
    monkeypatch.setattr(against_body, "ROUNDING", 1e-5)
    for seed in range(SEED, SEED + CASES):
        rng = np.random.default_rng([seed, 20])
        check, draw = CHECKS[seed % len(CHECKS)]
        arguments = draw(rng)
        try:
            check(*arguments)
        except Exception as error:
            error.add_note(f"seed {seed}: {check.__name__}{arguments}")
            raise
