"""Appends grafts to the base model: a graft is a small separate graph, whose nodes are copied to the base model.

The base model is a `ModelProto`, because users' blocks append nodes to it directly. The losses and other graph code of
this package use an emitter with onnx_ir. A graft connects the two: its inputs are values of the base model, and its
other values are renamed where the base model already uses their names. The base model itself is not converted, so that
its weights are not copied, and external data is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock.model_accessor import ModelAccessor
from onnxtrain.passes import infer_shapes, mark_constant

# The first IR version with model-local functions, which losses and optimizers call.
_FUNCTIONS_IR_VERSION = 8

# Emits nodes: called with an emitter and one value per input, returns the output or outputs.
Writer = Callable[..., "ir.Value | Sequence[ir.Value]"]


def names_of(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the names of all values and nodes in a graph and its subgraphs."""
    # Including subgraphs, because ONNX does not allow these to shadow names of the enclosing graph.
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
    """Returns a name that the base model does not use yet: `wish`, or else `wish_1`, `wish_2`, ..."""
    return _unused(wish, set(names_of(base.graph)))


def _unused(wish: str, taken: set[str]) -> str:
    """Returns a name that is not in `taken`: `wish`, or else `wish_1`, `wish_2`, ..."""
    name, count = wish, 0
    while name in taken:
        count += 1
        name = f"{wish}_{count}"
    return name


def has_value(base: onnx.ModelProto, name: str) -> bool:
    """True if the main graph has an input, initializer or node output with this name."""
    graph = base.graph
    return (
        any(info.name == name for info in graph.input)
        or any(tensor.name == name for tensor in graph.initializer)
        or any(name in node.output for node in graph.node)
    )


def find(base: onnx.ModelProto, name: str, doing: str) -> None:
    """Raises GraphBuildError if the base model has no value `name`; the message begins with `doing`."""
    if not isinstance(name, str):
        raise GraphBuildError(
            f"{doing}: received {name!r}; pass the name (a str) of a value of the base model"
        )
    if not has_value(base, name):
        outputs = ", ".join(repr(info.name) for info in base.graph.output) or "none"
        inputs = ", ".join(repr(info.name) for info in base.graph.input) or "none"
        raise GraphBuildError(
            f"{doing}: the base model has no value {name!r}; its outputs are {outputs}, its inputs {inputs}"
        )


def describe(accessor: ModelAccessor, name: str, doing: str) -> ir.Value:
    """Returns an onnx_ir value with the name, dtype and shape of a value of the base model.

    Raises:
        GraphBuildError: the base model has no such value; the message begins with `doing`.
    """
    # Inference covers the whole model, so its results are stored in the base model for reuse.
    find(accessor.model, name, doing)
    info = _declared(accessor.model, name)
    if info is None:
        infer(accessor)
        info = _declared(accessor.model, name)
    # For outputs of nonstandard ops, dtype and shape are unknown.
    if info is None:
        return ir.Value(name=name)
    return ir.serde.deserialize_value_info_proto(info, None)


def _declared(base: onnx.ModelProto, name: str) -> onnx.ValueInfoProto | None:
    """Returns the declaration of a value in the base model; None if its dtype is not declared."""
    graph = base.graph
    for tensor in graph.initializer:
        if tensor.name == name:
            return onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
    for info in (*graph.input, *graph.value_info, *graph.output):
        # An info without a type only declares the name.
        if info.name == name and info.type.WhichOneof("value"):
            declared: onnx.ValueInfoProto = info
            return declared
    return None


def infer(accessor: ModelAccessor) -> None:
    """Runs shape inference on the base model, and adds the missing dtypes and shapes to its value infos."""
    # The user's declarations are kept, even if inference finds more.
    graph = accessor.model.graph
    declared = {info.name for info in (*graph.input, *graph.output, *graph.value_info)}
    for node in infer_shapes(accessor.to_ir()).graph:
        for value in node.outputs:
            if value.name and value.type is not None and value.name not in declared:
                graph.value_info.append(ir.serde.serialize_value(value))


def append(
    accessor: ModelAccessor, doing: str, inputs: Sequence[str], write: Writer, *, wish: str | None = None
) -> tuple[str, ...]:
    """Calls `write` to emit nodes, and appends the nodes to the base model.

    Args:
        accessor: accessor of the base model.
        doing: beginning of error messages, e.g. "building the block Add".
        inputs: names of values of the base model.
        write: called with an emitter and one value per input; returns the output or outputs. Initializers that it
            creates are constants, not parameters. Inputs that it adds to the emitter's graph become inputs of the base
            model.
        wish: preferred name of the first output, e.g. "loss"; if it is in use, a number is appended.

    Returns:
        The names of the outputs in the base model.

    Raises:
        GraphBuildError: the base model has no value with one of the names in `inputs`. Errors raised by `write`
            propagate.
    """
    base = accessor.model
    values = {name: describe(accessor, name, doing) for name in inputs}
    opset = opset_of(base, "")
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": opset}, name="graft")
    model = ir.Model(graph, ir_version=max(base.ir_version, _FUNCTIONS_IR_VERSION))
    op = Emitter(graph, functions=model.functions)
    # `inputs` may contain a name twice, for the same value.
    result = write(op, *(values[name] for name in inputs))
    results = [result] if isinstance(result, ir.Value) else list(result)
    # An output may also be one of the inputs, which has no producer here, and already has a name in the base model.
    new = [value for value in results if value.producer() is not None]
    graph.outputs.extend(dict.fromkeys(new))
    # The base model then declares the new values, and the next graft needs no inference.
    infer_shapes(model)
    _rename(model, new[0] if new else None, wish, set(names_of(base.graph)))
    _merge(base, ir.to_proto(model))
    return tuple(str(value.name) for value in results)


