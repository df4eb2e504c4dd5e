"""Builds the ONNX model of one optimizer step for all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import Emitter, Operand
from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.fusion.elementwise import ElementwisePass
from onnxtrain.fusion.grouped_steps import GroupStepsPass
from onnxtrain.op_facts import ELEMENTWISE
from onnxtrain.passes.canonical.opset import fit_ir_version
from onnxtrain.passes.io.load import CANONICAL_OPSET, MAX_OPSET
from onnxtrain.passes.runtime_faults.long_sums import LongSumsPass

from ._base import Optimizer, StepInputs
from ._clipping import cast
from ._plan import ParameterSpec, Update, moment_dtype, plan_updates
from ._rows import Rows
from ._scalar_ranks import ScalarRanks

_Settings = tuple[Optimizer, float, ir.DataType]
"""An optimizer, the factor of its learning rate, and the dtype of its computation."""


def build_optimizer_model(
    optimizer: Optimizer, parameters: Sequence[ParameterSpec], opset: int = CANONICAL_OPSET
) -> ir.Model:
    """Builds the model of one optimizer step for all parameters.

    Inputs: `learning_rate` (float32 []), `step` (int64 [], 1 at the first step), then for each parameter `<p>`,
    `<p>_grad`, `<p>_momentum0`, ... Outputs: for each parameter `<p>_updated`, `<p>_momentum0_updated`, ... with the
    same shapes and dtypes. Every output may be bound to the buffer of its input.

    A sparse gradient `<p>_grad` has the shape `[reads, *rest]`, and is followed by the input `<p>_grad_indices`, int64
    `[reads]`. Gradients with the same index are summed. Rows without a gradient, and their moments, don't change.

    float16 and bfloat16 parameters are converted to float32, updated, and rounded; their moments are float32. Changes
    smaller than half a unit in the parameter's last place are lost.

    Args:
        optimizer: the optimizer and its hyperparameters.
        parameters: the trained parameters, in graph order.
        opset: opset of the model, 21 to 26.

    Raises:
        NothingToTrain: there are no parameters.
        GraphBuildError: a parameter has a dtype that cannot be trained, or a shape or gradient that its optimizer does
            not support, a group matches no parameter, or two inputs or outputs would have the same name.

    Example:
        >>> from onnxtrain.optimizers import SGD
        >>> model = build_optimizer_model(SGD(momentum=0.9), [ParameterSpec("w", "float32", (3,))])
        >>> [value.name for value in model.graph.inputs]
        ['learning_rate', 'step', 'w', 'w_grad', 'w_momentum0']
        >>> [value.name for value in model.graph.outputs]
        ['w_updated', 'w_momentum0_updated']
    """
    if not parameters:
        raise NothingToTrain("building the optimizer model: no parameters were given; name some to train")
    if not CANONICAL_OPSET <= opset <= MAX_OPSET:
        raise GraphBuildError(
            f"building the optimizer model: opset {opset}; choose one from {CANONICAL_OPSET} to {MAX_OPSET}"
        )
    learning_rate = ir.Value(name="learning_rate", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.FLOAT))
    step = ir.Value(name="step", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.INT64))
    slots = [_Slot.of(update) for update in plan_updates(optimizer, parameters)]
    inputs = [learning_rate, step, *(value for slot in slots for value in slot.inputs)]
    _check_names([*(str(v.name) for v in inputs), *(name for slot in slots for name in slot.outputs)])
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name="optimizer")
    model = ir.Model(graph, ir_version=10, producer_name="onnxtrain")
    op = Emitter(graph, functions=model.functions)
    for name in (name for slot in slots for name in slot.outputs):
        # Reserved, because a parameter may have the name that the emitter would choose for an intermediate value.
        op.unique_name(name)
    _write(op, optimizer, slots, learning_rate, step)
    for name in [name for name, constant in graph.initializers.items() if not constant.uses()]:
        del graph.initializers[name]
    GroupStepsPass()(model)
    _declare_scalars(graph)
    # One program for all scalars. Tensors have no shapes here, and therefore stay as they are: their memory may be that
    # of the results.
    ElementwisePass()(model)
    LongSumsPass()(model)
    fit_ir_version(model)
    return model


def _declare_scalars(graph: ir.Graph) -> None:
    """Sets the shapes of the values that elementwise ops compute from scalars, except for those computed from state."""
    settings = {value for value in graph.inputs if value.name in ("learning_rate", "step")}
    for node in graph:
        scalars = all(
            value is not None and value.shape == () and (value in settings or not value.is_graph_input())
            for value in node.inputs
        )
        if (
            node.domain == ""
            and node.op_type in ELEMENTWISE
            and scalars
            and not node.outputs[0].is_graph_output()
        ):
            node.outputs[0].shape = ir.Shape(())


def manifest_entry(optimizer: Optimizer, parameters: Sequence[ParameterSpec]) -> dict[str, Any]:
    """Returns the manifest entry of the model that :func:`build_optimizer_model` builds from these arguments."""
    updates = plan_updates(optimizer, parameters)
    # One value per name: the plan numbers moments so that equal names have equal initial values.
    values = {moment.name: moment.initial_value for update in updates for moment in update.moments}
    # Numerically: momentum10 follows momentum9.
    names = sorted(values, key=lambda name: int(name.removeprefix("momentum")))
    return {
        "type": type(optimizer).__name__,
        "settings": _settings(optimizer),
        "moments": names,
        "initial_values": [values[name] for name in names],
        # Including sizes, because moments may be smaller than parameters, and a host without Python cannot easily read
        # them from the model.
        "states": [
            {
                "parameter": update.parameter.name,
                "moment": moment.name,
                "dtype": moment_dtype(update.parameter.data_type).numpy().name,
                "shape": list(moment.shape),
            }
            for update in updates
            for moment in update.moments
        ],
        "learning_rate": "learning_rate",
        "step": "step",
    }


def _settings(owner: Any) -> dict[str, Any]:
    """Returns the non-empty fields of an optimizer, parameter group or gradient clipping as JSON values."""
    values = {field.name: _plain(getattr(owner, field.name)) for field in fields(owner)}
    return {name: value for name, value in values.items() if value is not None and value != []}


def _plain(value: object) -> Any:
    """Returns a setting as a JSON value, or as a string if JSON cannot represent it, e.g. "inf"."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **_settings(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value)):
        return value
    return repr(value)


