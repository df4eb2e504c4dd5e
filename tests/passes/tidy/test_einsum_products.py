"""Tests that Einsums of two operands become matrix products with the same result, beside NumPy."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.passes import infer_shapes
from onnxtrain.passes.tidy.einsum_products import EinsumProductsPass


def _model(equation: str, shapes: Sequence[Sequence[int | str]], dtype: ir.DataType) -> ir.Model:
    values = [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        for name, shape in zip("ab", shapes, strict=True)
    ]
    node = ir.node("Einsum", values, {"equation": equation})
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(dtype)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 21}, name="g")
    return infer_shapes(ir.Model(graph, ir_version=10))


def _run(model: ir.Model, *arrays: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip("ab", arrays, strict=True)))[0]


def _ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type not in ("Constant", "Identity")]


def _random_equation(draw: random.Random) -> tuple[str, str, str]:
    letters = draw.sample("abcdefghij", draw.randint(2, 7))
    places = [draw.choice(["batch", "left", "right", "summed"]) for _ in letters]
    places[0] = "summed"

    def shuffled(*kept: str) -> str:
        chosen = [letter for letter, place in zip(letters, places, strict=True) if place in kept]
        draw.shuffle(chosen)
        return "".join(chosen)

    left, right = shuffled("batch", "left", "summed"), shuffled("batch", "right", "summed")
    return left, right, shuffled("batch", "left", "right")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("known", ["static", "symbolic", "mixed"])
def test_equals_numpy(seed: int, known: str) -> None:
    draw = random.Random(seed)
    left, right, output = _random_equation(draw)
    # Symbolic sizes may be zero.
    size = {
        label: draw.choice([1, 2, 3, 5] if known == "static" else [0, 1, 2, 3, 5]) for label in left + right
    }
    named = {"static": [], "symbolic": list(size), "mixed": [label for label in size if draw.random() < 0.4]}
    declared = {label: f"size_{label}" if label in named[known] else count for label, count in size.items()}
    numbers = np.random.default_rng(seed)
    a, b = (numbers.standard_normal([size[label] for label in term]) for term in (left, right))
    equation = f"{left},{right}->{output}"
    shapes = [[declared[label] for label in term] for term in (left, right)]
    model = _model(equation, shapes, ir.DataType.DOUBLE)
    changed = EinsumProductsPass()(model).modified
    assert changed == (0 not in declared.values())
    if not changed:
        return
    assert "Einsum" not in _ops(model)
    for value in (
        value for node in model.graph for value in node.outputs if node.op_type in ("MatMul", "Transpose")
    ):
        assert value.dtype == ir.DataType.DOUBLE
        assert value.shape is not None
    actual = _run(model, a, b)
    np.testing.assert_allclose(actual, np.einsum(equation, a, b), rtol=1e-12, atol=1e-12)
