"""Trains one file as a user would and compares its gradient with finite differences of the file itself.

Prints a JSON object: the verdict and what it rests on.

Usage: python judge.py FILE [--verbose]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from differences import Array, slopes
from files import FLOATS, feeds_of, prediction, said, session
from judges import Case, Evaluator, exposed, judges, runs

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import NothingToTrain, OnnxTrainError
from onnxtrain.functional.float64_reference import in_precision
from onnxtrain.passes import is_quantization_or_rotary, load_model
from onnxtrain.selection import is_float

STEPS = 3
SAME = {"float64": 1e-6, "float32": 2e-3, "float16": 5e-2}
"""Largest difference of the losses of the training model and the file, relative to the size of the predictions."""


class Refusal(Exception):
    """A verdict other than that the file trains."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


class Overshot(Refusal):
    """Training led to something that is not finite."""


def judge(path: Path, verbose: bool = False, feeds: dict[str, Array] | None = None) -> dict[str, Any]:
    """Return the verdict on a file, run with `feeds` or with inputs that are found for it.

    trained, wrong (the gradient, or the loss), unsettled (differences tell nothing), refused (an error of onnxtrain),
    crashed (any other), constant (no small change of what it holds changes what comes out), not finite (the file itself
    computes numbers that are not), no parameter (it holds no number of floating point), no output (nothing of floating
    point comes out), not run (by ONNX Runtime as it stands).
    """
    try:
        return _judge(path, verbose, feeds)
    except Refusal as refusal:
        return {"verdict": refusal.verdict, "reason": refusal.reason}
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {"verdict": "crashed", "reason": f"{type(error).__name__}: {said(error)}"}


def _judge(path: Path, verbose: bool, feeds: dict[str, Array] | None) -> dict[str, Any]:
    case = _case(path, feeds)
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        straight = _build(case, Path(directory))
        built = time.perf_counter() - start
        trained = _trained(case, Path(directory), 0.01 if straight else 0.1)
        manifest = json.loads((Path(directory) / "manifest.json").read_text())
        values, gradients, value = _gradient(case, Path(directory), manifest)
        compared = _compare(case, Path(directory), values, gradients, value, straight, verbose)
        if compared["verdict"] == "wrong" and _is_right_in_float64(case, Path(directory), manifest, straight):
            raise Refusal(
                "unsettled", "its gradient is right in float64, and lost in rounding in its own dtype"
            )
    return {
        "parameters": len(gradients),
        "straight_through": straight,
        "built": round(built, 1),
        **trained,
        **compared,
    }


def _case(path: Path, feeds: dict[str, Array] | None) -> Case:
    model = onnx.load(path)
    try:
        feeds = feeds or feeds_of(path, model)
    except ValueError as error:
        raise Refusal("not run", str(error)) from error
    run = session(path)
    outputs = dict(zip([o.name for o in run.get_outputs()], run.run(None, feeds), strict=True))
    found = prediction(model, outputs)
    if found is None:
        kinds = sorted({o.type for o in run.get_outputs()})
        raise Refusal("no output", f"nothing of floating point comes out: {', '.join(kinds)}")
    output, known_as = found
    predicted = outputs.get(output)
    if predicted is None:
        (predicted,) = session(exposed(model, output)).run([output], feeds)
    _check_declared(model, output, predicted)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(predicted.shape) * max(float(np.std(predicted.astype(np.float64))), 0.1)
    return Case(path, model, feeds, output, known_as, np.asarray(predicted + noise, predicted.dtype))


def _check_declared(model: onnx.ModelProto, name: str, value: Array) -> None:
    for info in model.graph.output:
        shape = info.type.tensor_type.shape
        if info.name == name and info.type.tensor_type.HasField("shape"):
            dims = [dim.dim_value for dim in shape.dim]
            if len(dims) != value.ndim or any(
                d not in (0, n) for d, n in zip(dims, value.shape, strict=True)
            ):
                raise Refusal(
                    "not run", f"it declares its output {dims}, and computes one of {list(value.shape)}"
                )


def _float_tensors(graph: onnx.GraphProto) -> int:
    """Count the tensors of floating point in a graph."""
    count = sum(tensor.data_type in FLOATS for tensor in graph.initializer)
    count += sum(tensor.values.data_type in FLOATS for tensor in graph.sparse_initializer)
    for node in graph.node:
        for attribute in node.attribute:
            count += node.op_type == "Constant" and attribute.t.data_type in FLOATS
            count += _float_tensors(attribute.g) if attribute.HasField("g") else 0
    return count