@dataclass(frozen=True)
class _Slot:
    """The graph inputs of one parameter, and its update.

    Attributes:
        w: the parameter, e.g. the input `fc.weight`.
        g: the gradient, e.g. the input `fc.weight_grad`.
        indices: row indices of a sparse gradient, int64 [reads]; None for a dense gradient.
        moments: the optimizer state, e.g. [`fc.weight_momentum0`].
        update: optimizer, learning rate scale and specification of the moments.
    """

    w: ir.Value
    g: ir.Value
    indices: ir.Value | None
    moments: list[ir.Value]
    update: Update

    @classmethod
    def of(cls, update: Update) -> _Slot:
        """Creates the graph inputs of one parameter."""
        parameter = update.parameter
        name, dtype = parameter.name, parameter.data_type

        def value(name: str, dtype: ir.DataType, shape: Sequence[int | str] = parameter.shape) -> ir.Value:
            return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

        moments = [value(f"{name}_{m.name}", moment_dtype(dtype), m.shape) for m in update.moments]
        gradient, indices = value(f"{name}_grad", dtype), None
        if parameter.sparse:
            reads = f"{name}_reads"
            gradient = value(f"{name}_grad", dtype, (reads, *parameter.shape[1:]))
            indices = value(f"{name}_grad_indices", ir.DataType.INT64, (reads,))
        return cls(value(name, dtype), gradient, indices, moments, update)

    @property
    def state(self) -> list[ir.Value]:
        """The graph inputs that a step updates: the parameter and its moments."""
        return [self.w, *self.moments]

    @property
    def dtype(self) -> ir.DataType:
        """The dtype of the computation, e.g. float32 for a float16 parameter."""
        assert self.w.dtype is not None
        return moment_dtype(self.w.dtype)

    @property
    def settings(self) -> _Settings:
        """Optimizer, learning rate scale and dtype. Slots with equal settings share the scalars of the step."""
        return self.update.optimizer, self.update.learning_rate_scale, self.dtype

    @property
    def inputs(self) -> list[ir.Value]:
        """All graph inputs of the parameter, in the order in which the optimizer model lists them."""
        return [self.w, self.g, *([] if self.indices is None else [self.indices]), *self.moments]

    @property
    def outputs(self) -> list[str]:
        """Names of the graph outputs, one per entry of `state`."""
        return [f"{value.name}_updated" for value in self.state]


