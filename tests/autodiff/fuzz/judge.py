"""Compare the gradients of a graph with finite differences of its loss, computed by ONNX's reference evaluator.

The loss is evaluated in float64 by ONNX's reference evaluator. Its slope along a random direction in all leaves at
once, and for second derivatives its mixed difference along two directions, must be those that the gradient model
gives on ONNX Runtime in the graph's own dtype. Second derivatives are asked for in one of three ways.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort

from autodiff.fuzz.graph import Array, Graph
from autodiff.reference import ReferenceEvaluator
from onnxtrain import hessian_vector_product, jvp
from onnxtrain.autodiff import differentiate
from onnxtrain.errors import OnnxTrainError
from runtimes import computes_float64, keeps_nothing, runs_opset
from slopes import settled_slope

RIGHT, WRONG, CRASH = "right", "wrong", "crash"
REFUSED = "refused"
"""A documented error of onnxtrain said why there is no gradient."""
INCONCLUSIVE = "inconclusive"
"""Near a kink, or the differences do not settle."""
NOT_OURS = "not ours"
"""The model itself does not run, or not as its specification says."""

FINDINGS = (WRONG, CRASH, REFUSED)
"""Verdicts that someone has to look at."""

WAYS = ("differentiate twice", "hessian_vector_product", "jvp")
"""Of derivatives behind the gradient: the second two differentiate a graph that holds a gradient, too."""

Feeds = Mapping[str, Array]
Run = Callable[[list[str], Feeds], list[Array]]
Loss = Callable[[dict[str, Array]], float]
TOLERANCE = {np.float64: 2e-6, np.float32: 1e-3}
"""Of slopes, relative to the sum of the absolute values of their terms; mixed differences are allowed ten times it."""


@dataclass
class Verdict:
    """A verdict on a graph.

    Attributes:
        kind: one of the above.
        reason: why; for what is refused, the error's type and beginning.
        notes: numbers.
    """

    kind: str
    reason: str = ""
    notes: dict[str, str] = field(default_factory=dict)


class _NoKernel(Exception):
    """ONNX Runtime has no kernel for a dtype, and says so when it runs."""


class _Undecided(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def judge(graph: Graph, *, second: str | None, tell: Callable[[str], None] = lambda stage: None) -> Verdict:
    """Returns the verdict on the gradient, and then on one of `WAYS` if asked for.

    What is to come is told before: "model", "gradient", "second gradient".
    """
    try:
        return _judge(graph, second=second, tell=tell)
    except _Undecided as outcome:
        return Verdict(outcome.kind, str(outcome))


def _judge(graph: Graph, *, second: str | None, tell: Callable[[str], None]) -> Verdict:
    tell("model")
    loss = _reference_loss(graph)
    model = graph.model(graph.dtype)
    feeds = graph.feeds(graph.dtype)
    run = None if _is_beyond_runtime(graph) else _runtime(model)
    expected = loss({})
    if run is not None:
        try:
            _check_model_runs(graph, run, feeds, expected)
        except _NoKernel:
            run = None
    tell("gradient")
    names = [leaf.name for leaf in graph.wrt]
    try:
        first = differentiate(model, "loss", names)
    except OnnxTrainError as error:
        return _refusal(error)
    except Exception:
        return Verdict(CRASH, "differentiate", {"error": traceback.format_exc(limit=-4)})
    got = _gradients(graph, first, feeds, run is not None, ["loss", *(f"{name}_grad" for name in names)])
    if isinstance(got, Verdict):
        return got
    value, *gradients = got
    if not _close(value, expected, 1e-3):
        return Verdict(WRONG, "the loss changed", {"loss": f"{value} instead of {expected}"})
    verdict = _check_first(graph, loss, gradients)
    if verdict.kind != RIGHT or second is None:
        return verdict
    tell("second gradient")
    if not np.isfinite(loss({})):
        return Verdict(RIGHT, "loss not finite: shapes only")
    check = {
        "differentiate twice": _check_twice,
        "hessian_vector_product": _check_products,
        "jvp": _check_jvp,
    }
    try:
        return check[second](graph, loss, first, feeds, run is not None)
    except OnnxTrainError as error:
        return _refusal(error, f" ({second})")
    except _Undecided:
        raise
    except Exception:
        return Verdict(CRASH, second, {"error": traceback.format_exc(limit=-4)})


def _is_beyond_runtime(graph: Graph) -> bool:
    """Tell whether an old ONNX Runtime lacks ops of the gradient or gets them wrong: the reference is used then."""
    return (
        not runs_opset(graph.opset)
        or (graph.dtype is np.float64 and not computes_float64("Cos"))
        or (graph.empty and not keeps_nothing())
    )


def _check_model_runs(graph: Graph, run: Run, feeds: Feeds, expected: float) -> None:
    (value,) = run(["loss"], feeds)
    if not _close(value, expected, 1e-3):
        raise _Undecided(
            NOT_OURS, f"ONNX Runtime and the reference differ: {' '.join(sorted(set(graph.ops)))}"
        )
    if not graph.empty:
        return
    # A loss of nothing tells nothing: all values must have their shapes.
    model = graph.model(graph.dtype)
    names = [name for node in graph.nodes for name in node.outputs if name != "loss"]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    wide = _runtime(model)
    for name, array in zip(names, wide(names, feeds) if wide is not None else (), strict=wide is not None):
        if array.shape != graph.result_shapes.get(name, array.shape):
            raise _Undecided(NOT_OURS, "ONNX Runtime and the reference differ: shapes of nothing")


def _check_first(graph: Graph, loss: Loss, gradients: list[Array]) -> Verdict:
    for leaf, gradient in zip(graph.wrt, gradients, strict=True):
        if gradient.shape != leaf.array.shape or gradient.dtype != graph.dtype:
            shown = f"{leaf.name}: {gradient.dtype}{list(gradient.shape)} for {list(leaf.array.shape)}"
            return Verdict(WRONG, "shape or dtype", {"gradient": shown})
    if not np.isfinite(loss({})):
        return Verdict(RIGHT, "loss not finite: shapes only")
    rng = np.random.default_rng(0)
    direction = {leaf.name: rng.uniform(-1, 1, leaf.array.shape) for leaf in graph.wrt}
    slope = _slope(graph, loss, direction)
    terms = [
        g.astype(np.float64) * direction[leaf.name] for leaf, g in zip(graph.wrt, gradients, strict=True)
    ]
    scale = sum(float(np.abs(t).sum()) for t in terms) + abs(slope) + 1e-4 * abs(loss({})) + 1e-3
    projected = sum(float(t.sum()) for t in terms)
    notes = {"slope": f"{projected} instead of {slope}", "scale": str(scale)}
    if not np.isfinite(projected):
        return Verdict(WRONG, "gradient not finite", notes)
    if abs(projected - slope) > TOLERANCE[graph.dtype] * scale:
        return Verdict(WRONG, "gradient", notes)
    return Verdict(RIGHT)


def _slope(graph: Graph, loss: Loss, direction: dict[str, Array]) -> float:
    """The derivative along the direction.

    Raises:
        _Undecided: the sides or the steps disagree.
    """

    def at(t: float) -> float:
        return loss({leaf.name: leaf.array + t * direction[leaf.name] for leaf in graph.wrt})

    with np.errstate(all="ignore"):
        slope = settled_slope(at, 1e-5, middle=at(0.0), part=1e-2, settled=2e-6)
    if slope is None or not np.isfinite(slope):
        raise _Undecided(INCONCLUSIVE, "kink")
    return slope


def _check_twice(
    graph: Graph, loss: Loss, first: onnx.ModelProto, feeds: dict[str, Array], on_runtime: bool
) -> Verdict:
    """The gradient of <v, gradient of one leaf>."""
    names, leaf = [leaf.name for leaf in graph.wrt], graph.wrt[0]
    known = {output.name for output in first.graph.output}
    model = differentiate(first, first.graph.output[1].name, names, cotangent="v")
    added = [output.name for output in model.graph.output if output.name not in known]
    rng = np.random.default_rng(1)
    v = rng.uniform(0.5, 1.5, leaf.array.shape)
    got = _gradients(graph, model, {**feeds, "v": v.astype(graph.dtype)}, on_runtime, added)
    if isinstance(got, Verdict):
        return _of_way(got, "differentiate twice")
    direction = {leaf.name: rng.uniform(-1, 1, leaf.array.shape) for leaf in graph.wrt}
    return _check_curvature(graph, loss, {leaf.name: v}, direction, got, "differentiate twice")


def _check_products(
    graph: Graph, loss: Loss, first: onnx.ModelProto, feeds: dict[str, Array], on_runtime: bool
) -> Verdict:
    """The products of the Hessian with a vector of all leaves."""
    model = hessian_vector_product(graph.model(graph.dtype), "loss", [leaf.name for leaf in graph.wrt])
    rng = np.random.default_rng(1)
    vectors = {leaf.name: rng.uniform(0.5, 1.5, leaf.array.shape) for leaf in graph.wrt}
    given = {f"{name}_vector": vector.astype(graph.dtype) for name, vector in vectors.items()}
    products = [f"{leaf.name}_hvp" for leaf in graph.wrt]
    got = _gradients(graph, model, {**feeds, **given}, on_runtime, products)
    if isinstance(got, Verdict):
        return _of_way(got, "hessian_vector_product")
    direction = {leaf.name: rng.uniform(-1, 1, leaf.array.shape) for leaf in graph.wrt}
    return _check_curvature(graph, loss, vectors, direction, got, "hessian_vector_product")


def _check_jvp(
    graph: Graph, loss: Loss, first: onnx.ModelProto, feeds: dict[str, Array], on_runtime: bool
) -> Verdict:
    """The slope along a direction in all leaves, at once."""
    model = jvp(graph.model(graph.dtype), ["loss"], [leaf.name for leaf in graph.wrt])
    rng = np.random.default_rng(0)
    direction = {leaf.name: rng.uniform(-1, 1, leaf.array.shape) for leaf in graph.wrt}
    given = {f"{name}_tangent": tangent.astype(graph.dtype) for name, tangent in direction.items()}
    got = _gradients(graph, model, {**feeds, **given}, on_runtime, ["loss_tangent"])
    if isinstance(got, Verdict):
        return _of_way(got, "jvp")
    # Terms of the slope are not to be had; those of the loss are as large.
    slope, scale = _slope(graph, loss, direction), abs(loss({})) + sum(leaf.array.size for leaf in graph.wrt)
    notes = {"slope": f"{float(got[0])} instead of {slope}", "scale": str(scale)}
    if not abs(float(got[0]) - slope) <= TOLERANCE[graph.dtype] * (scale + abs(slope)):
        return Verdict(WRONG, "jvp", notes)
    return Verdict(RIGHT)


def _of_way(verdict: Verdict, way: str) -> Verdict:
    verdict.reason += f" ({way})"
    return verdict


def _check_curvature(
    graph: Graph,
    loss: Loss,
    vectors: dict[str, Array],
    direction: dict[str, Array],
    products: list[Array],
    way: str,
) -> Verdict:
    """Compares <direction, products> with the mixed difference of the loss along the vectors and the direction."""
    for leaf, product in zip(graph.wrt, products, strict=True):
        if product.shape != leaf.array.shape or product.dtype != graph.dtype:
            shown = f"{leaf.name}: {product.dtype}{list(product.shape)} for {list(leaf.array.shape)}"
            return Verdict(WRONG, f"shape or dtype ({way})", {"product": shown})
    rounded = {name: vector.astype(graph.dtype).astype(np.float64) for name, vector in vectors.items()}
    curvature = _mixed(graph, loss, rounded, direction)
    terms = [p.astype(np.float64) * direction[leaf.name] for leaf, p in zip(graph.wrt, products, strict=True)]
    scale = sum(float(np.abs(t).sum()) for t in terms) + abs(curvature) + 1e-1 * abs(loss({})) + 1e-1
    projected = sum(float(t.sum()) for t in terms)
    notes = {"curvature": f"{projected} instead of {curvature}", "scale": str(scale)}
    if not abs(projected - curvature) <= 10 * TOLERANCE[graph.dtype] * scale:
        return Verdict(WRONG, f"second gradient ({way})", notes)
    return Verdict(RIGHT)


def _mixed(graph: Graph, loss: Loss, vectors: dict[str, Array], direction: dict[str, Array]) -> float:
    """The second derivative along the vectors, of some leaves, and along the direction in all."""

    def at(s: float, t: float) -> float:
        return loss(
            {
                leaf.name: leaf.array + t * direction[leaf.name] + s * vectors.get(leaf.name, 0.0)
                for leaf in graph.wrt
            }
        )

    found = []
    with np.errstate(all="ignore"):
        for h in (2e-4, 8e-4):
            found.append((at(h, h) - at(h, -h) - at(-h, h) + at(-h, -h)) / (4 * h * h))
    near, far = found
    if not np.isfinite(near + far) or abs(near - far) > 2e-5 * (abs(near) + abs(loss({})) + 1):
        raise _Undecided(INCONCLUSIVE, "kink (second)")
    return near


def _reference_loss(graph: Graph) -> Loss:
    """The loss in float64, with some leaves replaced."""
    model = graph.model(np.float64, judge=True)
    given = {**graph.feeds(np.float64), **{leaf.name: leaf.array for leaf in graph.wrt}}
    try:
        evaluator = ReferenceEvaluator(model)
        evaluator.run(["loss"], given)
    except Exception as error:
        raise _Undecided(NOT_OURS, f"no reference: {type(error).__name__}") from error

    def loss(replaced: dict[str, Array]) -> float:
        with np.errstate(all="ignore"):
            return float(evaluator.run(["loss"], {**given, **replaced})[0])

    return loss


def _runtime(model: onnx.ModelProto) -> Run | None:
    """ONNX Runtime, None where it lacks a kernel for a dtype.

    Raises:
        _Undecided: it does not run the model.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = str(error)
        if "NOT_IMPLEMENTED" in text or ("INVALID_GRAPH" in text and "Type Error" in text):
            return None
        raise _Undecided(NOT_OURS, f"no session: {text[:90]}") from error

    def run(names: list[str], feeds: Feeds) -> list[Array]:
        try:
            return [np.asarray(array) for array in session.run(names, dict(feeds))]
        except Exception as error:
            if "does not support double" in str(error):
                raise _NoKernel from error
            raise _Undecided(NOT_OURS, f"no run: {str(error)[:500]}") from error

    return run