def _rename(model: ir.Model, first: ir.Value | None, wish: str | None, taken: set[str]) -> None:
    """Renames values and nodes of a graft, a small separate graph, so that it can be merged into the base model.

    Only names that the base model already uses are changed. Inputs of the graft keep their names.

    Args:
        model: the graft, changed in place.
        first: its first new output, which gets the name `wish`, or `wish_1`, ... if `wish` is in use.
        wish: preferred name of `first`; None to keep its name unless the base model uses this name.
        taken: the names that the base model uses.
    """
    values = [
        *model.graph.initializers.values(),
        *(value for node in model.graph for value in node.outputs if value.name),
    ]
    named: list[ir.Value | ir.Node] = [*values, *model.graph]
    # The names of the graft itself are in use as well: onnx_ir does not allow two initializers to have the same name,
    # even temporarily.
    unavailable = taken | {str(item.name) for item in named}
    for item in named:
        if item is first and wish is not None:
            item.name = _unused(wish, unavailable)
        elif item.name in taken:
            item.name = _unused(str(item.name), unavailable)
        unavailable.add(str(item.name))


def _merge(base: onnx.ModelProto, graft: onnx.ModelProto) -> None:
    """Copies the contents of a graft, a small separate graph, into the base model.

    Copies nodes, initializers, value infos, functions, missing opset imports, and inputs that the base model lacks.
    """
    # Inputs of the graft that exist in the base model are its values; the others are new inputs, e.g. targets.
    inputs = {info.name for info in graft.graph.input}
    base.graph.input.extend(info for info in graft.graph.input if not has_value(base, info.name))
    base.graph.node.extend(graft.graph.node)
    base.graph.initializer.extend(graft.graph.initializer)
    base.graph.value_info.extend(info for info in graft.graph.value_info if info.name not in inputs)
    base.graph.value_info.extend(info for info in graft.graph.output if info.name not in inputs)
    # An earlier graft may have added the same function: functions with the same name are equal.
    present = {(function.domain, function.name, function.overload) for function in base.functions}
    for function in graft.functions:
        if (function.domain, function.name, function.overload) not in present:
            base.functions.append(function)
    if graft.functions:
        base.ir_version = max(base.ir_version, _FUNCTIONS_IR_VERSION)
    # Functions add their domain. For the standard domain, the graft already has the base model's version.
    for imported in graft.opset_import:
        opset_of(base, imported.domain, imported.version)


def opset_of(base: onnx.ModelProto, domain: str, default: int | None = None) -> int:
    """Returns the opset version that the base model imports for `domain`.

    If the base model does not import the domain, an import of version `default` is added.

    Raises:
        GraphBuildError: the base model does not import the domain, and there is no default.
    """
    # The standard domain has two names.
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
    """Appends a node of a domain that emitters don't support; returns the name of its output.

    Args:
        accessor: accessor of the base model.
        doing: beginning of error messages, e.g. "building the block LabelEncoder".
        op_type: the op, e.g. "LabelEncoder".
        inputs: names of the input values.
        domain: the op's domain, e.g. "ai.onnx.ml".
        version: opset version to import if the base model does not import the domain.
        **attributes: attributes of the node.
    """
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
    """Adds an initializer to the base model under an unused name, and returns the name.

    Args:
        base: the base model.
        tensor: the initializer, with the preferred name.
        constant: True for a constant, False for a parameter.
    """
    tensor.name = unique_name(base, tensor.name)
    base.graph.initializer.append(tensor)
    # All floating-point initializers are parameters unless they are marked.
    if constant:
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(ir.DataType(tensor.data_type)), shape=ir.Shape(tensor.dims)
        )
        mark_constant(value)
        base.graph.value_info.append(ir.serde.serialize_value(value))
    return tensor.name


def add_parameter(base: onnx.ModelProto, name: str, array: np.ndarray[Any, Any], dtype: ir.DataType) -> str:
    """Adds an array to the base model as a parameter, under an unused name, and returns the name."""
    tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
    return declare(base, ir.serde.serialize_tensor(tensor))


def add_input(base: onnx.ModelProto, value: ir.Value, doing: str) -> str:
    """Adds a graph input with the name, dtype, shape and metadata of `value`; returns its name.

    Raises:
        GraphBuildError: the base model already has a value with this name; the message begins with `doing`.
    """
    name = str(value.name)
    if has_value(base, name):
        raise GraphBuildError(f"{doing}: the base model already has a value {name!r}; choose another name")
    base.graph.input.append(ir.serde.serialize_value(value))
    return name
