"""Checks the gradients of a model against finite differences of its outputs."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain._words import argument
from onnxtrain.autodiff import differentiate
from onnxtrain.emitter import find_value, static_dims
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.functional.finite_differences import Verdict, compare
from onnxtrain.functional.float64_reference import Run, expand_rounded, run_in_float64, widen
from onnxtrain.functional.random_inputs import random_inputs
from onnxtrain.passes import (
    ModelSource,
    TrainingModePass,
    apply_workarounds,
    canonicalize,
    is_stop_gradient,
    load_model,
    promote_initializers,
    to_proto,
)
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.session import open_session, run_on_arrays
from onnxtrain.selection import select_parameters, some_names

Array = npt.NDArray[Any]
Evaluate = Callable[[Mapping[str, Array]], Array]
GradientOf = Callable[[Mapping[str, Array], Array], dict[str, Array]]

_COTANGENT = "onnxtrain.cotangent"
# Central differences have an error of O(h²) plus rounding / h. These steps h are the usual compromise per precision.
_STEP = {"float64": 1e-5, "float32": 1e-2}
_TOLERANCE = {"float64": 1e-3, "float32": 5e-2}
# Largest accepted distance between the outputs of the reference evaluator and of ONNX Runtime, relative to the norm, by
# the dtype of ONNX Runtime's output.
_SAME_OUTPUT = {"float64": 1e-6, "float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
# A gradient counts as wrong only if it is contradicted along this many random directions.
_DIRECTIONS = 2
# The rounding error of a gradient is estimated by this many runs with inputs perturbed in the last bit. A derivative
# along a random direction may be off by _ROUNDING times that estimate, because intermediate values are rounded as well.
_NUDGES = 2
_ROUNDING = 10.0


@dataclass(frozen=True)
class GradientCheck:
    """Comparison of one parameter's gradient with a finite difference, along a random direction.

    Attributes:
        name: name of the parameter, e.g. "fc.weight".
        shape: shape of the parameter, e.g. (784, 10).
        norm: L2 norm of the gradient, computed by ONNX Runtime in the model's own precision.
        derivative: dot product of the gradient and a random unit direction.
        difference: central finite difference along the same direction.
        precision: precision of the finite difference: "float64" if the ONNX reference evaluator computed it, or
            "float32" if ONNX Runtime did because the reference evaluator lacks an op or computes a different output.
        error: |derivative - difference| divided by norm / sqrt(size), the typical derivative along a random direction.
            If the terms of a gradient cancel, the divisor is larger, so that their rounding errors are tolerated.
        tolerance: largest error that passes, e.g. 1e-3.
        verdict: "agrees"; "differs" if stable finite differences contradict the gradient along two directions;
            "inconclusive" if the differences are not stable, or the parameter is at a kink.
        reason: why a check is inconclusive, e.g. "a kink: the slope is 0 on one side and 1 on the other"; otherwise
            empty.
    """

    name: str
    shape: tuple[int, ...]
    norm: float
    derivative: float
    difference: float
    precision: str
    error: float
    tolerance: float
    verdict: Verdict
    reason: str = ""

    @property
    def passed(self) -> bool:
        """True if the derivative and the finite difference agree."""
        return self.verdict == "agrees"

    def __str__(self) -> str:
        """Returns the result as a phrase, e.g. "'fc.weight' differs: ... 0.42 by the gradient, ..."."""
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.name!r} {self.verdict}{why}: along a random direction, the derivative is "
            f"{self.derivative:.6g} by the gradient and {self.difference:.6g} by finite differences in "
            f"{self.precision} (error {self.error:.3g}, tolerance {self.tolerance:g})"
        )


def check_gradients(
    model: ModelSource,
    *,
    of: str | None = None,
    wrt: Sequence[str] | None = None,
    inputs: Mapping[str, Array] | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
) -> list[GradientCheck]:
    """Compares the gradient of each parameter with finite differences.

    The output is multiplied by a random cotangent and summed, so no loss is needed. Dropout is switched off, because
    each run would drop different elements; BatchNormalization keeps its mode. Where the model stops gradients (a
    `detach`, the statistics of `onnxtrain.nn.RINorm`), the finite differences treat the stopped value as a constant,
    just as the gradients do.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`.
        of: name of the output to differentiate. Default: the first floating-point output.
        wrt: names of parameters. Default: all trainable parameters.
        inputs: values of inputs, by name, e.g. {"x": array}. Inputs without a value get random values.
        dims: sizes of symbolic dimensions, e.g. {"sequence": 5}. Default: 3 along the first axis, 8 elsewhere.
        seed: seed of all random numbers.

    Returns:
        One check per parameter.

    Raises:
        OnnxTrainError: the model cannot be loaded or differentiated, or an array does not match its input.
    """
    forward = canonicalize(load_model(model), wrt or ())
    # In training mode, BatchNormalization's gradient also flows through the batch statistics, so it is worth checking.
    TrainingModePass(dropout="inference")(forward)
    output = of or _first_float_output(forward)
    names = list(wrt) if wrt is not None else select_parameters(forward, None, None).trainable
    _check_dims(forward, dims or {})
    rng = np.random.default_rng(seed)
    given_arrays = _checked(forward, inputs or {})
    feeds = random_inputs(forward, rng, _sizes(forward, given_arrays) | dict(dims or {})) | given_arrays
    parameters = {name: _value(forward, name) for name in names}
    result, cotangent, gradient_of = _gradients(forward, output, names, feeds, rng)
    gradients = gradient_of(feeds, cotangent)
    evaluate, precision = _evaluator(forward, output, names, feeds, parameters, result)

    @functools.cache
    def rounded() -> list[dict[str, Array]]:
        """Recomputes the gradients from inputs and cotangents that are perturbed in the last bit."""
        return [
            gradient_of({k: _nudged(v, rng) for k, v in feeds.items()}, _nudged(cotangent, rng))
            for _ in range(_NUDGES)
        ]

    def rounding(name: str) -> float:
        return max(float(np.linalg.norm(widen(again[name]) - widen(gradients[name]))) for again in rounded())

    return [
        _compare(name, parameters, gradients[name], cotangent, evaluate, precision, rng, rounding)
        for name in names
    ]


def _first_float_output(model: ir.Model) -> str:
    """Returns the name of the first floating-point output.

    Raises:
        GraphBuildError: the model has no floating-point output.
    """
    for value in model.graph.outputs:
        if value.dtype is not None and value.dtype.is_floating_point():
            return str(value.name)
    raise GraphBuildError(
        "checking gradients: the model has no floating-point output; name a value with of=..."
    )


def _value(model: ir.Model, name: str) -> Array:
    """Returns the value of a parameter.

    Raises:
        GraphBuildError: the model has no such parameter.
    """
    value = model.graph.initializers.get(name)
    if value is None or value.const_value is None:
        raise GraphBuildError(
            f"checking gradients: the model has no parameter {name!r}; its initializers are "
            f"{some_names(list(model.graph.initializers))}"
        )
    return np.asarray(value.const_value.numpy())


def _check_dims(model: ir.Model, dims: Mapping[str, int]) -> None:
    """Raises InputError if a name in `dims` is not a symbolic dimension of any input."""
    # A misspelled name would be ignored, and the check would run with other sizes than the user intended.
    symbols = [d.value for v in model.graph.inputs for d in v.shape or () if isinstance(d, ir.SymbolicDim)]
    symbols_of_inputs = sorted({symbol for symbol in symbols if symbol})
    if unknown := sorted(set(dims) - set(symbols_of_inputs)):
        raise InputError(
            f"The model's inputs have no symbolic dimension {', '.join(map(repr, unknown))}; they "
            f"have {', '.join(symbols_of_inputs) or 'none'}."
        )


def _checked(model: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Converts the user's inputs to arrays of the model's dtypes.

    Raises:
        InputError: an input is unknown or has the wrong shape.
    """
    model_inputs = {str(value.name): value for value in model.graph.inputs}
    result = {}
    for name, array in inputs.items():
        if name not in model_inputs:
            raise InputError(f"The model has no input '{name}'; its inputs are {', '.join(model_inputs)}.")
        dtype, dims = model_inputs[name].dtype, static_dims(model_inputs[name])
        result[name] = np.asarray(array, dtype.numpy() if dtype is not None else None)
        shape = result[name].shape
        if dims is not None and (
            len(shape) != len(dims) or any(d not in (None, n) for d, n in zip(dims, shape, strict=True))
        ):
            raise InputError(
                f"The input '{name}' has shape {model_inputs[name].shape}, received an array of shape {list(shape)}."
            )
    return result


def _sizes(model: ir.Model, given: Mapping[str, Array]) -> dict[str, int]:
    """Infers the sizes of symbolic dimensions from the shapes of the user's arrays, e.g. {"batch": 4}."""
    return {
        dim.value: size
        for value in model.graph.inputs
        if str(value.name) in given and value.shape is not None
        for dim, size in zip(value.shape, given[str(value.name)].shape, strict=True)
        if not isinstance(dim, int) and dim.value is not None
    }


def _gradients(
    forward: ir.Model, output: str, names: Sequence[str], feeds: Mapping[str, Array], rng: np.random.Generator
) -> tuple[Array, Array, GradientOf]:
    """Runs the model once with ONNX Runtime, and builds the model that computes its gradients.

    Returns:
        The value of `output`, a random cotangent of the same shape, and a function that computes the gradients of the
        parameters `names` from inputs and a cotangent.
    """
    # The model runs once before it is differentiated, because the cotangent needs the output's shape, which may be
    # symbolic.
    plain = _session(_proto(forward, [output]))
    declared = find_value(forward.graph, output)
    y = run_on_arrays(plain, [output], feeds)[0]
    # For bfloat16 outputs the run returns float32.
    if declared is not None and declared.dtype is not None:
        y = y.astype(declared.dtype.numpy())
    cotangent = np.asarray(rng.standard_normal(np.shape(y)), y.dtype)
    step = differentiate(forward, of=output, wrt=names, cotangent=_COTANGENT)
    session = _session(to_proto(step))
    results = [str(value.name) for value in step.graph.outputs][-len(names) :]
    # Some inputs may not be used by the gradient model, and ONNX Runtime rejects unknown inputs.
    step_inputs = {i.name for i in session.get_inputs()}

    def gradient_of(values: Mapping[str, Array], ct: Array) -> dict[str, Array]:
        given = {name: array for name, array in {**values, _COTANGENT: ct}.items() if name in step_inputs}
        return dict(zip(names, run_on_arrays(session, results, given), strict=True))

    return y, cotangent, gradient_of


def _nudged(array: Array, rng: np.random.Generator) -> Array:
    """Perturbs an array in the last bit, to estimate the rounding error of gradients that are computed from it.

    Moves each float randomly up or down by about one unit in the last place. Returns arrays of other dtypes unchanged.
    """
    if array.dtype.kind in "iubOUS":
        return array
    step = np.finfo(array.dtype).eps if array.dtype.kind == "f" else 2.0**-7
    moved = widen(array) * (1 + float(step) * rng.choice([-1.0, 1.0], array.shape))
    return np.asarray(moved, array.dtype)


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Opens an inference session for a model on the CPU."""
    # Rewrites what ONNX Runtime has no kernels for, e.g. bfloat16 ops.
    suited = to_proto(apply_workarounds(ir.from_proto(model)))
    return open_session(suited.SerializeToString(), "model to check", CPU, None)


def _proto(model: ir.Model, outputs: Sequence[str], given: Sequence[str] = ()) -> onnx.ModelProto:
    """Returns a copy of a model that computes `outputs` and takes the values named in `given` as additional inputs.

    Args:
        model: the model; it is not modified.
        outputs: names of the values to compute, which replace the model's outputs.
        given: names of node outputs that become inputs. The nodes that computed them are removed.

    Raises:
        GraphBuildError: no node computes a value named in `outputs`.
    """
    cut = model.clone()
    cut.graph.outputs.clear()
    values = {str(v.name): v for node in cut.graph for v in node.outputs}
    for name in given:
        computed = values[name]
        node = computed.producer()
        assert node is not None
        values[name] = ir.Value(name=name, type=computed.type, shape=computed.shape)
        computed.replace_all_uses_with(values[name])
        cut.graph.remove(node, safe=True)
        cut.graph.inputs.append(values[name])
    if unknown := [name for name in outputs if name not in values]:
        raise GraphBuildError(
            f"checking gradients: no node of the model computes {unknown[0]!r}, which {argument('of')} names; its "
            f"outputs are {some_names([str(value.name) for value in model.graph.outputs])}"
        )
    cut.graph.outputs.extend(values[name] for name in outputs)
    return to_proto(cut)


def _evaluator(
    forward: ir.Model,
    output: str,
    names: Sequence[str],
    feeds: Mapping[str, Array],
    parameters: Mapping[str, Array],
    result: Array,
) -> tuple[Evaluate, str]:
    """Returns a function that computes the output from parameter values, for use in finite differences.

    The ONNX reference evaluator computes the output in float64 if it supports all ops and agrees with ONNX Runtime;
    otherwise, ONNX Runtime computes it in the model's own dtypes. Stop-gradient nodes are held constant.

    Args:
        forward: canonical model.
        output: name of the output.
        names: names of the parameters.
        feeds: values of the inputs, by name.
        parameters: values of the parameters, by name.
        result: the output computed by ONNX Runtime, with which the reference evaluator must agree.

    Returns:
        The function, and the precision in which it computes: "float64" for the reference evaluator, "float32" for ONNX
        Runtime.
    """
    bare = expand_rounded(forward)
    promote_initializers(bare, list(names))
    # Gradients treat a stopped value as a constant, so it must not move with the parameters. It is computed once and
    # fed as an input for the finite differences.
    stopped = [str(node.outputs[0].name) for node in bare.graph if is_stop_gradient(node)]
    with_stopped_outputs, cut = _proto(bare, stopped), _proto(bare, [output], given=stopped)

    def evaluator(make: Callable[[onnx.ModelProto], Run]) -> Evaluate:
        values = make(with_stopped_outputs)(stopped, {**feeds, **parameters}) if stopped else []
        constants = {**feeds, **dict(zip(stopped, values, strict=True))}
        run = make(cut)
        return lambda values: run([output], {**constants, **values})[0]

    try:
        evaluate = evaluator(run_in_float64)
        same = _is_same_output(evaluate(parameters), result)
    except Exception:
        # For missing ops, the reference evaluator raises exceptions of any class.
        same = False
    return (evaluate, "float64") if same else (evaluator(_runtime), "float32")


def _is_same_output(reference: Array, result: Array) -> bool:
    """True if the reference evaluator and ONNX Runtime agree up to rounding in the dtype of ONNX Runtime's output."""
    # If they disagree, the reference evaluator is wrong, and its finite differences would contradict a correct
    # gradient.
    if reference.shape != result.shape:
        return False
    exact, distance = widen(result), widen(reference) - widen(result)
    return bool(np.linalg.norm(distance) <= _SAME_OUTPUT[result.dtype.name] * (np.linalg.norm(exact) + 1e-6))


def _runtime(proto: onnx.ModelProto) -> Run:
    """Returns a function that runs a model with ONNX Runtime, in the model's own dtypes."""
    session = _session(proto)
    dtypes = {
        info.name: onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        for info in proto.graph.input
    }

    def run(outputs: Sequence[str], values: Mapping[str, Array]) -> list[Array]:
        typed = {name: np.asarray(values[name], dtype) for name, dtype in dtypes.items()}
        return run_on_arrays(session, outputs, typed)

    return run


def _compare(
    name: str,
    parameters: Mapping[str, Array],
    gradient: Array,
    cotangent: Array,
    evaluate: Evaluate,
    precision: str,
    rng: np.random.Generator,
    rounding: Callable[[str], float],
) -> GradientCheck:
    """Compares the gradient of one parameter with finite differences along random directions.

    The tolerance allows for the gradient's own rounding error: the terms of a gradient may cancel except for rounding
    errors, e.g. for the bias of attention keys, to which softmax is invariant.

    Args:
        name: name of the parameter.
        parameters: values of all parameters, by name.
        gradient: gradient of the parameter, computed by ONNX Runtime.
        cotangent: cotangent of the output.
        evaluate: computes the output from the values of all parameters.
        precision: precision of `evaluate`, "float64" or "float32".
        rng: draws the directions.
        rounding: estimates the norm of the rounding error in the gradient of a parameter, given the parameter's name.
    """
    value, exact = widen(parameters[name]), widen(gradient)
    norm = float(np.linalg.norm(exact))
    # The error needs a nonzero scale when the gradient is zero: errors below 1e-8 always pass.
    expected = max(norm / np.sqrt(max(1, exact.size)), 1e-8)
    # Relative to the parameter's magnitude: a step must not vanish in rounding, nor be far larger than the values.
    step = _STEP[precision] * max(1.0, float(np.linalg.norm(value)) / np.sqrt(max(1, value.size)))
    middle = evaluate(parameters).astype(np.float64)

    # Rounding may spoil the differences along one direction by chance, but rarely along two.
    for _ in range(_DIRECTIONS):
        direction = rng.standard_normal(value.shape)
        direction /= np.linalg.norm(direction) or 1.0

        def along(size: float, direction: Array = direction) -> float:
            moved = evaluate({**parameters, name: value + size * direction})
            return float(((moved - middle) * widen(cotangent)).sum())

        derivative = float((exact * direction).sum())
        comparison = compare(along, derivative, step, _TOLERANCE[precision] * expected)
        if comparison.verdict == "agrees":
            break
        margin = _ROUNDING * rounding(name) / np.sqrt(max(1, exact.size))
        if margin > _TOLERANCE[precision] * expected:
            expected = margin / _TOLERANCE[precision]
            comparison = compare(along, derivative, step, margin)
        if comparison.verdict != "differs":
            break
    error = float(abs(derivative - comparison.difference) / expected)
    return GradientCheck(
        name,
        tuple(value.shape),
        norm,
        derivative,
        comparison.difference,
        precision,
        error,
        _TOLERANCE[precision],
        comparison.verdict,
        comparison.reason,
    )
