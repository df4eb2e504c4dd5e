"""Models of opsets 27 and 28 are written in opset 26, which computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from autodiff.case import Case, runtime_inputs
from autodiff.cases import newer
from onnxtrain import Trainer
from onnxtrain.errors import UnsupportedOpsetError
from onnxtrain.passes import apply_workarounds, canonicalize, load_model, to_proto
from runtimes import needs_opset


def in_opset_26(model: onnx.ModelProto) -> onnx.ModelProto:
    written = to_proto(apply_workarounds(canonicalize(load_model(model))))
    assert (written.opset_import[0].version, written.ir_version) == (26, 13)
    onnx.checker.check_model(written, full_check=True)
    return written


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 14, opset_import: ["": 28]> g {text}')


# onnxruntime 1.32 does not run SwiGLU: it finds the Swish of its body at opset 24 only.
RUN = [case for case in newer.CASES if case.op != "SwiGLU"]


@needs_opset(28)
@pytest.mark.parametrize("case", RUN, ids=lambda case: case.id)
def test_new_ops_compute_what_onnxruntime_does(case: Case) -> None:
    model = case.model(np.dtype(np.float32), symbolic=True)
    names = [f"y{index}" for index in range(case.outputs)]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    feeds = runtime_inputs(case, case.arrays(np.dtype(np.float32)))
    weights = [np.ones(shape, np.float32) for shape in case.output_shapes()]
    feeds |= {f"w{index}": weight for index, weight in enumerate(weights)}
    written = in_opset_26(model)
    assert not {node.op_type for node in written.graph.node} & {case.op}
    for got, expected in zip(run(written, feeds), run(model, feeds), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@needs_opset(26)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_remainder_of_floats_has_the_sign_of_the_divisor(dtype: type) -> None:
    kind = {np.float32: "float", np.float64: "double"}[dtype]
    model = parsed(f"({kind}[n] a, {kind}[n] b) => ({kind}[n] y) {{ y = Mod(a, b) }}")
    a = np.array([5.3, -5.3, 5.3, -5.3, 6.0, -6.0, 0.0, 2.0, -2.0, np.nan, np.inf], dtype)
    b = np.array([3.0, 3.0, -3.0, -3.0, 3.0, 3.0, -2.0, np.inf, np.inf, 1.0, 1.0], dtype)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(run(in_opset_26(model), {"a": a, "b": b})[0], np.mod(a, b), rtol=1e-6)


@needs_opset(26)
def test_ops_with_more_dtypes_and_modes() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 6))
    model = parsed("(double[2, 3, 4, 6] x) => (double[2, 3, 4, 6] y) { y = Celu<alpha=0.7>(x) }")
    expected = torch.nn.functional.celu(torch.from_numpy(x), 0.7).numpy()
    # onnxruntime 1.32 has no Elu of float64, of which the body is made.
    np.testing.assert_allclose(
        ReferenceEvaluator(in_opset_26(model)).run(None, {"x": x})[0], expected, rtol=1e-6
    )
    for mode, order in (("DCR", (0, 3, 5, 1, 2, 4)), ("CRD", (0, 1, 3, 5, 2, 4))):
        text = f'(float[2, 3, 4, 6] x) => (float[2, 12, 2, 3] y) {{ y = SpaceToDepth<blocksize=2, mode="{mode}">(x) }}'
        blocks = x.astype(np.float32).reshape(2, 3, 2, 2, 3, 2).transpose(order).reshape(2, 12, 2, 3)
        np.testing.assert_array_equal(run(in_opset_26(parsed(text)), {"x": x.astype(np.float32)})[0], blocks)
    model = parsed("(float16 a, float16 limit, float16 d) => (float16[n] y) { y = Range(a, limit, d) }")
    a, limit, d = (np.array(number, np.float16) for number in (1, 2.2, 0.1))
    expected = np.arange(13, dtype=np.float32) * np.float32(d) + np.float32(a)
    got = run(in_opset_26(model), {"a": a, "limit": limit, "d": d})[0]
    np.testing.assert_array_equal(got, expected[expected < np.float32(limit)].astype(np.float16))


def test_what_has_no_equal_is_named() -> None:
    model = parsed('(int32[n] x, int32[n] s) => (int32[n] y) { y = BitShift<direction="RIGHT">(x, s) }')
    with pytest.raises(UnsupportedOpsetError, match=r"BitShift of INT32, INT32.* has no equivalent"):
        canonicalize(load_model(model))


@needs_opset(26)
def test_a_model_of_opset_28_trains() -> None:
    """A gated layer, a causal convolution and linear attention learn what their twin with other weights computes."""
    model = parsed("""(float[batch, 6, 8] x) => (float[batch, 6, 4] y) {
        gate = MatMul(x, w_gate)
        up = MatMul(x, w_up)
        gated = SwiGLU(gate, up)
        channels = Transpose<perm=[0, 2, 1]>(gated)
        mixed, state = CausalConvWithState<activation="silu">(channels, w_conv)
        back = Transpose<perm=[0, 2, 1]>(mixed)
        attended, memory = LinearAttention<q_num_heads=2, kv_num_heads=2, update_rule="linear">(back, gated, back)
        y = MatMul(attended, w_out)
    }""")
    rng = np.random.default_rng(1)
    for name, shape in {"w_gate": (8, 8), "w_up": (8, 8), "w_conv": (8, 1, 3), "w_out": (8, 4)}.items():
        array = rng.normal(size=shape).astype(np.float32) * 0.4
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    x = rng.normal(size=(32, 6, 8)).astype(np.float32)
    target = np.tanh(x[..., :4])
    trainer = Trainer(model, "mse", "adamw", 0.1)
    assert {name for name, _ in trainer.parameters} == {"w_gate", "w_up", "w_conv", "w_out"}
    before = trainer.evaluate(x, target)["loss"]
    trainer.fit(x, target, epochs=25, batch_size=16)
    assert trainer.evaluate(x, target)["loss"] < 0.6 * before
