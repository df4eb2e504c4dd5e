"""Calls the formula that a user has registered as a gradient, and checks what it returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import DifferentiationError
from onnxtrain.passes import captured_values

from ._node import NodeView, Signature, where


def call_checked(
    formula: Callable[[Emitter, NodeView, Any], Any],
    names: Sequence[str],
    of_outputs: Sequence[str],
    signature: Signature,
    broadcasts: bool,
    op: Emitter,
    n: NodeView,
    ct: Any,
) -> dict[str, Any]:
    """Calls a formula for a node, and checks the number, types, dtypes and static shapes of its cotangents.

    Returns:
        The cotangents by input name.

    Raises:
        DifferentiationError: the formula returned something else than one cotangent per input.
    """
    doing = f"differentiating {n.node.domain or 'ai.onnx'}::{n.op_type} ({where(n.node)}): its gradient"
    if len(of_outputs) > 1 and not signature.variadic_output:
        # As in PyTorch, a formula gets zeros for an output that the loss does not depend on.
        values = [getattr(n.out, name) for name in of_outputs]
        ct = tuple(
            op.zeros_like(value) if part is None and value is not None else part
            for part, value in zip(ct, values, strict=True)
        )
    last = op.graph[-1] if len(op.graph) else None
    result = formula(op, n, ct)
    new = list(itertools.takewhile(lambda node: node is not last, reversed(op.graph)))[::-1]
    cotangents = _by_name(result, names, doing)
    inferred = _inferred(new, [value for value in cotangents.values() if isinstance(value, ir.Value)])
    variadic = signature.inputs[-1] if signature.variadic_input else None
    for name, value in cotangents.items():
        if value is None or name == variadic:
            continue
        if not isinstance(value, ir.Value):
            raise DifferentiationError(
                f"{doing} returned a {type(value).__name__} for the input {name!r}; return a value that `op` has "
                "emitted, or None"
            )
        _check_type(value, getattr(n, name), name, inferred.get(value), broadcasts, doing)
    return cotangents


def _by_name(result: Any, names: Sequence[str], doing: str) -> dict[str, Any]:
    """Returns what a formula returned as a dict by input name.

    Raises:
        DifferentiationError: there is not one cotangent for each name.
    """
    if isinstance(result, Mapping):
        if unknown := [name for name in result if name not in names]:
            raise DifferentiationError(
                f"{doing} returned a cotangent for {unknown[0]!r}; it is registered for {', '.join(names)}"
            )
        return {name: result.get(name) for name in names}
    parts = list(result) if isinstance(result, list | tuple) else [result]
    if len(parts) != len(names):
        raise DifferentiationError(
            f"{doing} returned {len(parts)} cotangent{'s' if len(parts) != 1 else ''}, but is registered for "
            f"{len(names)} input{'s' if len(names) != 1 else ''} ({', '.join(names)}); return one for each, or None"
        )
    return dict(zip(names, parts, strict=True))


def _check_type(
    cotangent: ir.Value,
    primal: ir.Value | None,
    name: str,
    inferred: ir.Value | None,
    broadcasts: bool,
    doing: str,
) -> None:
    """Raises DifferentiationError if the dtype or a static size of a cotangent is not that of its input."""
    # Nothing reads the cotangent of an integer, e.g. of indices.
    if primal is None or (primal.dtype is not None and not primal.dtype.is_floating_point()):
        return
    if cotangent.dtype is None and inferred is not None and inferred.type is not None:
        cotangent.type = inferred.type
    dtypes = (cotangent.dtype, primal.dtype)
    if None not in dtypes and dtypes[0] != dtypes[1]:
        raise DifferentiationError(
            f"{doing} returned a cotangent of dtype {cotangent.dtype} for the input {name!r} ({primal.name!r}), which "
            f"is {primal.dtype}; cast it with op.Cast"
        )
    known = inferred if inferred is not None and inferred.shape is not None else cotangent
    mine, wanted = static_dims(known), static_dims(primal)
    if broadcasts or mine is None or wanted is None:
        return
    if len(mine) != len(wanted) or any(
        None not in pair and pair[0] != pair[1] for pair in zip(mine, wanted, strict=True)
    ):
        raise DifferentiationError(
            f"{doing} returned a cotangent of shape {known.shape} for the input {name!r} ({primal.name!r}), which has "
            f"shape {primal.shape}. A cotangent has the shape of its input; pass broadcasts=True if it is to be summed "
            "over broadcast axes"
        )


def _inferred(nodes: Sequence[ir.Node], results: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Infers dtypes and shapes of values from the nodes that compute them; returns typed values by value."""
    made = {value for node in nodes for value in node.outputs}
    read = [value for node in nodes for value in (*node.inputs, *captured_values(node)) if value is not None]
    outside = {
        str(value.name): value
        for value in read
        if value not in made and value.type is not None and value.name
    }
    wanted = {str(value.name): value for value in results if value in made}
    if not wanted:
        return {}
    graph = onnx.GraphProto(name="gradient")
    for value in outside.values():
        if value.const_value is not None and value.const_value.size <= 64:
            tensor = ir.serde.serialize_tensor(value.const_value)
            tensor.name = str(value.name)
            graph.initializer.append(tensor)
        else:
            graph.input.append(ir.serde.serialize_value(value))
    graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
    owner = nodes[0].graph
    imports = owner.opset_imports if isinstance(owner, ir.Graph) else {}
    proto = onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in imports.items()],
    )
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    # onnx raises InferenceError and RuntimeError; without shapes, there is nothing to compare.
    except Exception:
        return {}
    return {
        wanted[info.name]: ir.serde.deserialize_value_info_proto(info, None)
        for info in inferred.graph.value_info
        if info.name in wanted
    }
