"""Provides the normalization layers of darts, a forecasting library, as PyTorch modules that export well.

Constructors, parameter names, state dicts, values and gradients match `darts.models.components.layer_norm_variants`.
`ORTModule` and `generate_artifacts` run each layer as one op, and its gradient as one op (docs/reference/nn.md).
"""

from __future__ import annotations

# Must be the first import: if PyTorch is not installed, the error then says what to install.
import onnxtrain._pytorch  # noqa: F401  # isort: skip

from onnxtrain.nn._export import stop_gradient
from onnxtrain.nn._layer_norm import LayerNorm, LayerNormNoBias
from onnxtrain.nn._rin_norm import RINorm
from onnxtrain.nn._rms_norm import RMSNorm

__all__ = ["LayerNorm", "LayerNormNoBias", "RINorm", "RMSNorm", "stop_gradient"]
