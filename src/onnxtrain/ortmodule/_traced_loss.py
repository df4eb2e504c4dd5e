"""Traces a Python function of PyTorch tensors into an ONNX model: a loss of outputs of a model and of targets.

`onnxtrain.losses.TorchLoss` calls :func:`guess_targets` and :func:`trace_loss` when it is appended to a graph.
"""

from __future__ import annotations

import itertools
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import fx

from onnxtrain.autodiff import add_gradients
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError, OnnxTrainError
from onnxtrain.losses import Argument
from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.capture.autograd._gradients import flow_of
from onnxtrain.ortmodule.capture.autograd._rehearsal import note_inputs
from onnxtrain.ortmodule.capture.graph._assertions import mark_assertions
from onnxtrain.ortmodule.capture.graph._no_grad import correct_requires_grad
from onnxtrain.ortmodule.lowering import aten as _aten
from onnxtrain.ortmodule.lowering._functional_graph import functional_graph
from onnxtrain.ortmodule.lowering._graph_lowering import GraphLowering
from onnxtrain.ortmodule.lowering._table import DTYPES, UnsupportedATenOp
from onnxtrain.passes import CeilModePass, apply_workarounds, infer_shapes, mark_constant, to_proto

# Imported only to fill the table of lowerings.
del _aten

Function = Callable[..., Any]
_TORCH_DTYPES = {onnx_dtype: dtype for dtype, onnx_dtype in DTYPES.items()}
# float32 beside float64: the sums of a loss lose a few of the seven digits.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class _Draw:
    """Distributions of the random arguments of one call.

    Attributes:
        scores: "normal", or "unit" for numbers between 0 and 1, e.g. for probabilities and variances.
        targets: "shares" for numbers from 0 to 1, "signs" for 1 and -1.
        labels: True for random labels, False for zeros.
        larger: True for other sizes of the symbolic dimensions.
    """

    scores: str = "normal"
    targets: str = "shares"
    labels: bool = True
    larger: bool = False


_DRAWS = tuple(
    _Draw(scores, targets, labels)
    for labels, scores, targets in itertools.product((True, False), ("normal", "unit"), ("shares", "signs"))
)


def guess_targets(
    function: Function,
    called: str,
    parameters: Sequence[str],
    of_model: Sequence[Argument],
    names: Sequence[str],
) -> list[Argument]:
    """Finds dtypes and shapes of targets with which a function runs.

    The first that it accepts counts, in the order that :class:`onnxtrain.losses.TorchLoss` documents.

    Args:
        function: the function.
        called: its name in messages, e.g. "the lambda".
        parameters: names of all its arguments, in order.
        of_model: the arguments that are values of the model.
        names: the arguments to find.

    Raises:
        GraphBuildError: the function accepts none of the combinations.
    """
    forms = _forms(of_model)
    remedy = f"declare them: TorchLoss(function, targets={{{', '.join(f'{name!r}: ' + _EXAMPLE for name in names)}}})"
    if len(names) > 4:
        raise GraphBuildError(f"tracing {called}: it has {len(names)} targets; {remedy}")
    known = {entry.name: entry for entry in of_model}

    def arguments(chosen: Sequence[tuple[ir.DataType, tuple[Any, ...]]]) -> list[Argument]:
        found = {
            name: Argument(name, dtype, dims, False)
            for name, (dtype, dims) in zip(names, chosen, strict=True)
        }
        return [(known | found)[name] for name in parameters]

    # Sums of ranks: each target prefers the first form.
    ranks = sorted(
        itertools.product(range(len(forms)), repeat=len(names)), key=lambda rank: (sum(rank), rank)
    )
    errors: list[str] = []
    results: list[tuple[tuple[int, ...], str]] = []
    for rank in ranks:
        chosen = [forms[k] for k in rank]
        if (error := _refusal(function, arguments(chosen))) is not None:
            errors.append(f"{_shown(arguments(chosen))}: {error}")
            if isinstance(error, _NoLoss):
                results.append((error.shape, errors[-1]))
            continue
        # A function that also takes floats of this shape may mean quantities, and sums over pairs of samples.
        if not any(
            dtype == ir.DataType.INT64
            and _refusal(
                function,
                arguments([*chosen[:k], (of_model[0].dtype, dims), *chosen[k + 1 :]]),
            )
            is None
            for k, (dtype, dims) in enumerate(chosen)
        ):
            return [entry for entry in arguments(chosen) if not entry.of_model]
    if results:
        # The function runs. Targets that broadcast make its result larger.
        likeliest = min(results, key=lambda entry: (len(entry[0]), math.prod(entry[0])))[1]
        raise GraphBuildError(f"tracing {called} for {likeliest}. If the targets are others, {remedy}")
    raise GraphBuildError(
        f"tracing {called}: the dtype and shape of the targets ({', '.join(names)}) are unknown. It raised, for "
        + "; for ".join(errors[:2])
        + f". If they are others, {remedy}"
        # The message of PyTorch's loss.
        + (f". {_CTC}" if any("input_lengths must be" in error for error in errors) else "")
    )


