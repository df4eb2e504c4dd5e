"""Reverse-mode automatic differentiation of ONNX graphs."""

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.passes import reads

from . import rules as _rules  # registers every rule
from ._activity import active_values
from ._bodies import defbody
from ._coverage import OpCoverage, coverage, coverage_of
from ._differentiate import (
    add_gradients,
    append_outputs,
    check_names,
    check_scalar,
    differentiable_values,
    differentiate,
    expand_path,
    find_values,
    typed_values,
    without_gradient,
)
from ._driver import pull_back
from ._node import NodeView, Signature
from ._own_ops import op_signature, register_body, register_gradient
from ._registry import defvjp, local_rules, nondifferentiable, not_yet, vjp
from ._straight_through import straight_through_rules

__all__ = [
    "NodeView",
    "OpCoverage",
    "Signature",
    "active_values",
    "add_gradients",
    "append_outputs",
    "check_names",
    "check_scalar",
    "coverage",
    "coverage_of",
    "defbody",
    "defvjp",
    "differentiable_values",
    "differentiate",
    "expand_path",
    "find_values",
    "local_rules",
    "nondifferentiable",
    "not_yet",
    "op_signature",
    "pull_back",
    "reads",
    "register_body",
    "register_gradient",
    "straight_through_rules",
    "typed_values",
    "vjp",
    "without_gradient",
]

del _rules
