"""Chains of standard ops that become one composite op, with one for the gradient; one pass per file.

These are passes that know `onnxtrain.functions`, which `onnxtrain.passes` does not.
"""

from __future__ import annotations

from onnxtrain.fusion.instance_norm import RINormFusionPass
from onnxtrain.fusion.rms_norm import RMSNormFusionPass

__all__ = ["RINormFusionPass", "RMSNormFusionPass"]
