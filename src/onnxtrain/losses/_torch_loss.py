"""Defines `TorchLoss`, a loss that is a Python function of PyTorch tensors.

PyTorch is not imported here: `onnxtrain.ortmodule` traces the function when the loss is appended to a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphBuildError, MissingPackageError

from ._base import Reduction
from ._function import Argument, FunctionLoss, TargetTypes


class TorchLoss(FunctionLoss):
    """A Python function of PyTorch tensors, or a criterion such as an `nn.Module`, as a loss.

    The function is traced once into ONNX ops, which are trained with onnxtrain's own gradients; PyTorch is not needed
    afterwards. On random inputs, value and gradient are compared with those of PyTorch, for two batch sizes: a
    difference is an error.

    Arguments that have the name of an output of the model receive this output. If no argument has such a name, the
    first arguments are the outputs, in order. The other arguments are targets, except those with a default. Dtype and
    shape of a target that is not declared are the first of these that the function accepts, for scores [N, C, ...]:
    int64 labels of shape [N, ...] or, without the last axis, [N, C, ...]; floats of the shape of the scores; int64 of
    that shape; floats of shape [N]. Integers are chosen only if the function refuses floats of the same shape.

    The function returns a floating-point tensor: one number, or one per sample, [N]; only the latter can be trained
    with sample weights or class weights. It must not depend on values of tensors in Python (`if`, `.item()`,
    `.numpy()`), modify its arguments, or draw random numbers. Tensors that it reads, e.g. weights of classes, become
    constants; if they require a gradient, that is an error.

    Args:
        function: the function, e.g. `lambda scores, y: F.cross_entropy(scores, y)`, or a `torch.nn.Module`.
        targets: dtype and shape of targets by name, e.g. {"y": ("int64", ["N"])}.
        reduction: how one value per sample becomes the loss of a batch: "mean" or "sum". For a function that returns
            one number: whether it is a mean or a sum over the samples of the batch.

    Raises:
        GraphBuildError: the function has no fixed list of arguments, or a declaration is not a dtype and a shape.
    """

    def __init__(
        self, function: Callable[..., Any], targets: TargetTypes | None = None, reduction: Reduction = "mean"
    ) -> None:
        if not callable(function):
            raise GraphBuildError(
                f"making TorchLoss: received {function!r}; pass a function of PyTorch tensors"
            )
        function = not_compiled(function)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "_parameters", _parameters(function))
        super().__init__(targets, reduction)

    function: Callable[..., Any]
    _parameters: tuple[str, ...]

    @property
    def parameters(self) -> Sequence[str]:
        return self._parameters

    @property
    def called(self) -> str:
        return _name(self.function)

    def _target_types(self, of_model: Sequence[Argument], names: Sequence[str]) -> list[Argument]:
        found: list[Argument] = _tracing().guess_targets(
            self.function, self.called, self.parameters, of_model, names
        )
        return found

    def _model_of(self, arguments: Sequence[Argument]) -> ir.Model:
        model: ir.Model = _tracing().trace_loss(self.function, self.called, arguments)
        return model


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or module that `torch.compile` has wrapped; other functions are returned unchanged."""
    # Tried on targets of several shapes, a compiled function would be compiled for each, and PyTorch logs each failure.
    module = type(function).__name__ == "OptimizedModule"
    name = "_orig_mod" if module else "_torchdynamo_orig_callable"
    original: Callable[..., Any] | None = getattr(function, name, None)
    # `functools.wraps(compiled)` copies the attribute to a function that may compute something else.
    if original is not None and (module or getattr(function, "__wrapped__", None) is original):
        return original
    return function


def _tracing() -> Any:
    """Imports the module that traces functions.

    Raises:
        MissingPackageError: PyTorch is not installed.
    """
    try:
        from onnxtrain.ortmodule import _traced_loss
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackageError(
            "A loss that is a Python function is traced with PyTorch, which is not installed: pip install "
            "'onnxtrain[torch]'. Without PyTorch, pass an onnxscript function or a .onnx file."
        ) from error
    return _traced_loss


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    if name == "<lambda>":
        return "the lambda"
    return f"the function '{name}'" if name else f"the criterion {type(function).__name__}"


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the required parameters of a function, or of the forward method of a module.

    Raises:
        GraphBuildError: the signature is unknown or has `*args`.
    """
    doing = f"making TorchLoss of {_name(function)}"
    forward = getattr(function, "forward", None)
    try:
        signature = inspect.signature(forward if callable(forward) else function)
    except (TypeError, ValueError) as error:
        raise GraphBuildError(
            f"{doing}: its arguments are unknown ({error}); wrap it: lambda scores, y: f(scores, y)"
        ) from error
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise GraphBuildError(
            f"{doing}: it takes {signature}, so that the number of its arguments is unknown; wrap it: lambda scores, "
            "y: f(scores, y)"
        )
    names = tuple(p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if keyword or not names:
        raise GraphBuildError(
            f"{doing}: it takes {signature}; a loss takes the outputs of the model and the targets by position, "
            "e.g. def loss(scores, y)"
        )
    return names