def _build(case: Case, directory: Path) -> bool:
    """Builds the artifacts; returns whether gradients had to pass rounding."""
    options = {
        "loss": "mse",
        "optimizer": "sgd",
        "loss_input_names": [case.known_as],
        "artifact_directory": directory,
        "requires_grad": with_scales(case.path),
    }
    try:
        generate_artifacts(case.path, **options)  # type: ignore[arg-type]
    except OnnxTrainError as error:
        if "straight_through=True" not in str(error):
            raise _refused(case, error) from error
    else:
        return False
    try:
        generate_artifacts(case.path, **options, straight_through=True)  # type: ignore[arg-type]
    except OnnxTrainError as error:
        raise _refused(case, error) from error
    return True


def with_scales(path: Path) -> list[str] | None:
    """Names the parameters of a file and its quantization scales, which train only where they are named."""
    try:
        initializers = load_model(path).graph.initializers
    except OnnxTrainError:  # building says so
        return None
    scales = [n for n, value in initializers.items() if is_quantization_or_rotary(value) and is_float(value)]
    return ["*", *scales] if scales else None


def _refused(case: Case, error: OnnxTrainError) -> Refusal:
    if isinstance(error, NothingToTrain):
        if not _float_tensors(case.model.graph):
            return Refusal("no parameter", "it holds no tensor of floating point")
        if _is_piecewise_constant(case):
            return Refusal("constant", f"small changes of what it holds change nothing. {said(error)}")
    return Refusal("refused", f"{type(error).__name__}: {said(error)}")


def _is_piecewise_constant(case: Case) -> bool:
    """Tell whether small changes of all floats in the file leave its output as it is."""
    model = in_precision(exposed(case.model, case.output), onnx.TensorProto.FLOAT)
    tensors = {
        t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type in FLOATS
    }
    try:
        run = runs(model, tensors, case)
    except Exception:
        return False
    rng = np.random.default_rng(2)
    moved = {name: t * (1 + 1e-4 * rng.standard_normal(t.shape)) for name, t in tensors.items()}
    return bool(np.array_equal(run(tensors), run(moved), equal_nan=True))


def _check_finite(case: Case, numbers: Sequence[float]) -> None:
    if np.isfinite(numbers).all():
        return
    copy = onnx.ModelProto()
    copy.CopyFrom(case.model)
    del copy.graph.output[:]
    names = [name for node in copy.graph.node for name in node.output if name]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        values = dict(zip(names, session(copy).run(names, case.feeds), strict=True))
    except Exception as error:
        raise Refusal("wrong", f"not finite: {list(numbers)}; {said(error)}") from error
    for name, value in values.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
            raise Refusal(
                "not finite", f"the file itself computes values that are infinite or no numbers ({name})"
            )
    raise Refusal("wrong", f"not finite: {list(numbers)}")


def _trained(case: Case, directory: Path, part: float) -> dict[str, Any]:
    """Trains by smaller steps where a step led so far that nothing finite comes out."""
    for smaller in (part, part / 10):
        try:
            return _train(case, directory, smaller)
        except Overshot:
            continue
    return _train(case, directory, part / 1000)


def _train(case: Case, directory: Path, part: float) -> dict[str, Any]:
    """Trains three steps with the on-device API, each of which takes `part` off the loss, as the gradient says."""
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    module = Module(directory / "training_model.onnx", state, directory / "eval_model.onnx")
    optimizer = Optimizer(directory / "optimizer_model.onnx", module)
    before = {name: p.data.copy() for name, p in state.parameters if p.requires_grad}
    batch = [case.feeds.get(name, case.target) for name in module.input_names()]
    losses = []
    for _ in range(STEPS):
        losses.append(float(module(*batch)))
        if len(losses) == 1:
            square = sum(
                float((p.grad.astype(np.float64) ** 2).sum()) for _, p in state.parameters if p.requires_grad
            )
            _check_finite(case, [losses[0], square])
            # But none changes more than a tenth of the parameters.
            size = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in before.values()))
            rate = min(part * losses[0] / square, 0.1 * size / np.sqrt(square)) if square else 0.1
            if square and rate * square < np.finfo(np.float32).eps * losses[0]:
                # Steps of such a size in a direction that rounding has chosen may lead anywhere.
                raise Refusal(
                    "unsettled", "the steps are lost in rounding: its gradient is one of rounding errors"
                )
            optimizer.set_learning_rate(rate)
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    losses.append(float(module(*batch)))
    if np.isfinite(losses[0]) and not np.isfinite(losses).all():
        raise Overshot("wrong", f"not finite: {losses}")
    _check_finite(case, losses)
    changed = sum(not np.array_equal(before[name], state.parameters[name].data) for name in before)
    if not changed and square:
        raise Refusal("unsettled", "the steps are lost in rounding: they change no parameter")
    return {"losses": losses, "falls": losses[-1] < losses[0], "changed": changed}


