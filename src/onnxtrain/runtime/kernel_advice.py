"""Advises to install the native kernels, once, if training runs without them."""

from __future__ import annotations

import sys
from collections.abc import Collection

from onnxtrain._printable import get_logger

FACTORS = {"convolutional": 2.8, "recurrent": 2.1, "transformer": 1.2, "dense": 1.6}
"""For each kind of net, how many times as long a training step takes without the kernels.

Medians over the nets of `benchmarks/results/steps.json`, which `tests/runtime/test_kernel_advice.py` computes.
"""
PLATFORMS = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")}
"""`sys.platform` and machine for which onnxtrain-kernels has wheels."""

# Parts of function names, by kind; the first kind that occurs counts.
_MARKS = {
    "convolutional": ("Convolution",),
    "recurrent": ("LSTM", "GRU", "Recurrent"),
    "transformer": ("Attention", "SoftmaxGradient", "LayerNormalization", "RMSNormalization"),
}

_log = get_logger()
_given = False


def kind_of_training(functions: Collection[str]) -> str | None:
    """Returns the kind of net that a training model with these functions trains, as a key of `FACTORS`.

    Args:
        functions: names of functions of domain `onnxtrain`, e.g. ["ConvolutionGradient0_float"].

    Returns:
        The kind; None if no function computes a gradient.
    """
    if not any("Gradient" in name for name in functions):
        return None
    kinds = (
        kind for kind, marks in _MARKS.items() if any(mark in name for name in functions for mark in marks)
    )
    return next(kinds, "dense")


def advise(functions: Collection[str]) -> None:
    """Logs a warning that training runs without the kernels, the first time in this process that a net is trained.

    Does nothing on platforms without a wheel of the kernels.

    Args:
        functions: see :func:`kind_of_training`.
    """
    global _given
    # Imported late: a device that has the kernels does not need it.
    import platform

    kind = kind_of_training(functions)
    if _given or kind is None or (sys.platform, platform.machine()) not in PLATFORMS:
        return
    _given = True
    _log.warning(
        "Training runs without the native kernels: a step of a %s net takes about %.1f times as long. To install them, "
        "run: pip install onnxtrain-kernels (in a checkout: make kernels). To silence this message, set "
        "ONNXTRAIN_KERNELS=off.",
        kind,
        FACTORS[kind],
    )
