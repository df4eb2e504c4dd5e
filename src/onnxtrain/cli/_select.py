"""Parameters by patterns, as the command line names them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.errors import GraphBuildError

__all__ = ["float_parameters", "match"]


def float_parameters(model: ir.Model) -> list[str]:
    """Returns the names of the floating-point initializers of a model."""
    return [
        name
        for name, value in model.graph.initializers.items()
        if value.dtype is not None and value.dtype.is_floating_point()
    ]


def match(names: Sequence[str], patterns: Sequence[str] | None) -> list[str] | None:
    """Returns the names that match any pattern (`*`, `?`, `[...]`); None for no patterns.

    >>> match(["conv.w", "conv.b", "fc.w"], ["conv.*"])
    ['conv.w', 'conv.b']

    Raises:
        GraphBuildError: a pattern matches nothing.
    """
    if not patterns:
        return None
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise GraphBuildError(f"no parameter matches '{pattern}'; the parameters are {shown or 'none'}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
