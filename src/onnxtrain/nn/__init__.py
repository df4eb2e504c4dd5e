"""Offers the normalisation layers of darts, a library of forecasting models, as PyTorch modules that export well.

Constructors, parameter names, state dicts, values and gradients are those of
`darts.models.components.layer_norm_variants`. `ORTModule` and `generate_artifacts` run each layer as one op, and its
gradient as one op. docs/layer-norms.md has the formulas.
"""

from __future__ import annotations

# PyTorch is no dependency of the package: it is needed by those who export from it.
try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "importing onnxtrain.nn: PyTorch is not installed; pip install 'onnxtrain[torch]'", name="torch"
    ) from error

from onnxtrain.nn._export import stop_gradient
from onnxtrain.nn._layer_norm import LayerNorm, LayerNormNoBias
from onnxtrain.nn._rin_norm import RINorm
from onnxtrain.nn._rms_norm import RMSNorm

__all__ = ["LayerNorm", "LayerNormNoBias", "RINorm", "RMSNorm", "stop_gradient"]
