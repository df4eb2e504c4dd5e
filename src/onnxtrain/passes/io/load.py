"""Loads a model from a file, a proto or the IR, without reading its weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import ModelLoadError, UnsupportedOpsetError
from onnxtrain.passes.io.attribute_types import mistyped_attribute
from onnxtrain.passes.io.constant_weights import lift_weights
from onnxtrain.passes.io.dictionary_outputs import tensors_for_maps
from onnxtrain.passes.io.tensor_sizes import check_tensors
from onnxtrain.passes.tidy.unique_names import values_of
from onnxtrain.runtime.atomic import is_stream
from onnxtrain.runtime.external_data import ExternalData, check_external_data, locate

ModelSource = str | os.PathLike[str] | onnx.ModelProto | ir.Model
"""A model as users provide it: path of a file, proto, or onnx_ir model."""

CANONICAL_OPSET = 21
"""Opset to which older models are converted; gradient rules support its schemas and newer ones."""

MAX_OPSET = 26
"""Newest opset of the standard domain that is written: the newest that all stock ONNX Runtime builds accept."""

NEWEST_OPSET = 28
"""Newest opset that is read: onnxruntime 1.32 for Python runs it. `newer_opsets.py` lowers it to `MAX_OPSET`."""

MAX_IR_VERSION = 13
"""Newest IR version that stock ONNX Runtime builds accept."""

# External tensors up to this size are read immediately: the version converter and shape inference need the values of
# shapes and axes, and every memory-mapped tensor takes a file descriptor.
_EAGER_BYTES = 16 * 1024


def load_model(source: ModelSource) -> ir.Model:
    """Loads and checks a model. Later passes may modify the result without affecting `source`.

    External data is not read but memory-mapped on first use, so models beyond protobuf's limit of 2 GB can be loaded.
    If a file stores all its weights in Constant nodes, they become initializers. :func:`onnxtrain.passes.canonicalize`
    converts the result to canonical form.

    Args:
        source: path of an ONNX file, a proto, or an IR model. Relative external data paths of a proto are relative to
            the working directory; if they are relative to the file, pass the file's path instead.

    Raises:
        ModelLoadError: the file or its external data is missing, truncated or not ONNX; the graph is empty or invalid.
        UnsupportedOpsetError: the opset is newer than stock runtimes accept.
        TypeError: `source` has an unsupported type.
    """
    if isinstance(source, ir.Model):
        origin = "the given onnx_ir.Model"
        model = _detached(_clone(source, origin))
    elif isinstance(source, onnx.ModelProto):
        origin = "the given ModelProto"
        model = _detached(_from_proto(source, origin))
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        origin = f"'{path}'"
        proto = _read(path)
        _check_file(path, origin)
        model = _from_proto(proto, origin)
        # Absolute, because the working directory may change before a tensor is read.
        ir.external_data.set_base_dir(model.graph, path.absolute().parent)
    else:
        raise TypeError(
            f"Cannot load a model from {type(source).__name__}; "
            "pass a path, an onnx.ModelProto or an onnx_ir.Model."
        )
    # Versions first: the following checks look up ops at the model's opset.
    _check_versions(model, origin)
    _check_text(model, origin)
    _check_graph(model, origin)
    _forget_negative_sizes(model)
    for tensor in _external_tensors(model):
        _check_reference(tensor, origin)
    for graph in _graphs_and_functions(model):
        for node in graph:
            _store_texts(node)
    lift_weights(model)
    for graph in model.graphs():
        # onnx's checker requires a name, runtimes do not.
        graph.name = graph.name or "graph"
        for value in graph.initializers.values():
            _load_small_external_data(value, origin)
            if value.const_value is not None and value.dtype != value.const_value.dtype:
                # Converters to float16 annotate tensors as float16 even if they have left them in float32.
                value.type = ir.TensorType(value.const_value.dtype)
    return model


def _refusal(origin: str, problem: str) -> ModelLoadError:
    """Returns the error for a model that cannot be loaded. `origin` describes the model's source, e.g. "'net.onnx'"."""
    return ModelLoadError(f"Cannot load a model from {origin}: {problem}")


