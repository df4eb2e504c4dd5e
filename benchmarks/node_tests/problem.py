"""A node test of ONNX as a loss of tensors, in its own dtype and in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.autodiff import coverage_of

Array = np.ndarray
LOSS = "node_test.loss"
NEWEST_OPSET, NEWEST_IR = 28, 14
FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
NARROW = FLOATS - {TensorProto.DOUBLE}
TRAINING = "ai.onnx.preview.training"


@dataclass
class Problem:
    """A model with a loss.

    Attributes:
        name: of the test.
        model: with an output `LOSS` beside those that the test expects.
        feeds: the data of the test.
        expected: outputs that are tensors.
        wrt: floating-point inputs that have a gradient.
        ops: types of the nodes, in functions too.
        reason: why there is nothing to differentiate; empty else.
        verdict: what that is called, "not differentiable" if empty.
    """

    name: str
    rtol: float
    model: onnx.ModelProto = field(default_factory=onnx.ModelProto)
    feeds: dict[str, Array] = field(default_factory=dict)
    expected: dict[str, Array] = field(default_factory=dict)
    wrt: list[str] = field(default_factory=list)
    ops: set[str] = field(default_factory=set)
    reason: str = ""
    verdict: str = ""

    def with_constants(self) -> Problem:
        """Returns the problem with inputs that are no floats as constants of the model."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        fixed = [v for v in model.graph.input if v.type.tensor_type.elem_type not in FLOATS]
        for info in fixed:
            model.graph.input.remove(info)
            model.graph.initializer.append(numpy_helper.from_array(self.feeds[info.name], info.name))
        names = {info.name for info in fixed}
        feeds = {name: array for name, array in self.feeds.items() if name not in names}
        return replace(self, model=model, feeds=feeds)


def problem_of(case: Any) -> Problem:
    """Returns the loss of a test, or why it has none."""
    problem = Problem(case.name, case.rtol)
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    problem.ops = {node.op_type for node in _all_nodes(model)}
    ((inputs, outputs),) = case.data_sets
    if said := _lower_opset(model):
        problem.verdict, problem.reason = "newer opset", said
        return problem
    if TRAINING in {imported.domain for imported in model.opset_import}:
        model = onnxtrain.lower_training_ops(model)
    if not any(imported.domain == "" for imported in model.opset_import):
        model.opset_import.add(domain="", version=21)
        model.ir_version = 10
    problem.model = model
    try:
        _tensors_in(problem, inputs)
        _loss_of(problem, outputs)
    except _Nothing as nothing:
        problem.reason = str(nothing)
    return problem


class _Nothing(Exception):
    """There is nothing to differentiate."""


def _lower_opset(model: onnx.ModelProto) -> str:
    """Declares an opset that stock runtimes accept where the model is the same there; else says why it is not."""
    for imported in model.opset_import:
        if imported.domain == "" and imported.version > NEWEST_OPSET:
            version, imported.version = imported.version, NEWEST_OPSET
            model.ir_version = min(model.ir_version, NEWEST_IR)
            try:
                onnx.checker.check_model(model, full_check=True)
            except Exception as error:
                return f"opset {version}, and stock runtimes accept {NEWEST_OPSET}: {str(error).splitlines()[0][:120]}"
    return ""


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    stack = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while stack:
        node = stack.pop()
        yield node
        stack += [inner for a in node.attribute for g in (a.g, *a.graphs) for inner in g.node]


def _tensors_in(problem: Problem, inputs: list[Any]) -> None:
    """Makes every input a tensor: sequences and optionals of tensors are built from these in the model."""
    graph = problem.model.graph
    values, added = list(graph.input), []
    del graph.input[:]
    for info, value in zip(values, inputs, strict=True):
        kind = info.type.WhichOneof("value")
        if kind == "tensor_type":
            _add(problem, info.name, value, info)
            continue
        if value is None:
            raise _Nothing(f"its input {info.name!r} is an optional without a value")
        tensors = [np.asarray(v) for v in value] if isinstance(value, list) else [np.asarray(value)]
        names = [f"{info.name}.{k}" for k in range(len(tensors))]
        for name, tensor in zip(names, tensors, strict=True):
            _add(problem, name, tensor, None)
        wrapped = kind == "optional_type"
        last = f"{info.name}.sequence" if wrapped and isinstance(value, list) else info.name
        if isinstance(value, list) and not names:
            raise _Nothing(f"its input {info.name!r} is a sequence without tensors")
        if isinstance(value, list):
            added.append(helper.make_node("SequenceConstruct", names, [last]))
            names = [last]
        if wrapped:
            added.append(helper.make_node("Optional", names, [info.name]))
    for node in reversed(added):
        graph.node.insert(0, node)
    floats = [v.name for v in graph.input if v.type.tensor_type.elem_type in FLOATS]
    if not floats:
        raise _Nothing("no input that is a floating-point tensor")
    fixed = _without_gradient(problem)
    problem.wrt = [name for name in floats if name not in fixed]
    if not problem.wrt:
        raise _Nothing("the schema of the op says that its floating-point inputs have no gradient")


def _array(value: Any) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _add(problem: Problem, name: str, value: Any, info: onnx.ValueInfoProto | None) -> None:
    array = _array(value)
    if array.dtype.kind not in "fiubUSO" and array.dtype.name != "bfloat16":
        # numpy has no such dtype of its own, in which ONNX Runtime would take it.
        if isinstance(value, onnx.TensorProto):
            tensor = onnx.TensorProto()
            tensor.CopyFrom(value)
            tensor.name = name
        else:
            tensor = numpy_helper.from_array(array, name)
        problem.model.graph.initializer.append(tensor)
        return
    if info is None:
        info = helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
    problem.model.graph.input.append(info)
    problem.feeds[name] = array


