"""Explain in error messages why the dtype or rank of a value is unknown."""

from __future__ import annotations

from collections import deque

import onnx
import onnx_ir as ir


def why_untyped(value: ir.Value) -> str:
    """Return a sentence that names the op because of which dtype or rank of `value` are unknown.

    It is the nearest op before `value` whose inputs are known and whose result is not. "" if there is none.
    """
    # Breadth first, so that the nearest such op is found first.
    waiting, seen = deque([value]), {value}
    while waiting:
        producer = waiting.popleft().producer()
        if producer is None:
            continue
        unknown = [v for v in producer.inputs if v is not None and _is_open(v)]
        if not unknown:
            return _sentence(producer)
        fresh = [v for v in unknown if v not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return ""


def _is_open(value: ir.Value) -> bool:
    return value.dtype is None or value.shape is None


def _sentence(node: ir.Node) -> str:
    op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    result = next((str(v.name) for v in node.outputs if v.name), "")
    known = onnx.defs.has(node.op_type, node.domain)
    what = f"{op!r}" if known else f"{op!r}, an op that onnx does not know"
    remedy = "" if known else f', or register a rule with domain="{node.domain}" and shapes='
    return (
        f" The file does not declare the result {result!r} of {what}, whose inputs are known: add its dtype and shape "
        f"to value_info{remedy}."
    )
