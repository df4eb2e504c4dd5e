"""Fresh statistics equal fresh weights; neither exporters nor ONNX Runtime must make them one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper

from models import make_model
from onnxtrain.passes import IsolateStatisticsPass, canonicalize, load_model


def fresh_batch_norm() -> ir.Model:
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    node = helper.make_node(
        "BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["y", "rm", "rv"], training_mode=1
    )
    values = {"scale": ones, "bias": zeros, "mean": zeros, "var": ones}
    model = make_model([node], {"x": ["n", 4, 2]}, {"y": ["n", 4, 2]}, values)
    return canonicalize(load_model(model))


X = np.random.default_rng(0).normal(3, 2, (5, 4, 2)).astype(np.float32)


def three_runs(model: ir.Model) -> list[np.ndarray]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return [session.run(None, {"x": X})[0] for _ in range(3)]


def test_weights_survive_repeated_runs() -> None:
    model = fresh_batch_norm()
    IsolateStatisticsPass()(model)
    expected = (X - X.mean((0, 2), keepdims=True)) / np.sqrt(X.var((0, 2), keepdims=True) + 1e-5)
    for y in three_runs(model):
        np.testing.assert_allclose(y, expected, atol=1e-5)


def test_without_the_pass_a_run_changes_the_weights() -> None:
    """If this fails, a new ONNX Runtime keeps weights and statistics apart: the pass may go."""
    first, *others = three_runs(fresh_batch_norm())
    assert not np.allclose(others, first)


def test_statistics_that_are_read_stay() -> None:
    model = fresh_batch_norm()
    node = model.graph.node(0)
    model.graph.outputs.extend(node.outputs[1:])
    for output in node.outputs[1:]:
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([4])
    assert not IsolateStatisticsPass()(model).modified
    assert [value.name for value in node.inputs] == ["x", "scale", "bias", "mean", "var"]


def test_statistics_that_share_an_initializer_with_weights_get_their_own() -> None:
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    node = helper.make_node("BatchNormalization", ["x", "ones", "zeros", "zeros", "ones"], ["y"])
    model = make_model([node], {"x": ["n", 4, 2]}, {"y": ["n", 4, 2]}, {"ones": ones, "zeros": zeros})
    canonical = canonicalize(load_model(model))
    names = [value.name for value in canonical.graph.node(0).inputs]
    assert names == ["x", "ones", "zeros", "ones.running_mean", "ones.running_var"]


def test_a_batch_norm_that_is_applied_twice_keeps_its_statistics() -> None:
    values = dict(zip(("scale", "bias", "mean", "var"), np.ones((4, 4), np.float32), strict=True))
    nodes = [helper.make_node("BatchNormalization", [x, *values], [y]) for x, y in (("x", "h"), ("h", "y"))]
    canonical = canonicalize(load_model(make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, values)))
    assert [value.name for value in canonical.graph.node(1).inputs[1:]] == list(values)
