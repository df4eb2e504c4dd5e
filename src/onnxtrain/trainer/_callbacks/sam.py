"""Sharpness-aware minimization (SAM)."""

from __future__ import annotations

import math

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import widen
from onnxtrain.trainer._fit.events import StepGradients
from onnxtrain.trainer._trainer import Callback, Trainer

# Avoids division by zero; the value of the authors' PyTorch implementations.
_EPSILON = 1e-12


class SAM(Callback):
    """Sharpness-aware minimization (Foret et al. 2021): finds flat minima by using gradients at the worst nearby point.

    If g is the gradient of a step at the parameters w, the optimizer gets the gradient of the same batches at w + rho *
    g / |g|, where |g| is the global L2 norm. A step costs two forward and two backward passes. SAM works with any
    optimizer; gradient clipping applies to the second gradient. Recorded losses are computed at w.

    Args:
        rho: radius of the neighborhood, in units of the parameters, e.g. 0.05.
        adaptive: scale the neighborhood by the magnitude of each weight (ASAM, Kwon et al. 2021): the gradient is taken
            at w + rho * w**2 * g / | |w| * g |. This needs a larger radius, e.g. 0.5.

    Example:
        >>> from onnxtrain.trainer import SAM
        >>> SAM(rho=0.1).rho
        0.1
    """

    def __init__(self, rho: float = 0.05, adaptive: bool = False) -> None:
        if isinstance(rho, bool) or not isinstance(rho, int | float) or not 0 <= rho < math.inf:
            raise InputError(f"SAM: rho must be a finite number >= 0, received {rho!r}.")
        self.rho = float(rho)
        self.adaptive = adaptive

    def on_gradients(self, trainer: Trainer, gradients: StepGradients) -> None:
        """Replaces the gradients with the gradients at the worst nearby point."""
        # Through the store: `trainer.parameters` returns bfloat16 as raw bits.
        store = trainer.state._store
        values = {
            name: widen(store.parameters[name].read(), store.parameters[name].dtype)
            for name in store.trainable
        }
        directions = gradients.values()
        scaled = {name: abs(values[name]) * g if self.adaptive else g for name, g in directions.items()}
        # Summed in float64: squares of float32 gradients above 2e19 overflow.
        norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in scaled.values()))
        step = self.rho / (norm + _EPSILON)
        gradients.recompute_at(
            {
                name: values[name] + g.dtype.type(step) * (values[name] ** 2 * g if self.adaptive else g)
                for name, g in directions.items()
            }
        )
