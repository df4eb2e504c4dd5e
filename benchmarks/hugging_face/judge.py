"""Trains a file through the public API and holds its gradients beside differences of what the file itself computes.

The loss is the mean squared difference from random numbers. Its slopes along random directions come from runs of the
*given* file, whose initializers are fed, so that no code of onnxtrain has a part in them: in all parameters at once by
the reference evaluator in float64, and where that fails, in one at a time by ONNX Runtime in float32. Only where
onnxtrain has given parameters another shape they are moved in the inference model, which must give the file's loss.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import rounding  # noqa: F401  registers its ops
from reference import Evaluator

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import OnnxTrainError
from onnxtrain.functional.float64_reference import in_precision
from onnxtrain.passes import is_quantisation_or_rotary, load_model
from onnxtrain.selection import is_float

Array = npt.NDArray[Any]
Loss = Callable[[Mapping[str, Array]], float]
Places = list[tuple[str, bool]]
"""Initializers of a file, and whether they hold the transpose."""

STEPS = {np.float32: (2.0**-6, 2.0**-8, 2.0**-10), np.float64: (2.0**-12, 2.0**-18)}
"""Differences are taken over these and their doubles and quadruples, relative to the parameter's size."""
TOLERANCE, ROUNDED = 1e-2, 3e-2
"""Largest error of a slope, relative to the size that it has along a random direction on average; the second where
numbers are rounded, as float32 and float64 round some to different sides."""
UNSURE = 0.2
"""Differences that are less sure than this part of that size decide nothing."""


@dataclass
class Slope:
    """A gradient times a direction, and what differences say.

    Attributes:
        derivative: the gradient times the direction.
        difference: extrapolated from central differences over three steps.
        doubt: how far the extrapolations are from each other, plus what rounding adds.
        size: what the derivative is along a random direction, on average.
        tolerance: as a part of the size.
    """

    derivative: float
    difference: float
    doubt: float
    size: float
    tolerance: float = TOLERANCE

    @property
    def error(self) -> float:
        """Relative to the size."""
        return abs(self.derivative - self.difference) / (self.size or 1.0)

    @property
    def verdict(self) -> str:
        """right, wrong or unsure."""
        error = abs(self.derivative - self.difference)
        if not np.isfinite(self.derivative):
            return "wrong"
        if error <= self.tolerance * self.size + 3 * self.doubt:
            return "right" if self.doubt <= UNSURE * self.size or self.size == 0 else "unsure"
        return "wrong"


@dataclass
class Outcome:
    """The verdict on a file.

    Attributes:
        verdict: right, wrong, refused, crash, or "not ours" where onnxruntime does not run the file.
        reason: why it is not right.
        parameters: how many are trained.
        moved: how many have another shape than in the file.
        losses: before each of three steps, and behind them.
        judge: the precision of the differences, "none" where there are none; float32 also for those that have moved.
        unsure: how many slopes, of those that were looked at one by one in float32, it cannot tell.
        worst: the largest error of a slope that it can, relative to its size.
    """

    verdict: str
    reason: str = ""
    parameters: int = 0
    moved: int = 0
    losses: list[float] = field(default_factory=list)
    judge: str = "float32"
    unsure: int = 0
    worst: float = 0.0


def judge(path: Path, feeds: Mapping[str, Array], *, straight_through: bool = False) -> Outcome:
    """Returns what becomes of a file."""
    try:
        y = _session(onnx.load(path)).run(None, dict(feeds))[0]
    except Exception as error:
        return Outcome("not ours", f"onnxruntime: {short(error)}")
    if not np.isfinite(y).all():
        return Outcome("not ours", "what the file computes is not finite")
    target = np.random.default_rng(0).normal(size=y.shape).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        try:
            output = onnx.load(path, load_external_data=False).graph.output[0].name
            generate_artifacts(
                path, loss="mse", loss_input_names=[output], optimizer="sgd", artifact_directory=folder,
                straight_through=straight_through, requires_grad=_with_scales(path),
            )  # fmt: skip
        except OnnxTrainError as error:
            return Outcome("refused", short(error))
        except Exception as error:
            return Outcome("crash", f"building: {short(error)}")
        try:
            return _judge(path, Path(folder), feeds, target, straight_through=straight_through)
        except Exception as error:
            return Outcome("crash", short(error))


def _with_scales(path: Path) -> list[str] | None:
    """Names the parameters of a file and its quantisation scales, which train only where they are named."""
    initializers = load_model(path).graph.initializers.items()
    scales = [name for name, value in initializers if is_quantisation_or_rotary(value) and is_float(value)]
    return ["*", *scales] if scales else None


