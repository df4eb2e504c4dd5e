"""docs/reference/ops.md is made from the rule table.

`ONNXTRAIN_WRITE_DOCS=1 pytest tests/autodiff/test_coverage_page.py` writes it.
"""

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
        "onnxtrain has a formula for the gradient with respect to the inputs in the third column below",
    ),
    "function": (
        "through its definition",
        "onnxtrain replaces the op by its definition in other ops, and differentiates those",
    ),
    "nondifferentiable": (
        "no gradient flows",
        "the derivative is zero or undefined, e.g. because the output is an integer. The op ends the gradient, but the "
        "model can be trained",
    ),
    "not yet": (
        "not yet",
        "raises `NoGradientRule` if the op lies between a trained parameter and the loss",
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
        "ONNX Runtime's graph optimizers and quantizers write these ops.",
        "",
        "| gradient | ops |",
        "|---|---|",
        "| through its definition in standard ops, if the op lies between a trained parameter and the loss. Otherwise "
        f"the op isn't changed | {_names(op_bodies(), microsoft)}; also SimplifiedLayerNormalization, which ONNX "
        "Runtime writes into the standard domain |",
        f"| gradient rule; ONNX Runtime's kernel computes the op itself | {_names(RULES, microsoft)} |",
        f"| raises `NoGradientRule`; the message says why | {_names(NOT_YET, microsoft)} |",
        "",
        "Quantized ops need `straight_through=True`. `onnxtrain ops --domain com.microsoft --status unknown` lists the",
        "other ops of the installed ONNX Runtime. They have no gradient.",
        "",
        "## ai.onnx.ml",
        "",
        "Converters for scikit-learn write these ops. Their coefficients are attributes, so they aren't trained.",
        "",
        "| gradient | ops |",
        "|---|---|",
        f"| with respect to the input | {_names(op_bodies(), learnt)}; {_names(RULES, learnt)}, through its output "
        "`scores` |",
        f"| no gradient flows | {_names(NON_DIFFERENTIABLE, learnt)} |",
    ]


def render() -> str:
    rows = coverage()
    lines = [
        "# Ops and their gradients",
        "",
        "Look up here whether an op of ONNX has a gradient. To check all ops of a model, run",
        "",
        "```sh",
        "onnxtrain ops model.onnx",
        "```",
        "",
        "It names the ops that prevent training. Without a model, `onnxtrain ops` prints the table of the standard",
        "domain below.",
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
        "**Ops that round.** With `straight_through=True`, the gradients of Round, Ceil, Floor, QuantizeLinear,",
        "DynamicQuantizeLinear, MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv are straight-through:",
        "rounding counts as the identity.",
        "",
        "To add a gradient rule, see [CONTRIBUTING.md](../../CONTRIBUTING.md#adding-an-op). The gradients were also",
        "[compared with other engines](../../notes/ops-beside-others.md) and on",
        "[ONNX's node tests](../../notes/node-tests.md).",
        "",
        "## Standard domain",
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
