"""Messages about values of which nothing is known name the op that leaves them open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxtrain import differentiate, generate_artifacts
from onnxtrain.errors import DifferentiationError, GraphBuildError

BODIES = {
    "y": "h = MatMul(x, w)  y = my.ops.Blur(h)",
    "h": "h = my.ops.Blur(x)  y = MatMul(h, w)",
    "t": "h = MatMul(x, w)  t = my.ops.Blur(h)  u = Relu(t)  y = Add(u, h)",
}


def model(result: str) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["": 21, "my.ops": 1]> g (float[n, 4] x) => (y) {{ {BODIES[result]} }}'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    return proto


@pytest.mark.parametrize("result", BODIES)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", None])
def test_an_unknown_op_without_a_declared_result_is_named(
    result: str, loss: str | None, tmp_path: Path
) -> None:
    with pytest.raises(GraphBuildError, match=rf"result '{result}' of 'my.ops::Blur', an op .*value_info"):
        generate_artifacts(model(result), loss=loss, artifact_directory=tmp_path)
    with pytest.raises(DifferentiationError, match=rf"result '{result}' of 'my.ops::Blur'"):
        differentiate(model(result), of="y", wrt=["w"])