def _without_gradient(problem: Problem) -> set[str]:
    """Inputs that are read only where the schema says that there is no gradient, and no rule of ours gives one."""
    model = problem.model
    versions = {imported.domain: imported.version for imported in model.opset_import}
    fixed, read = (
        set(),
        {name for node in _all_nodes(model) if node not in model.graph.node for name in node.input},
    )
    for node in model.graph.node:
        names = list(node.input)
        for name in _fixed_inputs(node, versions):
            names.remove(name)
            fixed.add(name)
        read.update(names)
    return fixed - read


FIXED = {"MaxRoiPool": ("rois",), "RoiAlign": ("rois",), "Upsample": ("scales",)}
"""Inputs that have no gradient by convention, or are said to have none in later versions of the op."""


def _fixed_inputs(node: onnx.NodeProto, versions: dict[str, int]) -> Iterator[str]:
    try:
        schema = onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain)
    except (KeyError, onnx.defs.SchemaError):
        return
    ours = coverage_of(node.domain, node.op_type).inputs
    none = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    for formal, name in zip(schema.inputs, node.input, strict=False):
        tagged = formal.differentiation_category == none and formal.name not in ours
        if name and (tagged or formal.name in FIXED.get(node.op_type, ())):
            yield name


def _loss_of(problem: Problem, outputs: list[Any]) -> None:
    """Adds the weighted sum of all floating-point outputs, of the finite elements that they have."""
    graph, terms = problem.model.graph, []
    rng = np.random.default_rng(len(problem.name))
    values = list(graph.output)
    del graph.output[:]
    for info, value in zip(values, outputs, strict=True):
        for name, array in _tensors_out(graph, info, value):
            problem.expected[name] = array
            graph.output.append(
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
                if name != info.name
                else info
            )
            if helper.np_dtype_to_tensor_dtype(array.dtype) in FLOATS and array.size:
                terms.append(_term(graph, name, array, rng))
    if not terms:
        raise _Nothing("no output that is a floating-point tensor")
    graph.node.append(helper.make_node("Sum", terms, [LOSS]))
    graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))


def _tensors_out(
    graph: onnx.GraphProto, info: onnx.ValueInfoProto, value: Any
) -> Iterator[tuple[str, Array]]:
    name = info.name
    if info.type.WhichOneof("value") == "tensor_type":
        yield name, _array(value)
        return
    if value is None:
        return
    if info.type.WhichOneof("value") == "optional_type":
        graph.node.append(helper.make_node("OptionalGetElement", [name], [f"{name}.value"]))
        name = f"{name}.value"
    if not isinstance(value, list):
        yield name, np.asarray(value)
        return
    for k, array in enumerate(value):
        graph.initializer.append(numpy_helper.from_array(np.array(k, np.int64), f"{name}.{k}.position"))
        graph.node.append(helper.make_node("SequenceAt", [name, f"{name}.{k}.position"], [f"{name}.{k}"]))
        yield f"{name}.{k}", np.asarray(array)


def _term(graph: onnx.GraphProto, name: str, array: Array, rng: np.random.Generator) -> str:
    """Adds <value, weight> as a float; what is not finite has no weight."""

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        output = f"{LOSS}.{name}.{op}"
        graph.node.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def constant(what: str, value: Array) -> str:
        graph.initializer.append(numpy_helper.from_array(value, f"{LOSS}.{name}.{what}"))
        return f"{LOSS}.{name}.{what}"

    value = name
    finite = np.isfinite(array.astype(np.float64))
    if not finite.all():
        zero = np.zeros((), array.dtype)
        value = node("Where", constant("finite", finite), value, constant("zero", zero))
    if array.dtype != np.float32:
        value = node("Cast", value, to=TensorProto.FLOAT)
    weight = constant("weight", rng.uniform(0.5, 1.5, array.shape).astype(np.float32))
    return node("ReduceSum", node("Mul", value, weight), keepdims=0)


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of a model in which every float is a float64."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _widen_graph(copy.graph)
    for function in copy.functions:
        _widen_nodes(function.node)
    return copy


def _widen_graph(graph: onnx.GraphProto) -> None:
    for initializer in graph.initializer:
        _widen_tensor(initializer)
    for info in (*graph.input, *graph.output, *graph.value_info):
        _widen_type(info.type)
    _widen_nodes(graph.node)


def _widen_type(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which == "tensor_type" and kind.tensor_type.elem_type in NARROW:
        kind.tensor_type.elem_type = TensorProto.DOUBLE
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, which).elem_type)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in NARROW:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )


DTYPES = {"to", "dtype", "stash_type", "softmax_precision", "output_datatype"}
"""Attributes that name a dtype."""


def _widen_nodes(nodes: Any) -> None:
    for node in nodes:
        if node.op_type == "Constant" and node.attribute[0].name in ("value_float", "value_floats"):
            own = node.attribute[0]
            value = np.array(own.f if own.name == "value_float" else list(own.floats), np.float64)
            own.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = numpy_helper.from_array(np.zeros(1, np.float64))
            node.attribute.append(helper.make_attribute("value", zero))
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _widen_graph(graph)
            if attribute.HasField("tp"):
                _widen_type(attribute.tp)
            if attribute.name in DTYPES and attribute.i in NARROW:
                attribute.i = TensorProto.DOUBLE
