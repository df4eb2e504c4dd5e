"""One node test of ONNX: the gradient of its model beside differences of what the model computes.

The loss is a weighted sum of all floating-point outputs. Its derivative along random directions in one input at a time
is taken from the gradient model, run by ONNX Runtime in the dtype of the test, and from central differences of the
test's own model. These are computed with every float widened to float64, by ONNX Runtime where it has the kernels, else
by ONNX's reference evaluator, or else in float32 by ONNX Runtime. A judge must give the outputs that the test expects
before it is asked anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from problem import LOSS, Problem, in_double, problem_of

from autodiff.reference import ReferenceEvaluator
from onnxtrain.autodiff import coverage, differentiate
from onnxtrain.errors import OnnxTrainError
from onnxtrain.op_facts import RANDOM_OPS
from slopes import settled_slope

Array = np.ndarray
Feeds = Mapping[str, Array]
Run = Callable[[Sequence[str], Feeds], list[Array]]

TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Of a derivative along a direction, relative to the sum of the absolute values of its terms."""
STEP = {"float64": 1e-5, "float32": 4e-3}
SETTLED = {"float64": 1e-5, "float32": 1e-2}
"""Largest distance of the differences of two steps; a kink is near if they, or the slopes to both sides, disagree."""
MOVES = 8
"""Number of times data at a kink is moved, each time a little farther."""
DIRECTIONS = 3


