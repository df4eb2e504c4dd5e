"""Converts a model to an opset and IR version that the gradient rules and stock runtimes support."""

from __future__ import annotations

import onnx_ir as ir
from onnx import helper, version_converter

from onnxtrain.errors import UnsupportedOpsetError
from onnxtrain.passes.canonical.converter_repairs import drop_saved_statistics, restore_legacy_semantics
from onnxtrain.passes.canonical.newer_opsets import lower_opset
from onnxtrain.passes.io.load import CANONICAL_OPSET, MAX_IR_VERSION, MAX_OPSET, NEWEST_OPSET
from onnxtrain.passes.io.without_weights import lean_proto, restore


def convert_opset(model: ir.Model) -> ir.Model:
    """Converts a model to an opset between 21 and 26, and lowers its IR version to the minimum for that opset.

    Models older than opset 21 are converted to 21, and models newer than opset 26 to 26. Exporters often write
    a newer IR version than the opset needs, and older runtimes would reject it. Tensors, metadata, and the names of
    values and symbolic dimensions stay the same.

    Args:
        model: a model without model-local functions.

    Returns:
        The converted model: `model` itself if its opset did not have to be converted.

    Raises:
        UnsupportedOpsetError: the opset is above 28, or the model cannot be converted.
    """
    opset = model.graph.opset_imports[""]
    if opset > NEWEST_OPSET:
        raise UnsupportedOpsetError(
            f"Cannot use a model of opset {opset}: stock ONNX Runtime accepts at most {NEWEST_OPSET}."
        )
    model = lower_opset(model)
    if opset < CANONICAL_OPSET:
        model = _convert(model, opset)
    model.ir_version = _oldest_ir_version(model)
    return model


def fit_ir_version(model: ir.Model) -> None:
    """Replaces an IR version that is too old for the opset, or too new for stock runtimes, with the opset's minimum.

    The minimum is at least 4, the first IR version in which initializers need not be graph inputs as well.
    """
    minimum = _oldest_ir_version(model)
    if not minimum <= model.ir_version <= MAX_IR_VERSION:
        model.ir_version = minimum


def _oldest_ir_version(model: ir.Model) -> int:
    """Returns the IR version of the ONNX release that introduced the model's opset, at least 4."""
    # The table has no entries for opsets 2 to 4.
    return max(4, helper.OP_SET_ID_VERSION_MAP.get(("ai.onnx", model.graph.opset_imports[""]), 3))


def _convert(model: ir.Model, opset: int) -> ir.Model:
    """Converts a model to opset 21, and repairs what the version converter breaks or drops."""
    drop_saved_statistics(model, opset)
    proto = lean_proto(model)
    proto.ir_version = helper.OP_SET_ID_VERSION_MAP["ai.onnx", CANONICAL_OPSET]
    try:
        converted = ir.from_proto(version_converter.convert_version(proto, CANONICAL_OPSET))
    # The converter raises ConvertError, but also RuntimeError and IndexError from assertions in its C++.
    except Exception as error:
        raise UnsupportedOpsetError(
            f"Cannot convert the model from opset {opset} to {CANONICAL_OPSET}: {error}. "
            f"Export it again with an opset between {CANONICAL_OPSET} and {MAX_OPSET}."
        ) from error
    restore(converted, model)
    _check_interface(model, converted, opset)
    _restore_metadata(model, converted)
    restore_legacy_semantics(converted, opset)
    return converted


def _check_interface(model: ir.Model, converted: ir.Model, opset: int) -> None:
    """Raises UnsupportedOpsetError if names or ranks of inputs or outputs have changed."""
    # Callers find inputs and outputs by name, and the converter renames some when it replaces an op.
    changes = []
    for kind in ("inputs", "outputs"):
        before = [value.name for value in getattr(model.graph, kind)]
        after = [value.name for value in getattr(converted.graph, kind)]
        if before != after:
            changes.append(f"its {kind} from {before} to {after}")
    for old, new in zip(model.graph.inputs, converted.graph.inputs, strict=False):
        # A Scan of opset 8 has a leading batch axis, which the converter removes, also from the graph's inputs.
        if old.shape is not None and new.shape is not None and old.shape.rank() != new.shape.rank():
            changes.append(f"the shape of {old.name!r} from {old.shape} to {new.shape}")
    if changes:
        raise UnsupportedOpsetError(
            f"Cannot convert the model from opset {opset} to {CANONICAL_OPSET}: the converter changed {changes[0]}. "
            f"Export it again with opset {CANONICAL_OPSET} or newer."
        )


def _restore_metadata(model: ir.Model, converted: ir.Model) -> None:
    """Copies metadata of the model, graph, inputs and nodes, which the version converter drops."""
    converted.metadata_props.update(model.metadata_props)
    converted.graph.metadata_props.update(model.graph.metadata_props)
    for old, new in zip(model.graph.inputs, converted.graph.inputs, strict=True):
        new.metadata_props.update(old.metadata_props)
    before = {
        out.name: (node, out)
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        for out in node.outputs
    }
    for node in ir.traversal.RecursiveGraphIterator(converted.graph):
        for out in node.outputs:
            source, value = before.get(out.name, (None, None))
            if value is not None:
                out.metadata_props.update(value.metadata_props)
            # A node's metadata describes a PyTorch operation; nodes that the converter added have none.
            if source is not None and source.op_type == node.op_type and out is node.outputs[0]:
                node.metadata_props.update(source.metadata_props)
