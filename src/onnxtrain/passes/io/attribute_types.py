"""Finds attributes whose type is missing or differs from the op's schema, e.g. a float instead of an int."""

from __future__ import annotations

import contextlib
import functools

import onnx
import onnx_ir as ir


def mistyped_attribute(model: ir.Model) -> str | None:
    """Describes the first attribute whose type is missing or differs from the schema; None if all types are correct.

    onnx's checker also rejects such attributes, but it runs after passes of onnx_ir, which raise TypeError for a
    Constant with such an attribute.
    """
    owners: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for owner in owners:
        # A function may import a different opset than the model; if it imports none, the model's applies.
        opset = owner.opset_imports.get("", model.graph.opset_imports.get(""))
        for node in owner.all_nodes():
            kinds = {} if node.domain else _kinds(node.op_type, opset or onnx.defs.onnx_opset_version())
            for attribute in node.attributes.values():
                # onnx_ir cannot write such an attribute, whatever the op.
                if attribute.type == ir.AttributeType.UNDEFINED and not attribute.is_ref():
                    return (
                        f"the attribute '{attribute.name}' of {node.op_type} '{node.name or ''}' has no type"
                    )
                kind = kinds.get(attribute.name)
                if kind is not None and attribute.type.value != kind:
                    return (
                        f"the attribute '{attribute.name}' of {node.op_type} '{node.name or ''}' has the "
                        f"type {attribute.type.name}, but the ONNX standard specifies "
                        f"{ir.AttributeType(kind).name}"
                    )
    return None


@functools.cache
def _kinds(op_type: str, opset: int) -> dict[str, int]:
    """Maps the names of an op's attributes to their AttributeProto.AttributeType, e.g. {"axis": 2}.

    The result is empty for a nonstandard op.
    """
    kinds: dict[str, int] = {}
    # The newest opset as well: passes of onnx_ir read `value_int` of a Constant whatever opset a damaged model
    # declares.
    for version in (onnx.defs.onnx_opset_version(), opset):
        with contextlib.suppress(onnx.defs.SchemaError):
            attributes = onnx.defs.get_schema(op_type, version).attributes
            kinds |= {name: int(attribute.type.value) for name, attribute in attributes.items()}  # type: ignore[attr-defined]  # of nanobind
    return kinds