_EXAMPLE = "('int64', ['N'])"
_CTC = (
    "In place of F.ctc_loss, pass loss='ctc', or onnxtrain.losses.CTCLoss(blank=...), with the same gradients"
)


def _forms(of_model: Sequence[Argument]) -> list[tuple[ir.DataType, tuple[Any, ...]]]:
    """Returns the dtypes and shapes that a target may have, the most likely first."""
    forms: list[tuple[ir.DataType, tuple[Any, ...]]] = []
    labels = ir.DataType.INT64
    outputs = [entry for entry in of_model if entry.dtype.is_floating_point() and entry.dims]
    for entry in outputs:
        dims = entry.dims
        forms.append((labels, (dims[0], *dims[2:])))
        if len(dims) > 2:
            forms.append((labels, dims[:-1]))
    forms += [(entry.dtype, entry.dims) for entry in outputs]
    forms += [(labels, entry.dims) for entry in outputs]
    forms += [(entry.dtype, entry.dims[:1]) for entry in outputs]
    return list(dict.fromkeys(forms))


def _refusal(function: Function, arguments: Sequence[Argument]) -> _Refused | None:
    """Returns why a function refuses arguments, however they are drawn; None if it takes them."""
    first: _Refused | None = None
    for draw in _DRAWS:
        try:
            _evaluated(function, arguments, _tensors(arguments, draw))
            return None
        except _Refused as error:
            first = first or error
    return first


class _Refused(Exception):
    """The function raises an error, or its result is not a loss."""


class _NoLoss(_Refused):
    """The function returns floats of a shape that a loss does not have."""

    def __init__(self, message: str, shape: tuple[int, ...]) -> None:
        super().__init__(message)
        self.shape = shape


