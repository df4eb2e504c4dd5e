"""A few small calls of every kernel but those of convolutions, on inputs that fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels import (
    against_body,
    test_activations,
    test_attention,
    test_batch_norm,
    test_bfloat16_products,
    test_column_sums,
    test_extrema,
    test_indexing,
    test_losses,
    test_norms,
    test_optimizers,
    test_products,
    test_quantized_products,
    test_recurrent,
    test_rotary,
    test_running_sums,
    test_transposes,
)
from kernels.against_body import Attributes, Inputs, Signature, run

Call = tuple[str, Inputs, dict[str, Any]]
Check = Callable[..., None]
SHAPE = [3, 5, 23]

CHECKS: list[tuple[Check, tuple[Any, ...]]] = [
    *((test_activations.test_pointwise_gradient, (name, SHAPE)) for name in test_activations.POINTWISE),
    *((test_activations.test_bounded_gradient, (name, SHAPE)) for name in test_activations.BOUNDED),
    (test_activations.test_silu, (SHAPE,)),
    (test_activations.test_safe_softmax, (SHAPE, 1)),
    (test_activations.test_safe_softmax, (SHAPE, -1)),
    (test_activations.test_log_softmax_of_rows, (SHAPE,)),
    *(
        (test_activations.test_gradient_along_an_axis, (name, SHAPE, axis))
        for name in ("SoftmaxGradient", "LogSoftmaxGradient")
        for axis in (1, -1)
    ),
    *(
        (test_attention.test_attention, (name, [1, 2, 9, 21, 5, 6]))
        for name in ("Attention", "CausalAttention")
    ),
    *(
        (test_attention.test_masked_attention, (name, shape))
        for name in ("MaskedAttention", "SafeMaskedAttention")
        for shape in test_attention.MASKS[:2]
    ),
    *(
        (test_attention.test_qkv_attention, (name, [2, 2, 9, 5], test_attention.PERMS[0]))
        for name in ("Attention", "CausalAttention", "MaskedAttention", "SafeMaskedAttention")
    ),
    *((test_rotary.test_rotary, sizes) for sizes in test_rotary.SIZES[:2]),
    (test_batch_norm.test_against_bodies, ([3, 5, 4, 9],)),
    (test_batch_norm.test_against_bodies, ([3, 5, 3, 3],)),
    *((test_batch_norm.test_max_pool, pooling) for pooling in test_batch_norm.POOLINGS[1:6:2]),
    (test_indexing.test_embedding_gradient, ([30, 9], (5, 7))),
    *((test_extrema.test_extremum, ([19, 37, 23], axis, largest)) for axis in (1, -1) for largest in (0, 1)),
    (test_losses.test_cross_entropy_gradient, ([4, 21],)),
    (test_losses.test_cross_entropy_gradient, ([4, 3, 21],)),
    (test_losses.test_mean, ([4, 21], 0.3)),
    (test_losses.test_mean, ([4, 3, 21], 0.3)),
    (test_norms.test_layer_normalization, ([3, 4, 37], -1)),
    (test_norms.test_layer_normalization_gradient, ([3, 4, 37],)),
    (test_norms.test_rms_normalization, ([3, 4, 37],)),
    (test_norms.test_floored_rms_normalization, ([3, 4, 37],)),
    (test_norms.test_group_normalization, ([3, 6, 7, 9], 3)),
    (test_norms.test_group_normalization_gradient, ([3, 6, 7, 9], 3)),
    (test_norms.test_reversible_instance_normalization, ([3, 12, 5],)),
    (test_bfloat16_products.test_rounding, (SHAPE,)),
    (test_bfloat16_products.test_matmul, ([2, 13, 40], [40, 35])),
    *(
        (test_bfloat16_products.test_matmul_of_permuted_factors, ([2, 13, 40], [2, 40, 35], which))
        for which in ("Left", "Right", "Both")
    ),
    (test_bfloat16_products.test_gemm, ((13, 40, 35), (0, 1), ["n"])),
    (test_products.test_matrix_product, ((13, 300, 35), (0, 0))),
    (test_products.test_matrix_product, ((13, 40, 35), (1, 1))),
    *((test_products.test_linear_layer, ((13, 40, 35), name, 1)) for name in ("Linear", "LinearRelu")),
    *(
        (test_quantized_products.test_product, (bits, ([3, 13], 300, 96, 32), zeros))
        for bits in (4, 8)
        for zeros in test_quantized_products.ZEROS
    ),
    *(
        (test_quantized_products.test_packed_matmul, (bits, ([3, 13], 35, 300, 32), zeros))
        for bits, zeros in test_quantized_products.KINDS
    ),
    *((test_optimizers.test_step, (name, (5, 7))) for name in test_optimizers.NATIVE),
    *(
        (check, (direction, (3, 5, 6, 19)))
        for check in (
            test_recurrent.test_lstm,
            test_recurrent.test_lstm_gradient,
            test_recurrent.test_gru,
            test_recurrent.test_gru_gradient,
            test_recurrent.test_weight_gradient,
        )
        for direction in ("", "Reverse")
    ),
    *(
        (test_column_sums.test_column_sum, ([300, *columns], len(columns)))
        for columns in ([9], [130], [3, 20])
    ),
    *(
        (test_running_sums.test_running_sum, ([3, 37, 23], axis, flags))
        for axis in (1, -1)
        for flags in test_running_sums.FLAGS
    ),
    *((test_transposes.test_transpose, ([5, 33, 70], perm)) for perm in ([0, 2, 1], [1, 0, 2])),
]


@functools.cache
def recorded_calls() -> tuple[Call, ...]:
    """Returns a call of every kernel, or several: those that the checks above make."""
    calls: dict[tuple[str, Signature, Attributes], Call] = {}
    session = against_body._session

    class Recording:
        def __init__(self, name: str, signature: Signature, attributes: Attributes, *others: Any) -> None:
            self._key = name, signature, attributes
            self._session = session(name, signature, attributes, *others)

        def run(self, outputs: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            name, signature, attributes = self._key
            inputs = {key: feeds.get(key) for key, _ in signature}
            calls.setdefault(self._key, (name, inputs, dict(attributes)))
            results: list[np.ndarray] = self._session.run(outputs, feeds)
            return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(against_body, "_session", Recording)
        # It is the inputs that are wanted here: nothing is compared.
        patch.setattr(against_body, "exactly", functools.partial(run, native=False))
        patch.setattr(against_body, "ROUNDING", np.inf)
        for check, arguments in CHECKS:
            check(*arguments)
    return (*calls.values(), *_batch_norm_and_pool())


def _batch_norm_and_pool() -> list[Call]:
    rng = np.random.default_rng(0)
    parameters = {key: rng.random(4).astype(np.float32) + 0.5 for key in ("scale", "bias", "mean", "var")}
    inputs = {"x": rng.standard_normal((3, 4, 8, 10), np.float32), **parameters}
    assert list(inputs) == list(against_body.COMPOSITES["BatchNormalizationMaxPoolRelu"].inputs)
    windows = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 0, 0]}
    forward = ("BatchNormalizationMaxPoolRelu", inputs, {"epsilon": 1e-5, "momentum": 0.9, **windows})
    y, _, _, indices = run(*forward, native=False)
    gradient = {
        "ct": rng.standard_normal(y.shape, np.float32),
        "x": inputs["x"],
        "scale": parameters["scale"],
        "y": y,
        "indices": indices,
    }
    return [forward, ("BatchNormalizationMaxPoolReluGradient", gradient, {"epsilon": 1e-5})]


@functools.cache
def results_of_bodies() -> list[list[np.ndarray]]:
    """Returns what the bodies give for the recorded calls."""
    return [run(*call, native=False) for call in recorded_calls()]


def forget_sessions() -> None:
    """Forgets the sessions that have been made, whose kernels are of the level at that time."""
    against_body._session.cache_clear()
