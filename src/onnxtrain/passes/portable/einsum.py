"""Rewrites Einsum of three or more operands as a chain of Einsums of two."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.portable._nodes import standard_nodes
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node


class EinsumPass(ir.passes.InPlacePass):
    """Contracts the operands of an Einsum from left to right, two at a time.

    The default bundle of onnxruntime-web (JSEP, 1.30) silently computes Einsum of three operands incorrectly on WebGPU.
    Each step keeps the labels that a later operand or the output uses, and sums over the others.

    >>> steps(["ij", "jk", "kl"], "il")
    ['ij,jk->ik', 'ik,kl->il']
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        nodes = [node for node in standard_nodes(model, "Einsum") if len(node.inputs) > 2]
        for node in nodes:
            terms, output = _parse(node.attributes["equation"].as_string())
            write, (result, *others) = WriterBefore(node), node.inputs
            assert result is not None
            for equation, operand in zip(steps(terms, output), others, strict=True):
                result = write("Einsum", result, operand, equation=equation)
            replace_node(node, result)
        return ir.passes.PassResult(model, bool(nodes))


def _parse(equation: str) -> tuple[list[str], str]:
    """Splits an equation into the labels of its operands and those of its output."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    # Without an arrow, the output has the ellipsis and the labels that occur once, in alphabetical order.
    if not arrow:
        once = sorted(label for label in set(left) if label.isalpha() and left.count(label) == 1)
        output = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), output


def steps(terms: list[str], output: str) -> list[str]:
    """Splits an Einsum into equations of two operands: the result of each is the first operand of the next."""
    equations = []
    term = terms[0]
    for index, other in enumerate(terms[1:], start=2):
        later = "".join(terms[index:]) + output
        kept = output if index == len(terms) else _kept(term + other, later)
        equations.append(f"{term},{other}->{kept}")
        term = kept
    return equations


def _kept(labels: str, later: str) -> str:
    """Returns the labels of a product that are used later, each once, after an ellipsis."""
    # Ellipsis dimensions are broadcast, and only summed by the last step.
    dots = "..." if "..." in labels else ""
    named = dict.fromkeys(label for label in labels if label.isalpha())
    return dots + "".join(label for label in named if label in later)
