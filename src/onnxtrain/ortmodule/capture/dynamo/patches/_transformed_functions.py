"""Breaks the graph where a `torch.func` transform meets a custom autograd function.

Inside `vmap`, `grad`, `jvp` and `jacrev`, Dynamo (PyTorch 2.13) captures only the function's forward, and loses
its backward or jvp (https://github.com/pytorch/pytorch/issues/193279, 192985).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import AutogradFunctionVariable, graph_break, peek_interpreter_stack
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


def _break_inside_transforms() -> Callable[[], None]:
    """Patches Dynamo to break the graph at custom autograd functions inside `torch.func` transforms.

    Returns:
        The undo function.
    """
    before = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if peek_interpreter_stack() is not None:
            graph_break(
                gb_type="Custom autograd function inside a transform of torch.func",
                context=str(self.fn_cls),
                explanation="Dynamo would lose the backward of the function.",
                hints=["Call the function outside the transform."],
            )
        return before(self, *args, **kwargs)

    return replace((AutogradFunctionVariable, "call_apply", call_apply))


transformed_functions = ProcessWide(_break_inside_transforms)
