"""Defines the base class of losses that are functions of named arguments: outputs of the model, and targets.

Also copies the ONNX model of such a function into another graph.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.emitter import Emitter, find_value, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes import (
    ModelSource,
    apply_workarounds,
    canonicalize,
    inline_functions,
    load_model,
    mark_constant,
    save_model,
)

from ._base import Reduction, TargetSpec
from ._joint import JointLoss

TargetTypes = Mapping[str, tuple[Any, Sequence[int | str | None]]]
"""Dtype and shape of targets by name, e.g. {"y": ("int64", ["N"])}; the first dimension is the batch."""


@dataclass(frozen=True)
class Argument:
    """An argument of a loss function.

    Attributes:
        name: its name, e.g. "scores".
        dtype: its dtype, e.g. FLOAT.
        dims: its dimensions, e.g. ("batch", 10).
        of_model: True if it is a value of the model, False if it is a target.
    """

    name: str
    dtype: ir.DataType
    dims: tuple[int | str | None, ...]
    of_model: bool


class FunctionLoss(JointLoss):
    """Base class of losses that are functions. Arguments named like outputs of the model are these outputs.

    If no argument has such a name, the first arguments are the outputs, in order. All others are targets.

    Args:
        targets: dtype and shape of targets by name, e.g. {"y": ("int64", ["N"])}. A dimension may be a name of a
            dimension of the model's outputs; the first one is the batch.
        reduction: of one value per sample: "mean" or "sum". For a function that returns one number, how that number
            grows with the batch: "mean" if it is a mean over the samples, "sum" if it is a sum.
    """

    # The functions may be anything, so equality is identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, targets: TargetTypes | None, reduction: Reduction) -> None:
        object.__setattr__(self, "reduction", reduction)
        object.__setattr__(self, "_declared", {})
        super().__post_init__()
        declared = {str(name): self._declaration(name, entry) for name, entry in dict(targets or {}).items()}
        object.__setattr__(self, "_declared", declared)
        unknown = set(declared) - set(self.parameters)
        if unknown:
            raise self._error(
                f"targets has {', '.join(map(repr, sorted(unknown)))}, but {self.called} takes "
                f"{', '.join(self.parameters) or 'no arguments'}"
            )

    _declared: Mapping[str, tuple[ir.DataType, tuple[int | str | None, ...]]]

    @property
    @abstractmethod
    def parameters(self) -> Sequence[str]:
        """Names of the function's arguments, in order."""

    @property
    @abstractmethod
    def called(self) -> str:
        """Name of the function in messages, e.g. "the function 'loss'"."""

    @abstractmethod
    def _target_types(self, of_model: Sequence[Argument], names: Sequence[str]) -> list[Argument]:
        """Returns the arguments `names`, for which there is no declaration; `of_model` are those of the model."""

    @abstractmethod
    def _model_of(self, arguments: Sequence[Argument]) -> ir.Model:
        """Returns the function as a model with one input per argument and one output, the loss: [] or [N]."""

    def chosen(self, outputs: Sequence[ir.Value], *, named: bool) -> tuple[list[ir.Value], list[ir.Value]]:
        names = [str(value.name) for value in outputs]
        shown = f"{self.called} takes {', '.join(self.parameters)}, and the model has the outputs {', '.join(names)}"
        remedy = (
            f"Name the arguments like outputs, declare the targets ({type(self).__name__}(..., "
            f"targets={{'y': ('int64', ['N'])}})), or name the outputs in {argument('loss_input_names')}"
        )
        values = list(outputs)
        free = [name for name in self.parameters if name not in self._declared]
        if not named:
            same = [value for value in values if value.name in free]
            if same:
                values = same
            elif self._declared:
                values = values[: len(free)]
                if len(outputs) != len(free):
                    raise self._error(
                        f"{shown}, but without the declared targets it takes {', '.join(free) or 'none'}. {remedy}"
                    )
            elif len(values) > 1 and len(free) <= len(values):
                raise self._error(f"{shown}: which of them are targets is ambiguous. {remedy}")
        if not free or len(values) > len(free):
            raise self._error(f"{shown}: it takes too few. {remedy}")
        assigned = self._assigned(values)
        return [assigned[name] for name in self.parameters if name in assigned], []

    def _assigned(self, values: Sequence[ir.Value]) -> dict[str, ir.Value]:
        """Assigns values of the model to arguments: by name, then the others to the first free arguments."""
        free = [name for name in self.parameters if name not in self._declared]
        assigned = {str(value.name): value for value in values if value.name in free}
        left = iter([name for name in free if name not in assigned])
        return assigned | {next(left): value for value in values if value.name not in assigned}

    def _arguments(self, scores: Sequence[ir.Value]) -> list[Argument]:
        """Returns the function's arguments in order, with the dtypes and shapes of these outputs of the model."""
        known: dict[str, Argument] = {}
        for name, value in self._assigned(scores).items():
            dims, dtype = self._dims_of(value), value.dtype
            assert dtype is not None
            # The function computes in float32, as other losses of float16 and bfloat16 scores do.
            if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                dtype = ir.DataType.FLOAT
            known[name] = Argument(name, dtype, dims, True)
        of_model = list(known.values())
        batch = next((entry.dims[0] for entry in of_model if entry.dims), None)
        for name, (dtype, dims) in self._declared.items():
            # The first dimension is the batch, whatever it is called.
            first = () if not dims else (batch if not isinstance(dims[0], int) else dims[0],)
            known[name] = Argument(name, dtype, (*first, *dims[1:]), False)
        left = [name for name in self.parameters if name not in known]
        known |= {entry.name: entry for entry in self._target_types(of_model, left)} if left else {}
        return [known[name] for name in self.parameters]

    def _dims_of(self, value: ir.Value) -> tuple[int | str | None, ...]:
        # Integers of the model, e.g. its attention mask, are arguments, too.
        if value.dtype is not None and not value.dtype.is_floating_point() and value.shape is not None:
            return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        return self._scores_dims(value)

    def joint_targets(self, scores: Sequence[ir.Value]) -> list[TargetSpec]:
        return [
            TargetSpec(entry.name, entry.dtype, entry.dims)
            for entry in self._arguments(scores)
            if not entry.of_model
        ]

    def _joint_terms(self, op: Emitter, scores: Sequence[ir.Value], targets: Sequence[ir.Value]) -> ir.Value:
        arguments = self._arguments(scores)
        model = self._model_of(arguments)
        values = self._assigned(scores)
        names = [entry.name for entry in arguments if not entry.of_model]
        values |= dict(zip(names, targets, strict=True))
        batch = next((entry.dims[0] for entry in arguments if entry.of_model and entry.dims), None)
        return copy_model(op, model, [values[name] for name in self.parameters], batch)

    def save(
        self,
        path: str | os.PathLike[str],
        model: ModelSource,
        *,
        loss_input_names: Sequence[str] | None = None,
    ) -> None:
        """Writes the loss of a model as a `.onnx` file, from which :class:`ModelLoss` or `--loss FILE` reads it.

        Args:
            path: the file to write, e.g. "my_loss.onnx". Its inputs are the arguments of the function.
            model: the model that is to be trained, whose outputs are arguments.
            loss_input_names: names of the values of the model that are the first arguments, as for `Trainer`.

        Raises:
            GraphBuildError: the function does not fit the outputs of the model, or cannot be converted.
            ModelError: the model cannot be read, or the file cannot be written.
        """
        graph = canonicalize(load_model(model)).graph
        values = list(graph.outputs)
        if loss_input_names is not None:
            found = {name: find_value(graph, name) for name in loss_input_names}
            missing = [name for name, value in found.items() if value is None]
            if missing:
                names = ", ".join(str(value.name) for value in graph.outputs)
                raise self._error(
                    f"{', '.join(missing)} are not values of the model; its outputs are {names}"
                )
            values = [value for value in found.values() if value is not None]
        scores, _ = self.chosen(values, named=loss_input_names is not None)
        arguments = self._arguments(scores)
        loss = apply_workarounds(inline_functions(self._model_of(arguments)))
        for value in (*loss.graph.inputs, *(result for node in loss.graph for result in node.outputs)):
            if value.name in self.parameters or value.name == "loss":
                value.name = f"{value.name}/inner"
        for entry, value in zip(arguments, loss.graph.inputs, strict=True):
            value.name, value.shape = entry.name, ir.Shape(entry.dims)
        loss.graph.outputs[0].name = "loss"
        save_model(loss, path)

    def _declaration(self, name: object, entry: object) -> tuple[ir.DataType, tuple[int | str | None, ...]]:
        """Returns the dtype and dimensions of a declared target.

        Raises:
            GraphBuildError: the declaration is not a dtype and a shape.
        """
        dtype: Any
        shape: Any
        try:
            dtype, shape = entry  # type: ignore[misc]
            # A dtype of PyTorch is "torch.int64" as text.
            text = str(dtype).removeprefix("torch.") if "torch." in str(dtype) else dtype
            kind = ir.DataType.from_numpy(np.dtype(text))
            dims = tuple(shape)
            valid = not isinstance(shape, str) and all(
                dim is None or isinstance(dim, str) or (type(dim) is int and dim > 0) for dim in dims
            )
        except (TypeError, ValueError) as error:
            raise self._bad_declaration(name, entry) from error
        if not valid:
            raise self._bad_declaration(name, entry)
        return kind, dims

    def _bad_declaration(self, name: object, entry: object) -> GraphBuildError:
        return self._error(
            f"targets has {name!r}: {entry!r}; give a dtype and a shape, e.g. ('int64', ['N']) or ('float32', "
            "['N', 10])"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.called})"


