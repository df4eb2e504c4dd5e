"""Defines `ModelLoss`, a loss that is an ONNX model or an onnxscript function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, TypeGuard, runtime_checkable

import onnx
import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.errors import GraphBuildError, OnnxTrainError
from onnxtrain.passes import ModelSource, canonicalize, load_model

from ._base import Reduction
from ._function import Argument, FunctionLoss, TargetTypes


@runtime_checkable
class OnnxscriptFunction(Protocol):
    """A function decorated with `onnxscript.script()`."""

    name: str

    def to_model_proto(self) -> onnx.ModelProto:
        """Returns the function as a model."""

    def to_function_proto(self) -> onnx.FunctionProto:
        """Returns the function as a model-local function."""


class ModelLoss(FunctionLoss):
    """An ONNX model as a loss: a `.onnx` file, a `ModelProto`, or an onnxscript function.

    Inputs that have the name of an output of the trained model receive this output. If no input has such a name, the
    first inputs are the outputs, in order. The other inputs are targets, with the dtype and shape that the model
    declares. The model has one output, a floating-point tensor: one number, or one per sample, [N]; only the latter can
    be trained with sample weights or class weights. Its weights are constants.

    Args:
        model: path of the `.onnx` file, `ModelProto`, `onnx_ir.Model`, or a function decorated with
            `onnxscript.script()`. A file is read at once.
        targets: dtype and shape of targets by name, for an onnxscript function without annotations, e.g.
            {"y": ("int64", ["N"])}.
        reduction: how one value per sample becomes the loss of a batch: "mean" or "sum". For a model that returns one
            number: whether it is a mean or a sum over the samples of the batch.

    Raises:
        ModelError: the model cannot be loaded.
        GraphBuildError: the model has no inputs, or not exactly one output.
    """

    def __init__(
        self,
        model: ModelSource | OnnxscriptFunction,
        targets: TargetTypes | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        name = ""
        if isinstance(model, str | os.PathLike):
            name = f"the model '{os.fspath(model)}'"
        elif is_onnxscript(model):
            name = f"the onnxscript function '{model.name}'"
        object.__setattr__(self, "_name", name or "the model")
        object.__setattr__(self, "_model", _loaded(model))
        graph = self._model.graph
        # Initializers may be inputs as well, with these values as defaults.
        names = tuple(str(value.name) for value in graph.inputs if value.name not in graph.initializers)
        object.__setattr__(self, "_parameters", names)
        super().__init__(targets, reduction)
        if len(graph.outputs) != 1 or not names:
            raise self._error(
                f"{self.called} has {len(names)} inputs and {len(graph.outputs)} outputs; a loss takes the outputs of "
                "the trained model and the targets, and returns one tensor"
            )

    _name: str
    _model: ir.Model
    _parameters: tuple[str, ...]

    @property
    def parameters(self) -> Sequence[str]:
        return self._parameters

    @property
    def called(self) -> str:
        return self._name

    def _target_types(self, of_model: Sequence[Argument], names: Sequence[str]) -> list[Argument]:
        batch = next((entry.dims[0] for entry in of_model if entry.dims), None)
        inputs = {str(value.name): value for value in self._model.graph.inputs}
        # Names of dimensions of the loss model stand for those of the trained model.
        known: dict[str, int | str | None] = {}
        for entry in of_model:
            for inner, outer in zip(inputs[entry.name].shape or (), entry.dims, strict=False):
                if isinstance(inner, ir.SymbolicDim) and inner.value is not None:
                    known.setdefault(inner.value, outer)
        found = []
        for name in names:
            value = inputs[name]
            if value.dtype is None or value.shape is None:
                raise self._error(
                    f"the dtype and shape of the target {name!r} of {self.called} are unknown; declare them: "
                    f"ModelLoss(..., targets={{{name!r}: ('int64', ['N'])}})"
                )
            dims = [
                dim if isinstance(dim, int) else known.get(str(dim.value), dim.value) for dim in value.shape
            ]
            if dims and not isinstance(dims[0], int):
                dims[0] = batch
            found.append(Argument(name, value.dtype, tuple(dims), False))
        return found

    def _model_of(self, arguments: Sequence[Argument]) -> ir.Model:
        model = self._model.clone()
        inputs = {str(value.name): value for value in model.graph.inputs}
        for entry in arguments:
            value = inputs[entry.name]
            self._check_argument(entry, value)
            value.type = value.type or ir.TensorType(entry.dtype)
            value.shape = ir.Shape(entry.dims) if value.shape is None else value.shape
        try:
            model = canonicalize(model)
        except OnnxTrainError as error:
            raise self._error(f"{self.called} cannot be used: {error}") from error
        result = model.graph.outputs[0]
        dims = static_dims(result)
        if dims is None or len(dims) > 1 or result.dtype is None or not result.dtype.is_floating_point():
            raise self._error(
                f"{self.called} returns {result.dtype} {result.shape}; a loss is floating point, one number of shape "
                "[] or one per sample, [N]"
            )
        return model

    def _check_argument(self, entry: Argument, value: ir.Value) -> None:
        """Raises GraphBuildError if an argument does not fit an input of the loss model."""
        dims, declared = entry.dims, value.shape
        clash = declared is not None and (
            len(declared) != len(dims)
            or any(
                isinstance(a, int) and isinstance(b, int) and a != b
                for a, b in zip(declared, dims, strict=True)
            )
        )
        # Floats are cast, e.g. float16 scores, which losses receive in float32.
        both_float = (
            value.dtype is not None and value.dtype.is_floating_point() and entry.dtype.is_floating_point()
        )
        if clash or not (value.dtype in (None, entry.dtype) or both_float):
            raise self._error(
                f"the input {entry.name!r} of {self.called} is {value.dtype} {declared}, but receives {entry.dtype} "
                f"{ir.Shape(dims)}"
            )


def is_onnxscript(value: object) -> TypeGuard[OnnxscriptFunction]:
    """True if a value is a function decorated with `onnxscript.script()`."""
    return isinstance(value, OnnxscriptFunction)


def _loaded(source: ModelSource | OnnxscriptFunction) -> ir.Model:
    if is_onnxscript(source):
        return _of_onnxscript(source)
    return load_model(source)  # type: ignore[arg-type]


def _of_onnxscript(source: OnnxscriptFunction) -> ir.Model:
    try:
        proto = source.to_model_proto()
    # onnxscript raises errors of many types for functions that it cannot convert.
    except Exception as error:
        raise GraphBuildError(
            f"making ModelLoss: onnxscript cannot convert {source.name!r} to a model: {error}"
        ) from error
    return ir.from_proto(proto)
