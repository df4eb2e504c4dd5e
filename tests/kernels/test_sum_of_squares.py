"""The sum of squares of many gradients, by the kernel and by the body, beside float64."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from kernels.against_body import needs_kernels
from onnxtrain.emitter import Emitter
from onnxtrain.functions.optimizer import sum_of_squares
from onnxtrain.runtime.kernels import register_kernels

SHAPES = ((3, 17), (), (0, 4), (300, 401), (1,), (100_003,), (16,), (64, 1, 1))


@functools.cache
def _session(native: bool, threads: int) -> ort.InferenceSession:
    inputs = [
        ir.Value(name=f"x{index}", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for index, shape in enumerate(SHAPES)
    ]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="norm")
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    graph.outputs.append(op.call(sum_of_squares([value.shape for value in inputs]), *inputs))
    graph.outputs[0].shape = ir.Shape(())
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if native:
        register_kernels(options, [function.name for function in model.functions.values()])
    return ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _sum(tensors: list[np.ndarray], *, native: bool, threads: int = 1) -> np.ndarray:
    return _session(native, threads).run(None, {f"x{i}": t for i, t in enumerate(tensors)})[0]


def _tensors(seed: int = 0, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(scale * rng.standard_normal(shape), np.float32) for shape in SHAPES]


both = pytest.mark.parametrize("native", [pytest.param(True, marks=needs_kernels), False])


@both
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_sum_of_float64(native: bool, scale: float) -> None:
    for seed in range(5):
        tensors = _tensors(seed, scale)
        exact = sum(np.square(tensor.astype(np.float64)).sum() for tensor in tensors)
        np.testing.assert_allclose(_sum(tensors, native=native), exact, rtol=5e-7)


@both
def test_long_sums_do_not_drift(native: bool) -> None:
    tensors = [np.full(shape, 0.1, np.float32) for shape in SHAPES]
    exact = sum(tensor.size for tensor in tensors) * float(np.float32(0.1)) ** 2
    np.testing.assert_allclose(_sum(tensors, native=native), exact, rtol=5e-7)


@needs_kernels
def test_the_same_bits_on_two_threads() -> None:
    for seed in range(20):
        one, two = (_sum(_tensors(seed), native=True, threads=threads) for threads in (1, 2))
        assert one.tobytes() == two.tobytes()


@both
@pytest.mark.parametrize(
    ("value", "expected"), [(np.nan, np.nan), (-np.inf, np.inf), (1e30, np.inf), (1e-30, 0.0)]
)
@pytest.mark.parametrize("which", [0, 1, 3, 5])
def test_special_values(native: bool, value: float, expected: float, which: int) -> None:
    tensors = [np.zeros(shape, np.float32) for shape in SHAPES]
    tensors[which].flat[-1] = value
    np.testing.assert_array_equal(_sum(tensors, native=native), np.float32(expected))