def _judge(
    path: Path, folder: Path, feeds: Mapping[str, Array], target: Array, *, straight_through: bool
) -> Outcome:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    arguments = [*(feeds[spec.name] for spec in module.manifest.inputs), target]
    first = float(np.asarray(module(*arguments)))
    trained = {name: p for name, p in state.parameters if p.requires_grad}
    start = {name: p.data.copy() for name, p in trained.items()}
    gradients = {name: p.grad.copy() for name, p in trained.items()}
    outcome = Outcome("right", parameters=len(trained))
    # The scales of quantised weights are numbers that little is to be added to.
    outcome.losses = [
        first,
        *_steps(module, folder, arguments, gradients, 1e-4 if straight_through else 1e-2),
    ]
    if not np.all(np.isfinite(outcome.losses)):
        return _with(outcome, "wrong", "the loss is not finite")
    if outcome.losses[-1] > first and not straight_through:  # where numbers are rounded a step can do nothing
        return _with(outcome, "wrong", "the loss rises")
    own = onnx.load(path)
    # What masks fill with is as good as infinite: nothing is to be seen of a step from there.
    start = {name: value for name, value in start.items() if np.abs(value).max(initial=0) < 1e30}
    places = _places(own, start)
    theirs = {name: value for name, value in start.items() if places[name]}
    outcome.moved = len(start) - len(theirs)
    wide = _wide_loss(own, places, feeds, target)
    if wide is not None:
        outcome.judge = "float64"
        if abs(wide({}) - first) > (0.05 if straight_through else 1e-3) * (abs(first) + 1):
            return _with(outcome, "wrong", f"the loss is {first}, {wide({})} in float64")
        _check_all(outcome, theirs, gradients, wide, ROUNDED if straight_through else TOLERANCE)
        if outcome.verdict == "wrong" and straight_through and abs(wide({}) - first) > 1e-4 * abs(first):
            outcome.judge = "none"
            _with(
                outcome, "right", "float32 and float64 round to other integers, which the gradients depend on"
            )
    elif straight_through:
        outcome.judge = "none"
    if outcome.verdict == "wrong" or (wide is not None and not outcome.moved) or straight_through:
        return outcome
    narrow = {True: _loss(own, places, feeds, target)}
    if outcome.moved:
        values = {**feeds, **_all(state, start)}
        narrow[False] = _loss(onnx.load(folder / "inference_model.onnx"), {}, values, target)
    expected = narrow[True]({})
    if abs(expected - first) > 1e-3 * (abs(first) + 1):
        return _with(outcome, "wrong", f"the loss is {first} instead of {expected}")
    if wide is None and outcome.moved:
        exact = _wide_loss(
            onnx.load(folder / "inference_model.onnx"),
            {name: [(name, False)] for name in start},
            values,
            target,
        )
        if exact is not None and abs(exact({}) - expected) <= 1e-3 * (abs(expected) + 1):
            outcome.judge = "float64"
            _check_all(outcome, start, gradients, exact, TOLERANCE)
            return outcome
    left = {name: value for name, value in start.items() if wide is None or name not in theirs}
    _check_each(outcome, left, gradients, lambda name: narrow[name in theirs])
    return outcome


def _check_each(
    outcome: Outcome, start: Mapping[str, Array], gradients: Mapping[str, Array], loss: Callable[[str], Loss]
) -> None:
    """Slopes in one parameter at a time, in float32."""
    rng = np.random.default_rng(1)
    for name, value in start.items():
        slope = _slope(loss(name), {name: value}, gradients, rng, np.float32)
        if slope.verdict == "wrong":
            _with(outcome, "wrong", f"{name}: {slope}")
            return
        outcome.unsure += slope.verdict == "unsure"
        if slope.verdict == "right":
            outcome.worst = max(outcome.worst, slope.error)


def _check_all(
    outcome: Outcome, start: Mapping[str, Array], gradients: Mapping[str, Array], loss: Loss, tolerance: float
) -> None:
    """Slopes along directions in all parameters at once, in float64."""
    rng = np.random.default_rng(2)
    for _ in range(3):
        slope = _slope(loss, start, gradients, rng, np.float64)
        slope.tolerance = tolerance
        if slope.verdict != "right":
            _with(outcome, "wrong", f"all, in float64: {slope}")
        outcome.worst = max(outcome.worst, slope.error)


def _steps(
    module: Module, folder: Path, arguments: list[Array], gradients: Mapping[str, Array], part: float
) -> list[float]:
    """Three steps down the gradient, that would take this part of the loss each if it were a plane."""
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    losses = []
    for _ in range(3):
        module.lazy_reset_grad()
        loss = float(np.asarray(module(*arguments)))
        square = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values())
        optimizer.set_learning_rate(part * loss / max(square, 1e-12))
        optimizer.step()
        losses.append(loss)
    module.eval()
    return [*losses[1:], float(np.asarray(module(*arguments)))]


def _all(state: CheckpointState, start: Mapping[str, Array]) -> dict[str, Array]:
    """Every parameter and statistic, the trained ones before the training."""
    values = {name: p.data for name, p in state.parameters} | {name: p.data for name, p in state.statistics}
    return values | dict(start)


