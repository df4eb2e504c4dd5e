"""Equations and sizes that the rule of Einsum refuses."""

from __future__ import annotations

import onnx
import pytest

from onnxtrain.autodiff import differentiate
from onnxtrain.errors import DifferentiationError


@pytest.mark.parametrize("size", ["2", "n"])
def test_axis_of_size_one_before_a_larger_one_is_refused(size: str) -> None:
    """onnx infers shape [1] for the output of this node, so that no gradient behind it could be trusted."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[1, 3] a, float[{size}, 3] b) => (float y) {{
            c = Einsum<equation="ij,ij->i">(a, b)  y = ReduceSum<keepdims=0>(c) }}"""
    )
    with pytest.raises(DifferentiationError, match="size one is"):
        differentiate(model, of="y", wrt=["a"])


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("...,...->...", "its ellipsis stands for 1 and 2 dimensions"),
        ("i,j->", "'a' has 2 dimensions but"),
        ("ijk...,j->", "'a' has 2 dimensions but"),
    ],
)
def test_equation_that_does_not_fit_the_operands_is_refused(equation: str, message: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] a, float[3] b) => (float y) {{
            c = Einsum<equation="{equation}">(a, b)  y = ReduceSum<keepdims=0>(c) }}"""
    )
    with pytest.raises(DifferentiationError, match=message):
        differentiate(model, of="y", wrt=["a"])
