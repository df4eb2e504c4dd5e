"""Find inputs that a file runs with, its outputs, and the value that a loss can be put on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

Array = npt.NDArray[Any]

FLOATS = {
    onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16,
}  # fmt: skip
SIZES = ((2, 8), (2, 16), (1, 8), (4, 4), (2, 3), (2, 32), (1, 1))
"""For symbolic axes, the first one and others: tried in turn until the file runs."""


def session(model: onnx.ModelProto | Path, **settings: Any) -> ort.InferenceSession:
    """Returns a session on the CPU that leaves the graph as it is."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, value in settings.items():
        setattr(options, name, value)
    source = model if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def user_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Returns the inputs that have no value in the file."""
    known = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in known]


def stored_feeds(path: Path, model: onnx.ModelProto) -> dict[str, Array] | None:
    """Returns the inputs that lie beside a file, of the dtypes that it takes."""
    beside = path.with_suffix(".npz")
    if not beside.exists():
        return None
    with np.load(beside) as arrays:
        return {value.name: np.asarray(arrays[value.name], _dtype(value)) for value in user_inputs(model)}


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def feeds_of(path: Path, model: onnx.ModelProto) -> dict[str, Array]:
    """Returns inputs with which a file runs.

    Raises:
        ValueError: It runs with none of those that were tried; the error says what ONNX Runtime said.
    """
    stored = stored_feeds(path, model)
    try:
        run = session(path)
    except Exception as error:
        raise ValueError(f"ONNX Runtime cannot load it: {said(error)}") from error
    tries = [stored] if stored is not None else [_random(model, *sizes) for sizes in SIZES]
    problem: Exception | None = None
    for feeds in tries:
        try:
            run.run(None, feeds)
        except Exception as error:
            problem = problem or error
        else:
            return feeds
    raise ValueError(f"ONNX Runtime cannot run it: {said(problem)}")


def said(error: BaseException | None) -> str:
    """Returns an error in one line, without what differs from file to file and from machine to machine."""
    text = " ".join(str(error).split()).split("[ONNXRuntimeError] : ")[-1]
    return text.replace(str(Path.home()), "~")[:400]


def _random(model: onnx.ModelProto, first: int, other: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    found = {}
    sizes: dict[str, int] = {}
    for value in user_inputs(model):
        tensor, dtype = value.type.tensor_type, _dtype(value)
        dims = [
            dim.dim_value
            or sizes.setdefault(dim.dim_param or f"{value.name}.{axis}", other if axis else first)
            for axis, dim in enumerate(tensor.shape.dim)
        ]
        if tensor.elem_type in FLOATS:
            found[value.name] = rng.standard_normal(dims).astype(dtype)
        elif dtype == np.bool_:
            found[value.name] = np.ones(dims, dtype)
        elif dtype == np.uint8:
            found[value.name] = rng.integers(0, 256, dims).astype(dtype)
        else:
            found[value.name] = rng.integers(0, 2, dims).astype(dtype)
    return found


def prediction(model: onnx.ModelProto, outputs: Mapping[str, Array]) -> tuple[str, str] | None:
    """Returns the value to put a loss on, and the name under which onnxtrain knows it.

    The first output of floats; or what a ZipMap makes dictionaries of, which is the output then; or the first tensor of
    a sequence.
    """
    for value in model.graph.output:
        array = outputs.get(value.name)
        if isinstance(array, np.ndarray) and value.type.tensor_type.elem_type in FLOATS and array.size:
            return value.name, value.name
    names = {value.name for value in model.graph.output}
    for node in model.graph.node:
        if node.op_type == "ZipMap" and node.output[0] in names:
            return node.input[0], node.output[0]
        if node.op_type == "SequenceConstruct" and node.output[0] in names:
            return node.input[0], node.input[0]
    return None