class Outcome(Exception):
    """A verdict that is known before the end."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


@dataclass
class Judge:
    """Computes the loss of the test's model.

    Attributes:
        run: the model.
        precision: "float64" or "float32".
        by: who computes it.
    """

    run: Run
    precision: str
    by: str

    def loss(self, feeds: Feeds) -> float:
        """Returns the loss."""
        with np.errstate(all="ignore"):
            return float(self.run([LOSS], feeds)[0])


def measure(case: Any) -> dict[str, Any]:
    """Returns the verdict on a node test, and what it rests on."""
    try:
        return _measure(case)
    except Outcome as outcome:
        return {"verdict": outcome.verdict, "reason": str(outcome)}


def _measure(case: Any) -> dict[str, Any]:
    problem = problem_of(case)
    if problem.reason:
        raise Outcome(problem.verdict or "not differentiable", problem.reason)
    result: dict[str, Any] = {"inputs": list(problem.wrt)}
    try:
        gradients = differentiate(problem.model, LOSS, problem.wrt)
    except OnnxTrainError as refusal:
        problem = problem.with_constants()
        try:
            gradients = differentiate(problem.model, LOSS, problem.wrt)
        except OnnxTrainError:
            raise Outcome("refused", f"{type(refusal).__name__}: {refusal}") from refusal
        result["constants"] = f"{type(refusal).__name__}: {refusal}"
    if why := _draws(problem):
        raise Outcome("not differentiable", why)
    run, by = _runner(problem, gradients)
    result["gradient"] = by
    for judge in _accepted(problem):
        found, move = _compare_somewhere(problem, judge, run)
        if found["verdict"] != "at a kink":
            break
    if found["verdict"] == "wrong" and judge.precision == "float64":
        # Where float32 loses digits (1 - y² of a tanh near 1), the same gradient in float64 says who is right.
        wide = replace(problem, model=in_double(problem.model))
        gradients = differentiate(wide.model, LOSS, problem.wrt)
        again, move = _compare_somewhere(wide, judge, _widened(_runner(wide, gradients)[0]))
        if again["verdict"] == "right" and found["verdict"] == "wrong" and found.get("close"):
            found = {**again, "rounding": found["reason"]}
    found.pop("close", None)
    result |= {"judge": f"{judge.by}, {judge.precision}", **({"moved": move} if move else {}), **found}
    if result["verdict"] == "right" and result.pop("zero") and (why := _constant(problem)):
        result |= {"verdict": "not differentiable", "reason": why}
    return result


def _compare_somewhere(problem: Problem, judge: Judge, run: Run) -> tuple[dict[str, Any], int]:
    """Compares at the data of the test, or else near it; returns how often it was moved."""
    for move in range(MOVES):
        try:
            found = _compare(problem, judge, run, _moved(problem, move))
        except Exception as error:  # near the data, outputs may have other sizes
            if not move:
                raise Outcome("wrong", f"the gradient does not run: {str(error)[:300]}") from error
            continue
        if found["verdict"] != "at a kink":
            return found, move
    return {"verdict": "at a kink", "reason": ", ".join(problem.wrt)}, 0


def _draws(problem: Problem) -> str:
    """Why a model that draws discrete random numbers has no gradient."""
    rows = {row.op_type: row for row in coverage()}
    return "; ".join(f"{op}: {rows[op].reason}" for op in problem.ops & RANDOM_OPS if rows[op].reason)


def _constant(problem: Problem) -> str:
    """Why a gradient is zero everywhere: the ops that no gradient flows through."""
    rows = {row.op_type: row for row in coverage()}
    return "; ".join(
        f"{op}: {rows[op].reason}"
        for op in problem.ops
        if op in rows and rows[op].status == "nondifferentiable"
    )


def _accepted(problem: Problem) -> list[Judge]:
    """Returns the judges that give the outputs that the test expects, the best first."""
    said, accepted = [], []
    for by, precision, make in _judges(problem):
        try:
            judge = Judge(make(), precision, by)
            outputs = judge.run(list(problem.expected), problem.feeds)
        except Exception as error:  # each runtime fails in its own ways
            said.append(f"{by}, {precision}: {type(error).__name__} {str(error)[:120]}")
            continue
        wrong = [k for k, got in zip(problem.expected, outputs, strict=True) if not _same(problem, k, got)]
        if wrong:
            said.append(f"{by}, {precision}: other values of {', '.join(wrong)}")
        else:
            accepted.append(judge)
    if not accepted:
        raise Outcome("no judge", "; ".join(said))
    return accepted


def _same(problem: Problem, name: str, got: Array) -> bool:
    want = problem.expected[name]
    if got.shape != want.shape:
        return False
    if problem.ops & RANDOM_OPS or (want.dtype.kind not in "fiub" and want.dtype.name != "bfloat16"):
        return True
    rtol = max(problem.rtol, {"float16": 5e-3, "bfloat16": 3e-2}.get(want.dtype.name, 1e-3))
    close = np.isclose(got.astype(np.float64), want.astype(np.float64), rtol, rtol / 10, equal_nan=True)
    return bool(close.all())


def _judges(problem: Problem) -> Iterator[tuple[str, str, Callable[[], Run]]]:
    model = problem.model
    if not problem.ops & RANDOM_OPS:
        double = in_double(model)
        yield "onnxruntime", "float64", lambda: _widened(_onnxruntime(double))
        yield "reference", "float64", lambda: _widened(_reference(double))
    yield "onnxruntime", "float32", lambda: _typed(model, _fresh(model))
    yield "reference", "float32", lambda: _typed(model, _reference(model))


def _runner(problem: Problem, gradients: onnx.ModelProto) -> tuple[Run, str]:
    """Returns what computes gradients: ONNX Runtime, or the reference where ONNX Runtime has the model itself wrong."""
    try:
        outputs = _onnxruntime(problem.model)(list(problem.expected), problem.feeds)
    except Exception:  # it lacks a kernel
        return _reference(gradients), "reference"
    if not all(_same(problem, name, got) for name, got in zip(problem.expected, outputs, strict=True)):
        return _reference(gradients), "reference"
    try:
        return _onnxruntime(gradients), "onnxruntime"
    except Exception as error:
        raise Outcome("wrong", f"the gradient does not load: {str(error)[:300]}") from error


def _compare(problem: Problem, judge: Judge, run: Run, feeds: Feeds) -> dict[str, Any]:
    names = [f"{name}_grad" for name in problem.wrt]
    with np.errstate(all="ignore"):
        loss, *arrays = run([LOSS, *names], feeds)
    middle = judge.loss(feeds)
    if np.isfinite(middle) and not np.isclose(float(loss), middle, 2e-2, 1e-2):
        return {"verdict": "wrong", "reason": f"the loss is {loss} instead of {middle}"}
    worst, zero = 0.0, True
    rng = np.random.default_rng(len(problem.name))
    for name, gradient in zip(problem.wrt, arrays, strict=True):
        array = feeds[name]
        if gradient.shape != array.shape or (gradient.dtype != array.dtype and gradient.dtype != np.float64):
            said = f"{name}: {gradient.dtype}{list(gradient.shape)} for {array.dtype}{list(array.shape)}"
            return {"verdict": "wrong", "reason": said}
        exact = gradient.astype(np.float64)
        zero &= not exact.any()
        for _ in range(DIRECTIONS):
            direction = _direction(problem, name, array, rng)
            slope = _slope(judge, feeds, name, direction, middle)
            if slope is None:
                return {"verdict": "at a kink", "reason": name}
            terms = np.where(direction == 0, 0, exact * direction)
            projected, scale = float(terms.sum()), float(np.abs(terms).sum()) + abs(slope) + 1e-3
            scale += 1e-4 * abs(middle)  # sums that cancel
            if judge.precision == "float32":
                scale += SETTLED["float32"] * abs(middle) + 1e-2
            tolerance = max(TOLERANCE[gradient.dtype.name], 1e-2 if judge.precision == "float32" else 0)
            error = abs(projected - slope) / (tolerance * scale)
            if not error <= 1:
                said = f"{name}: {projected:.6g} along a direction, the difference is {slope:.6g}"
                close = abs(projected - slope) <= 1e-3 * np.abs(middle)
                return {"verdict": "wrong", "reason": said, "close": bool(close)}
            worst = max(worst, error)
    return {"verdict": "right", "error": round(worst, 4), "zero": zero}


def _direction(problem: Problem, name: str, array: Array, rng: np.random.Generator) -> Array:
    """A random direction; equal numbers that must stay equal move alike, and none where the result is not finite."""
    direction = rng.uniform(0.3, 1.0, array.shape) * rng.choice([-1.0, 1.0], array.shape)
    if "Unique" in problem.ops:
        _, where = np.unique(array, return_inverse=True)
        direction = direction.reshape(-1)[where].reshape(array.shape)
    for values in problem.expected.values():
        if values.shape == array.shape and values.dtype == array.dtype:
            direction = np.where(np.isfinite(values.astype(np.float64)), direction, 0.0)
    return direction


def _slope(judge: Judge, feeds: Feeds, name: str, direction: Array, middle: float) -> float | None:
    """The derivative along a direction, or None where sides or steps disagree."""
    array = feeds[name].astype(np.float64)

    def at(t: float) -> float:
        try:
            return judge.loss({**feeds, name: np.asarray(array + t * direction)})
        except Exception:  # other sizes than here
            return float("nan")

    # Large numbers need large steps, unless only their differences matter.
    for size in dict.fromkeys((max(1.0, float(np.abs(array).max(initial=0)) / 10), 1.0)):
        step, part = STEP[judge.precision] * size, 1e-2 if judge.precision == "float64" else 1.0
        slope = settled_slope(at, step, middle=middle, part=part, settled=SETTLED[judge.precision])
        if slope is not None:
            return slope
    return None


def _moved(problem: Problem, times: int) -> dict[str, Array]:
    """The data of the test, or data near it."""
    rng = np.random.default_rng(times)
    feeds = dict(problem.feeds)
    for name in problem.wrt if times else ():
        array = feeds[name].astype(np.float64)
        reach = 0.02 * times * min(1.0, float(np.abs(array).max(initial=0)) or 1.0)
        feeds[name] = np.asarray(array + rng.uniform(-reach, reach, array.shape), feeds[name].dtype)
    return feeds


def _onnxruntime(model: onnx.ModelProto) -> Run:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    low = {v.name: v.type for v in (*session.get_inputs(), *session.get_outputs()) if "bfloat16" in v.type}

    def run(outputs: Sequence[str], feeds: Feeds) -> list[Array]:
        given = {name: array for name, array in feeds.items() if name in names}
        if low:
            return _bound(session, outputs, given)
        return [np.asarray(array) for array in session.run(list(outputs), given)]

    return run


def _bound(session: ort.InferenceSession, outputs: Sequence[str], feeds: Feeds) -> list[Array]:
    """Runs a session with bfloat16, which numpy, and so `run`, does not know."""
    binding = session.io_binding()
    for name, array in feeds.items():
        code = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(_plain(array), code)
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    results = []
    for value in binding.get_outputs():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
        array = value.numpy() if dtype.kind in "fiub" else np.asarray(_bits(value)).view(dtype)
        results.append(array)
    return results


def _bits(value: ort.OrtValue) -> Array:
    import torch

    return torch.from_dlpack(value._ortvalue.to_dlpack()).view(torch.int16).numpy()


def _plain(array: Array) -> Array:
    return array if array.dtype.kind in "fiub" else array.view(np.uint16)


def _fresh(model: onnx.ModelProto) -> Run:
    """As `_onnxruntime`, in a session of its own each time, so that random numbers are the same ones."""
    _onnxruntime(model)
    return lambda outputs, feeds: _onnxruntime(model)(outputs, feeds)


def _reference(model: onnx.ModelProto) -> Run:
    evaluator = ReferenceEvaluator(model)
    names = {value.name for value in model.graph.input}

    def run(outputs: Sequence[str], feeds: Feeds) -> list[Array]:
        with np.errstate(all="ignore"):
            results: Any = evaluator.run(list(outputs), {k: v for k, v in feeds.items() if k in names})
        return [np.asarray(result) for result in results]

    return run


def _widened(run: Run) -> Run:
    def wide(outputs: Sequence[str], feeds: Feeds) -> list[Array]:
        return run(
            outputs, {k: v if v.dtype.kind in "iubUOS" else v.astype(np.float64) for k, v in feeds.items()}
        )

    return wide


def _typed(model: onnx.ModelProto, run: Run) -> Run:
    """Rounds to the dtypes of the model."""
    dtypes = {
        v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input
    }

    def typed(outputs: Sequence[str], feeds: Feeds) -> list[Array]:
        return run(outputs, {k: v.astype(dtypes[k]) for k, v in feeds.items() if k in dtypes})

    return typed
