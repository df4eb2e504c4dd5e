"""Registry of function bodies that define nonstandard ops, e.g. com.microsoft's, in terms of standard ops.

Gradient rules (`autodiff`) register the bodies; shape inference and inlining (`passes`) look them up. The first look-up
imports the rules, so that its result does not depend on what the program has imported before. No other module below
`autodiff` imports from it; pyproject.toml lists this import as an exception.
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
    """Registers the function body of a nonstandard op, for shape inference and for inlining.

    Args:
        key: domain and name of the op.
        make: returns the body for a node and an opset. `make` replaces a function registered earlier for the op.
    """
    _BODIES[key] = make


def register_shapes(key: OpKey, make: MakeShapes) -> None:
    """Registers a function from which shape inference derives the output shapes and dtypes of an op.

    Args:
        key: domain and name of the op.
        make: returns the function for a node and an opset. `make` takes precedence over the op's body, and replaces a
            function that was registered earlier for the op.
    """
    _SHAPES[key] = make


def op_bodies() -> Mapping[OpKey, MakeBody]:
    """Maps each op with a registered body to the function that makes the body."""
    _import_rules()
    return _BODIES


def op_shapes() -> Mapping[OpKey, MakeShapes]:
    """Maps each registered op to the function from which shape inference derives its output shapes.

    A function from :func:`register_shapes` takes precedence over the op's body.
    """
    _import_rules()
    return {**_BODIES, **_SHAPES}


def _import_rules() -> None:
    # Imported here, not above: the rules import `passes`, which imports this module.
    import onnxtrain.autodiff.rules  # noqa: F401