def copy_model(op: Emitter, model: ir.Model, values: Sequence[ir.Value], batch: int | str | None) -> ir.Value:
    """Appends a model to a graph, with existing values as its inputs; returns its only output.

    All initializers of the model become constants, which are not trained.

    Args:
        op: emitter of the graph.
        model: the model, in canonical form. It is not modified.
        values: one value per input of the model. Floating-point values are cast to the dtype of the input.
        batch: first dimension of the output, if it has axes.

    Raises:
        GraphBuildError: the graph has an older opset than the model.
    """
    opset = model.graph.opset_imports[""]
    if op.opset < opset:
        raise GraphBuildError(
            f"appending a loss: the model has opset {op.opset}, but the loss has opset {opset}; convert the model: "
            f"onnx.version_converter.convert_version(model, {opset})"
        )
    copy = model.clone()
    names: dict[str, int | str | None] = {}
    for formal, value in zip(copy.graph.inputs, values, strict=True):
        dims = value.shape or ()
        for inner, outer in zip(formal.shape or (), dims, strict=False):
            if isinstance(inner, ir.SymbolicDim) and inner.value is not None:
                names.setdefault(inner.value, outer if isinstance(outer, int) else outer.value)
    for graph in (copy.graph, *copy.graph.subgraphs()):
        for node in graph:
            for result in node.outputs:
                result.shape = _renamed(result.shape, names)
        for initializer in graph.initializers.values():
            mark_constant(initializer)
    actual = [
        op.Cast(value, to=formal.dtype) if formal.dtype is not None and value.dtype != formal.dtype else value
        for formal, value in zip(copy.graph.inputs, values, strict=True)
    ]
    for cast, value in zip(actual, values, strict=True):
        cast.shape = value.shape
    op.add_functions(copy)
    outputs = op.copy_of(copy.graph, actual)
    result = outputs[0]
    if result in actual or result.is_initializer():
        result = op.Identity(result)
        result.type = outputs[0].type
    sizes = static_dims(model.graph.outputs[0])
    if sizes == (1,) and batch != 1:
        # One number for the whole batch.
        result, sizes = op.Reshape(result, op.const([])), ()
    result.shape = ir.Shape([] if sizes == () else [batch])
    return result


def _renamed(shape: ir.Shape | None, names: Mapping[str, int | str | None]) -> ir.Shape | None:
    """Returns a shape with other names of dimensions; a name that is not among the keys becomes unknown."""
    if shape is None:
        return None
    return ir.Shape([dim if isinstance(dim, int) else names.get(str(dim.value)) for dim in shape])
