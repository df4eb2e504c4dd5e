"""Inserts a frozen teacher into the graph of its student, for knowledge distillation.

The teacher becomes part of the training model and the eval model: it reads the same inputs, and its weights are
constants, so that no gradient is computed for it and no checkpoint contains it. The inference model leaves it out,
because the outputs of the student don't depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.emitter import Emitter, find_value, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import TARGET_KEY, Loss
from onnxtrain.op_facts import CASTS, VIEWS
from onnxtrain.passes import (
    CleanupPass,
    FoldFrozenBatchNormPass,
    ModelSource,
    TrainingModePass,
    canonicalize,
    fit_opset,
    infer_shapes,
    load_model,
    mark_constant,
    stand_in,
)
from onnxtrain.selection import is_float, some_names
from onnxtrain.training.key_value_cache import DropCachePass, find_cache

_DOING = "attaching the teacher"
_SCOPE = "teacher/"
# For each activation of a loss, the op whose input the loss expects as scores.
_PROBABILITIES = {"softmax": "Softmax", "softmax_last": "Softmax", "exp": "Softmax", "sigmoid": "Sigmoid"}


def attach_teacher(
    model: ir.Model, source: ModelSource, loss: Loss, scores: str, output: str | None = None
) -> ir.Value:
    """Appends a frozen teacher, in inference mode, to the graph of its student, in place.

    Args:
        model: canonical model of the student, before its loss is appended.
        source: the teacher: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; it is not modified.
        loss: loss on the targets. If it expects logits, the teacher's logits are used, even if the teacher's output is
            the softmax or sigmoid of them.
        scores: name of the student's scores.
        output: name of the teacher's scores. Default: the output named as `scores`, or the only one.

    Returns:
        The teacher's scores, in the graph of the student.

    Raises:
        ModelError: the teacher cannot be loaded or converted, or has an op that the student's opset lacks.
        GraphBuildError: its inputs are not those of the student, or its scores are ambiguous.
    """
    teacher = canonicalize(load_model(source))
    _cut(teacher, loss, _chosen_output(teacher, scores, output))
    _freeze(teacher)
    teacher = fit_opset(teacher, model.graph.opset_imports[""], _DOING)
    inputs = _matching_inputs(model, teacher)
    _import_domains(model, teacher)
    op = Emitter(model.graph, functions=model.functions)
    op.scope = _SCOPE
    for value in tuple(teacher.graph.initializers.values()):
        value.name = f"{_SCOPE}{value.name}"
    before = set(model.graph.initializers)
    result = op.copy_of(
        teacher.graph, [_as_type(op, *pair) for pair in zip(inputs, teacher.graph.inputs, strict=True)]
    )
    for name, value in model.graph.initializers.items():
        if name not in before:
            # Neither trained nor part of the checkpoint.
            mark_constant(value)
    infer_shapes(model)
    return result[0]


def _chosen_output(teacher: ir.Model, scores: str, output: str | None) -> ir.Value:
    """Returns the teacher's scores: the value named `output`, else the output named `scores`, else the only one."""
    if output is not None:
        value = find_value(teacher.graph, output)
        if value is None:
            raise _refusal(
                f"{argument('teacher_output', output)} is not a value of the teacher; its outputs are "
                f"{_listed(teacher.graph.outputs)}"
            )
        return value
    floats = [value for value in teacher.graph.outputs if value.dtype is None or is_float(value)]
    named = [value for value in floats if value.name == scores]
    if len(named or floats) != 1:
        raise _refusal(
            f"its outputs are {_listed(teacher.graph.outputs)}, and none has the name of the student's scores, "
            f"{scores!r}. Name the teacher's scores in {argument('teacher_output')}"
        )
    return (named or floats)[0]


def _cut(teacher: ir.Model, loss: Loss, value: ir.Value) -> None:
    """Makes the teacher's scores its only output; goes back to the logits if the output is their softmax or sigmoid."""
    wanted = _PROBABILITIES.get(str(loss.activation))
    node = value.producer()
    while node is not None and node.op_type in CASTS | VIEWS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    # Exported classifiers often return probabilities. A softmax of probabilities would teach hardly anything.
    if node is not None and node.domain == "" and node.op_type == wanted and node.inputs[0] is not None:
        value = node.inputs[0]
    cache = find_cache(teacher.graph)
    teacher.graph.outputs.clear()
    teacher.graph.outputs.append(value)
    DropCachePass(cache)(teacher)


