"""Leaves an `assert` about a data-dependent number to Python, between two graphs.

For `assert int(mask.sum()) > 2` Dynamo (PyTorch 2.13) assumes the condition, draws conclusions from it, and leaves the
check to the compiler of the graph, without the user's message: `torch.compile(backend="eager")` checks nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, statically_known_true

from onnxtrain.ortmodule._torch import symbolic_convert
from onnxtrain.ortmodule.capture._nodes import depends_on_data
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


class AssertedNumber(GuardOnDataDependentSymNode):
    """A capture has reached an `assert` about a data-dependent number, e.g. `assert int(mask.sum()) > 2`."""

    # Dynamo (PyTorch 2.13) re-raises exceptions of this base class, and wraps all others.

    def __init__(self, condition: torch.SymBool) -> None:
        super().__init__(condition.node.expr, f"assert {condition}")


def _raise_at_asserts() -> Callable[[], None]:
    """Patches Dynamo to raise AssertedNumber at asserts about data-dependent numbers; returns the undo function."""
    before = symbolic_shapes.expect_true

    def expect_true(a: bool | torch.SymBool, skip: int = 0) -> bool:
        in_assert = sys._getframe(1).f_code.co_filename == symbolic_convert.__file__
        if in_assert and isinstance(a, torch.SymBool) and depends_on_data(a) and not statically_known_true(a):
            raise AssertedNumber(a)
        return before(a, skip + 1)

    return replace((symbolic_shapes, "expect_true", expect_true))


asserted_numbers = ProcessWide(_raise_at_asserts)
"""Context manager in which captures raise AssertedNumber at an `assert` about a data-dependent number. The caller must
then capture again, with different settings."""
