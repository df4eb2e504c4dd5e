"""docs/ops.md is made from the rule table: `ONNXTRAIN_WRITE_DOCS=1 pytest tests/autodiff/test_coverage_page.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from onnxtrain.autodiff import coverage
from onnxtrain.autodiff._registry import NON_DIFFERENTIABLE, NOT_YET, RULES
from onnxtrain.passes import BODIES

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"
STATUS = {
    "rule": "gradient rule",
    "function": "through the ops that it is made of",
    "nondifferentiable": "no gradient flows",
    "not yet": "not yet",
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
        "On the path of a gradient these ops, as onnxruntime's optimizer leaves them, become the standard ops that",
        f"they are made of; elsewhere they stay: {_names(BODIES, microsoft)}.",
        "Those on quantized numbers let gradients pass with `straight_through=True`.",
        "So does SimplifiedLayerNormalization, which it writes into the standard domain.",
        f"A rule, beside onnxruntime's own kernel: {_names(RULES, microsoft)}.",
        f"Refused with a reason: {_names(NOT_YET, microsoft)}.",
        "`onnxtrain ops --domain com.microsoft --status unknown` lists the others that the installed onnxruntime has.",
        "",
        "## ai.onnx.ml",
        "",
        f"Gradients pass to the input of {_names(BODIES, learnt)} and, through its scores, {_names(RULES, learnt)};",
        "their parameters are attributes, which nothing trains.",
        f"No gradient flows through {_names(NON_DIFFERENTIABLE, learnt)}.",
    ]


def render() -> str:
    rows = coverage()
    counts = ", ".join(f"{sum(r.status == key for r in rows)} {label}" for key, label in STATUS.items())
    lines = [
        "# Ops and their gradients",
        "",
        f"All {len(rows)} ops of the standard domain in opsets 21 to 28: {counts}.",
        "",
        "This page follows from the rule table. `onnxtrain ops` prints it; `onnxtrain ops MODEL` says what stops a",
        "model from being trained. Through ops on integers (QLinearConv, QLinearMatMul) gradients pass where asked:",
        "`straight_through=True`, which MatMulInteger, ConvInteger, Round, Ceil and Floor take, too. What other",
        "engines differentiate is in [ops-beside-others.md](ops-beside-others.md), ONNX's own tests of each op in",
        "[node-tests.md](node-tests.md).",
        "",
        "| op | gradient | with respect to | why not |",
        "|---|---|---|---|",
    ]
    for row in rows:
        since = f" (from opset {row.since})" if row.since > 21 else ""
        lines.append(
            f"| {row.op_type}{since} | {STATUS[row.status]} | {', '.join(row.inputs)} | {row.reason} |"
        )
    return "\n".join([*lines, *_contrib()]) + "\n"


def test_page_follows_from_the_rule_table() -> None:
    if os.environ.get("ONNXTRAIN_WRITE_DOCS"):
        PAGE.write_text(render())
    assert PAGE.read_text() == render()
