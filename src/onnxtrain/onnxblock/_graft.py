"""Grafts: nodes written with an emitter on a small graph of their own, then appended to the base model.

The base model is a `ModelProto`, because the blocks of users append nodes to it directly. Losses and other
graph code of this package write with an emitter. A graft is the bridge: its inputs carry the dtypes and
shapes that the base model gives them, its values get names that the base model does not have yet, and the
base model's weights are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock.model_accessor import ModelAccessor
from onnxtrain.passes import infer_shapes, mark_constant

__all__ = [
    "add_input",
    "add_node",
    "append",
    "declare",
    "describe",
    "find",
    "has_value",
    "infer",
    "unique_name",
]

# The first IR version with model-local functions.
_FUNCTIONS_IR_VERSION = 8

Writer = Callable[..., "ir.Value | Sequence[ir.Value]"]


def names_of(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields every name of a value or node in a graph and its subgraphs."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        yield info.name
    for tensor in graph.initializer:
        yield tensor.name
    for node in graph.node:
        yield node.name
        yield from node.input
        yield from node.output
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from names_of(subgraph)


def unique_name(base: onnx.ModelProto, wish: str) -> str:
    """Returns `wish`, or `wish_1`, `wish_2`, ... whichever the base model does not have yet."""
    return _unused(wish, set(names_of(base.graph)))


def _unused(wish: str, taken: set[str]) -> str:
    name, count = wish, 0
    while name in taken:
        count += 1
        name = f"{wish}_{count}"
    return name


def has_value(base: onnx.ModelProto, name: str) -> bool:
    """Returns whether the main graph has an input, initializer or node output of this name."""
    graph = base.graph
    return (
        any(info.name == name for info in graph.input)
        or any(tensor.name == name for tensor in graph.initializer)
        or any(name in node.output for node in graph.node)
    )


def find(base: onnx.ModelProto, name: str, doing: str) -> None:
    """Raises GraphBuildError if the base model has no value `name`; `doing` says what needs it."""
    if not isinstance(name, str):
        raise GraphBuildError(
            f"{doing}: received {name!r}; pass the name of a value of the base model, a str"
        )
    if not has_value(base, name):
        outputs = ", ".join(repr(info.name) for info in base.graph.output) or "none"
        inputs = ", ".join(repr(info.name) for info in base.graph.input) or "none"
        raise GraphBuildError(
            f"{doing}: the base model has no value {name!r}; its outputs are {outputs}, its inputs {inputs}"
        )


def describe(accessor: ModelAccessor, name: str, doing: str) -> ir.Value:
    """Returns a new value of the name, dtype and shape that a value of the base model has.

    What the base model does not declare is inferred, once, and declared in it.

    Raises:
        GraphBuildError: the base model has no such value.
    """
    find(accessor.model, name, doing)
    info = _declared(accessor.model, name)
    if info is None:
        infer(accessor)
        info = _declared(accessor.model, name)
    if info is None:  # the output of an op that onnx does not know
        return ir.Value(name=name)
    return ir.serde.deserialize_value_info_proto(info, None)


def _declared(base: onnx.ModelProto, name: str) -> onnx.ValueInfoProto | None:
    graph = base.graph
    for tensor in graph.initializer:
        if tensor.name == name:
            return onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
    for info in (*graph.input, *graph.value_info, *graph.output):
        if info.name == name and info.type.WhichOneof("value"):
            found: onnx.ValueInfoProto = info
            return found
    return None


def infer(accessor: ModelAccessor) -> None:
    """Declares in the base model the dtypes and shapes that it does not declare yet, as far as inferred."""
    graph = accessor.model.graph
    declared = {info.name for info in (*graph.input, *graph.output, *graph.value_info)}
    for node in infer_shapes(accessor.to_ir()).graph:
        for value in node.outputs:
            if value.name and value.type is not None and value.name not in declared:
                graph.value_info.append(ir.serde.serialize_value(value))


def append(
    accessor: ModelAccessor, doing: str, inputs: Sequence[str], write: Writer, *, wish: str | None = None
) -> tuple[str, ...]:
    """Appends what `write` emits to the base model.

    Args:
        accessor: holds the base model.
        doing: what is being built, as errors say it.
        inputs: names of values of the base model.
        write: called with an emitter and a value per input; returns the resulting value or values.
            Initializers that it makes are constants, not parameters. Inputs that it adds to the emitter's graph
            become inputs of the base model.
        wish: name that the first result should get if it is free.

    Returns:
        The names that the results have in the base model.

    Raises:
        GraphBuildError: the base model has no value of one of the names, or `write` raises it.
    """
    base = accessor.model
    values = {name: describe(accessor, name, doing) for name in inputs}
    opset = opset_of(base, "")
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": opset}, name="graft")
    model = ir.Model(graph, ir_version=max(base.ir_version, _FUNCTIONS_IR_VERSION))
    op = Emitter(graph, functions=model.functions)
    result = write(op, *(values[name] for name in inputs))
    results = [result] if isinstance(result, ir.Value) else list(result)
    new = [value for value in results if value.producer() is not None]
    graph.outputs.extend(dict.fromkeys(new))
    infer_shapes(model)
    _rename(model, new[0] if new else None, wish, set(names_of(base.graph)))
    _merge(base, ir.to_proto(model))
    return tuple(str(value.name) for value in results)


def _rename(model: ir.Model, first: ir.Value | None, wish: str | None, taken: set[str]) -> None:
    """Gives what has a name in `taken` another one: initializers, nodes, outputs; `first` gets `wish`."""
    values = [
        *model.graph.initializers.values(),
        *(value for node in model.graph for value in node.outputs if value.name),
    ]
    named: list[ir.Value | ir.Node] = [*values, *model.graph]
    # The graft's own names are not free either: two initializers must not have one name even briefly.
    unavailable = taken | {str(item.name) for item in named}
    for item in named:
        if item is first and wish is not None:
            item.name = _unused(wish, unavailable)
        elif item.name in taken:
            item.name = _unused(str(item.name), unavailable)
        unavailable.add(str(item.name))


def _merge(base: onnx.ModelProto, graft: onnx.ModelProto) -> None:
    inputs = {info.name for info in graft.graph.input}
    base.graph.input.extend(info for info in graft.graph.input if not has_value(base, info.name))
    base.graph.node.extend(graft.graph.node)
    base.graph.initializer.extend(graft.graph.initializer)
    base.graph.value_info.extend(info for info in graft.graph.value_info if info.name not in inputs)
    base.graph.value_info.extend(info for info in graft.graph.output if info.name not in inputs)
    known = {(function.domain, function.name, function.overload) for function in base.functions}
    for function in graft.functions:
        if (function.domain, function.name, function.overload) not in known:
            base.functions.append(function)
    if graft.functions:
        base.ir_version = max(base.ir_version, _FUNCTIONS_IR_VERSION)
    for imported in graft.opset_import:
        opset_of(base, imported.domain, imported.version)


def opset_of(base: onnx.ModelProto, domain: str, default: int | None = None) -> int:
    """Returns the version of `domain` that the base model imports; adds `default` where it imports none."""
    spellings = ("", "ai.onnx") if domain == "" else (domain,)
    for imported in base.opset_import:
        if imported.domain in spellings:
            return int(imported.version)
    if default is None:
        raise GraphBuildError("building on the base model: it imports no opset of the standard ONNX domain")
    base.opset_import.append(onnx.helper.make_opsetid(domain, default))
    return default


def add_node(
    accessor: ModelAccessor,
    doing: str,
    op_type: str,
    inputs: Sequence[str],
    domain: str,
    version: int,
    **attributes: Any,
) -> str:
    """Appends one node of a domain that emitters do not write; returns the name of its output."""
    base = accessor.model
    for name in inputs:
        find(base, name, doing)
    opset_of(base, domain, version)
    taken = set(names_of(base.graph))
    output = _unused(f"{op_type}_out", taken)
    name = _unused(op_type, {*taken, output})
    base.graph.node.append(
        onnx.helper.make_node(op_type, list(inputs), [output], name, domain=domain, **attributes)
    )
    return output


def declare(base: onnx.ModelProto, tensor: onnx.TensorProto, *, constant: bool = False) -> str:
    """Adds an initializer to the base model under a free name; returns that name.

    Args:
        base: the base model.
        tensor: the initializer; it gets the free name.
        constant: whether it is a constant rather than a parameter.
    """
    tensor.name = unique_name(base, tensor.name)
    base.graph.initializer.append(tensor)
    if constant:
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(ir.DataType(tensor.data_type)), shape=ir.Shape(tensor.dims)
        )
        mark_constant(value)
        base.graph.value_info.append(ir.serde.serialize_value(value))
    return tensor.name


def add_input(base: onnx.ModelProto, value: ir.Value, doing: str) -> str:
    """Adds a graph input of the name, dtype, shape and metadata of `value`; returns its name.

    Raises:
        GraphBuildError: the base model has a value of this name.
    """
    name = str(value.name)
    if has_value(base, name):
        raise GraphBuildError(f"{doing}: the base model has a value {name!r} already; choose another name")
    base.graph.input.append(ir.serde.serialize_value(value))
    return name