def _gradient(
    case: Case, directory: Path, manifest: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, Array], float]:
    """Returns the parameters of the checkpoint, the gradients of those that are trained, and the loss."""
    values, known, names = _stored(case, directory, manifest)
    run = session(directory / "training_model.onnx")
    feeds = {i.name: known.get(i.name, case.target) for i in run.get_inputs()}
    loss, *gradients = run.run([manifest["loss"], *names.values()], feeds)
    return values, dict(zip(names, gradients, strict=True)), float(loss)


def _stored(
    case: Case, directory: Path, manifest: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, Array], dict[str, str]]:
    """Returns the parameters of the checkpoint, all inputs but the target, and the names of gradients by parameter."""
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    values = {name: np.array(p.data) for name, p in state.parameters}
    statistics = {name: np.array(p.data) for name, p in state.statistics}
    names = {p["name"]: p["gradient"] for p in manifest["parameters"] if p["gradient"] is not None}
    return values, {**case.feeds, **values, **statistics}, names


def _is_right_in_float64(case: Case, directory: Path, manifest: Mapping[str, Any], straight: bool) -> bool:
    """Tell whether gradient and differences agree when the reference evaluator computes both in float64."""
    values, known, names = _stored(case, directory, manifest)
    model = in_precision(onnx.load(directory / "training_model.onnx"), onnx.TensorProto.DOUBLE)
    feeds = {i.name: known.get(i.name, case.target) for i in model.graph.input}
    feeds = {n: v.astype(np.float64) if v.dtype in (np.float16, np.float32) else v for n, v in feeds.items()}
    for name, _, make in judges(case, directory, straight):
        if not name.endswith("reference evaluator"):
            continue
        try:
            exact = dict(zip(names, Evaluator(model).run(list(names.values()), feeds), strict=True))
            run = make(values)
            found = slopes(
                lambda given, run=run: case.loss(run(given)),
                values,
                exact,
                "float64",
                np.random.default_rng(1),
            )
        except Exception:  # it lacks an op, or the file a parameter: the inference model may have it
            continue
        return all(slope.verdict == "right" for slope in found)
    return False


def _compare(
    case: Case,
    directory: Path,
    values: Mapping[str, Array],
    gradients: Mapping[str, Array],
    value: float,
    straight: bool,
    verbose: bool,
) -> dict[str, Any]:
    """Compares the loss with that of the file, and the gradient with differences by one judge after the other."""
    (plain,) = session(exposed(case.model, case.output)).run([case.output], case.feeds)
    dtype = str(plain.dtype)
    size = float(np.mean(case.target.astype(np.float64) ** 2))
    if abs(value - case.loss(plain)) > SAME.get(dtype, 5e-2) * (size + case.loss(plain)):
        raise Refusal("wrong", f"the loss is {value:.6g}, that of the file {case.loss(plain):.6g}")
    tried: dict[str, Any] = {}
    for name, precision, make in judges(case, directory, straight):
        try:
            run = make(values)
            if straight and abs(case.loss(run(values)) - value) > 2e-5 * value:
                tried[name] = "cannot: an op between integers rounds, too"
                continue
            found = slopes(
                lambda given, run=run: case.loss(run(given)),
                values,
                gradients,
                precision,
                np.random.default_rng(1),
            )
        except Exception as error:
            if verbose:
                traceback.print_exc()
            tried[name] = f"cannot: {said(error)[:120]}"
            continue
        if verbose:
            for slope in found:
                print(name, slope)
        verdicts = [slope.verdict for slope in found]
        worst = max(found, key=lambda slope: slope.error)
        kind = "wrong" if "wrong" in verdicts else "unsettled" if "unsettled" in verdicts else "trained"
        tried[name] = f"{kind}: {worst.error:.2g} ({worst.allowed:.2g} allowed)"
        if kind == "trained":
            return {"verdict": "trained", "judge": name, "error": worst.error, "tried": tried}
    rounds = [text for text in tried.values() if "rounds, too" in text]
    if rounds:
        raise Refusal("unsettled", rounds[0])
    said_by_float64 = [t for name, t in tried.items() if "float64" in name and not t.startswith("cannot")]
    decisive = said_by_float64 or tried.values()
    verdict = "wrong" if any(text.startswith("wrong") for text in decisive) else "unsettled"
    return {"verdict": verdict, "reason": json.dumps(tried), "tried": tried}


def main() -> None:
    """Prints the verdict on the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("onnxtrain").setLevel(logging.ERROR)
    print(json.dumps({"file": arguments.file.name, **judge(arguments.file, arguments.verbose)}, indent=1))


if __name__ == "__main__":
    main()
