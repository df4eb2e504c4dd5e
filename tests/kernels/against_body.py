"""A native kernel beside the body of its function.

The kernel runs in a model without the body, so that nothing else can compute the result. The reference is the body in
float64, by ONNX's reference evaluator; the kernel may be as far from it as twice what the body in float32 is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxtrain.functions import COMPOSITES
from onnxtrain.runtime.kernels import register_kernels

OPSET = 21
ROUNDING = 1e-6
"""Error allowed to a kernel beyond twice that of the body, which is small by chance now and then."""
Inputs = Mapping[str, "np.ndarray | None"]
Signature = tuple[tuple[str, tuple[str, int] | None], ...]
Attributes = tuple[tuple[str, Any], ...]


def run(
    name: str, inputs: Inputs, attributes: Mapping[str, Any], *, native: bool, threads: int = 2
) -> list[np.ndarray]:
    """Returns all outputs of a composite op in float32 on ONNX Runtime, by its kernel or its body."""
    feeds = _of_dtype(inputs, np.float32)
    session = _session(name, _signature(feeds), _frozen(attributes), native, threads)
    return session.run(None, {key: value for key, value in feeds.items() if value is not None})


def bound_in_place(name: str, inputs: Inputs) -> list[np.ndarray]:
    """Returns the outputs of the kernel of an optimizer step, each in the memory of the input that it updates."""
    feeds = _of_dtype(inputs, np.float32)
    options = ort.SessionOptions()
    register_kernels(options)
    model = _model(name, _signature(feeds), (), np.float32, with_body=False).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    values = {
        key: ort.OrtValue.ortvalue_from_numpy(value) for key, value in feeds.items() if value is not None
    }
    binding = session.io_binding()
    for key, value in values.items():
        binding.bind_ortvalue_input(key, value)
    updated = [key for key, value in feeds.items() if value is not None and value.ndim and key != "g"]
    for output, key in zip(session.get_outputs(), updated, strict=True):
        binding.bind_ortvalue_output(output.name, values[key])
    session.run_with_iobinding(binding)
    return [values[key].numpy().copy() for key in updated]


def exactly(name: str, inputs: Inputs, attributes: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns what the body gives in float64."""
    feeds = _of_dtype(inputs, np.float64)
    evaluator = _evaluator(name, _signature(feeds), _frozen(attributes))
    with np.errstate(over="ignore"):
        return evaluator.run(None, {k: v for k, v in feeds.items() if v is not None})


def _signature(feeds: Inputs) -> Signature:
    """Return name, element type and rank of each input; None in place of type and rank for an absent one."""
    return tuple((key, None if v is None else (v.dtype.name, v.ndim)) for key, v in feeds.items())


def _frozen(attributes: Mapping[str, Any]) -> Attributes:
    return tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in attributes.items())


