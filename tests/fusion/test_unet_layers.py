"""SiLU and GroupNormalization, as exporters write them, become one op each, with one for the gradient."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fusion.rewriting import ops, rewritten, with_gradients
from onnxtrain.fusion import FUSIONS, FusionPass, NativeOpsPass
from onnxtrain.passes import canonicalize, load_model, promote_initializers, to_proto
from passes._models import run
from tolerances import norm_relative_error

SILU = """<ir_version: 10, opset_import: ["": 21]>
net (float[batch, 6, 4] x) => (float[batch, 6, 4] y) { s = Sigmoid(x)  y = Mul(s, x) }"""

SILU_BY_EXP = """<ir_version: 10, opset_import: ["": 21]>
net (float[batch, 6, 4] x) => (float[batch, 6, 4] y) <float one = {1}> {
  n = Neg(x)  e = Exp(n)  d = Add(one, e)  y = Div(x, d) }"""

GROUPED = """<ir_version: 10, opset_import: ["": 21]>
net (float[batch, 6, 4, 5] x) => (float[batch, 6, 4, 5] y)
<float[6] weight, float[6] bias, float[GROUPS] one, float[GROUPS] zero,
 int64[3] rows = {0, GROUPS, -1}, int64[2] axes = {1, 2}> {
  flat = Reshape(x, rows)
  standard = InstanceNormalization<epsilon = 0.001>(flat, one, zero)
  shape = Shape(x)
  back = Reshape(standard, shape)
  factor = Unsqueeze(weight, axes)
  scaled = Mul(back, factor)
  shift = Unsqueeze(bias, axes)
  wide = Cast<to = 1>(shift)
  y = Add(scaled, wide)
}"""


def grouped(groups: int, **values: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(GROUPED.replace("GROUPS", str(groups)))
    given = {
        "weight": np.linspace(0.5, 2, 6, dtype=np.float32),
        "bias": np.linspace(-1, 1, 6, dtype=np.float32),
        "one": np.ones(groups, np.float32),
        "zero": np.zeros(groups, np.float32),
    } | values
    del model.graph.value_info[:]
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in given.items())
    return model


def check_gradients(proto: onnx.ModelProto, x: np.ndarray, wrt: list[str], gradient: str) -> None:
    """The fused model has the values and gradients of the one that is not fused, in one op."""
    joint = with_gradients(rewritten(proto, FusionPass(FUSIONS), wrt[1:]), wrt)
    assert gradient in {node.op_type for node in joint.graph.node}
    feeds = {"x": x, "ct": np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)}
    feeds |= {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if t.name in wrt}
    plain = canonicalize(load_model(proto))
    promote_initializers(plain, wrt[1:])
    want = run(with_gradients(plain, wrt), feeds)
    for value, reference in zip(run(joint, feeds), want, strict=True):
        assert norm_relative_error(value, reference) <= 1e-6


@pytest.mark.parametrize("text", [SILU, SILU_BY_EXP], ids=["sigmoid", "exp"])
def test_silu_becomes_one_op(text: str) -> None:
    model = onnx.parser.parse_model(text)
    assert ops(rewritten(model, FusionPass(FUSIONS))) == {"Silu_float": 1}


def test_a_gate_is_no_silu() -> None:
    model = onnx.parser.parse_model(SILU.replace("Mul(s, x)", "Mul(s, s)"))
    assert ops(rewritten(model, FusionPass(FUSIONS))) == {"Sigmoid": 1, "Mul": 1}


def test_another_number_than_one_is_no_silu() -> None:
    model = onnx.parser.parse_model(SILU_BY_EXP.replace("{1}", "{2}"))
    assert "Silu_float" not in ops(rewritten(model, FusionPass(FUSIONS)))


def test_half_silu_stays() -> None:
    """In float16 there is no kernel."""
    model = onnx.parser.parse_model(SILU.replace("float[", "float16["))
    assert ops(rewritten(model, FusionPass(FUSIONS))) == {"Sigmoid": 1, "Mul": 1}


@pytest.mark.parametrize("groups", [1, 3])
def test_group_normalization_becomes_one_op_with_one_for_the_gradient(groups: int) -> None:
    result = rewritten(grouped(groups), FusionPass(FUSIONS), ["weight", "bias"])
    assert ops(result) == {"GroupNormalization_float": 1}
    (node,) = result.graph
    assert node.domain == "onnxtrain"
    assert node.attributes["num_groups"].as_int() == groups
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-3)


def test_scaled_groups_stay() -> None:
    """A scale of the groups is not one of the channels."""
    model = grouped(3, one=np.array([1, 2, 1], np.float32))
    assert ops(rewritten(model, FusionPass(FUSIONS), ["weight", "bias"]))["InstanceNormalization"] == 1


def test_the_standard_op_becomes_the_one_with_a_gradient() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    net (float[batch, 6, 5] x, float[6] w, float[6] b) => (float[batch, 6, 5] y) {
      y = GroupNormalization<num_groups = 2>(x, w, b) }"""
    (node,) = rewritten(onnx.parser.parse_model(text), FusionPass(FUSIONS)).graph
    assert (node.domain, node.attributes["num_groups"].as_int()) == ("onnxtrain", 2)


def test_gradients_of_groups() -> None:
    x = np.random.default_rng(0).standard_normal((3, 6, 4, 5)).astype(np.float32)
    check_gradients(grouped(3), x, ["x", "weight", "bias"], "GroupNormalizationGradient_float")


@pytest.mark.parametrize("text", [SILU, SILU_BY_EXP], ids=["sigmoid", "exp"])
def test_gradient_of_silu(text: str) -> None:
    x = 4 * np.random.default_rng(0).standard_normal((3, 6, 4)).astype(np.float32)
    check_gradients(onnx.parser.parse_model(text), x, ["x"], "SiluGradient_float")


def test_a_pooling_whose_indices_are_saved() -> None:
    """As in the forward half of a graph, whose gradient another session computes."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[2, 3, 6, 8] x) => (float[2, 3, 3, 4] y, int64[2, 3, 3, 4] i) {
        y, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) }"""
    )
    model = rewritten(proto, NativeOpsPass())
    assert ops(model) == {"MaxPool_float": 1}
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 8)).astype(np.float32)
    for own, reference in zip(run(to_proto(model), {"x": x}), run(proto, {"x": x}), strict=True):
        np.testing.assert_array_equal(own, reference)
