"""What the installed onnxruntime runs: the tests also run with the oldest one that is declared."""

from __future__ import annotations

import functools

import onnxruntime as ort
import pytest
from onnx import TensorProto, helper


@functools.cache
def runs_opset(opset: int) -> bool:
    """Whether onnxruntime loads a model of this opset, tried with a single Identity."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "tiny", [x], [y])
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(
        graph, opset_imports=imports, ir_version=helper.find_min_ir_version_for(imports)
    )
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions share no base class but Exception
        if "is till opset" in str(error) or "Unsupported model IR version" in str(error):
            return False
        raise
    return True


def needs_opset(opset: int) -> pytest.MarkDecorator:
    """Returns the mark of a test, or of a parameter, that onnxruntime has to run a model of this opset for."""
    return pytest.mark.skipif(
        not runs_opset(opset), reason=f"onnxruntime {ort.__version__} loads no model of opset {opset}"
    )
