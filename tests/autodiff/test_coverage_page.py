"""docs/reference/ops.md is made from the rule table: `ONNXTRAIN_WRITE_DOCS=1 pytest tests/autodiff/test_coverage_page.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from onnxtrain.autodiff import coverage
from onnxtrain.autodiff._registry import NON_DIFFERENTIABLE, NOT_YET, RULES
from onnxtrain.op_bodies import op_bodies

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ops.md"
STATUS = {
    "rule": (
        "gradient rule",
        "onnxtrain computes the gradient by a formula, with respect to the inputs that the table below names",
    ),
    "function": (
        "through the ops that it is made of",
        "onnxtrain replaces the op by its definition in other ops, which have gradients",
    ),
    "nondifferentiable": (
        "no gradient flows",
        "the derivative is zero or undefined, e.g. of a result in integers. The op passes no gradient on, and does not "
        "stop a training",
    ),
    "not yet": (
        "not yet",
        "an error, if the op lies between a trained parameter and the loss",
    ),
}


def _names(table: Iterable[tuple[str, str]], domain: str) -> str:
    return ", ".join(sorted(op for of, op in table if of == domain))


def _contrib() -> list[str]:
    """Write the page's lines on ops of other domains."""
    microsoft, learnt = "com.microsoft", "ai.onnx.ml"
    return [
        "",
        "## com.microsoft",
        "",
        "onnxruntime's optimizers and quantizers write these ops.",
        "",
        "| gradient | ops |",
        "|---|---|",
        "| through the standard ops that the op is made of, where it lies between a trained parameter and the loss. "
        f"Elsewhere the op stays as it is | {_names(op_bodies(), microsoft)}; also SimplifiedLayerNormalization, which "
        "onnxruntime writes into the standard domain |",
        f"| gradient rule; onnxruntime's kernel computes the op itself | {_names(RULES, microsoft)} |",
        f"| an error that says why | {_names(NOT_YET, microsoft)} |",
        "",
        "Ops on quantised numbers need `straight_through=True`. The command",
        "`onnxtrain ops --domain com.microsoft --status unknown` lists the other ops of the installed",
        "onnxruntime: they have no gradient.",
        "",
        "## ai.onnx.ml",
        "",
        "Converters of scikit-learn write these ops. Their numbers are attributes, which are not trained.",
        "",
        "| gradient | ops |",
        "|---|---|",
        f"| with respect to the input | {_names(op_bodies(), learnt)}; {_names(RULES, learnt)}, through its scores |",
        f"| no gradient flows | {_names(NON_DIFFERENTIABLE, learnt)} |",
    ]


def render() -> str:
    rows = coverage()
    lines = [
        "# Ops and their gradients",
        "",
        "This page lists the ops of ONNX, and whether onnxtrain computes a gradient for them. To check a model, run",
        "`onnxtrain ops model.onnx`, which names the ops that stop a training.",
        "",
        f"The standard domain has {len(rows)} ops in opsets 21 to 28:",
        "",
        "| gradient | meaning | ops |",
        "|---|---|---|",
        *(
            f"| {label} | {meaning} | {sum(row.status == key for row in rows)} |"
            for key, (label, meaning) in STATUS.items()
        ),
        "",
        "**Ops that round.** With `straight_through=True`, gradients pass Round, Ceil, Floor, QuantizeLinear,",
        "DynamicQuantizeLinear, MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv as if they did not round.",
        "",
        "`onnxtrain ops` prints the table below. [ops-beside-others.md](ops-beside-others.md) compares other engines,",
        "[node-tests.md](node-tests.md) has ONNX's own tests of each op.",
        "[CONTRIBUTING.md](../CONTRIBUTING.md#adding-an-op) shows how to add a gradient.",
        "",
        "| op | gradient | with respect to | why not |",
        "|---|---|---|---|",
    ]
    for row in rows:
        since = f" (from opset {row.since})" if row.since > 21 else ""
        lines.append(
            f"| {row.op_type}{since} | {STATUS[row.status][0]} | {', '.join(row.inputs)} | {row.reason} |"
        )
    return "\n".join([*lines, *_contrib()]) + "\n"


def test_every_op_is_on_the_page() -> None:
    unknown = [row.op_type for row in coverage() if row.status not in STATUS]
    assert not unknown, "these ops are not accounted for, see tests/autodiff/test_completeness.py"
    if os.environ.get("ONNXTRAIN_WRITE_DOCS"):
        PAGE.write_text(render())
    assert PAGE.read_text() == render(), (
        "write docs/reference/ops.md again: ONNXTRAIN_WRITE_DOCS=1 pytest -q tests/autodiff/test_coverage_page.py"
    )