def _evaluated(
    function: Function, arguments: Sequence[Argument], tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Calls a function in eager PyTorch; returns its result.

    Raises:
        _Refused: the function raises an error, or its result is not a loss of one number or one per sample.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Targets [N] beside scores [N, 1] would compare every sample with every other.
        warnings.filterwarnings("error", message="Using a target size")
        try:
            with torch.enable_grad(), torch.inference_mode(False):
                result = function(*tensors)
        # The user's function may raise any exception.
        except Exception as error:
            raise _Refused(_first_line(error)) from error
    if not isinstance(result, torch.Tensor):
        raise _Refused(f"it returned a {type(result).__name__}, not a tensor")
    batch = _batch(arguments, tensors)
    if not result.is_floating_point() or (result.shape != () and tuple(result.shape) != (batch,)):
        shown = (
            f"it returned {str(result.dtype).removeprefix('torch.')} of shape {list(result.shape)} for {batch} "
            "samples; a loss is one number (mean() or sum()) or one per sample"
        )
        if result.is_floating_point():
            raise _NoLoss(shown, tuple(result.shape))
        raise _Refused(shown)
    if not result.requires_grad:
        raise _Refused("its result does not depend on an output of the model, or only through detach()")
    return result


def _batch(arguments: Sequence[Argument], tensors: Sequence[torch.Tensor]) -> int | None:
    """Returns the number of samples: the first size of the first value of the model that has axes."""
    return next(
        (t.shape[0] for entry, t in zip(arguments, tensors, strict=True) if entry.of_model and t.dim()), None
    )


def _tensors(arguments: Sequence[Argument], draw: _Draw, double: bool = False) -> list[torch.Tensor]:
    """Returns random arguments, the same for the same `draw`; floats of the model require a gradient.

    Args:
        arguments: the arguments.
        draw: how to draw them.
        double: True for float64 in place of float32.
    """
    generator = np.random.default_rng(0)
    sizes = _sizes(arguments, draw.larger)
    # Labels that fit any axis of the scores.
    outputs = [sizes[entry] for entry in arguments if entry.of_model and entry.dtype.is_floating_point()]
    count = min((size for shape in outputs for size in shape[1:]), default=2)
    result = []
    for entry in arguments:
        shape = sizes[entry]
        dtype = _TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise _Refused(f"PyTorch has no dtype {entry.dtype}, of {entry.name!r}")
        if not entry.dtype.is_floating_point():
            numbers: Any = generator.integers(0, count if draw.labels and count > 1 else 1, shape)
        elif entry.of_model:
            numbers = generator.normal(size=shape)
            numbers = numbers if draw.scores == "normal" else 0.05 + 0.9 / (1 + np.exp(-numbers))
        elif draw.targets == "signs":
            numbers = generator.choice([1.0, -1.0], shape)
        else:
            numbers = np.where(generator.uniform(size=shape) < 0.5, generator.uniform(size=shape), 1.0)
        # The float32 numbers, also in float64.
        tensor = torch.from_numpy(np.asarray(numbers)).to(dtype)
        tensor = tensor.double() if double and tensor.is_floating_point() else tensor
        result.append(tensor.requires_grad_(entry.of_model and tensor.is_floating_point()))
    return result


def _sizes(arguments: Sequence[Argument], larger: bool) -> dict[Argument, tuple[int, ...]]:
    """Returns the shape of each argument, with a number for each symbolic dimension that no other dimension has."""
    static = {dim for entry in arguments for dim in entry.dims if isinstance(dim, int)}
    free = (number for number in itertools.count(6 if larger else 3, 2) if number not in static)
    names: dict[str, int] = {}

    def size(dim: int | str | None) -> int:
        if isinstance(dim, int):
            return dim
        if dim is None:
            return next(free)
        if dim not in names:
            names[dim] = next(free)
        return names[dim]

    return {entry: tuple(map(size, entry.dims)) for entry in arguments}


def trace_loss(function: Function, called: str, arguments: Sequence[Argument]) -> ir.Model:
    """Traces a function; returns a model with one input per argument and one output, the loss.

    Value and gradients of the model are compared with those of eager PyTorch.

    Args:
        function: the function.
        called: its name in messages, e.g. "the lambda".
        arguments: its arguments, in order.

    Raises:
        GraphBuildError: the function cannot be traced, or the model computes something else.
    """
    draws = list(_accepted(function, arguments))
    if not draws:
        raise GraphBuildError(f"tracing {called} for {_shown(arguments)}: {_refusal(function, arguments)}")
    try:
        model = _captured(function, called, arguments, _tensors(arguments, draws[0]))
    except OnnxTrainError:
        raise
    # Dynamo and PyTorch's tracing raise errors of many types.
    except Exception as error:
        raise GraphBuildError(f"tracing {called}: {_explained(error)}") from error
    _compare(function, called, arguments, model, draws)
    return model


def _accepted(function: Function, arguments: Sequence[Argument]) -> Iterator[_Draw]:
    """Yields the draws that a function accepts: first one with finite results, then others to compare with."""
    finite: list[_Draw] = []
    infinite: list[_Draw] = []
    for draw in _DRAWS:
        try:
            result = _evaluated(function, arguments, _tensors(arguments, draw))
        except _Refused:
            continue
        (finite if bool(result.isfinite().all()) else infinite).append(draw)
    yield from (finite or infinite)[:3]


def _captured(
    function: Function, called: str, arguments: Sequence[Argument], tensors: list[torch.Tensor]
) -> ir.Model:
    """Captures a function with Dynamo, and lowers the graph."""
    for entry, tensor in zip(arguments, tensors, strict=True):
        for axis, dim in enumerate(entry.dims):
            if not isinstance(dim, int):
                _torch.dynamo.mark_dynamic(tensor, axis)
    models: list[ir.Model] = []
    errors: list[Exception] = []

    def backend(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not errors:
            try:
                models.append(_lowered(graph_module, inputs, called, arguments, tensors))
            # Dynamo would wrap it in another one.
            except Exception as error:
                errors.append(error)
        return graph_module.forward

    def call(*values: Any) -> Any:
        return function(*values)

    # Dynamo counts graphs per code object, and runs a function in eager PyTorch after eight.
    fresh = types.FunctionType(call.__code__.replace(), globals(), "call", closure=call.__closure__)
    compiled = torch.compile(fresh, backend=backend, fullgraph=True)
    with torch.enable_grad(), torch.inference_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled(*tensors)
        except _torch.InternalTorchDynamoError:
            # The graph is complete, but a later call could not be guarded: the function's globals are not those of an
            # imported module, e.g. in a program that runs code with `exec`.
            if not models:
                raise
    if errors:
        raise errors[0]
    if not models:
        raise GraphBuildError(f"tracing {called}: it computes nothing from its arguments")
    return models[0]


def _lowered(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    called: str,
    arguments: Sequence[Argument],
    tensors: Sequence[torch.Tensor],
) -> ir.Model:
    """Lowers a captured graph to a model whose inputs are the arguments.

    Args:
        graph_module: the graph.
        inputs: the values of its placeholders: arguments, and tensors and sizes that the function reads.
        called: the function's name in messages.
        arguments: the function's arguments.
        tensors: their values, which are among `inputs`.
    """
    places = {id(tensor): entry for entry, tensor in zip(arguments, tensors, strict=True)}
    trained = [
        value
        for value in inputs
        if isinstance(value, torch.Tensor) and id(value) not in places and value.requires_grad
    ]
    if trained:
        shapes = ", ".join(str(list(value.shape)) for value in trained[:3])
        raise GraphBuildError(
            f"tracing {called}: it reads {len(trained)} tensors that require a gradient (shape {shapes}), but only "
            "parameters of the model are trained. Freeze them (criterion.requires_grad_(False)), or make them part of "
            "the model before its export"
        )
    note_inputs(graph_module, inputs)
    correct_requires_grad(graph_module)
    mark_assertions(graph_module)
    functional = functional_graph(graph_module, flow_of(graph_module))
    try:
        lowered = GraphLowering(functional, "loss").run()
    except UnsupportedATenOp as error:
        raise GraphBuildError(
            f"tracing {called}: {error}. Write it in other PyTorch functions, or choose a loss of onnxtrain.losses"
        ) from error
    if lowered.mutated:
        raise GraphBuildError(
            f"tracing {called}: it writes to one of its arguments, or to a tensor outside of it, in place; compute a "
            "new tensor instead, e.g. scores + 1 in place of scores.add_(1)"
        )
    if lowered.random:
        raise GraphBuildError(
            f"tracing {called}: it draws random numbers, e.g. by dropout; a loss must be a function of its arguments"
        )
    kind, place = lowered.outputs[0]
    if kind != "tensor":
        raise GraphBuildError(f"tracing {called}: its result is an argument or a constant, not a loss")
    model = lowered.model
    CeilModePass(keep_sizes=True)(model)
    op = Emitter(model.graph, functions=model.functions)
    loss = model.graph.outputs[place]
    # A failed check, e.g. of probabilities outside of [0, 1], makes the loss NaN, which stops training.
    for index, _ in lowered.assertions:
        shape = loss.shape
        loss = op.Where(model.graph.outputs[index], loss, np.nan)
        loss.shape = shape
    model.graph.outputs.clear()
    if loss.is_graph_input():
        loss = op.Identity(loss)
    model.graph.outputs.append(loss)
    _bind_inputs(model, lowered.inputs, inputs, arguments, places)
    return infer_shapes(model)


def _bind_inputs(
    model: ir.Model,
    indices: Sequence[int],
    inputs: Sequence[Any],
    arguments: Sequence[Argument],
    places: Mapping[int, Argument],
) -> None:
    """Makes the arguments the inputs of a lowered model, in order, and all other inputs constants."""
    values = dict(zip(list(model.graph.inputs), indices, strict=True))
    by_name: dict[str, ir.Value] = {}
    model.graph.inputs.clear()
    for value, index in values.items():
        source = inputs[index]
        entry = places.get(id(source))
        if entry is not None:
            by_name[entry.name] = value
            continue
        array = source.detach().cpu() if isinstance(source, torch.Tensor) else torch.tensor(source)
        # NumPy has no bfloat16.
        numbers = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
        assert value.dtype is not None
        value.const_value = ir.Tensor(numbers.astype(value.dtype.numpy()), dtype=value.dtype, name=value.name)
        mark_constant(value)
        model.graph.register_initializer(value)
    for entry in arguments:
        value = by_name.get(entry.name) or ir.Value(type=ir.TensorType(entry.dtype))
        value.name = None
        value.name = f"argument/{entry.name}"
        # The names of sizes that equal one another in PyTorch's graph are in the inferred shapes.
        if value.shape is None:
            value.shape = ir.Shape(entry.dims)
        model.graph.inputs.append(value)


def _compare(
    function: Function,
    called: str,
    arguments: Sequence[Argument],
    model: ir.Model,
    draws: Sequence[_Draw],
) -> None:
    """Raises GraphBuildError if a traced model computes another value or gradient than the function in PyTorch."""
    wrt = [
        f"argument/{entry.name}" for entry in arguments if entry.of_model and entry.dtype.is_floating_point()
    ]
    loss = model.graph.outputs[0]
    try:
        step, gradients = add_gradients(model, str(loss.name), wrt, cotangent="cotangent")
    except OnnxTrainError as error:
        raise GraphBuildError(f"tracing {called}: its gradient cannot be computed: {error}") from error
    op = Emitter(step.graph, functions=step.functions)
    step.graph.outputs.extend([op.Identity(gradient) for gradient in gradients])
    for output in step.graph.outputs[1:]:
        output.type = output.type or ir.TensorType(ir.DataType.FLOAT)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        to_proto(apply_workarounds(step)).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = {value.name for value in session.get_inputs()}
    for draw in (*draws, _Draw(draws[0].scores, draws[0].targets, draws[0].labels, larger=True)):
        expected = _expected(function, arguments, draw)
        # The function may refuse other sizes.
        if expected is None:
            continue
        feeds = {
            f"argument/{entry.name}": tensor.detach().numpy()
            for entry, tensor in zip(arguments, _tensors(arguments, draw), strict=True)
        }
        cotangent = _cotangent(expected[0].shape)
        feeds["cotangent"] = cotangent.astype(np.float32 if loss.dtype == ir.DataType.FLOAT else np.float64)
        try:
            results = session.run(None, {name: feed for name, feed in feeds.items() if name in wanted})
        # ONNX Runtime raises its own exceptions, which have no common class.
        except Exception as error:
            raise GraphBuildError(
                f"tracing {called}: what was traced for {_shown(arguments)} does not run for other sizes of the batch: "
                f"{_first_line(error)}"
            ) from error
        names = ["value", *(f"gradient of {name.removeprefix('argument/')!r}" for name in wrt)]
        for name, got, want in zip(names, results, expected, strict=True):
            if not _close(got, want):
                raise GraphBuildError(
                    f"tracing {called}: its {name} differs from PyTorch's on random numbers for {_shown(arguments)}: "
                    f"{_numbers(got)}, PyTorch {_numbers(want)}. The function may depend on values or sizes of its "
                    "arguments in Python, or have a gradient of its own"
                )


def _cotangent(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape) if shape else np.ones(())


def _expected(function: Function, arguments: Sequence[Argument], draw: _Draw) -> list[np.ndarray] | None:
    """Returns PyTorch's value and gradients in float64, or in float32 if the function takes no float64.

    None if the function refuses the arguments.
    """
    for double in (True, False):
        tensors = _tensors(arguments, draw, double)
        try:
            value = _evaluated(function, arguments, tensors)
        except _Refused:
            continue
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        cotangent = torch.from_numpy(_cotangent(tuple(value.shape))).to(value.dtype)
        gradients = torch.autograd.grad(value, leaves, cotangent, allow_unused=True)
        return [
            value.detach().numpy(),
            *(
                np.zeros(tuple(leaf.shape)) if gradient is None else gradient.numpy()
                for leaf, gradient in zip(leaves, gradients, strict=True)
            ),
        ]
    return None


def _close(got: np.ndarray, want: np.ndarray) -> bool:
    """True if two arrays are equal up to rounding, relative to the largest element; NaN equals NaN."""
    if got.shape != want.shape or not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return False
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return False
    largest = np.abs(want[finite]).max(initial=0.0)
    return bool((np.abs(got[finite] - want[finite]) <= _TOLERANCE * largest + 1e-7).all())


def _numbers(array: np.ndarray) -> str:
    """Returns the first numbers of an array as text."""
    return ", ".join(f"{number:.6g}" for number in array.flat[:3]) + (", ..." if array.size > 3 else "")


def _shown(arguments: Sequence[Argument]) -> str:
    """Returns arguments as text, e.g. "scores float32 [batch, 10], y int64 [batch]"."""
    return ", ".join(
        f"{entry.name} {str(_TORCH_DTYPES.get(entry.dtype, entry.dtype)).removeprefix('torch.')} "
        f"[{', '.join(str(dim) for dim in entry.dims)}]"
        for entry in arguments
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _explained(error: Exception) -> str:
    """Returns what a user can do about an exception of the tracing."""
    text = _first_line(error)
    whole = str(error)
    if "ctc_loss" in whole:
        return f"PyTorch cannot trace F.ctc_loss, because the graph depends on values of the lengths. {_CTC} ({text})"
    if "mark" in whole and "dynamic" in whole and "specialized" in whole:
        return (
            "its result is only valid for one batch size, because it turns a size into a constant, e.g. by int(), a "
            f"range() or a table of fixed length ({text})"
        )
    if isinstance(error, _torch.Unsupported | _torch.UserError) or "data-dependent" in whole.lower():
        return (
            "PyTorch cannot trace it, because Python reads the values of a tensor (if, while, .item(), .numpy(), "
            "float()), or calls code that PyTorch does not know. Use torch.where in place of if, and PyTorch "
            f"functions in place of NumPy's ({text})"
        )
    return text
