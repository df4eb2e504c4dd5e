"""Dropout in training: its gradient keeps what the forward pass kept."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.autodiff import differentiate

SHAPE = (40, 50)


def _run(ratio: float | None, *, ratio_input: bool, mode_input: bool, training: bool, elem: int):
    """Output of Dropout on ones, and its vector-Jacobian product with 1, 2, 3, ...; stock ONNX Runtime."""
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    inputs = [
        helper.make_tensor_value_info("x", elem, SHAPE),
        helper.make_tensor_value_info("ct", elem, SHAPE),
    ]
    known, feeds = [], {"x": np.ones(SHAPE, dtype), "ct": np.arange(1, 2001).reshape(SHAPE).astype(dtype)}
    for name, value, at_run_time in [
        ("ratio", np.array(ratio, dtype), ratio_input),
        ("mode", np.array(training), mode_input),
    ]:
        if name == "ratio" and ratio is None:
            continue
        if at_run_time:
            code = helper.np_dtype_to_tensor_dtype(value.dtype)
            inputs.append(helper.make_tensor_value_info(name, code, []))
            feeds[name] = value
        else:
            known.append(numpy_helper.from_array(value, name))
    nodes = [
        helper.make_node("Dropout", ["x", "ratio" if ratio is not None else "", "mode"], ["y"], seed=7),
        helper.make_node("Mul", ["y", "ct"], ["p"]),
        helper.make_node("ReduceSum", ["p"], ["loss"], keepdims=0),
    ]
    outputs = [helper.make_tensor_value_info(n, elem, s) for n, s in [("loss", []), ("y", SHAPE)]]
    graph = helper.make_graph(nodes, "dropout", inputs, outputs, known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    step = differentiate(model, of="loss", wrt=["x"])
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    y, gradient = session.run(["y", "x_grad"], feeds)
    return y, gradient, feeds["ct"]


@pytest.mark.parametrize("mode_input", [False, True])
@pytest.mark.parametrize("ratio_input", [False, True])
@pytest.mark.parametrize("elem", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_gradient_has_the_mask_and_scale_of_the_output(
    elem: int, ratio_input: bool, mode_input: bool
) -> None:
    y, gradient, ct = _run(0.25, ratio_input=ratio_input, mode_input=mode_input, training=True, elem=elem)
    dropped = y == 0
    assert 0.15 < dropped.mean() < 0.35
    assert gradient.dtype == y.dtype
    np.testing.assert_allclose(gradient, np.where(dropped, 0, ct / 0.75), rtol=1e-6)


def test_ratio_is_a_half_unless_given() -> None:
    y, gradient, ct = _run(None, ratio_input=False, mode_input=False, training=True, elem=TensorProto.FLOAT)
    assert 0.4 < (y == 0).mean() < 0.6
    np.testing.assert_allclose(gradient, np.where(y == 0, 0, ct * 2), rtol=1e-6)


@pytest.mark.parametrize("ratio_input", [False, True])
def test_mode_of_inference_passes_everything(ratio_input: bool) -> None:
    y, gradient, ct = _run(
        0.25, ratio_input=ratio_input, mode_input=True, training=False, elem=TensorProto.FLOAT
    )
    np.testing.assert_array_equal(y, np.ones(SHAPE, np.float32))
    np.testing.assert_array_equal(gradient, ct)
