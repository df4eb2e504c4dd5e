"""Kernels write their first output over an input that nothing reads later, and compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from fresh_process import SOURCE, TESTS, python
from kernels.against_body import Inputs, needs_kernels, run
from kernels.every_kernel import recorded_calls
from onnxtrain.functions import COMPOSITES
from onnxtrain.runtime.kernels import kernel_library, register_kernels

pytestmark = needs_kernels
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}

CHAIN = """
import resource
import numpy as np
import onnxruntime as ort
from kernels.test_in_place import chain
from onnxtrain.runtime.kernels import register_kernels

options = ort.SessionOptions()
options.enable_cpu_mem_arena = False
register_kernels(options)
session = ort.InferenceSession(chain(links=3, size=1 << 24).SerializeToString(), options)
feeds = {name: np.ones(1 << 24, np.float32) for name in ("y", "ct")}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session.run(None, feeds)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def chain(links: int, size: int) -> onnx.ModelProto:
    """Makes a model of so many gradients of tanh, each the next one's cotangent, which the model gives a shape."""
    values = ["ct", *(f"ct{i}" for i in range(links))]
    nodes = [
        helper.make_node("TanhGradient_float", ["y", ct], [result], domain="onnxtrain")
        for ct, result in itertools.pairwise(values)
    ]
    nodes.append(helper.make_node("ReduceSum", [values[-1]], ["sum"], keepdims=0))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name in ["y", *values]]
    return _model(nodes, infos[:2], [helper.make_tensor_value_info("sum", TensorProto.FLOAT, [])], infos[2:])


def _model(nodes: Any, inputs: Any, outputs: Any, shapes: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "in_place", inputs, outputs, value_info=shapes)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _over_input(name: str, inputs: Inputs, attributes: Mapping[str, Any], key: str) -> list[np.ndarray]:
    """Returns the outputs of a kernel whose input `key`, and no other one, is a value within the graph."""
    feeds = {
        k: v if v.dtype == np.int64 else v.astype(np.float32) for k, v in inputs.items() if v is not None
    }
    names = ["" if value is None else k for k, value in inputs.items()]
    names[names.index(key)] = "test/value"
    outputs = COMPOSITES[name].function_for(ir.DataType.FLOAT, 21).outputs
    results = [f"result{i}" for i in range(len(outputs))]
    nodes = [
        helper.make_node("Mul", [key, "test/one"], ["test/value"]),
        helper.make_node(f"{name}_float", names, results, domain="onnxtrain", **attributes),
        helper.make_node("Mul", ["result0", "test/one"], ["out"]),
    ]
    feeds["test/one"] = np.ones((), np.float32)
    shapes = [
        helper.make_tensor_value_info(v, TensorProto.FLOAT, feeds[key].shape)
        for v in ("test/value", "result0")
    ]
    model = _model(
        nodes,
        [helper.make_tensor_value_info(k, TYPES[str(v.dtype)], v.shape) for k, v in feeds.items()],
        [helper.make_empty_tensor_value_info(v) for v in ["out", *results[1:]]],
        shapes,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register_kernels(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def test_results_in_the_place_of_an_input_are_the_same_bits() -> None:
    tried = set()
    for name, inputs, attributes in recorded_calls():
        expected = run(name, inputs, attributes, native=True)
        for key, value in inputs.items():
            if value is None or value.dtype == np.int64 or value.shape != expected[0].shape:
                continue
            tried.add(name)
            results = _over_input(name, inputs, attributes, key)
            for result, reference in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result, reference, err_msg=f"{name}: y over {key}")
    assert {"ReluGradient", "BatchNormalizationRelu6Gradient", "LayerNormalizationGradient"} <= tried


def test_a_chain_of_gradients_needs_one_tensor() -> None:
    pytest.importorskip("resource")  # there is none on Windows
    library = kernel_library()
    assert library is not None
    kilobytes = int(python("-c", CHAIN, path=(SOURCE, TESTS, Path(library).parents[1])).stdout)
    # A tensor has 64 MB. Two would be needed if each result had a place of its own.
    assert kilobytes < 100_000
