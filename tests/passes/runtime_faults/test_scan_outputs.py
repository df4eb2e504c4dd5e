"""Bodies of Scan that return what they were given: ONNX Runtime 1.32 leaves these outputs unset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.passes.runtime_faults.scan_outputs import ScanOutputsPass

MODEL = """<ir_version: 10, opset_import: ["": 21]>
net (float[4] k, float[3] s, float[5, 3] rows, float[4] w) => (float loss) {
    scaled = Mul(k, w)
    k_last, s_last, repeated, read = Scan<num_scan_inputs = 1, body = body
        (float[4] kept, float[3] sum, float[3] row) => (float[4] kept, float[3] next, float[4] kept, float[3] row)
        { next = Add(sum, row) }>(scaled, s, rows)
    a = ReduceSum<keepdims = 0>(k_last)  b = ReduceSumSquare<keepdims = 0>(repeated)
    c = ReduceSum<keepdims = 0>(s_last)  d = ReduceSumSquare<keepdims = 0>(read)
    loss = Sum(a, b, c, d) }"""
FEEDS = {
    "k": np.array([1, 2, -3, 0.5], np.float32),
    "s": np.array([0.25, -1, 2], np.float32),
    "rows": np.arange(15, dtype=np.float32).reshape(5, 3) / 8,
    "w": np.array([0.5, 1, -2, 4], np.float32),
}


def expected() -> tuple[float, np.ndarray]:
    """The loss and its gradient by `w`, from the model's formulas."""
    scaled = FEEDS["k"] * FEEDS["w"]
    sums = FEEDS["s"].sum() + FEEDS["rows"].sum()
    loss = scaled.sum() + 5 * (scaled**2).sum() + sums + (FEEDS["rows"] ** 2).sum()
    return float(loss), FEEDS["k"] * (1 + 10 * scaled)


def runs(model: onnx.ModelProto, names: list[str]) -> list[list[np.ndarray]]:
    """Results of 20 runs on memory that is full of other numbers."""
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = False
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    # The cotangent of the loss is the one input that the model did not have.
    feeds = {item.name: FEEDS.get(item.name, np.ones((), np.float32)) for item in session.get_inputs()}
    results = []
    for _ in range(20):
        junk = [np.full(size, 1e10, np.float32) for size in range(1, 40)]
        del junk
        results.append(session.run(names, feeds))
    return results


@pytest.mark.parametrize(
    "way",
    [
        lambda model: onnxtrain.differentiate(model, "loss", ["w"]),
        lambda model: onnxtrain.vjp(model, ["loss"], ["w"]),
    ],
    ids=["differentiate", "vjp"],
)
def test_gradient_models_are_right_in_every_run(way: object) -> None:
    model = way(onnx.parser.parse_model(MODEL))
    loss, gradient = expected()
    names = ["loss", next(o.name for o in model.graph.output if o.name != "loss")]

    for got_loss, got_gradient in runs(model, names):
        np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
        np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5)


def test_artifacts_are_right_in_every_run(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(MODEL)
    weights = onnx.numpy_helper.from_array(FEEDS["w"], "w")
    model.graph.initializer.append(weights)
    del model.graph.input[3]
    model.graph.output.append(onnx.helper.make_tensor_value_info("k_last", onnx.TensorProto.FLOAT, [4]))
    onnxtrain.generate_artifacts(
        model, requires_grad=["w"], additional_output_names=["k_last"], artifact_directory=tmp_path
    )
    loss, gradient = expected()

    for got_loss, got_gradient in runs(onnx.load(tmp_path / "training_model.onnx"), ["loss", "w_grad"]):
        np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
        np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5)
    for (got_loss,) in runs(onnx.load(tmp_path / "eval_model.onnx"), ["loss"]):
        np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for (kept,) in runs(onnx.load(tmp_path / "inference_model.onnx"), ["k_last"]):
        np.testing.assert_allclose(kept, FEEDS["k"] * FEEDS["w"], rtol=1e-6)


def test_onnxruntime_leaves_such_outputs_unset() -> None:
    """If this fails, a new ONNX Runtime sets them: the pass may go."""
    loss, _ = expected()
    losses = [got for (got,) in runs(onnx.parser.parse_model(MODEL), ["loss"])]
    assert not np.allclose(losses, loss, rtol=1e-5)


def test_only_outputs_that_are_inputs_are_copied() -> None:
    model = ir.from_proto(onnx.parser.parse_model(MODEL))

    assert ScanOutputsPass()(model).modified
    body = next(node for node in model.graph if node.op_type == "Scan").attributes["body"].as_graph()
    assert [node.op_type for node in body] == ["Add", "Identity", "Identity", "Identity"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert not ScanOutputsPass()(model).modified
