"""Ops for which ONNX Runtime 1.32 has no CPU kernel: Swish above opset 24, packed attention, bfloat16.

`tests/test_runtime_workarounds.py` tests that artifacts and gradients with them run.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.passes.runtime_faults.swish import SwishPass
from passes._models import normal, reference, run

SWISH = """<ir_version: 11, opset_import: ["": {opset}]>
    net (float[3] x) => (float[3] y) {{ y = Swish<alpha = {alpha}>(x) }}"""
PACKED = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    net (float[b, 3, 2, 3, 4] p) => (float[b, 3, 8] y) { y = com.microsoft.MultiHeadAttention<num_heads = 2>(p) }"""
BFLOAT16 = (
    """<ir_version: 10, opset_import: ["": 21]> net (bfloat16[3] x) => (bfloat16[3] y) { y = Tanh(x) }"""
)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("opset", [25, 26])
def test_swish_runs_as_a_product(opset: int, alpha: float) -> None:
    proto = onnx.parser.parse_model(SWISH.format(opset=opset, alpha=alpha))
    model = ir.from_proto(proto)
    assert SwishPass()(model).modified
    assert not SwishPass()(model).modified
    # ONNX Runtime 1.20 refuses these opsets; ONNX's reference judges the rewritten model everywhere.
    x = {"x": normal(3)}
    np.testing.assert_allclose(reference(ir.to_proto(model), x)[0], reference(proto, x)[0], rtol=1e-6)


def test_swish_of_opset_24_stays() -> None:
    model = ir.from_proto(onnx.parser.parse_model(SWISH.format(opset=24, alpha=1.0)))
    assert not SwishPass()(model).modified


@pytest.mark.parametrize("opset", [25, 26])
def test_onnxruntime_has_no_swish(opset: int) -> None:
    """If this fails, a new ONNX Runtime has one: SwishPass may go."""
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED|INVALID_ARGUMENT"):
        run(onnx.parser.parse_model(SWISH.format(opset=opset, alpha=1.0)), {"x": normal(3)})


def test_onnxruntime_has_no_packed_attention() -> None:
    """If this fails, a new ONNX Runtime has it: unpack_attention may go."""
    with pytest.raises(Exception, match="Packed QKV"):
        run(onnx.parser.parse_model(PACKED), {"p": normal(2, 3, 2, 3, 4)})


def test_onnxruntime_computes_no_bfloat16() -> None:
    """If this fails, a new ONNX Runtime does: see whether it rounds as PyTorch before the rewriting goes."""
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        ort.InferenceSession(onnx.parser.parse_model(BFLOAT16).SerializeToString())