def _gradients(
    graph: Graph, model: onnx.ModelProto, feeds: Feeds, on_runtime: bool, outputs: list[str]
) -> list[Array] | Verdict:
    """The outputs asked for, by ONNX Runtime, or by the reference where that evaluates the model itself."""
    try:
        _check_model(model, types=on_runtime)
    except Exception as error:
        return Verdict(CRASH, "checker", {"error": str(error)[:600]})
    if not on_runtime:
        try:
            with np.errstate(all="ignore"):
                return [np.asarray(a) for a in ReferenceEvaluator(model).run(outputs, dict(feeds))]
        except Exception as error:
            raise _Undecided(NOT_OURS, f"no reference of the gradient: {str(error)[:90]}") from error
    try:
        run = _runtime(model)
        if run is None:
            return Verdict(CRASH, "no kernel")
        return run(outputs, feeds)
    except _Undecided as outcome:
        return Verdict(CRASH, "gradient model", {"error": str(outcome)})


def _check_model(model: onnx.ModelProto, *, types: bool) -> None:
    """Checks the model; the checker takes no inputs without a rank, which runtimes do."""
    if all(value.type.tensor_type.HasField("shape") for value in model.graph.input):
        onnx.checker.check_model(model)
    if types:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def _refusal(error: OnnxTrainError, suffix: str = "") -> Verdict:
    return Verdict(REFUSED, type(error).__name__ + suffix, {"error": str(error)[:400]})


def _close(value: Array | float, reference: float, tolerance: float) -> bool:
    number = float(np.asarray(value))
    if not (np.isfinite(number) and np.isfinite(reference)):
        return bool(np.isfinite(number) == np.isfinite(reference))
    return abs(number - reference) <= tolerance * (abs(reference) + 1)
