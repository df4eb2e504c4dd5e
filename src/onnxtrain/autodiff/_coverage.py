"""Lists how the gradient of each op is found, for the docs, the command line and the completeness test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnxtrain.autodiff._registry import NON_DIFFERENTIABLE, NOT_YET, OPSETS, RULES, schemas_by_opset
from onnxtrain.passes import BODIES, NEWEST_OPSET, has_schema_function

READ_OPSETS = range(OPSETS[0], NEWEST_OPSET + 1)
"""Opsets whose ops are differentiated. Ops of opset 27 and 28 are rewritten with older ones when a model is loaded."""

Status = Literal["rule", "function", "nondifferentiable", "not yet", "unknown"]


@dataclass(frozen=True)
class OpCoverage:
    """Says by which way the gradient of one op is found.

    Attributes:
        op_type: name of the op.
        since: oldest supported opset that has it, e.g. 21; 0 for an op outside the standard domain.
        status: `rule`: it has a VJP rule. `function`: its function body of the ONNX standard, or one registered with
            `defbody`, is differentiated in its place. `nondifferentiable`: no gradient flows through it. `not yet`: a
            gradient that has to flow through it is an error. `unknown`: the same, as the op is not declared at all.
        inputs: for a rule, the names of the inputs that get a gradient, e.g. ("A", "B").
        reason: why it is `nondifferentiable` or `not yet`, e.g. "its result is boolean"; else empty.
    """

    op_type: str
    since: int
    status: Status
    inputs: tuple[str, ...] = ()
    reason: str = ""


def coverage(domain: str = "") -> list[OpCoverage]:
    """Returns one row per op of a domain, by name: of the standard domain those in the supported opsets.

    Args:
        domain: "" for the standard domain. Of another one, e.g. "com.microsoft", the rows are the ops that the
            installed onnxruntime knows and those that are registered.

    Example:
        >>> from onnxtrain.autodiff import coverage
        >>> rows = {row.op_type: row for row in coverage()}
        >>> rows["Concat"].status, rows["Concat"].inputs, rows["CenterCropPad"].status, rows["Shape"].status
        ('rule', ('inputs',), 'function', 'nondifferentiable')
    """
    if domain:
        registered = {
            op for table in (RULES, NON_DIFFERENTIABLE, NOT_YET, BODIES) for of, op in table if of == domain
        }
        known = {schema.name for schema in get_all_operator_schema() if schema.domain == domain}
        return [coverage_of(domain, name) for name in sorted(registered | known)]
    # Ops that all supported opsets deprecate, such as Upsample, have no row.
    names = sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
    return [row for name in names if (row := coverage_of("", name)).since]


def coverage_of(domain: str, op_type: str) -> OpCoverage:
    """Returns the row of an op of any domain; `since` is 0 for an op outside the standard."""
    opsets = [] if domain else list(schemas_by_opset(op_type, opsets=READ_OPSETS))
    # A rule wins over a function body, which is then never inlined on the path of a gradient.
    key, since = (domain, op_type), opsets[0] if opsets else 0
    if key in RULES:
        return OpCoverage(op_type, since, "rule", RULES[key].wrt)
    if key in NON_DIFFERENTIABLE:
        return OpCoverage(op_type, since, "nondifferentiable", reason=NON_DIFFERENTIABLE[key].reason)
    if key in NOT_YET:
        return OpCoverage(op_type, since, "not yet", reason=NOT_YET[key])
    if key in BODIES or (opsets and all(has_schema_function(op_type, opset) for opset in opsets)):
        return OpCoverage(op_type, since, "function")
    return OpCoverage(op_type, since, "unknown")