def _read(path: Path) -> onnx.ModelProto:
    """Reads a file without its external data. Raises ModelLoadError if that fails."""
    if path.is_dir():
        raise _refusal(f"'{path}'", "it is a directory. Pass the .onnx file inside it.")
    # Reading a pipe without a writer would block forever.
    if is_stream(path):
        raise _refusal(f"'{path}'", "it is a pipe or a device. Write the model to a file, and pass that.")
    try:
        return onnx.load(path, load_external_data=False)
    except FileNotFoundError as error:
        raise _refusal(f"'{path}'", "no such file. Check the path.") from error
    except OSError as error:
        raise ModelLoadError(f"Cannot read the model file '{path}': {error}.") from error
    # protobuf's DecodeError and the errors of onnx's text readers have no narrower common base class.
    except Exception as error:
        raise ModelLoadError(
            f"Cannot load a model from '{path}' ({path.stat().st_size} bytes): the file is truncated, "
            f"corrupt or not an ONNX model ({error}). Download or export it again."
        ) from error


def _from_proto(proto: onnx.ModelProto, origin: str) -> ir.Model:
    """Converts a proto to an IR model. Raises ModelLoadError if the proto is malformed."""
    if not proto.HasField("graph"):
        raise _refusal(origin, "it holds no graph, so it is empty or not an ONNX model.")
    if proto.graph.sparse_initializer:
        names = ", ".join(f"'{tensor.values.name}'" for tensor in proto.graph.sparse_initializer)
        raise _refusal(
            origin, f"sparse initializers ({names}) are not supported. Store them as dense tensors."
        )
    # Before the IR reads the tensors, so that a tensor with a huge declared shape fails here, not when memory is
    # allocated.
    try:
        check_tensors(proto)
    except ValueError as error:
        raise _refusal(origin, f"{error}. The file is corrupt; download or export it again.") from error
    try:
        return ir.from_proto(tensors_for_maps(proto))
    # onnx_ir wraps arbitrary errors caused by a malformed proto in its own exceptions.
    except Exception as error:
        raise _refusal(origin, _malformed(proto, error)) from error


def _malformed(proto: onnx.ModelProto, error: BaseException) -> str:
    """Returns why a proto cannot be read, for an error message: what is wrong with it, not which function failed."""
    if twice := _defined_twice(proto.graph):
        return (
            f"{twice}, but a value may only be defined once. PyTorch's exporter writes such a file if an output has "
            "the name of a value inside of the model, e.g. of an op: export it again with other output_names."
        )
    # onnx_ir wraps the reason once for each function on the way to it.
    while error.__cause__ is not None:
        error = error.__cause__
    return f"the graph is malformed ({error})."


def _defined_twice(graph: onnx.GraphProto) -> str:
    """Describes a value that two nodes of a graph or of one of its subgraphs define, or a node and an input.

    Returns "" if there is none.
    """
    definitions = {value.name: "as an input" for value in graph.input}
    for node in graph.node:
        described = f"by {node.op_type}" + (f" '{node.name}'" if node.name else "")
        for name in filter(None, node.output):
            if name in definitions:
                return f"the value '{name}' is defined twice, {definitions[name]} and {described}"
            definitions[name] = described
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if twice := _defined_twice(inner):
                    return twice
    return ""


def _clone(source: ir.Model, origin: str) -> ir.Model:
    """Clones the caller's model. Raises ModelLoadError if its nodes are not sorted."""
    try:
        return source.clone(deep_copy=True)
    # onnx_ir (1.1) clones in order and raises RuntimeError for a value that is used before it is defined.
    except RuntimeError as error:
        raise _refusal(
            origin,
            "a node uses a value that is not defined before it. If no node is missing, sort the graph "
            "(onnx_ir.passes.common.TopologicalSortPass).",
        ) from error


def _detached(model: ir.Model) -> ir.Model:
    """Replaces the types and tensor objects of `model` with copies that share the same data, and returns `model`.

    onnx_ir shares types and tensor objects between clones, so renaming a value would rename the caller's tensor.
    """
    for graph in model.graphs():
        for value in values_of(graph):
            value.type = copy.deepcopy(value.type)
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = share_tensor(value.const_value)
    return model


