"""Reverse-mode automatic differentiation of ONNX graphs."""

import onnxtrain._desk  # noqa: F401  # isort: skip

from . import rules as _rules  # registers every rule
from ._activity import active_values
from ._coverage import OpCoverage, coverage
from ._differentiate import add_gradients, append_outputs, differentiate, expand_path
from ._driver import pull_back
from ._node import NodeView, Signature
from ._registry import defvjp, local_rules, nondifferentiable, not_yet, vjp

__all__ = [
    "NodeView",
    "OpCoverage",
    "Signature",
    "active_values",
    "add_gradients",
    "append_outputs",
    "coverage",
    "defvjp",
    "differentiate",
    "expand_path",
    "local_rules",
    "nondifferentiable",
    "not_yet",
    "pull_back",
    "vjp",
]

del _rules
