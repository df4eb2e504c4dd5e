"""A model whose ops of ONNX Runtime lack required inputs is refused before anything is built of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import ModelError
from onnxtrain.passes import canonicalize


def product(inputs: list[str]) -> onnx.ModelProto:
    """A product of integers as onnxruntime's quantizer writes it, with these inputs of QGemm."""
    arrays = {
        "s": np.float32(0.1),
        "z": np.int8(0),
        "w": np.ones((3, 2), np.int8),
        "fc": np.ones((2, 2), np.float32),
    }
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        onnx.helper.make_node("QGemm", inputs, ["h"], domain="com.microsoft", name="layer"),
        onnx.helper.make_node("MatMul", ["h", "fc"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["q", "s", "z", "w", "s", ""], "the QGemm node 'layer' is missing its input 5, 'b_zero_point'"),
        (["q", "s", "", "w", "s", "z"], "the QGemm node 'layer' is missing its input 2, 'a_zero_point'"),
        (["q", "s", "z", "w", "s"], "the QGemm node 'layer' is missing its input 5, 'b_zero_point'"),
    ],
)
def test_missing_zero_points_are_refused(inputs: list[str], message: str, tmp_path) -> None:
    model = product(inputs)
    # ONNX Runtime says so, too, when a session is opened: on the device.
    with pytest.raises(Exception, match=r"marked single but has an empty string|range \[min="):
        ort.InferenceSession(model.SerializeToString())
    with pytest.raises(ModelError, match=message):
        generate_artifacts(model, loss="mse", artifact_directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_inputs_that_may_be_left_out_are_not_missed(tmp_path) -> None:
    model = product(["q", "s", "z", "w", "s", "z"])
    assert canonicalize(ir.from_proto(model))
    generate_artifacts(model, loss="mse", artifact_directory=tmp_path)
