"""Explains, for error messages, why the dtype or rank of a value is unknown."""

from __future__ import annotations

from collections import deque

import onnx
import onnx_ir as ir


def why_untyped(value: ir.Value) -> str:
    """Returns a sentence for an error message, naming the op that left the dtype or rank of `value` unknown.

    This is the nearest op upstream of `value` whose inputs all have a known dtype and rank. The sentence starts with a
    space. Returns "" if there is no such op.
    """
    # Breadth first, so that the nearest such op is found first.
    waiting, seen = deque([value]), {value}
    while waiting:
        producer = waiting.popleft().producer()
        if producer is None:
            continue
        unknown = [v for v in producer.inputs if v is not None and (v.dtype is None or v.shape is None)]
        if not unknown:
            return _sentence(producer)
        fresh = [v for v in unknown if v not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return ""


def _sentence(node: ir.Node) -> str:
    """Returns a sentence that says which output of a node lacks a dtype or rank, and how to declare it.

    The sentence starts with a space, so that it can be appended to an error message.
    """
    op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    result = next((str(v.name) for v in node.outputs if v.name), "")
    known = onnx.defs.has(node.op_type, node.domain)
    what = f"{op!r}" if known else f"{op!r}, an op that onnx does not know"
    call = f'onnxtrain.register_gradient("{node.domain}", "{node.op_type}", ..., shapes=...)'
    body = f'onnxtrain.register_body("{node.domain}", "{node.op_type}", ...)'
    remedy = "" if known else f", or pass shapes to {call}, or give it a body: {body}"
    return (
        f" The file does not declare the result {result!r} of {what}, whose inputs are known: add its dtype and shape "
        f"to value_info{remedy}."
    )
