"""Averages over more positions than float16 can count: their gradients are neither zero nor infinite."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from onnxtrain.autodiff import differentiate

OPS = {
    "GlobalAveragePool(x)": lambda x: x.mean((2, 3), keepdim=True),
    "ReduceMean(x)": lambda x: x.mean(),
    "ReduceMax(x)": lambda x: x.amax(),
    "AveragePool<kernel_shape = [300, 300]>(x)": lambda x: torch.nn.functional.avg_pool2d(x, 300),
}


@pytest.mark.parametrize("sizes", ["h, w", "300, 300"])
@pytest.mark.parametrize("op", OPS)
def test_counts_do_not_overflow_in_float16(op: str, sizes: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float16[1, 1, {sizes}] x) => (float16 y)
        {{ p = {op}  s = Constant<value_float = 16384.0>()  t = CastLike(s, p)  q = Mul(p, t)
           y = ReduceSum<keepdims = 0>(q) }}"""
    )
    step = differentiate(model, "y", ["x"])
    x = np.ones((1, 1, 300, 300), np.float16)
    twin = torch.ones(1, 1, 300, 300, dtype=torch.float64, requires_grad=True)
    (OPS[op](twin) * 16384).sum().backward()
    assert twin.grad is not None
    gradients = [ort.InferenceSession(step.SerializeToString()).run(["x_grad"], {"x": x})[0]]
    if "AveragePool<" not in op:  # minutes in the reference evaluator
        with np.errstate(over="ignore"):
            gradients.append(ReferenceEvaluator(step).run(["x_grad"], {"x": x})[0])
    for gradient in gradients:
        np.testing.assert_allclose(gradient.astype(np.float64), twin.grad.numpy(), rtol=2e-3)
