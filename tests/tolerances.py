"""Norm-relative tolerances per dtype, in one place; widening one needs a reason beside it."""

import numpy as np

NORM_RELATIVE = {
    np.dtype(np.float64): 1e-9,
    np.dtype(np.float32): 2e-5,
    np.dtype(np.float16): 5e-3,
}

BFLOAT16 = 2e-2
"""bfloat16 has 8 bits; results of several ops are some units in the last place apart."""

FINITE_DIFFERENCE = 2e-6
"""Central differences with step 1e-6 in float64: the truncation and rounding errors are both near 1e-9."""


def norm_relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """Returns |value - reference| / |reference| in the Euclidean norm (absolute where the reference is below 1e-3)."""
    difference = np.linalg.norm(
        np.asarray(value, np.float64).ravel() - np.asarray(reference, np.float64).ravel()
    )
    return float(difference / max(np.linalg.norm(np.asarray(reference, np.float64).ravel()), 1e-3))
