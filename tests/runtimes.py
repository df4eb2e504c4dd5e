"""Abilities of the installed onnxruntime: the tests also run with the oldest one that is declared."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper


@functools.cache
def runs_opset(opset: int) -> bool:
    """Tell whether onnxruntime loads a model of this opset, by trying a single Identity."""
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


def newest_opset(*opsets: int) -> int:
    """Returns the newest of some opsets that onnxruntime runs, or 21, which all do."""
    return max((opset for opset in opsets if runs_opset(opset)), default=21)


def needs_opset(opset: int) -> pytest.MarkDecorator:
    """Returns the mark of a test, or of a parameter, that onnxruntime has to run a model of this opset for."""
    return pytest.mark.skipif(
        not runs_opset(opset), reason=f"onnxruntime {ort.__version__} loads no model of opset {opset}"
    )


@functools.cache
def keeps_nothing() -> bool:
    """Tell whether a sum over no axes of no elements keeps its shape; onnxruntime 1.20 gives one element."""
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=1, noop_with_empty_axes=1)
    x, axes = np.ones((2, 0), np.float32), np.array([], np.int64)
    return _run(node, {"x": x, "axes": axes})[0].shape == (2, 0)


@functools.cache
def broadcasts_scales() -> bool:
    """Tell whether scale and bias of LayerNormalization may broadcast; not in onnxruntime 1.20."""
    node = helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"], axis=1)
    x = np.ones((2, 3), np.float32)
    try:
        _run(node, {"x": x, "scale": x[0], "bias": x[0, :1]})
    except Exception as error:
        if "must match this" in str(error):
            return False
        raise
    return True


@functools.cache
def computes_float64(op_type: str) -> bool:
    """Tell whether an op with one input has a float64 kernel; onnxruntime 1.20 has Sin, but not Cos."""
    try:
        _run(helper.make_node(op_type, ["x"], ["y"]), {"x": np.ones(1)})
    except Exception as error:
        if "Could not find an implementation" in str(error):
            return False
        raise
    return True


@functools.cache
def has_deform_conv() -> bool:
    """Tell whether DeformConv has a kernel; not in onnxruntime 1.20."""
    ones = np.ones((1, 1, 1, 1), np.float32)
    return _succeeds(
        helper.make_node("DeformConv", ["x", "w", "offset"], ["y"]),
        {"x": ones, "w": ones, "offset": np.zeros((1, 2, 1, 1), np.float32)},
        "Could not find an implementation",
    )


@functools.cache
def makes_reals_of_spectra() -> bool:
    """Tell whether the inverse DFT of half a spectrum is real, as onnx has it; onnxruntime 1.20 refuses it."""
    node = helper.make_node("DFT", ["x"], ["y"], inverse=1, onesided=1)
    return _succeeds(node, {"x": np.ones((1, 3, 2), np.float32)}, "cannot be enabled at the same time")


def _succeeds(node: onnx.NodeProto, feeds: dict[str, np.ndarray], refusal: str) -> bool:
    try:
        _run(node, feeds)
    except Exception as error:
        if refusal in str(error):
            return False
        raise
    return True


def _run(node: onnx.NodeProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for name, array in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)
