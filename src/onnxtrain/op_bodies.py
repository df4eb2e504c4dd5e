"""Registry of function bodies that define nonstandard ops, e.g. com.microsoft's, in terms of standard ops.

Gradient rules (`autodiff`) register the bodies; shape inference and inlining (`passes`) look them up. The first look-up
imports the rules, so that its result does not depend on what the program has imported before. No other module below
`autodiff` imports from it; pyproject.toml lists this import as an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import onnxtrain._desk  # noqa: F401  # isort: skip
import onnx_ir as ir

OpKey = tuple[str, str]
"""Domain and name of an op, e.g. ("com.microsoft", "MultiHeadAttention")."""

MakeShapes = Callable[[ir.Node, int], ir.Function]
"""Returns, for a node and an opset, a function whose outputs have the shapes and dtypes of the node's outputs."""

MakeBody = Callable[..., ir.Function]
"""Returns, for a node and an opset, a function that computes the node's outputs. An optional third argument is the
function table of a model, to which the body can add functions that it calls."""


@dataclass
class _Registry:
    """Functions by op.

    Attributes:
        bodies: the bodies.
        shapes: functions with the same output shapes.
        without_kernel: ops with a body that ONNX Runtime has no kernel for.
        gradients: ops with a gradient that a user registered; True, or False if it was dropped again.
    """

    bodies: dict[OpKey, MakeBody] = field(default_factory=dict)
    shapes: dict[OpKey, MakeShapes] = field(default_factory=dict)
    without_kernel: set[OpKey] = field(default_factory=set)
    gradients: dict[OpKey, bool] = field(default_factory=dict)


_GLOBAL = _Registry()
# A context variable, so that local bodies are invisible to other threads.
_LOCAL: ContextVar[tuple[_Registry, ...]] = ContextVar("onnxtrain local bodies", default=())


@contextmanager
def local_bodies() -> Iterator[None]:
    """Context manager: what :func:`register_own_body` registers in its block holds inside of it only."""
    token = _LOCAL.set((*_LOCAL.get(), _Registry()))
    try:
        yield
    finally:
        _LOCAL.reset(token)


def register_own_body(key: OpKey, make: MakeBody, *, has_kernel: bool, override: bool = False) -> bool:
    """Registers the body of a user's op, inside of the innermost :func:`local_bodies` block if there is one.

    Args:
        key: domain and name of the op.
        make: as for :func:`register_body`.
        has_kernel: True if ONNX Runtime has a kernel for the op. Otherwise the body replaces it in every model that
            is run.
        override: True to replace a registered body.

    Returns:
        False if the op has a body already, and `override` is False.
    """
    layers = _LOCAL.get()
    registry = layers[-1] if layers else _GLOBAL
    if not override and key in (registry.bodies if layers else op_bodies()):
        return False
    registry.bodies[key] = make
    registry.without_kernel.discard(key)
    if not has_kernel:
        registry.without_kernel.add(key)
    return True


def ops_without_kernel() -> set[OpKey]:
    """Returns the ops that have no kernel in ONNX Runtime, so that their bodies are run."""
    result = set(_GLOBAL.without_kernel)
    for layer in _LOCAL.get():
        result = (result - layer.bodies.keys()) | layer.without_kernel
    return result


def note_own_gradient(key: OpKey, present: bool) -> None:
    """Notes that a user has registered a gradient of an op, or has dropped it again."""
    layers = _LOCAL.get()
    (layers[-1] if layers else _GLOBAL).gradients[key] = present


def has_own_gradient(key: OpKey) -> bool:
    """True if a user has registered a gradient of the op, e.g. of a function that a model defines."""
    for registry in (*reversed(_LOCAL.get()), _GLOBAL):
        if key in registry.gradients:
            return registry.gradients[key]
    return False


def register_body(key: OpKey, make: MakeBody) -> None:
    """Registers the function body of a nonstandard op, for shape inference and for inlining.

    Args:
        key: domain and name of the op.
        make: returns the body for a node and an opset. `make` replaces a function registered earlier for the op.
    """
    _GLOBAL.bodies[key] = make


def register_shapes(key: OpKey, make: MakeShapes, *, local: bool = False) -> None:
    """Registers a function from which shape inference derives the output shapes and dtypes of an op.

    Args:
        key: domain and name of the op.
        make: returns the function for a node and an opset. `make` takes precedence over the op's body, and replaces a
            function that was registered earlier for the op.
        local: True to register it inside of the innermost :func:`local_bodies` block only, if there is one.
    """
    layers = _LOCAL.get() if local else ()
    (layers[-1] if layers else _GLOBAL).shapes[key] = make


def op_bodies() -> Mapping[OpKey, MakeBody]:
    """Maps each op with a registered body to the function that makes the body."""
    _import_rules()
    result = _GLOBAL.bodies
    for layer in _LOCAL.get():
        result = result | layer.bodies
    return result


def op_shapes() -> Mapping[OpKey, MakeShapes]:
    """Maps each registered op to the function from which shape inference derives its output shapes.

    A function from :func:`register_shapes` takes precedence over the op's body.
    """
    _import_rules()
    result = _GLOBAL.bodies | _GLOBAL.shapes
    for layer in _LOCAL.get():
        result = result | layer.bodies | layer.shapes
    return result


def _import_rules() -> None:
    # Imported here, not above: the rules import `passes`, which imports this module.
    import onnxtrain.autodiff.rules  # noqa: F401
