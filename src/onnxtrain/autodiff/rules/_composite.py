"""Registers rules of composite ops: one registration per function, i.e. per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxtrain.autodiff._node import Signature
from onnxtrain.autodiff._registry import RuleFunction, vjp
from onnxtrain.functions import DOMAIN, CompositeOp


def composite_vjp(
    composite: CompositeOp,
    names: Sequence[str],
    wrt: Sequence[str] = (),
    inputs: Sequence[str] = (),
    **settings: Any,
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the decorated function as the rule of a composite op, for all its dtypes.

    Args:
        composite: the op.
        names: names of the outputs, e.g. ("y", "log_sum").
        wrt: names of the inputs that can have a cotangent. Default: all inputs.
        inputs: names by which the rule accesses the inputs, for rules shared with a standard op. Default: the
            composite's own names.
        settings: passed to :func:`vjp`, e.g. `outputs` and `saves`.
    """
    signature = Signature(tuple(inputs or composite.inputs), tuple(names))

    def register(function: RuleFunction) -> RuleFunction:
        for name in composite.function_names:
            vjp(name, domain=DOMAIN, wrt=wrt or signature.inputs, signature=signature, **settings)(function)
        return function

    return register