def _freeze(teacher: ir.Model) -> None:
    """Puts the teacher into inference mode, in place, with ops that have no other mode."""
    TrainingModePass(batch_norm="inference", dropout="inference")(teacher)
    FoldFrozenBatchNormPass()(teacher)
    for node in tuple(ir.traversal.RecursiveGraphIterator(teacher.graph)):
        # The student's modes, e.g. batch_norm="training", must not reach the teacher's layers. Metadata tells where an
        # exporter has removed a Dropout.
        node.metadata_props.clear()
        if node.domain != "":
            continue
        if node.op_type == "Dropout" and node.inputs[0] is not None:
            stand_in(node.outputs[0], node.inputs[0], node)
        elif node.op_type == "BatchNormalization":
            _write_normalization(teacher, node)
    CleanupPass(keep=set())(teacher)
    for value in tuple(teacher.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            teacher.graph.inputs.remove(value)
    # Symbolic sizes of the teacher may have names that mean something else in the student.
    for node in ir.traversal.RecursiveGraphIterator(teacher.graph):
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                value.shape = None


def _write_normalization(teacher: ir.Model, node: ir.Node) -> None:
    """Writes a BatchNormalization in inference mode as x·factor + shift, with one factor and shift per channel."""
    x, scale, bias, mean, variance = node.inputs[:5]
    if node.graph is not teacher.graph or x is None or x.shape is None:
        return
    assert scale is not None
    assert bias is not None
    assert mean is not None
    op = Emitter(teacher.graph)
    per_channel = [1, -1, *[1] * (x.shape.rank() - 2)]
    with op.placing(before=node):
        root = op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5)))
        factor = op.Div(scale, root)
        if factor.dtype != mean.dtype:
            factor = op.Cast(factor, to=mean.dtype)
        shift = op.Sub(bias, op.Mul(mean, factor))
        parts = [op.Reshape(value, per_channel) for value in (factor, shift)]
        if x.dtype != mean.dtype:
            parts = [op.Cast(value, to=x.dtype) for value in parts]
        result = op.Add(op.Mul(x, parts[0]), parts[1])
        result.shape = node.outputs[0].shape
    stand_in(node.outputs[0], result, node)


def _matching_inputs(model: ir.Model, teacher: ir.Model) -> list[ir.Value]:
    """Returns the student's input for each input of the teacher: the one of the same name, or the only one.

    Raises:
        GraphBuildError: an input has no counterpart, or the types differ.
    """
    mine = {str(value.name): value for value in model.graph.inputs if TARGET_KEY not in value.metadata_props}
    others = list(teacher.graph.inputs)
    if len(mine) == len(others) == 1:
        pairs = [(next(iter(mine.values())), others[0])]
    else:
        missing = [str(value.name) for value in others if value.name not in mine]
        if missing:
            raise _refusal(
                f"it has inputs that the student lacks: {some_names(missing)}. The inputs of the student are "
                f"{some_names(list(mine))}. Both models are fed the same inputs, which must have the same names; "
                "rename those of the teacher"
            )
        pairs = [(mine[str(value.name)], value) for value in others]
    for student, other in pairs:
        _check_pair(student, other)
    return [student for student, _ in pairs]


def _check_pair(student: ir.Value, teacher: ir.Value) -> None:
    """Raises GraphBuildError if an input of the student cannot be fed to the teacher."""
    if None not in (student.dtype, teacher.dtype) and student.dtype != teacher.dtype:
        kinds = [
            (value.dtype.is_floating_point(), value.dtype.is_integer())
            for value in (student, teacher)
            if value.dtype
        ]
        if kinds[0] != kinds[1] or not any(kinds[0]):
            raise _refusal(
                f"its input {teacher.name!r} is {teacher.dtype}, but the student's input {student.name!r} is "
                f"{student.dtype}"
            )
    mine, others = static_dims(student), static_dims(teacher)
    if mine is None or others is None:
        return
    if len(mine) != len(others) or any(
        None not in pair and pair[0] != pair[1] for pair in zip(mine, others, strict=True)
    ):
        raise _refusal(
            f"its input {teacher.name!r} has shape {teacher.shape}, but the student's input {student.name!r} has shape "
            f"{student.shape}"
        )
    if len(others) and others[0] is not None and mine[0] is None:
        raise _refusal(
            f"its input {teacher.name!r} has the fixed batch size {others[0]}, but the student takes batches of any "
            f"size. Make it dynamic: {argument('teacher')}=onnxtrain.make_batch_dynamic(teacher)"
        )


def _as_type(op: Emitter, student: ir.Value, teacher: ir.Value) -> ir.Value:
    """Returns an input of the student, cast to the dtype that the teacher's input has, e.g. float16."""
    if teacher.dtype is None or student.dtype == teacher.dtype:
        return student
    cast: ir.Value = op.Cast(student, to=teacher.dtype)
    cast.shape = student.shape
    return cast


def _import_domains(model: ir.Model, teacher: ir.Model) -> None:
    """Adds the domains of the teacher's ops to the imports of the student's model.

    Raises:
        GraphBuildError: both import different versions of a domain.
    """
    for domain, version in teacher.graph.opset_imports.items():
        present = model.graph.opset_imports.setdefault(domain, version)
        if domain and present != version:
            raise _refusal(
                f"it imports version {version} of the ops {domain!r}, but the student version {present}. Export both "
                "with the same version"
            )


def _listed(values: Sequence[ir.Value]) -> str:
    return some_names([str(value.name) for value in values])


def _refusal(problem: str) -> GraphBuildError:
    return GraphBuildError(f"{_DOING}: {problem}")
