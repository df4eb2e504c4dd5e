"""Registry of nonstandard ops that are defined by standard ops, e.g. those of com.microsoft.

Shape inference and inlining (`passes`) look up an op here; gradient rules (`autodiff`) register it. The first look-up
imports the rules, so that its result does not depend on what the program has imported before. This is the only import
from a lower package into `autodiff`, and pyproject.toml lists it as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnxtrain._desk  # noqa: F401  # isort: skip
import onnx_ir as ir

OpKey = tuple[str, str]
"""Domain and name of an op, e.g. ("com.microsoft", "MultiHeadAttention")."""

MakeShapes = Callable[[ir.Node, int], ir.Function]
"""Returns, for a node and an opset, a function whose outputs have the shapes and dtypes of the node's outputs."""

MakeBody = Callable[..., ir.Function]
"""Returns, for a node and an opset, a function that computes the node's outputs. An optional third argument is the
function table of a model, to which the body can add functions that it calls."""

_BODIES: dict[OpKey, MakeBody] = {}
_SHAPES: dict[OpKey, MakeShapes] = {}


def register_body(key: OpKey, make: MakeBody) -> None:
    """Registers the body of an op, replacing an earlier one."""
    _BODIES[key] = make


def register_shapes(key: OpKey, make: MakeShapes) -> None:
    """Registers the shapes of an op that has a gradient rule but no body, replacing earlier ones."""
    _SHAPES[key] = make


def op_bodies() -> Mapping[OpKey, MakeBody]:
    """Returns the bodies of all registered ops."""
    _import_rules()
    return _BODIES


def op_shapes() -> Mapping[OpKey, MakeShapes]:
    """Returns the functions that compute the output shapes of registered ops: `register_shapes` functions or bodies."""
    _import_rules()
    return {**_BODIES, **_SHAPES}


def _import_rules() -> None:
    # Imported here, not above: the rules import `passes`, which imports this module.
    import onnxtrain.autodiff.rules  # noqa: F401
