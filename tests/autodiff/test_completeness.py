"""The tables together account for every op of the supported opsets, and every gradient has a test."""

from __future__ import annotations

import onnx

from autodiff.fuzz import contrib
from autodiff.fuzz.layers import AVAILABLE, DRAWERS
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

NOT_DRAWN = {
    **dict.fromkeys(QUANTIZED, "gradients straight through rounding are not the differences"),
    **dict.fromkeys(
        ("CausalConvWithState", "LinearAttention", "SwiGLU"),
        "opsets up to 26 are drawn; `cases/newer.py` has cases of those behind it",
    ),
}
"""Ops with a gradient that the fuzz leaves out, and why."""

OTHER_DOMAINS = {
    "ai.onnx.ml": "of its one op with a rule, `test_contrib.py` has a case",
    "com.microsoft": "`test_contrib.py` has cases of all; of those with a body the most frequent ones are drawn",
    "onnxtrain": "functions with native kernels, of which the tests of these draw cases",
}
"""Domains with rules that the fuzz leaves out, and why."""

WITHOUT_A_CASE = {
    "Attention": {"qk_matmul_output_mode": "of an output without a gradient", "softmax_precision": "a dtype"},
    **{
        op_type: dict.fromkeys(("round_mode", "saturate"), "of casts to float8, which stop gradients")
        for op_type in ("Cast", "CastLike")
    },
    "ConvTranspose": {"kernel_shape": "the shape of the weight"},
    "DeformConv": {"kernel_shape": "the shape of the weight"},
    "DequantizeLinear": {"output_dtype": "a dtype"},
    "Dropout": {"seed": "random numbers: test_dropout.py"},
    "GroupNormalization": {"stash_type": "a dtype"},
    "LayerNormalization": {"stash_type": "a dtype"},
    "LinearAttention": {"chunk_size": "changes the speed only"},
    "RMSNormalization": {"stash_type": "a dtype"},
    "Range": {"stash_type": "a dtype"},
    "SpaceToDepth": {"mode": "replaced when a model is loaded: tests/passes/canonical/test_newer_opsets.py"},
    "TopK": {"sorted": "the gradient follows from the indices, in any order"},
    **{
        op_type: dict.fromkeys(settings.split(), "refused: test_differentiate.py")
        for op_type, settings in {
            "GRU": "activation_alpha activation_beta activations clip",
            "LSTM": "activation_alpha activation_beta activations clip input_forget",
            "RNN": "activation_alpha activation_beta clip",
        }.items()
    },
}
"""Per op, attributes that no case sets to another value than the default, and why."""

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
    assert not unknown, (
        f"{sorted(unknown)}: write a rule in src/onnxtrain/autodiff/rules/, or declare the op nondifferentiable there "
        "or not_yet"
    )


def test_every_op_is_declared_once_and_reasons_are_given() -> None:
    declared = [op for table in (RULES, NON_DIFFERENTIABLE, NOT_YET) for domain, op in table if not domain]
    assert sorted(set(declared)) == sorted(declared)
    assert set(declared) <= set(ROWS)
    assert {op for op, row in ROWS.items() if row.reason} == _with_status("nondifferentiable", "not yet")


def test_every_gradient_has_a_case() -> None:
    tested, differentiated = (
        {case.op for case in CASES} | CONTROL_FLOW | QUANTIZED,
        _with_status("rule", "function"),
    )
    assert differentiated - tested == set(), (
        "add a Case to CASES of the family's file in tests/autodiff/cases/"
    )
    assert tested - differentiated == set(), "these ops have cases, but neither a rule nor a function body"


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
    untested = {op_type: names for op_type, names in missing.items() if names}
    assert not untested, (
        "in a case of tests/autodiff/cases/, make these inputs F(...), so that they are differentiated"
    )


def _default(schema: onnx.defs.OpSchema, attribute: str) -> object:
    value = schema.attributes[attribute].default_value
    default = onnx.helper.get_attribute_value(value) if value.type else None
    return default.decode() if isinstance(default, bytes) else default


def test_every_attribute_has_a_case() -> None:
    """An attribute that a rule forgets would give a wrong gradient."""
    untested: dict[str, set[str]] = {}
    for op_type in {case.op for case in CASES}:
        schema = _schemas(op_type)[-1]
        given = [case.attrs for case in CASES if case.op == op_type]
        missing = {
            attribute
            for attribute in schema.attributes
            if all(attrs.get(attribute, d) == d for d in [_default(schema, attribute)] for attrs in given)
        }
        if missing:
            untested[op_type] = missing
    excused = {op_type: set(attributes) for op_type, attributes in WITHOUT_A_CASE.items()}
    more = {op: names - excused.get(op, set()) for op, names in untested.items()}
    assert {op: names for op, names in more.items() if names} == {}, (
        "add a case in tests/autodiff/cases/ that sets these attributes to another value than their default"
    )
    assert untested == excused, "delete the attributes that have a case from WITHOUT_A_CASE"


def test_what_onnx_tags_differentiable_has_a_gradient() -> None:
    tagged = {
        op_type
        for op_type in ROWS
        for schema in _schemas(op_type)
        for formal in schema.inputs
        if formal.differentiation_category == DIFFERENTIABLE
    }
    assert tagged - _with_status("rule", "function") - TAGGED_BUT_CONSTANT.keys() == set(), (
        "ONNX's schemas say that these ops are differentiable: write a rule, or name the op in TAGGED_BUT_CONSTANT"
    )
    assert set(TAGGED_BUT_CONSTANT) <= _with_status("nondifferentiable")


def test_every_gradient_is_in_random_graphs() -> None:
    differentiated, drawn = _with_status("rule", "function"), set(DRAWERS) - set(contrib.DRAWERS)
    assert differentiated - drawn - NOT_DRAWN.keys() == set(), (
        "add a function that draws a node of the op to DRAWERS of a file in tests/autodiff/fuzz/"
    )
    assert drawn - differentiated == set()
    assert not set(DRAWERS) & NOT_DRAWN.keys()
    assert NOT_DRAWN.keys() <= differentiated
    assert {op for ops in AVAILABLE.values() for op in ops} == set(DRAWERS)


def test_random_graphs_leave_domains_out_for_a_reason() -> None:
    assert {domain for domain, _ in RULES} == {"", *OTHER_DOMAINS}
