"""Products whose packed weights ONNX Runtime unpacks as a whole become one op; those that it reads as they are stay."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fusion.rewriting import ops, rewritten
from onnxtrain.fusion import PackedProductPass
from onnxtrain.passes import to_proto
from passes._models import run

K, N, SIZE = 40, 6, 16
BLOCKS = math.ceil(K / SIZE)
RNG = np.random.default_rng(4)
X = RNG.standard_normal((2, 3, K)).astype(np.float32)


def product(bits: int, zeros: str = "none", attributes: str = "", others: str = "") -> onnx.ModelProto:
    """The model of a MatMulNBits; `others` are its inputs after the zero points."""
    points = {
        "none": None,
        "codes": RNG.integers(0, 256, N * math.ceil(BLOCKS * bits / 8)).astype(np.uint8),
        "floats": RNG.uniform(0, 2**bits, (N, BLOCKS)).astype(np.float32),
    }[zeros]
    names = f"x, codes, scales{', zeros' if points is not None else ', ' if others else ''}{others}"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        net (float[a, b, {K}] x) => (float[a, b, {N}] y) {{
            y = com.microsoft.MatMulNBits<K = {K}, N = {N}, bits = {bits}, block_size = {SIZE}{attributes}>({names})
        }}"""
    )
    arrays = {
        "codes": RNG.integers(0, 256, (N, BLOCKS, SIZE * bits // 8)).astype(np.uint8),
        "scales": RNG.uniform(0.01, 0.05, (N, BLOCKS)).astype(np.float32),
        "zeros": points,
        "order": np.arange(K, dtype=np.int32) // SIZE if "order" in others else None,
        "bias": np.ones(N, np.float32) if "bias" in others else None,
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items() if array is not None
    )
    return model


@pytest.mark.parametrize(
    ("bits", "zeros"), [(2, "none"), (2, "codes"), (8, "none"), (8, "codes"), (2, "floats"), (4, "floats")]
)
def test_becomes_one_op(bits: int, zeros: str) -> None:
    proto = product(bits, zeros)
    model = rewritten(proto, PackedProductPass())
    assert ops(model) == {f"PackedMatMul{'FloatZeros' * (zeros == 'floats')}_float": 1}
    # Without kernels the body is the node that was there.
    np.testing.assert_array_equal(run(to_proto(model), {"x": X})[0], run(proto, {"x": X})[0])


@pytest.mark.parametrize(
    "model",
    [
        product(4),
        product(4, "codes"),
        product(8, attributes=", accuracy_level = 4"),
        product(8, others=", order"),
        product(8, others=", , bias"),
    ],
    ids=["4 bits", "4 bits with zero points", "int8 activations", "an order", "a bias"],
)
def test_others_stay(model: onnx.ModelProto) -> None:
    assert ops(rewritten(model, PackedProductPass())) == {"MatMulNBits": 1}


def test_float16_stays() -> None:
    model = product(8)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    scales = next(tensor for tensor in model.graph.initializer if tensor.name == "scales")
    scales.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scales).astype(np.float16), "scales"))
    assert ops(rewritten(model, PackedProductPass())) == {"MatMulNBits": 1}
