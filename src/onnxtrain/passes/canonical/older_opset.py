"""Puts a canonical model into an older opset of the canonical range, to merge it into a model of that opset."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import UnsupportedOpsetError
from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions


def fit_opset(model: ir.Model, opset: int, doing: str) -> ir.Model:
    """Returns a canonical model whose nodes are valid in `opset`, with the same results.

    Ops of a newer opset are replaced by their function bodies. From opset 21 to 26, ops only gained dtypes and
    attributes, so nothing has to be done for a newer `opset`.

    Args:
        model: a canonical model.
        opset: version of the standard domain, 21 to 26.
        doing: start of the error message, e.g. "attaching the teacher".

    Raises:
        UnsupportedOpsetError: an op is missing in `opset` and has no function body.
    """
    own = model.graph.opset_imports[""]
    if own <= opset:
        return model
    model = inline_schema_functions(model, lambda node: node.domain != "" or _fits(node, own, opset))
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain == "" and not _fits(node, own, opset):
            raise UnsupportedOpsetError(
                f"{doing}: it has opset {own}, and its {node.op_type} does not exist in this form in opset {opset}, "
                "which the other model has. Export both with the same opset."
            )
    return model


def _fits(node: ir.Node, own: int, opset: int) -> bool:
    """True if a standard node of opset `own` means the same in the older opset; removes new attributes at defaults."""
    try:
        older = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    newer = onnx.defs.get_schema(node.op_type, own, "")
    for name in [name for name in node.attributes if name not in older.attributes]:
        default = newer.attributes[name].default_value if name in newer.attributes else None
        if (
            default is None
            or ir.to_proto(node.attributes[name]).SerializeToString() != default.SerializeToString()
        ):
            return False
        node.attributes.pop(name)
    return len(node.inputs) <= older.max_input
