"""Computes per-sample gradients of a batch, with an ONNX Loop over the samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx
import onnx_ir as ir

from onnxtrain._building import without_collection
from onnxtrain.autodiff import add_gradients, check_names, reads, straight_through_rules
from onnxtrain.emitter import Emitter, static_dims, values_by_name
from onnxtrain.errors import DifferentiationError
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes import CleanupPass, ModelSource, same_kind, settle_shapes

from ._products import finished, prepared


@same_kind
@without_collection()
def per_sample_gradients(
    model: ModelSource,
    of: str,
    wrt: Sequence[str],
    *,
    batched: Sequence[str] | None = None,
    straight_through: bool = False,
) -> onnx.ModelProto | ir.Model:
    """Returns a model that computes the gradient of `of` for each sample of a batch separately.

    The result equals `torch.func.vmap(torch.func.grad(loss), in_dims=...)`, where `loss` runs the model on a batch of
    one sample. Uses include differential privacy, influence functions and gradient variance. A Loop processes one
    sample at a time, so memory is needed for only one sample, and every op with a gradient is supported. Layers that
    mix samples (BatchNormalization in training mode, a loss that is a mean) see a batch of one; Dropout draws a new
    mask for each sample.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not modified.
        of: name of a floating-point value, such as a loss, that has one element for a batch of one sample.
        wrt: names of parameters (initializers) or inputs, floating point.
        batched: names of the inputs whose axis 0 is the batch axis. Default: all inputs.
        straight_through: as for :func:`onnxtrain.differentiate`.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its inputs are those of `model`, with a symbolic
        batch axis for those in `batched`. Its outputs are `of`, of shape [batch], then `<name>_grad` for every name in
        `wrt`. A gradient has shape [batch, *shape of the parameter], or the shape of the input for an input in
        `batched`. If an output name is taken, a number is appended to it.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown, not floating point, or listed twice; `of` has more than one element for
            one sample; or an input in `batched` is a scalar or has a fixed batch size other than 1.
        NoGradientRule: an op between `wrt` and `of` has no gradient rule.
        TypeError: `wrt` or `batched` is a string, or not a collection.

    Example:
        >>> import onnx, onnxruntime, numpy as np
        >>> import onnxtrain
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n, 2] x) => (float loss) <float[2] w = {1.0, 1.0}> {
        ...       p = Mul(x, w)  s = Mul(p, p)  loss = ReduceMean<keepdims=0>(s) }''')
        >>> step = onnxtrain.per_sample_gradients(model, "loss", ["w"])
        >>> session = onnxruntime.InferenceSession(step.SerializeToString())
        >>> loss, w_grad = session.run(None, {"x": np.array([[1, 2], [3, 4]], np.float32)})
        >>> loss.tolist(), w_grad.tolist()
        ([2.5, 12.5], [[1.0, 4.0], [9.0, 16.0]])
    """
    graph = prepared(model, [of], wrt)
    samples = _batched_inputs(graph.graph, batched)
    _check_ends(graph.graph, of, wrt)
    # Shapes for the finished model's inputs, read before the batch size is set to 1.
    declared = {name: _with_batch(graph, name, samples) for name in samples}
    _take_one_sample(graph, samples)
    with straight_through_rules(straight_through):
        graph, gradients = add_gradients(settle_shapes(graph), of, wrt)
    _loop(graph, declared, of, dict(zip(wrt, gradients, strict=True)))
    CleanupPass()(graph)
    return finished(graph, model)


def _batched_inputs(graph: ir.Graph, names: Sequence[str] | None) -> list[str]:
    """Returns the names of the batched inputs, i.e. the inputs whose axis 0 is the batch axis.

    Args:
        graph: the model's graph.
        names: the argument `batched` of :func:`per_sample_gradients`; duplicates are removed. None selects all inputs.

    Raises:
        DifferentiationError: there is no batched input, a name is unknown, or a batched input is a scalar, has an
            unknown rank, or has a fixed batch size other than 1.
    """
    inputs = {str(value.name): value for value in graph.inputs}
    if names is not None:
        check_names(names, "batched")
    chosen = list(inputs) if names is None else list(dict.fromkeys(names))
    if not chosen:
        raise DifferentiationError(
            "differentiating per sample: no input has a batch axis; name the inputs that have one in batched"
        )
    for name in chosen:
        if name not in inputs:
            raise DifferentiationError(
                f"differentiating per sample: batched names {name!r}, which is not an input; the inputs "
                f"are {', '.join(inputs)}"
            )
        dims = static_dims(inputs[name])
        if not dims:
            raise DifferentiationError(
                f"differentiating per sample: input {name!r} has shape {inputs[name].shape}, without a batch axis; "
                "leave it out of batched"
            )
        # A fixed batch size is also hard-coded elsewhere in the model, e.g. in the target shape of a Reshape.
        if dims[0] not in (None, 1):
            raise DifferentiationError(
                f"differentiating per sample: input {name!r} has shape {inputs[name].shape}, i.e. a fixed batch size; "
                "make it dynamic with onnxtrain.make_batch_dynamic"
            )
    return chosen


def _check_ends(graph: ir.Graph, of: str, wrt: Sequence[str]) -> None:
    """Raises DifferentiationError if `of` is an input or initializer, or if one of `wrt` is computed by the model."""
    values = values_by_name(graph)
    if values[of].producer() is None:
        raise DifferentiationError(
            f"differentiating per sample: of names {of!r}, which the model does not compute; name a loss"
        )
    # An intermediate value would move into the Loop's body, and its gradient has no shape outside of the body.
    for name in wrt:
        if values[name].producer() is not None:
            raise DifferentiationError(
                f"differentiating per sample: wrt names {name!r}, which the model computes; name parameters or inputs"
            )


def _with_batch(model: ir.Model, name: str, samples: Collection[str]) -> ir.Shape:
    """Returns the shape to declare for a batched input, whose batch size is symbolic, e.g. [batch, 784].

    Args:
        model: the model.
        name: name of the input.
        samples: names of all batched inputs. They get the same symbol for the batch size.
    """
    # All batched inputs share one symbol: the first that the model uses, or "batch" if its batch size is 1.
    sizes = {value.name: _sizes(value) for value in model.graph.inputs if value.name in samples}
    symbols = [symbol for dims in sizes.values() if (symbol := _symbol(dims[0]))]
    return ir.Shape([symbols[0] if symbols else "batch", *sizes[name][1:]])


def _take_one_sample(model: ir.Model, samples: Collection[str]) -> None:
    """Sets the batch size of the inputs in `samples` to 1, and clears symbolic sizes that may derive from it.

    Raises:
        DifferentiationError: the batch symbol is also the size of another axis or input.
    """
    inputs = list(model.graph.inputs)
    of_batch = {_symbol(_sizes(value)[0]) for value in inputs if value.name in samples} - {None}
    other = {_symbol(dim) for value in inputs for dim in _sizes(value)[value.name in samples :]} - {None}
    # Such a symbol cannot be set to 1.
    if mixed := sorted(map(str, of_batch & other)):
        raise DifferentiationError(
            f"differentiating per sample: the batch size {', '.join(mixed)} is also the size of another axis or "
            "input; give that size another name, or name all inputs with a batch axis in batched"
        )
    # Intermediate values too: a declared size such as [2 * batch] would contradict the newly inferred shapes.
    for graph in model.graphs():
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
            if value.shape is not None:
                dims = [_for_one(dim, of_batch, other) for dim in value.shape]
                value.shape = ir.Shape(dims)
    for value in inputs:
        if value.name in samples:
            value.shape = ir.Shape([1, *_sizes(value)[1:]])


def _sizes(value: ir.Value) -> list[int | ir.SymbolicDim]:
    """Returns the dimensions of a value; an empty list if its rank is unknown."""
    return list(value.shape or ())


def _symbol(dim: int | ir.SymbolicDim) -> str | None:
    """Returns the name of a symbolic dimension; None for a number or an unnamed dimension."""
    return None if isinstance(dim, int) else dim.value


def _for_one(
    dim: int | ir.SymbolicDim, of_batch: Collection[str | None], other: Collection[str | None]
) -> int | str | None:
    """Returns the size of a dimension for a batch of one sample.

    Args:
        dim: the dimension.
        of_batch: symbols that stand for the batch size.
        other: all other symbols in the shapes of inputs.

    Returns:
        1 if the dimension is in `of_batch`, and the dimension itself if it is an integer or in `other`. None for any
        other symbol, because it may derive from the batch size.
    """
    symbol = _symbol(dim)
    if isinstance(dim, int):
        return dim
    return 1 if symbol in of_batch and symbol is not None else symbol if symbol in other else None


def _loop(model: ir.Model, declared: dict[str, ir.Shape], of: str, gradients: dict[str, ir.Value]) -> None:
    """Wraps the model for one sample in a Loop over the samples, which stacks the values of `of` and its gradients.

    The stacked values become the model's outputs, e.g. loss [batch] and w_grad [batch, *shape of w].

    Args:
        model: the model for one sample, with its gradients.
        declared: shapes to declare for the batched inputs, by name, e.g. {"x": [batch, 784]}.
        of: name of the differentiated value, e.g. "loss".
        gradients: gradients computed by `model`, by the name of the parameter or input, e.g. {"w": w_grad}.
    """
    graph = model.graph
    op = Emitter(graph, functions=model.functions)
    values = values_by_name(graph)
    results = [values[of], *gradients.values()]
    graph.outputs.clear()
    body = op.subgraph({"sample": ir.DataType.INT64, "go_on": ir.DataType.BOOL})
    number, go_on = body.graph.inputs
    number.shape = go_on.shape = ir.Shape(())
    # With an index of shape [1], Gather keeps the batch axis, of size 1, which the model expects.
    index = body.Unsqueeze(number, op.const([0]))
    samples = {name: body.Gather(values[name], index, axis=0) for name in declared}
    for name, sample in samples.items():
        sample.shape = values[name].shape
        results = [sample if value is values[name] else value for value in results]
        for user, place in values[name].uses():
            # The Gather itself keeps reading the whole batch.
            if user is not sample.producer():
                user.replace_input_with(place, sample)
        values[name].shape = declared[name]
    # Nodes that depend only on parameters stay outside of the Loop and run once.
    inside = _inside(graph, samples.values(), results)
    graph.remove(inside)
    body.graph.extend(inside)
    body.graph.outputs.append(body.Identity(go_on))
    batch = next(iter(declared.values()))[0]
    body_results: list[tuple[ir.Value, ir.Value, list[int | ir.SymbolicDim]]] = [
        (body.Reshape(results[0], op.const([])), values[of], [])
    ]
    for name, gradient in zip(gradients, results[1:], strict=True):
        leaf = values[name]
        axes = _sizes(leaf)[name in declared :]
        # The Loop stacks results along a new axis 0, which replaces the batch axis of size 1. Identity, because two
        # names may share one gradient, and a Loop body must not return the same value twice.
        result = body.Squeeze(gradient, op.const([0])) if name in declared else body.Identity(gradient)
        body_results.append((result, leaf, axes))
    for result, like, axes in body_results:
        result.type, result.shape = like.type, ir.Shape(axes)
        body.graph.outputs.append(result)
    first, *others = (values[name] for name in declared)
    for other in others:
        _check_number(op, first, other, samples[str(other.name)])
    trips = op.Squeeze(op.Shape(first, start=0, end=1))
    attribute = ir.AttrGraph("body", body.graph)
    stacked = op.emit("Loop", trips, op.const(True), body=attribute, _outputs=len(body_results))
    # The stacked output takes over the name that the value for one sample had.
    values[of].name = op.unique_name(f"{of}_of_sample")
    names = [of, *(op.unique_name(f"{name}_grad") for name in gradients)]
    for output, name, (_, like, axes) in zip(stacked, names, body_results, strict=True):
        output.name, output.type, output.shape = name, like.type, ir.Shape([batch, *axes])
        graph.outputs.append(output)


def _check_number(op: Emitter, first: ir.Value, other: ir.Value, sample: ir.Value) -> None:
    """Makes the model fail at run time if two batched inputs have different numbers of samples.

    Adds a Reshape of `other` to the batch size of `first`. The Gather in the Loop reads the Reshape's output.

    Args:
        op: emitter of the graph that contains the Loop.
        first: a batched input.
        other: another batched input.
        sample: the current sample of `other`, i.e. the output of a Gather in the Loop.
    """
    # Without it, surplus samples of an input would be silently ignored.
    shape = op.Concat(op.Shape(first, start=0, end=1), op.Shape(other, start=1), axis=0)
    checked = op.Reshape(other, shape, allowzero=1)
    checked.shape = other.shape
    gather = sample.producer()
    assert gather is not None
    gather.replace_input_with(0, checked)


def _inside(graph: ir.Graph, samples: Iterable[ir.Value], results: Iterable[ir.Value]) -> list[ir.Node]:
    """Returns the nodes that must run once per sample, in the body of the Loop.

    They contribute to `results` and depend on `samples` or on random numbers. All other nodes stay outside of the Loop.

    Args:
        graph: the graph of the model for one sample.
        samples: the current sample of each batched input.
        results: the values that the body of the Loop returns.
    """
    dependent, needed = set(samples), set(results)
    for node in graph:
        # Outside of the Loop, all samples would share one Dropout mask.
        draws = node.domain == "" and node.op_type in RANDOM_OPS
        if draws or not dependent.isdisjoint(reads(node)):
            dependent.update(node.outputs)
    for node in reversed(graph):
        if not needed.isdisjoint(node.outputs):
            needed.update(reads(node))
    return [
        node
        for node in graph
        if not dependent.isdisjoint(node.outputs) and not needed.isdisjoint(node.outputs)
    ]
