"""Functions whose finite differences are taken: the file, and models made of it, as functions of the parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import rounding  # noqa: F401  registers its ops
from differences import Array
from files import FLOATS, session
from reference import Evaluator
from surrogate import quantizes, smooth

from onnxtrain.functional.float64_reference import in_precision

__all__ = ["Case", "Evaluator", "exposed", "judges", "runs"]

ENDLESS = 1e30
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


Make = Callable[[Mapping[str, Array]], Run]


def judges(case: Case, directory: Path, straight: bool) -> list[tuple[str, str, Make]]:
    """Return the functions whose differences are taken, the most exact first.

    Each has a name, a precision, and what makes it given the values of the parameters.
    """
    file = exposed(case.model, case.output)

    def wide(values: Mapping[str, Array]) -> Run:
        return runs(in_precision(file, onnx.TensorProto.DOUBLE), values, case)

    def reference(values: Mapping[str, Array]) -> Run:
        return _evaluates(in_precision(file, onnx.TensorProto.DOUBLE), values, case)

    def plain(values: Mapping[str, Array]) -> Run:
        return runs(in_precision(file, onnx.TensorProto.FLOAT), values, case)

    def inference(values: Mapping[str, Array]) -> Run:
        model = onnx.load(directory / "inference_model.onnx")
        return runs(in_precision(model, onnx.TensorProto.FLOAT), values, case)

    def inference_wide(values: Mapping[str, Array]) -> Run:
        model = onnx.load(directory / "inference_model.onnx")
        return _evaluates(in_precision(model, onnx.TensorProto.DOUBLE), values, case)

    def smoothed(to: int, make: Callable[..., Run]) -> Make:
        return lambda values: make(in_precision(_smooth(case), to), values, case)

    if not straight:
        return [
            ("file, float64", "float64", wide),
            ("file, float64, reference evaluator", "float64", reference),
            ("file, float32", "float32", plain),
            ("inference model, float64, reference evaluator", "float64", inference_wide),
            ("inference model, float32", "float32", inference),
        ]
    if not quantizes(case.model):
        return [
            ("file, float64", "float64", wide),
            ("file, float64, reference evaluator", "float64", reference),
            ("file, float32", "float32", plain),
        ]
    said = "file, rounded as before"
    return [
        # Its ops keep the rounding of their first run, and the numbers that integers stand for, which is exact beside
        # masks of -3e38, too.
        (f"{said}, float64, reference evaluator", "float64", reference),
        (f"{said}, smoothed, float64", "float64", smoothed(onnx.TensorProto.DOUBLE, runs)),
        (f"{said}, smoothed, float32", "float32", smoothed(onnx.TensorProto.FLOAT, runs)),
        (
            f"{said}, smoothed, float64, reference evaluator",
            "float64",
            smoothed(onnx.TensorProto.DOUBLE, _evaluates),
        ),
    ]


def _smooth(case: Case) -> onnx.ModelProto:
    """Return the file without its jumps.

    Raises:
        OverflowError: it quantizes over an endless range: numbers beside it would be lost.
    """
    held = [onnx.numpy_helper.to_array(t) for t in case.model.graph.initializer if t.data_type in FLOATS]
    if any(np.abs(v.astype(np.float64)).max(initial=0) > ENDLESS for v in held):
        raise OverflowError(
            "it quantises over an endless range (a mask of -3e38): numbers beside it are lost"
        )
    return exposed(smooth(case.model, case.feeds), case.output)


Places = dict[str, list[tuple[str, bool]]]


def _places(model: onnx.ModelProto, values: Mapping[str, Array]) -> Places:
    """Return the initializers that hold each parameter, and whether they hold its transpose.

    A parameter stands under its name, or under another one where an exporter has folded its transpose; a tied one has
    several places. Copies of a constant tensor are not looked for: zeros are not tied to all other zeros.
    """
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    others = {n: v for n, v in tensors.items() if n not in values and v.size > 1 and v.dtype.kind == "f"}
    constants = {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    inputs = {value.name for value in model.graph.input}
    places: Places = {}
    for name, value in values.items():
        known = (
            name in constants or name in inputs or getattr(tensors.get(name), "shape", None) == value.shape
        )
        own, copies = [(name, False)] if known else [], []
        if value.size > 1 and (np.ptp(value) > 0 or not own):
            copies = [(n, False) for n, v in others.items() if np.array_equal(v, value)]
            copies += [(n, True) for n, v in others.items() if v.ndim == 2 and np.array_equal(v.T, value)]
        places[name] = own + [copy for copy in copies if (copy[0], False) not in own]
        if not places[name]:
            raise LookupError(f"the file has no parameter {name}")
    return places


def _placed(values: Mapping[str, Array], places: Places) -> dict[str, Array]:
    """Return the values of the initializers that hold the parameters."""
    return {
        place: value.T if transposed else value
        for name, value in values.items()
        for place, transposed in places[name]
    }


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


def runs(model: onnx.ModelProto, values: Mapping[str, Array], case: Case) -> Run:
    """Return the output as a function of parameters, run by ONNX Runtime."""
    places = _places(model, values)
    dtypes = _overridable(model, list(_placed(values, places)))
    run = session(model)
    wanted = {value.name for value in run.get_inputs()}

    def evaluate(given: Mapping[str, Array]) -> Array:
        known = {**case.feeds, **_placed(given, places)}
        feeds = {n: np.asarray(known[n], dtypes[n]) for n in wanted}
        return np.asarray(run.run([case.output], feeds)[0])

    return evaluate


def _evaluates(model: onnx.ModelProto, values: Mapping[str, Array], case: Case) -> Run:
    """Return the output as a function of parameters, run by ONNX's reference evaluator."""
    places = _places(model, values)
    dtypes = _overridable(model, list(_placed(values, places)))
    run = Evaluator(_named(model))

    def evaluate(given: Mapping[str, Array]) -> Array:
        known = {**case.feeds, **_placed(given, places)}
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


def _named(model: onnx.ModelProto) -> onnx.ModelProto:
    """Name outputs that are left out: the evaluator would take what they are for inputs that are left out."""
    for place, node in enumerate(model.graph.node):
        for index, name in enumerate(list(node.output)):
            node.output[index] = name or f"unused {place} {index}"
    return model
