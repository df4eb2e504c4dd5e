"""Lists how each op is differentiated, for the docs, the command line and the completeness test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnxtrain.autodiff._registry import NON_DIFFERENTIABLE, NOT_YET, OPSETS, RULES, schemas_by_opset
from onnxtrain.op_bodies import op_bodies
from onnxtrain.passes import NEWEST_OPSET, has_schema_function

READ_OPSETS = range(OPSETS[0], NEWEST_OPSET + 1)
"""Opsets whose ops can be differentiated. Loading a model rewrites ops of opset 27 and 28 with older ops."""

Status = Literal["rule", "function", "nondifferentiable", "not yet", "unknown"]


@dataclass(frozen=True)
class OpCoverage:
    """Differentiation status of an op; a row of :func:`coverage`.

    Attributes:
        op_type: name of the op.
        since: oldest supported opset that has the op, e.g. 21; 0 for a nonstandard op.
        status: `rule`: the op has a VJP rule. `function`: the op has a function body, from the ONNX standard or
            registered with `defbody`, which is differentiated instead. `nondifferentiable`: no gradient flows through
            it. `not yet`: differentiating it raises an error that states the reason. `unknown`: differentiating it
            raises an error, because the op is not declared.
        inputs: for a rule, the names of the inputs that get a gradient, e.g. ("A", "B").
        reason: why the op is `nondifferentiable` or `not yet`, e.g. "its output is Boolean"; otherwise empty.
    """

    op_type: str
    since: int
    status: Status
    inputs: tuple[str, ...] = ()
    reason: str = ""


def coverage(domain: str = "") -> list[OpCoverage]:
    """Returns one row per op of a domain, sorted by name.

    Args:
        domain: "" lists the standard ops of the supported opsets. Another domain, e.g. "com.microsoft", lists the ops
            registered with onnxtrain and the ops of the installed ONNX Runtime.

    Example:
        >>> from onnxtrain.autodiff import coverage
        >>> rows = {row.op_type: row for row in coverage()}
        >>> rows["Concat"].status, rows["Concat"].inputs, rows["CenterCropPad"].status, rows["Shape"].status
        ('rule', ('inputs',), 'function', 'nondifferentiable')
    """
    if domain:
        registered = {
            op
            for table in (RULES, NON_DIFFERENTIABLE, NOT_YET, op_bodies())
            for of, op in table
            if of == domain
        }
        known = {schema.name for schema in get_all_operator_schema() if schema.domain == domain}
        return [coverage_of(domain, name) for name in sorted(registered | known)]
    # Ops that are deprecated in all supported opsets, such as Upsample, have no row.
    names = sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
    return [row for name in names if (row := coverage_of("", name)).since]


def coverage_of(domain: str, op_type: str) -> OpCoverage:
    """Returns the differentiation status of one op.

    Args:
        domain: domain of the op, e.g. "" or "com.microsoft".
        op_type: name of the op, e.g. "Gelu". The status of an op that is not declared is "unknown".
    """
    opsets = [] if domain else list(schemas_by_opset(op_type, opsets=READ_OPSETS))
    # A rule takes precedence over a function body.
    key, since = (domain, op_type), opsets[0] if opsets else 0
    if key in RULES:
        return OpCoverage(op_type, since, "rule", RULES[key].wrt)
    if key in NON_DIFFERENTIABLE:
        return OpCoverage(op_type, since, "nondifferentiable", reason=NON_DIFFERENTIABLE[key].reason)
    if key in NOT_YET:
        return OpCoverage(op_type, since, "not yet", reason=NOT_YET[key])
    if key in op_bodies() or (opsets and all(has_schema_function(op_type, opset) for opset in opsets)):
        return OpCoverage(op_type, since, "function")
    return OpCoverage(op_type, since, "unknown")