@functools.lru_cache(1000)
def _session(
    name: str, inputs: Signature, attributes: Attributes, native: bool, threads: int
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # there are many of them
    if native:
        register_kernels(options)
    model = _model(name, inputs, attributes, np.float32, with_body=not native).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@functools.lru_cache(1000)
def _evaluator(name: str, inputs: Signature, attributes: Attributes) -> ReferenceEvaluator:
    return ReferenceEvaluator(_model(name, inputs, attributes, np.float64, with_body=True))


def _of_dtype(inputs: Inputs, dtype: type) -> dict[str, np.ndarray | None]:
    """Convert all floating-point inputs; integers keep their dtype."""
    return {
        key: value if value is None or value.dtype.kind in "iu" else np.asarray(value, dtype)
        for key, value in inputs.items()
    }


def _model(
    name: str, inputs: Signature, attributes: Attributes, dtype: type, *, with_body: bool
) -> onnx.ModelProto:
    composite = COMPOSITES[name]
    assert [key for key, _ in inputs] == list(composite.inputs)
    function = composite.function_for(ir.DataType.from_numpy(np.dtype(dtype)), OPSET)
    outputs = [f"y{i}" for i in range(len(function.outputs))]
    # NumPy has no integers of four bits: the model makes them of bytes.
    nibbles = {key: f"{key}_uint4" for key, dtype in composite.dtypes.items() if dtype == ir.DataType.UINT4}
    names = ["" if type_ is None else nibbles.get(key, key) for key, type_ in inputs]
    casts = [helper.make_node("Cast", [key], [to], to=int(ir.DataType.UINT4)) for key, to in nibbles.items()]
    graph = helper.make_graph(
        [*casts, helper.make_node(function.name, names, outputs, domain="onnxtrain", **dict(attributes))],
        name,
        [
            helper.make_tensor_value_info(
                key, helper.np_dtype_to_tensor_dtype(np.dtype(type_[0])), [None] * type_[1]
            )
            for key, type_ in inputs
            if type_ is not None
        ],
        [helper.make_empty_tensor_value_info(y) for y in outputs],
    )
    return helper.make_model(
        graph,
        functions=[ir.to_proto(function)] if with_body else [],
        opset_imports=[
            helper.make_opsetid("", OPSET),
            helper.make_opsetid("onnxtrain", 1),
            helper.make_opsetid("com.microsoft", 1),
        ],
        ir_version=10,
    )


def check(
    name: str,
    inputs: Inputs,
    attributes: Mapping[str, Any] | None = None,
    *,
    terms: float | Sequence[float] = 0.0,
    exact: Sequence[np.ndarray] | None = None,
) -> None:
    """Compares kernel and body, and the kernel on one thread with itself on two.

    Errors are relative to the norm of the exact result, or to `terms`: the norm of terms that cancel, for all outputs
    or for each. `exact` are the outputs in float64; by default they are those of the body.
    """
    attributes = attributes or {}
    exact = exactly(name, inputs, attributes) if exact is None else exact
    body = run(name, inputs, attributes, native=False)
    kernel = run(name, inputs, attributes, native=True)
    again = run(name, inputs, attributes, native=True, threads=1)
    shapes = {key: None if value is None else value.shape for key, value in inputs.items()}
    for index, (reference, standard, own, one) in enumerate(zip(exact, body, kernel, again, strict=True)):
        what = f"output {index} of {name} {dict(attributes)} on {shapes}"
        assert own.shape == reference.shape, what
        np.testing.assert_array_equal(own, one, err_msg=f"{what}: not the same on one thread")
        least = terms if isinstance(terms, float) else terms[index]
        assert _error(own, reference, least) <= 2 * _error(standard, reference, least) + ROUNDING, what


def _error(value: np.ndarray, reference: np.ndarray, terms: float) -> float:
    """Returns the distance relative to the norm; values that are not finite must be the same ones."""
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.isfinite(value), finite)
    np.testing.assert_array_equal(value[~finite], reference[~finite].astype(value.dtype))
    norm = max(float(np.linalg.norm(reference[finite])), terms)
    return float(np.linalg.norm(value[finite] - reference[finite])) / (norm or 1.0)


LEVELS = ["baseline", "avx2", "avx512"]


def best_level(level: str) -> str:
    """Returns the best level up to `level` that this processor has.

    The test is skipped where kernels are compiled for higher levels only, as `make test` compiles them.
    """
    import onnxtrain_kernels

    found = onnxtrain_kernels.level(level)
    if LEVELS.index(found) > LEVELS.index(level):
        pytest.skip(f"there are no kernels of level {level!r}, which `make test-levels` compiles")
    return found


SIZES: Sequence[Sequence[int]] = ([0], [1], [3], [16], [17], [5, 0, 2], [4, 33], [2, 3, 5, 7], [40000])
needs_kernels = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("onnxtrain_kernels") is None,
    reason="package onnxtrain-kernels is not installed (there was no C++ compiler)",
)
