"""The tables together account for every op of the supported opsets, and every gradient has a test."""

from __future__ import annotations

import onnx

from autodiff.test_rules import CASES
from onnxtrain.autodiff import coverage
from onnxtrain.autodiff._coverage import READ_OPSETS
from onnxtrain.autodiff._registry import NON_DIFFERENTIABLE, NOT_YET, RULES

ROWS = {row.op_type: row for row in coverage()}

DIFFERENTIABLE = onnx.defs.OpSchema.DifferentiationCategory.Differentiable

TAGGED_BUT_CONSTANT = {
    "Hardmax": "one-hot of the maximum; torch's one_hot(argmax) has no gradient either",
}
"""Ops whose schema says differentiable and whose derivative is zero almost everywhere."""

CONTROL_FLOW = {"If", "Loop", "Scan"}
"""Ops that are no case of one node: `test_control_flow.py`."""

QUANTIZED = {"QLinearConv", "QLinearMatMul"}
"""Ops between integers: `test_quantized_ops.py`."""

PIECEWISE_CONSTANT = {
    "CastLike": {"target_type"},
    "Range": {"limit"},
}
"""Inputs to which a rule never gives a gradient: the result is (piecewise) constant in them."""


def _schemas(op_type: str) -> list[onnx.defs.OpSchema]:
    return [onnx.defs.get_schema(op_type, o, "") for o in READ_OPSETS if o >= ROWS[op_type].since]


def test_ops_are_those_of_the_installed_onnx() -> None:
    expected = set()
    for opset in READ_OPSETS:
        for schema in onnx.defs.get_all_schemas_with_history():
            if schema.domain == "" and schema.since_version <= opset:
                current = onnx.defs.get_schema(schema.name, opset, "")
                expected |= set() if current.deprecated else {schema.name}
    assert set(ROWS) == expected


def _with_status(*statuses: str) -> set[str]:
    return {op for op, row in ROWS.items() if row.status in statuses}


def test_every_op_is_accounted_for() -> None:
    unknown = _with_status("unknown")
    assert not unknown, f"{sorted(unknown)}: give them rules, or declare them nondifferentiable or not_yet"


def test_every_op_is_declared_once_and_reasons_are_given() -> None:
    declared = [op for table in (RULES, NON_DIFFERENTIABLE, NOT_YET) for domain, op in table if not domain]
    assert sorted(set(declared)) == sorted(declared)
    assert set(declared) <= set(ROWS)
    assert {op for op, row in ROWS.items() if row.reason} == _with_status("nondifferentiable", "not yet")


def test_every_gradient_has_a_case() -> None:
    assert {case.op for case in CASES} | CONTROL_FLOW | QUANTIZED == _with_status("rule", "function")


def test_every_input_of_a_rule_is_differentiated_in_a_case() -> None:
    missing = {}
    for (domain, op_type), rule in RULES.items():
        if domain or op_type in CONTROL_FLOW:
            continue
        inputs = rule.signature.inputs
        reached = {
            inputs[min(index, len(inputs) - 1)] for case in CASES if case.op == op_type for index in case.wrt
        }
        missing[op_type] = set(rule.wrt) - reached - PIECEWISE_CONSTANT.get(op_type, set())
    assert not {op_type: names for op_type, names in missing.items() if names}


def test_what_onnx_tags_differentiable_has_a_gradient() -> None:
    tagged = {
        op_type
        for op_type in ROWS
        for schema in _schemas(op_type)
        for formal in schema.inputs
        if formal.differentiation_category == DIFFERENTIABLE
    }
    assert tagged - _with_status("rule", "function") == set(TAGGED_BUT_CONSTANT)
    assert set(TAGGED_BUT_CONSTANT) <= _with_status("nondifferentiable")
