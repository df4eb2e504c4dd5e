"""Functions whose finite differences are taken: the file, and models made of it, as functions of the parameters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from differences import Array
from files import session
from surrogate import quantises, smooth

from onnxtrain.functional.float64_reference import in_precision

sys.path.append(str(Path(__file__).parents[1] / "hugging_face"))
from reference import Evaluator

__all__ = ["Case", "Evaluator", "exposed", "judges", "runs"]

REFERENCE_SECONDS = 20.0
"""No longer may one evaluation in ONNX's reference evaluator take."""

Run = Callable[[Mapping[str, Array]], Array]


@dataclass
class Case:
    """A file that runs.

    Attributes:
        path: the file.
        model: what is in it.
        feeds: inputs.
        output: the value that the loss is put on.
        known_as: its name in what onnxtrain makes of the file.
        target: what it should be.
    """

    path: Path
    model: onnx.ModelProto
    feeds: dict[str, Array]
    output: str
    known_as: str
    target: Array

    def loss(self, predicted: Array) -> float:
        """The mean square of the difference, in float64."""
        return float(np.mean((predicted.astype(np.float64) - self.target.astype(np.float64)) ** 2))


def exposed(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with an inner value as its only output."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if name not in {value.name for value in copy.graph.output}:
        del copy.graph.output[:]
        copy.graph.output.append(onnx.ValueInfoProto(name=name))
    return copy


def judges(
    case: Case, directory: Path, straight: bool
) -> list[tuple[str, str, Callable[[Sequence[str]], Run]]]:
    """The functions whose differences are taken: name, precision, and what makes one given names of parameters."""
    source = smooth(case.model, case.feeds) if straight and quantises(case.model) else case.model
    source = exposed(source, case.output)
    said = "file, rounded as before" if straight else "file"

    def wide(names: Sequence[str]) -> Run:
        return runs(in_precision(source, onnx.TensorProto.DOUBLE), names, case)

    def plain(names: Sequence[str]) -> Run:
        return runs(in_precision(source, onnx.TensorProto.FLOAT), names, case)

    def reference(names: Sequence[str]) -> Run:
        return _evaluates(in_precision(source, onnx.TensorProto.DOUBLE), names, case)

    def evaluation(names: Sequence[str]) -> Run:
        model = onnx.load(directory / "inference_model.onnx")
        return runs(in_precision(model, onnx.TensorProto.FLOAT), names, case)

    def evaluation_wide(names: Sequence[str]) -> Run:
        model = onnx.load(directory / "inference_model.onnx")
        return _evaluates(in_precision(model, onnx.TensorProto.DOUBLE), names, case)

    found = [
        (f"{said}, float64", "float64", wide),
        (f"{said}, float32", "float32", plain),
        (f"{said}, float64, reference evaluator", "float64", reference),
    ]
    if straight:
        return found
    return [
        *found,
        ("inference model, float32", "float32", evaluation),
        ("inference model, float64, reference evaluator", "float64", evaluation_wide),
    ]


def _overridable(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, np.dtype[Any]]:
    """Makes inputs of parameters; returns the dtypes of all inputs."""
    inputs = {value.name for value in model.graph.input}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    model.ir_version = max(model.ir_version, 4)
    for name in names:
        if name in inputs:
            continue
        if name in constants:
            tensors[name] = constants[name].attribute[0].t
            model.graph.node.remove(constants[name])
        if name not in tensors:
            raise LookupError(f"the file has no parameter {name}")
        tensor = tensors[name]
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in set(names)]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return {
        value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for value in model.graph.input
    }


def runs(model: onnx.ModelProto, names: Sequence[str], case: Case) -> Run:
    dtypes = _overridable(model, names)
    run = session(model)
    wanted = {value.name for value in run.get_inputs()}

    def evaluate(given: Mapping[str, Array]) -> Array:
        known = {**case.feeds, **given}
        feeds = {n: np.asarray(known[n], dtypes[n]) for n in wanted}
        return np.asarray(run.run([case.output], feeds)[0])

    return evaluate


def _evaluates(model: onnx.ModelProto, names: Sequence[str], case: Case) -> Run:
    dtypes = _overridable(model, names)
    run = Evaluator(model)

    def evaluate(given: Mapping[str, Array]) -> Array:
        known = {**case.feeds, **given}
        feeds = {
            value.name: np.asarray(known[value.name], dtypes[value.name])
            for value in model.graph.input
            if value.name in known
        }
        start = time.perf_counter()
        result: Any = run.run([case.output], feeds)
        if time.perf_counter() - start > REFERENCE_SECONDS:
            raise TimeoutError("the reference evaluator takes too long")
        return np.asarray(result[0])

    return evaluate