def _with(outcome: Outcome, verdict: str, reason: str) -> Outcome:
    outcome.verdict, outcome.reason = verdict, reason
    return outcome


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _places(model: onnx.ModelProto, parameters: Mapping[str, Array]) -> dict[str, Places]:
    """The initializers that hold a parameter: under its name, or, as exporters fold them, its transpose under another.

    A parameter that is tied has several.
    """
    numbers = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    others = {
        n: v for n, v in numbers.items() if n not in parameters and v.size > 1 and v.dtype == np.float32
    }
    found: dict[str, Places] = {}
    for name, value in parameters.items():
        own = [(name, False)] if numbers.get(name, np.zeros(0)).shape == value.shape else []
        copies = [(n, False) for n, v in others.items() if np.array_equal(v, value)]
        copies += [(n, True) for n, v in others.items() if v.ndim == 2 and np.array_equal(v.T, value)]
        found[name] = own + [copy for copy in copies if (copy[0], False) not in own]
    return found


def _placed(values: Mapping[str, Array], places: Mapping[str, Places]) -> dict[str, Array]:
    """The initializers of parameters; what is none stays."""
    result = {}
    for name, value in values.items():
        for place, transposed in places.get(name, [(name, False)]):
            result[place] = value.T if transposed else value
    return result


def _loss(
    model: onnx.ModelProto, places: Mapping[str, Places], feeds: Mapping[str, Array], target: Array
) -> Loss:
    """The loss as a function of what is fed beside the inputs; initializers that can be are made optional inputs."""
    session = _session(_open(model, places))
    name = session.get_outputs()[0].name
    wanted = {v.name for v in session.get_inputs()}
    given = {n: value for n, value in feeds.items() if n in wanted}
    wide = target.astype(np.float64)

    def loss(values: Mapping[str, Array]) -> float:
        narrow = {n: np.ascontiguousarray(v, np.float32) for n, v in _placed(values, places).items()}
        y = session.run([name], {**given, **narrow})[0]
        return float(np.mean((y.astype(np.float64) - wide) ** 2))

    return loss


def _open(model: onnx.ModelProto, places: Mapping[str, Places]) -> onnx.ModelProto:
    known = {value.name for value in model.graph.input}
    names = {place for found in places.values() for place, _ in found}
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in model.graph.initializer:
        if tensor.name in names and tensor.name not in known:
            model.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return model


def _slope(
    loss: Loss,
    values: Mapping[str, Array],
    gradients: Mapping[str, Array],
    rng: np.random.Generator,
    dtype: type,
) -> Slope:
    """Along a random direction in these parameters, over the steps that leave the least doubt."""
    directions = {}
    for name, value in values.items():
        rms = float(np.sqrt(np.mean(np.square(value, dtype=np.float64)))) if value.size else 0.0
        directions[name] = max(rms, 0.05) * rng.standard_normal(value.shape)
    if len(values) > 1:  # all of them are to count
        sizes = {n: float(np.linalg.norm(gradients[n].astype(np.float64) * d)) for n, d in directions.items()}
        common = float(np.median(list(sizes.values())))
        directions = {n: d * np.clip(common / max(sizes[n], 1e-30), 0.05, 20) for n, d in directions.items()}
    products = {n: gradients[n].astype(np.float64) * d for n, d in directions.items()}
    derivative = sum(float(p.sum()) for p in products.values())
    size = float(np.sqrt(sum(float((p**2).sum()) for p in products.values())))
    best: tuple[float, float] | None = None
    for step in STEPS[dtype]:

        def at(t: float, step: float = step) -> float:
            return loss({n: values[n].astype(np.float64) + t * step * d for n, d in directions.items()})

        near, middle, far = ((at(k) - at(-k)) / (2 * k * step) for k in (1, 2, 4))
        first, second = (4 * near - middle) / 3, (4 * middle - far) / 3
        noise = 4 * float(np.finfo(dtype).eps) * abs(at(0)) / step
        found = (abs(first - second) + noise, first)
        best = found if best is None or found[0] < best[0] else best
        if best[0] <= TOLERANCE * size:
            break
    assert best is not None
    return Slope(derivative, best[1], best[0], size)


def _wide_loss(
    own: onnx.ModelProto, places: Mapping[str, Places], feeds: Mapping[str, Array], target: Array
) -> Loss | None:
    """The loss of the file in float64, straight through what rounds; None where the evaluator lacks an op."""
    names = {place for found in places.values() for place, _ in found}
    start = {t.name: onnx.numpy_helper.to_array(t) for t in own.graph.initializer if t.name in names}
    given = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in {**feeds, **start}.items()}

    def loss(values: Mapping[str, Array]) -> float:
        with np.errstate(all="ignore"):
            y = evaluator.run(None, {**given, **_placed(values, places)})[0]
        return float(np.mean((np.asarray(y) - target.astype(np.float64)) ** 2))

    try:
        evaluator = Evaluator(_named(in_precision(_open(own, places))))
        loss({})
    except Exception as error:
        print("no reference:", short(error))
        return None
    return loss


def _named(model: onnx.ModelProto) -> onnx.ModelProto:
    """Names outputs that are left out: the evaluator would take what they are for inputs that are left out."""
    for place, node in enumerate(model.graph.node):
        for index, name in enumerate(list(node.output)):
            node.output[index] = name or f"unused {place} {index}"
    return model


def short(error: BaseException) -> str:
    """Return the text of an error, without the places of temporary files."""
    said = re.sub(rf"{re.escape(tempfile.gettempdir())}\S*/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {said[:300]}"