def share_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Returns a tensor that shares the data of `tensor`, but can be renamed independently of it.

    `ir.Tensor(tensor)` requires numpy 2: with numpy 1.26, its array is float64, whatever the dtype.
    """
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            base_dir=tensor.base_dir,
        )
    if tensor.dtype == ir.DataType.STRING:
        # onnx_ir (1.1) can only serialize strings of a StringTensor.
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in tensor.numpy().flat]
        return ir.StringTensor(texts, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)
    return ir.LazyTensor(
        lambda: tensor, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name
    )


def _check_versions(model: ir.Model, origin: str) -> None:
    """Checks the opset of the standard domain, and normalizes its import in place.

    An import named "ai.onnx" is renamed to "". A newer opset than `MAX_OPSET` becomes `MAX_OPSET` if the model's ops
    did not change in between. A model that has imports, but no standard op, gets `CANONICAL_OPSET` if "" is missing.

    Args:
        model: the model, changed in place.
        origin: description of the model's source for error messages, e.g. "'net.onnx'".

    Raises:
        UnsupportedOpsetError: the opset is newer than `NEWEST_OPSET` and cannot be lowered to `MAX_OPSET`.
        ModelLoadError: the model does not import the standard domain, or its opset is less than 1.
    """
    imports = model.graph.opset_imports
    # The standard domain has two names; onnx_ir normalizes them in nodes but not in imports.
    if "ai.onnx" in imports:
        imports[""] = max(imports.pop("ai.onnx"), imports.get("", 0))
    if imports and not any(node.domain == "" for graph in model.graphs() for node in graph):
        # A model of other domains alone need not import the standard one; passes add standard ops to it.
        imports.setdefault("", CANONICAL_OPSET)
    opset = imports.get("")
    if opset is None:
        raise _refusal(
            origin,
            "it imports no opset of the standard ONNX domain "
            f"(imports: {dict(imports)}); the file may be truncated.",
        )
    if opset < 1:
        raise _refusal(origin, f"it imports opset {opset}, but opsets start at 1. Export it again.")
    if opset > MAX_OPSET and _is_older(model, opset):
        for imported in (imports, *(function.opset_imports for function in model.functions.values())):
            imported[""] = min(imported.get("", MAX_OPSET), MAX_OPSET)
    elif opset > NEWEST_OPSET:
        raise UnsupportedOpsetError(
            f"Cannot use the model of {origin}: it has opset {opset}, but stock ONNX Runtime accepts at "
            f"most {NEWEST_OPSET}. Export it again with an opset between 13 and {NEWEST_OPSET}."
        )


def _is_older(model: ir.Model, opset: int) -> bool:
    """True if no standard op of a model has changed between `MAX_OPSET` and the model's newer opset.

    Such a model is loaded with opset `MAX_OPSET`. onnxruntime's optimizer, for example, writes the newest opset that it
    knows into models that import none.
    """
    # onnx has no schemas of opsets newer than its own.
    if opset > onnx.defs.onnx_opset_version():
        return False
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    ops = {node.op_type for graph in graphs for node in graph.all_nodes() if node.domain == ""}
    return all(onnx.defs.has(op) and onnx.defs.get_schema(op, opset).since_version <= MAX_OPSET for op in ops)


def _check_text(model: ir.Model, origin: str) -> None:
    """Raises an error for strings that are not UTF-8, which protobuf returns as bytes but cannot write."""
    for text in _texts(model):
        if isinstance(text, bytes):
            raise _refusal(
                origin,
                f"it contains the string {text[:60]!r}, which is not valid UTF-8. The file is corrupt; "
                "download or export it again.",
            )


def _graphs_and_functions(model: ir.Model) -> Iterator[ir.Graph]:
    """Yields the graphs of a model and of its functions, and all their subgraphs."""
    yield from model.graphs()
    for function in model.functions.values():
        yield from (function.graph, *function.graph.subgraphs())


def _store_texts(node: ir.Node) -> None:
    """Converts a string attribute of a Constant to a tensor, in place, because onnx_ir (1.1) decodes it as ASCII."""
    for name in ("value_string", "value_strings") if node.op_type == "Constant" and node.domain == "" else ():
        attribute = node.attributes.get(name)
        if attribute is None or attribute.is_ref():
            continue
        texts = [attribute.as_string()] if name == "value_string" else list(attribute.as_strings())
        shape = ir.Shape([] if name == "value_string" else [len(texts)])
        node.attributes.pop(name)
        tensor = ir.StringTensor([text.encode() for text in texts], shape=shape)
        node.attributes["value"] = ir.AttrTensor("value", tensor)


def _texts(model: ir.Model) -> Iterator[object]:
    """Yields the names, doc strings and metadata of a model and its graphs, values, nodes and attributes."""
    yield from (model.producer_name, model.producer_version, model.domain, *_descriptions(model))
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        yield from (graph.name, *_descriptions(graph), *graph.opset_imports)
        for value in (*graph.inputs, *graph.initializers.values()):
            yield from (value.name, *_descriptions(value))
        for node in graph:
            yield from (node.name, node.op_type, node.domain, node.overload, *_descriptions(node))
            for attribute in node.attributes.values():
                yield from (attribute.name, attribute.doc_string)
            for value in node.outputs:
                yield from (value.name, *_descriptions(value))


def _descriptions(owner: ir.Model | ir.Graph | ir.Node | ir.Value) -> Iterator[object]:
    """Yields the doc string and the metadata of an object."""
    yield owner.doc_string
    for pair in owner.metadata_props.items():
        yield from pair


def _check_graph(model: ir.Model, origin: str) -> None:
    """Checks a loaded graph, and sorts its nodes topologically in place.

    Args:
        model: the model, with its functions.
        origin: describes the model's source in error messages, e.g. "'net.onnx'".

    Raises:
        ModelLoadError: the main graph has no nodes or no outputs, a node or graph output reads a value that nothing
            defines, an attribute has the wrong type, or the graph has a cycle.
    """
    if not len(model.graph):
        raise _refusal(origin, "its graph has no nodes.")
    if not model.graph.outputs:
        raise _refusal(origin, "its graph has no outputs.")
    for graph in _graphs_and_functions(model):
        sources = {*graph.inputs, *graph.initializers.values()}
        users = [*graph.outputs, *(value for node in graph for value in node.inputs if value is not None)]
        for value in users:
            # `value.graph` is not sufficient: an output belongs to its graph even if no node computes it.
            if value.producer() is None and value.graph in (None, graph) and value not in sources:
                raise _refusal(
                    origin,
                    f"its graph uses '{value.name}', which nothing defines. The file may have been cut or "
                    "edited; export it again.",
                )
    if problem := mistyped_attribute(model):
        raise _refusal(origin, f"{problem}. The file is corrupt; download or export it again.")
    # Runtimes accept nodes in any order, but the ONNX standard, its checker and our passes require sorted nodes.
    try:
        common.TopologicalSortPass()(model)
    except ValueError as error:
        raise _refusal(origin, f"its graph has a cycle ({error}).") from error


def _forget_negative_sizes(model: ir.Model) -> None:
    """Makes negative sizes in declared shapes unknown, in place, as ONNX Runtime does.

    paddle2onnx and others declare a dynamic batch as -1.
    """
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        for value in values_of(graph):
            if value.shape is not None and any(isinstance(size, int) and size < 0 for size in value.shape):
                value.shape = ir.Shape(
                    None if isinstance(size, int) and size < 0 else size for size in value.shape
                )


def _check_file(path: Path, origin: str) -> None:
    """Checks that the external data files of all initializers and attributes exist in the model's folder."""
    try:
        check_external_data(str(path))
    except (ValueError, OSError) as error:
        raise _refusal(origin, f"{error}") from error


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yields the external tensors among a model's initializers and attributes."""
    for graph in _graphs_and_functions(model):
        tensors = [value.const_value for value in graph.initializers.values()]
        for attribute in (a for node in graph for a in node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR:
                tensors.append(attribute.value)
            elif attribute.type == ir.AttributeType.TENSORS:
                tensors += attribute.value
        yield from (tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor))


def _check_reference(tensor: ir.ExternalTensor, origin: str) -> None:
    """Checks that the file of an external tensor is in the model's folder and long enough."""
    data = ExternalData(
        str(tensor.name), str(tensor.location), tensor.offset or 0, tensor.length, int(tensor.nbytes)
    )
    try:
        locate(data, tensor.base_dir or ".")
    except ValueError as error:
        raise _refusal(origin, f"{error}") from error


def _load_small_external_data(value: ir.Value, origin: str) -> None:
    """Reads the data of a small external initializer into memory."""
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > _EAGER_BYTES:
        return
    try:
        array = tensor.numpy().copy()
    except (ValueError, OSError) as error:
        raise _refusal(
            origin, f"the data of '{value.name}' is in '{tensor.path}', which cannot be read: {error}"
        ) from error
    value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)
    tensor.release()
