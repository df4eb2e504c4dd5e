"""Kernels of optimizer steps beside their bodies, also with results in the place of what they are computed from."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.against_body import bound_in_place, check, needs_kernels, run
from onnxtrain.functions import COMPOSITES

pytestmark = needs_kernels

SCALARS = {
    "learning_rate": 0.01,
    "step_size": 0.01,
    "momentum": 0.9,
    "alpha": 0.99,
    "one_minus_alpha": 0.01,
    "beta1": 0.9,
    "one_minus_beta1": 0.1,
    "beta2": 0.999,
    "one_minus_beta2": 0.001,
    "eps": 1e-8,
    "decay": 0.999,
    "factor": 0.3,
}
NATIVE = [
    *("AdamStep", "AdamWStep", "SGDStep", "MomentumStep", "NesterovStep", "AdagradStep", "LionStep"),
    *("ClippedAdamStep", "ClippedAdamWStep"),
    *("RMSpropStep", "CenteredRMSpropStep", "RMSpropMomentumStep", "CenteredRMSpropMomentumStep"),
]


def _inputs(name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tensors = {"w": 1.0, "g": 0.1, "m": 0.1, "b": 0.1}
    made = {key: scale * rng.standard_normal(shape) for key, scale in tensors.items()}
    # A mean of squares is no less than the square of the mean.
    made |= {"v": made["m"] ** 2 + 0.01 * (0.1 + rng.random(shape)), "s": rng.random(shape)}
    return {key: made[key] if key in made else np.array(SCALARS[key]) for key in COMPOSITES[name].inputs}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("shape", [(), (1,), (15,), (3, 17), (0, 2), (200, 401)], ids=str)
def test_step(name: str, shape: tuple[int, ...]) -> None:
    check(name, _inputs(name, shape))


@pytest.mark.parametrize("name", NATIVE)
def test_step_with_scalars_of_the_rank_of_the_tensors(name: str) -> None:
    inputs = _inputs(name, (5, 7, 1, 1))
    check(name, {key: value if value.ndim else value.reshape(1, 1, 1, 1) for key, value in inputs.items()})


@pytest.mark.parametrize("name", NATIVE)
def test_step_in_place(name: str) -> None:
    inputs = _inputs(name, (50, 801))
    expected = run(name, inputs, {}, native=True)
    results = bound_in_place(name, inputs)
    for value, reference in zip(results, expected, strict=True):
        np.testing.assert_array_equal(value, reference)


# Lion takes no squares.
@pytest.mark.parametrize("name", [name for name in NATIVE if name != "LionStep"])
@pytest.mark.parametrize("scale", [1e21, 1e31])
def test_step_whose_squares_overflow(name: str, scale: float) -> None:
    """In the same elements as in the body, which has PyTorch's order: (renew·g)·g, not renew·(g·g)."""
    inputs = _inputs(name, (3, 17))
    inputs["g"] = np.float32(scale) * inputs["g"]
    native, body = (run(name, inputs, {}, native=native) for native in (True, False))
    for value, reference in zip(native, body, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-5)
