"""Kernels of normalisations beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels

ROWS = ([1, 1], [3, 1], [1, 5], [7, 16], [5, 17], [2, 3, 33], [600, 100], [0, 4])


def _rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_layer_normalization(shape: Sequence[int], axis: int) -> None:
    rng = _rng()
    x = 2 + rng.standard_normal(shape)
    scale, bias = rng.standard_normal((2, *shape[axis:]))
    inputs = {"x": x, "scale": scale, "bias": bias}
    inverse = 1 / np.sqrt(x.var(tuple(range(len(shape)))[axis:]) + 1e-5)
    # In a row of one element everything cancels, in one of two equal ones nearly so.
    terms = float(np.linalg.norm(inverse)) * (abs(x).max(initial=0) if scale.size < 3 else 1)
    check("LayerNormalizationTraining", inputs, {"axis": axis, "epsilon": 1e-5}, terms=(terms, 0.0, terms))


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_layer_normalization_gradient(shape: Sequence[int]) -> None:
    rng = _rng()
    x, ct = 2 + rng.standard_normal((2, *shape))
    mean = x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    scale = rng.standard_normal(shape[-1])
    # In a row of one element everything cancels.
    terms = float(np.linalg.norm(ct * scale * inverse)) if shape[-1] == 1 else 0.0
    inputs = {"ct": ct, "x": x, "scale": scale, "mean": mean, "inv_std_dev": inverse}
    check("LayerNormalizationGradient", inputs, terms=terms)


def test_layer_normalization_over_two_axes() -> None:
    rng = _rng()
    x, ct = rng.standard_normal((2, 4, 3, 5))
    mean, inverse = x.mean((1, 2), keepdims=True), 1 / x.std((1, 2), keepdims=True)
    scale = rng.standard_normal((3, 5))
    check(
        "LayerNormalizationGradient", {"ct": ct, "x": x, "scale": scale, "mean": mean, "inv_std_dev": inverse}
    )


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rms_normalization(shape: Sequence[int]) -> None:
    rng = _rng()
    x, ct = rng.standard_normal((2, *shape))
    scale = rng.standard_normal(shape[-1])
    check("InverseRMSNormalization", {"x": x, "scale": scale, "epsilon": np.array(1e-5)})
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    # In a row of one element everything cancels.
    terms = float(np.linalg.norm(ct * scale * inverse)) if shape[-1] == 1 else 0.0
    check(
        "InverseRMSNormalizationGradient",
        {"ct": ct, "x": x, "scale": scale, "inverse": inverse},
        terms=terms,
    )
    check("RMSNormalizationGradient", {"ct": ct, "x": x, "scale": scale}, {"epsilon": 1e-5}, terms=terms)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_floored_rms_normalization(shape: Sequence[int]) -> None:
    rng = _rng()
    x, ct = rng.standard_normal((2, *shape))
    x[:1] *= 1e-3  # below the floor
    numbers = {"factor": np.array(shape[-1] ** -0.5), "floor": np.array(0.1)}
    scale = rng.standard_normal(shape[-1])
    check("FlooredRMSNormalization", {"x": x, "scale": scale, **numbers})
    rms = np.linalg.norm(x, axis=-1, keepdims=True) * shape[-1] ** -0.5
    check("FlooredRMSNormalizationGradient", {"ct": ct, "x": x, "scale": scale, "rms": rms, **numbers})


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("shape", [[2, 6], [1, 6, 5], [3, 6, 7, 9], [2, 6, 40, 41]], ids=str)
def test_group_normalization_gradient(shape: Sequence[int], groups: int) -> None:
    rng = _rng()
    x, ct = 3 + rng.standard_normal((2, *shape))
    attributes = {"epsilon": 1e-3, "num_groups": groups}
    inputs = {"ct": ct, "x": x, "scale": rng.standard_normal(6)}
    # A group of one element has no deviation but epsilon, and its terms cancel.
    terms = float(np.linalg.norm(ct)) * 1e-3**-0.5 if x[0].size == 6 and groups != 1 else 0.0
    # The gradient of the scale is a sum of products that cancel, so its error is relative to their sizes.
    grouped = x.reshape(shape[0], groups or 6, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    normal = (centred / np.sqrt(grouped.var(-1, keepdims=True) + 1e-3)).reshape(x.shape)
    sizes = np.abs(ct * normal).sum(axis=(0, *range(2, len(shape))))
    of_scale = max(terms, float(np.linalg.norm(sizes)))
    check("GroupNormalizationGradient", inputs, attributes, terms=(terms, of_scale, terms))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shape", [[2, 6, 5], [3, 6, 7, 9], [2, 6, 40, 41]], ids=str)
def test_group_normalization(shape: Sequence[int], groups: int) -> None:
    rng = _rng()
    inputs = {
        "x": 3 + rng.standard_normal(shape),
        "scale": rng.standard_normal(6),
        "bias": rng.standard_normal(6),
    }
    check("GroupNormalization", inputs, {"epsilon": 1e-3, "num_groups": groups})


def test_group_normalization_of_nothing() -> None:
    inputs = {"ct": np.zeros((0, 6, 4)), "x": np.zeros((0, 6, 4)), "scale": np.ones(6)}
    ct_x, *sums = run("GroupNormalizationGradient", inputs, {"epsilon": 1e-3, "num_groups": 2}, native=True)
    assert ct_x.shape == (0, 6, 4)
    for value in sums:
        np.testing.assert_array_equal(value, np.zeros(6))


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "shape", [[4, 9, 1], [2, 3, 1030], [3, 50, 17], [2, 3, 4, 5], [1, 1, 16], [64, 96, 7]], ids=str
)
def test_reversible_instance_normalization(shape: Sequence[int]) -> None:
    rng = _rng()
    axes = list(range(1, len(shape) - 1))
    x, ct = 5 + rng.standard_normal((2, *shape))
    weight, bias, epsilon = *rng.standard_normal((2, shape[-1])), np.array(1e-5)
    check("InstanceStandardization", {"x": x, "epsilon": epsilon}, {"axes": axes})
    inputs = {"x": x, "weight": weight, "bias": bias, "epsilon": epsilon}
    check("ReversibleInstanceNormalization", inputs, {"axes": axes})
    centered = x - x.mean(tuple(axes), keepdims=True)
    stdev = np.sqrt(x.var(tuple(axes), keepdims=True) + 1e-5)
    sums = {"axes": axes, "rows": list(range(len(shape) - 1))}
    cotangents = {"ct": ct, "centered": centered, "weight": weight, "stdev": stdev}
    # Sums of few channels may cancel.
    of_parameters = [_norm(ct * centered / stdev), _norm(ct)]
    check(
        "ReversibleInstanceNormalizationGradient",
        cotangents,
        sums,
        terms=[_norm(ct * weight / stdev), *of_parameters],
    )
    del cotangents["weight"]
    check("ReversibleInstanceNormalizationParameterGradient", cotangents, sums, terms=of_parameters)


def test_one_series() -> None:
    rng = _rng()
    x, ct = rng.standard_normal((2, 20, 19))
    weight, bias, epsilon = *rng.standard_normal((2, 19)), np.array(1e-5)
    check("InstanceStandardization", {"x": x, "epsilon": epsilon}, {"axes": [0, 1]})
    inputs = {"x": x, "weight": weight, "bias": bias, "epsilon": epsilon}
    check("ReversibleInstanceNormalization", inputs, {"axes": [0, 1]})
    stdev = np.sqrt(x.var(keepdims=True) + 1e-5)
    cotangents = {"ct": ct, "centered": x - x.mean(), "weight": weight, "stdev": stdev}
    check("ReversibleInstanceNormalizationGradient", cotangents, {"axes": [0], "rows": [0]})
