"""The tables together account for every op of the supported opsets, and every gradient has a test."""

from __future__ import annotations

import onnx
import pytest

from autodiff.test_rules import CASES
from onnxtrain.autodiff import OpCoverage, coverage
from onnxtrain.autodiff._registry import NON_DIFFERENTIABLE, NOT_YET, OPSETS, RULES

ROWS = {row.op_type: row for row in coverage()}
TESTED = {case.op for case in CASES}

DIFFERENTIABLE = onnx.defs.OpSchema.DifferentiationCategory.Differentiable

TAGGED_BUT_CONSTANT = {
    "Hardmax": "one-hot of the maximum; torch's one_hot(argmax) has no gradient either",
}
"""Ops whose schema says differentiable and whose derivative is zero almost everywhere."""

PIECEWISE_CONSTANT = {"CastLike": {"target_type"}, "Range": {"limit"}}
"""Inputs to which a rule never gives a gradient, because the result is (piecewise) constant in them."""

each_op = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def _schemas(op_type: str) -> list[onnx.defs.OpSchema]:
    return [onnx.defs.get_schema(op_type, o, "") for o in OPSETS if o >= ROWS[op_type].since]


def test_ops_are_those_of_the_installed_onnx() -> None:
    expected = set()
    for opset in OPSETS:
        for schema in onnx.defs.get_all_schemas_with_history():
            if schema.domain == "" and schema.since_version <= opset:
                current = onnx.defs.get_schema(schema.name, opset, "")
                expected |= set() if current.deprecated else {schema.name}
    assert set(ROWS) == expected


@each_op
def test_every_op_is_accounted_for(row: OpCoverage) -> None:
    assert row.status != "unknown", (
        f"{row.op_type}: give it a rule, or declare it nondifferentiable or not_yet"
    )


@each_op
def test_every_op_is_declared_once_and_reasons_are_given(row: OpCoverage) -> None:
    key = ("", row.op_type)
    assert sum(key in table for table in (RULES, NON_DIFFERENTIABLE, NOT_YET)) <= 1
    assert bool(row.reason) == (row.status in ("nondifferentiable", "not yet"))


@each_op
def test_every_gradient_has_a_case(row: OpCoverage) -> None:
    assert (row.op_type in TESTED) == (row.status in ("rule", "function"))


@pytest.mark.parametrize("op_type", sorted(op for domain, op in RULES if not domain))
def test_every_input_of_a_rule_is_differentiated_in_a_case(op_type: str) -> None:
    rule = RULES["", op_type]
    inputs = rule.signature.inputs
    reached = {
        inputs[min(index, len(inputs) - 1)] for case in CASES if case.op == op_type for index in case.wrt
    }
    assert set(rule.wrt) - reached <= PIECEWISE_CONSTANT.get(op_type, set())


@each_op
def test_what_onnx_tags_differentiable_has_a_gradient(row: OpCoverage) -> None:
    tagged = any(
        formal.differentiation_category == DIFFERENTIABLE
        for schema in _schemas(row.op_type)
        for formal in schema.inputs
    )
    if tagged and row.op_type not in TAGGED_BUT_CONSTANT:
        assert row.status in ("rule", "function"), row.reason


@pytest.mark.parametrize("op_type", TAGGED_BUT_CONSTANT)
def test_exceptions_are_still_exceptions(op_type: str) -> None:
    assert ROWS[op_type].status == "nondifferentiable"


def test_declared_ops_exist() -> None:
    declared = {op for table in (RULES, NON_DIFFERENTIABLE, NOT_YET) for domain, op in table if not domain}
    assert declared <= set(ROWS)