def _check_names(names: Sequence[str]) -> None:
    """Raises GraphBuildError if two of `names`, the names of the model's inputs and outputs, are equal."""
    # Names of parameters come from the file, which may contain both `a` and `a_grad`.
    taken: set[str] = set()
    for name in names:
        if name in taken:
            raise GraphBuildError(
                f"building the optimizer model: two inputs or outputs would be named {name!r}; rename the "
                "parameters so that no name is repeated, is 'learning_rate' or 'step', or is another "
                "parameter's name followed by '_grad', '_momentum0' or '_updated'"
            )
        taken.add(name)


def _write(
    op: Emitter, optimizer: Optimizer, slots: Sequence[_Slot], learning_rate: ir.Value, step: ir.Value
) -> None:
    """Emits the optimizer step, and appends its results to the graph's outputs.

    The step clips the gradients, computes the scalars that parameters with equal settings share, and then updates each
    parameter.
    """
    ranks = ScalarRanks(op)
    gradients = [cast(op, slot.g, slot.dtype) for slot in slots]
    # Sparse gradients are summed per row before clipping, which needs the norm of the whole gradient.
    rows_of = [None if slot.indices is None else Rows(op, slot.indices) for slot in slots]
    gradients = [g if rows is None else rows.add_up(g) for g, rows in zip(gradients, rows_of, strict=True)]
    # Clipping uses the norm of the whole model's gradient, regardless of groups.
    factor = optimizer.clip_grad.factor(op, gradients) if optimizer.clip_grad is not None else None
    # Clipping by value limits each element, so there is no common factor.
    if optimizer.clip_grad is not None and factor is None:
        gradients = optimizer.clip_grad.apply(op, gradients)
    scalars_of: dict[_Settings, tuple[Sequence[Operand], ir.Value | None]] = {}
    inputs: list[StepInputs] = []
    states: list[list[ir.Value]] = []
    for slot, rows, gradient in zip(slots, rows_of, gradients, strict=True):
        own_optimizer, scale, dtype = settings = slot.settings
        if settings not in scalars_of:
            # A factor of 1 is omitted, so that a group without a factor has the same nodes as no group.
            rate = cast(op, learning_rate, dtype)
            scalars = own_optimizer.scalars(op, rate if scale == 1 else op.Mul(rate, scale), step)
            pending = factor if factor is None else cast(op, factor, dtype)
            # Folded into the scalars if possible, which saves a product per element of the gradients.
            scaled = None if pending is None else own_optimizer.scaled(op, scalars, pending)
            scalars_of[settings] = (scalars, pending) if scaled is None else (scaled, None)
        pending = scalars_of[settings][1]
        if pending is not None:
            with ranks.within(slot.w.shape, [gradient], [pending]):
                gradient = op.Mul(gradient, pending)
        state = slot.state if rows is None else [rows.read(table) for table in slot.state]
        states.append(state)
        inputs.append(StepInputs(cast(op, state[0], dtype), gradient, state[1:]))
    # A second loop, because scalars shared by several parameters may depend on the clipped gradients of all of them.
    shared = {}
    for settings, (scalars, _) in scalars_of.items():
        members = [entry for slot, entry in zip(slots, inputs, strict=True) if slot.settings == settings]
        shared[settings] = settings[0].shared_scalars(op, scalars, members)
    for slot, rows, state, step_inputs in zip(slots, rows_of, states, inputs, strict=True):
        step_scalars = shared[slot.settings]
        tensors = [step_inputs.w, step_inputs.g, *step_inputs.moments]
        with ranks.within(slot.w.shape, tensors, step_scalars):
            results = slot.update.optimizer.update(op, *step_inputs, step_scalars)
        for held, old, new, name in zip(slot.state, state, results, slot.outputs, strict=True):
            assert old.dtype is not None
            output = cast(op, new, old.dtype)
            if rows is not None:
                output = rows.write(held, output)
            output.name, output.shape = name, held.shape
            op.graph.outputs.append(output)
