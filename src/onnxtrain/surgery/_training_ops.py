"""Replaces the ops of domain `ai.onnx.preview.training` with standard ops, which every runtime supports."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain._building import without_collection
from onnxtrain.autodiff import differentiable_values, expand_path, find_values, pull_back, reads
from onnxtrain.emitter import Emitter, schema_of, values_by_name
from onnxtrain.errors import ModelError
from onnxtrain.functions import with_exact_masks
from onnxtrain.passes import (
    CleanupPass,
    ModelSource,
    apply_workarounds,
    as_given,
    canonicalize,
    inline_functions,
    lift_constants,
    load_model,
    mark_gradients,
    same_kind,
    settle_shapes,
)

_DOMAIN = "ai.onnx.preview.training"


@same_kind
@without_collection()
def lower_training_ops(model: ModelSource) -> onnx.ModelProto | ir.Model:
    """Returns a copy of the model in which Gradient, Adam, Adagrad and Momentum are replaced with standard ops.

    These ops are part of the ONNX standard, domain `ai.onnx.preview.training`, but no stock runtime supports them. A
    Gradient is replaced with the nodes that :func:`onnxtrain.differentiate` emits for the derivatives of `y` with
    respect to `xs`. If the inputs of the Gradient differ from the tensors named in `xs` and `zs`, the derivatives are
    evaluated at the inputs: the nodes that compute `y` from the named tensors are copied and read the inputs instead. A
    Gradient may differentiate another Gradient. Adam, Adagrad and Momentum are replaced with the formulas of the
    standard. The rest of the model, e.g. Dropout and BatchNormalization in training mode, is adapted to ONNX Runtime in
    the same way as by `differentiate`.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; not modified.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`, of opset 21 or newer. Inputs and outputs have the
        same names, shapes and dtypes as in `model`.

    Raises:
        ModelError: the model cannot be loaded or converted; a Gradient is in a subgraph, or depends on itself; an op
            has the wrong number of inputs.
        DifferentiationError: a Gradient names a tensor that does not exist, or `y` or one of `xs` is an integer tensor.
        NoGradientRule: an op between `xs` and `y` of a Gradient has no gradient rule.

    Example:
        >>> import onnx, onnxruntime, numpy as np
        >>> import onnxtrain
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        ...   step (float rate, int64 t, float[n] w, float[n] v) => (float[n] w_new, float[n] v_new) {
        ...       s = Mul(w, w)  loss = ReduceSum<keepdims=0>(s)
        ...       g = ai.onnx.preview.training.Gradient<xs=["w"], y="loss">(w)
        ...       w_new, v_new = ai.onnx.preview.training.Momentum<
        ...           alpha=0.5, beta=1.0, mode="standard", norm_coefficient=0.0>(rate, t, w, g, v) }''')
        >>> session = onnxruntime.InferenceSession(onnxtrain.lower_training_ops(model).SerializeToString())
        >>> w, v = np.array([1.0, 2.0], np.float32), np.zeros(2, np.float32)
        >>> feeds = {"rate": np.array(0.25, np.float32), "t": np.array(0), "w": w, "v": v}
        >>> [array.tolist() for array in session.run(None, feeds)]
        [[0.5, 1.0], [2.0, 4.0]]
    """
    result = canonicalize(load_model(model))
    # Optimizers first: a Gradient may differentiate through their formulas, as in meta-learning, but not through the
    # ops.
    _lower_optimizers(result)
    result = _lower_gradients(result)
    CleanupPass()(result)
    mark_gradients(result)
    result = apply_workarounds(result)
    return as_given(result, model)


def _lower_optimizers(model: ir.Model) -> None:
    """Replaces Adam, Adagrad and Momentum nodes with standard ops, in the main graph and in subgraphs."""
    main = Emitter(model.graph, functions=model.functions)
    modified = False
    for graph in tuple(model.graphs()):
        op = main if graph is model.graph else main.within(graph)
        for node in tuple(graph):
            lower = _OPTIMIZERS.get(node.op_type) if node.domain == _DOMAIN else None
            if lower is None:
                continue
            modified = True
            op.scope = f"{node.name or node.op_type}/"
            # Inputs: learning rate and update count, then all X, all G, all V, ...
            count, rest = divmod(len(node.inputs) - 2, lower[1])
            if rest or count < 1 or None in node.inputs:
                raise ModelError(
                    f"lowering {node.op_type} ({node.name or 'without a name'}): it has {len(node.inputs)} inputs; it "
                    f"takes the learning rate, the update count, and {lower[1]} for each tensor"
                )
            rate, step, *tensors = (value for value in node.inputs if value is not None)
            groups = [tensors[k::count] for k in range(count)]
            results = [lower[0](op, node, rate, step, *group) for group in groups]
            _replace(op, node, [value for part in zip(*results, strict=True) for value in part])
    if modified:
        # The emitter appended nodes to the end of each graph, after the readers of the results.
        common.TopologicalSortPass()(model)
        settle_shapes(lift_constants(model))


def _replace(op: Emitter, node: ir.Node, results: Sequence[ir.Value | None]) -> None:
    """Replaces the outputs of a node with `results`, which take over the outputs' names, and removes the node.

    There is one result per output; it is None for an unused output.
    """
    # Renames copies, because two results may be the same value, and an input of the model keeps its own name.
    graph = node.graph
    assert graph is not None
    for output, value in zip(node.outputs, results, strict=False):
        if value is None:
            continue
        result = op.Identity(value)
        result.type, result.shape = output.type or value.type, output.shape or value.shape
        result.name, output.name = output.name, op.unique_name(f"{output.name}_before")
        output.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _number(node: ir.Node, name: str) -> float:
    """Returns a float attribute of a training op, or the default of its schema."""
    default = schema_of(node.op_type, 1, _DOMAIN).attributes[name].default_value.f
    return float(node.attributes.get_float(name, default))


def _scalar(op: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    """Reshapes a value of shape [] or [1] to a scalar and casts it to the dtype of `like`."""
    result = op.Reshape(value, op.const([]))
    return result if result.dtype == like.dtype else op.Cast(result, to=like.dtype)


def _regularized(op: Emitter, node: ir.Node, x: ir.Value, g: ir.Value) -> ir.Value:
    """Adds the gradient of 0.5 * norm_coefficient * |X|² to g."""
    coefficient = _number(node, "norm_coefficient")
    return op.Add(op.Mul(x, coefficient), g) if coefficient else g


def _adam(
    op: Emitter,
    node: ir.Node,
    rate: ir.Value,
    step: ir.Value,
    x: ir.Value,
    g: ir.Value,
    v: ir.Value,
    h: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Emits the formula of ONNX's Adam-1 for the tensor x with the gradient g; returns the new x, v and h.

    v and h are the running averages of g and g²; `step` is the update count.
    """
    alpha, beta = _number(node, "alpha"), _number(node, "beta")
    r, t = _scalar(op, rate, x), _scalar(op, step, x)
    g = _regularized(op, node, x, g)
    v_new = op.Add(op.Mul(v, alpha), op.Mul(g, 1 - alpha))
    h_new = op.Add(op.Mul(h, beta), op.Mul(op.Mul(g, g), 1 - beta))
    h_sqrt = op.Add(op.Sqrt(h_new), _number(node, "epsilon"))
    of_beta = op.Sqrt(op.Sub(op.const(1.0, like=x), op.Pow(op.const(beta, like=x), t)))
    of_alpha = op.Sub(op.const(1.0, like=x), op.Pow(op.const(alpha, like=x), t))
    later = op.Greater(t, 0.0)
    # The standard corrects the bias from t = 1 on. The inner Where avoids 0/0 at t = 0, whose gradient would be NaN
    # although the outer Where selects the other branch.
    adjusted = op.Where(later, op.Div(op.Mul(r, of_beta), op.Where(later, of_alpha, 1.0)), r)
    x_new = op.Sub(x, op.Div(op.Mul(adjusted, v_new), h_sqrt))
    post = _number(node, "norm_coefficient_post")
    return (op.Mul(x_new, 1 - post) if post else x_new), v_new, h_new


def _adagrad(
    op: Emitter, node: ir.Node, rate: ir.Value, step: ir.Value, x: ir.Value, g: ir.Value, h: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Emits the formula of ONNX's Adagrad-1 for the tensor x with the gradient g; returns the new x and h.

    h is the sum of g² over all steps; `step` is the update count.
    """
    decay = _number(node, "decay_factor")
    r = op.Div(_scalar(op, rate, x), op.Add(op.Mul(_scalar(op, step, x), decay), 1.0))
    g = _regularized(op, node, x, g)
    h_new = op.Add(h, op.Mul(g, g))
    adaptive = op.Add(op.Sqrt(h_new), _number(node, "epsilon"))
    return op.Sub(x, op.Div(op.Mul(r, g), adaptive)), h_new


def _momentum(
    op: Emitter, node: ir.Node, rate: ir.Value, step: ir.Value, x: ir.Value, g: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Emits the formula of ONNX's Momentum-1 for the tensor x with the gradient g; returns the new x and v.

    v is the momentum; `step` is the update count.
    """
    alpha, mode = _number(node, "alpha"), node.attributes.get_string("mode", "")
    if mode not in ("standard", "nesterov"):
        raise ModelError(
            f"lowering Momentum ({node.name}): its mode is {mode!r}; choose standard or nesterov"
        )
    g = _regularized(op, node, x, g)
    first = op.const(1.0, like=x)
    # The standard ignores beta at the first step, t = 0.
    beta = op.Where(op.Greater(_scalar(op, step, x), 0.0), op.const(_number(node, "beta"), like=x), first)
    v_new = op.Add(op.Mul(v, alpha), op.Mul(beta, g))
    direction = v_new if mode == "standard" else op.Add(g, op.Mul(v_new, alpha))
    return op.Sub(x, op.Mul(_scalar(op, rate, x), direction)), v_new


_OPTIMIZERS: dict[str, tuple[Callable[..., tuple[ir.Value, ...]], int]] = {
    "Adam": (_adam, 4),
    "Adagrad": (_adagrad, 3),
    "Momentum": (_momentum, 3),
}
"""Maps each op to the function that emits its formula for one tensor, and its number of inputs per tensor."""


def _lower_gradients(model: ir.Model) -> ir.Model:
    """Replaces each Gradient node with the nodes that compute its outputs; returns the model.

    Nested Gradients are replaced from the inside out: if the `y` of one Gradient depends on the result of another, the
    other is replaced first.

    Raises:
        ModelError: a Gradient is in a subgraph, its `y` depends on its own result, or its inputs do not match `xs` and
            `zs`.
    """
    # A subgraph may refer to tensors of the enclosing graph, whose path to y is not contained in a single graph.
    for graph in model.graphs():
        for node in graph:
            if _is_gradient(node) and graph is not model.graph:
                raise ModelError(
                    f"lowering Gradient ({node.name or 'without a name'}): it is in a branch or body; move it to the "
                    "main graph"
                )
    while waiting := [node for node in model.graph if _is_gradient(node)]:
        ready = [node for node in waiting if not any(map(_is_gradient, _nodes_between(model, node)))]
        if not ready:
            raise ModelError(
                f"lowering Gradient ({waiting[0].name or 'without a name'}): its y, {_target(waiting[0])!r}, depends "
                "on its own result; name a y that is computed before the Gradient"
            )
        model = _lower_gradient(model, ready[0])
    return model


def _is_gradient(node: ir.Node) -> bool:
    """True if a node is a Gradient."""
    return node.domain == _DOMAIN and node.op_type == "Gradient"


def _target(node: ir.Node) -> str:
    """Returns the name of the tensor that a Gradient differentiates."""
    return node.attributes.get_string("y", "")


def _sources(node: ir.Node) -> tuple[list[str], list[str]]:
    """Returns the tensor names in the attributes `xs` and `zs` of a Gradient node."""
    xs, zs = node.attributes.get_strings("xs", ()), node.attributes.get_strings("zs", ())
    return list(xs), list(zs)


def _nodes_between(model: ir.Model, node: ir.Node) -> list[ir.Node]:
    """Returns the nodes on which the `y` of a Gradient depends, up to the tensors in `xs` and `zs`, in graph order."""
    xs, zs = _sources(node)
    (target,) = differentiable_values(model.graph, [_target(node)], "y")
    values = values_by_name(model.graph)
    sources = {values.get(name) for name in (*xs, *zs)}
    needed, between = {target}, []
    for other in reversed(model.graph):
        if any(output in needed and output not in sources for output in other.outputs):
            needed.update(reads(other))
            between.append(other)
    return between[::-1]


def _lower_gradient(model: ir.Model, node: ir.Node) -> ir.Model:
    """Returns the model with one Gradient node replaced with nodes that compute its outputs."""
    xs, zs = _sources(node)
    input_names = [None if value is None else str(value.name) for value in node.inputs]
    if len(input_names) != len(xs) + len(zs) or None in input_names:
        raise ModelError(
            f"lowering Gradient ({node.name or 'without a name'}): it has {len(input_names)} inputs for the "
            f"{len(xs) + len(zs)} tensors that xs and zs name"
        )
    differentiable_values(model.graph, xs, "xs")
    find_values(model.graph, zs, "zs")
    names = _names(node)
    target, leaves = _target(node), xs
    # The standard allows inputs that differ from the tensors named in xs and zs: the derivatives are then evaluated at
    # the inputs.
    if input_names != [*xs, *zs]:
        target, leaves = _copy_between(model, node)
    model = expand_path(model, [target], leaves)
    values, op = values_by_name(model.graph), Emitter(model.graph, functions=model.functions)
    seeds = {values[target]: op.ones_like(values[target])}
    gradients = pull_back(op, seeds, [values[name] for name in leaves])
    results = [
        (op.zeros_like(values[leaf]) if gradient is None else gradient) if name else None
        for leaf, gradient, name in zip(leaves, gradients, names, strict=False)
    ]
    # `expand_path` returned a copy of the model; find the node there by the names of its outputs.
    same_node = next(other for other in model.graph if _is_gradient(other) and _names(other) == names)
    _replace(op, same_node, results)
    common.TopologicalSortPass()(model)
    # Another Gradient may differentiate this one; composite ops have function bodies, but no rules.
    model = inline_functions(with_exact_masks(model))
    return settle_shapes(lift_constants(model))


def _names(node: ir.Node) -> list[str]:
    """Returns the names of a node's outputs, "" for omitted outputs."""
    return [output.name or "" for output in node.outputs]


def _copy_between(model: ir.Model, node: ir.Node) -> tuple[str, list[str]]:
    """Copies the nodes that compute `y` of a Gradient node; the copies read the node's inputs, not `xs` and `zs`.

    The derivatives are evaluated at the inputs of the node, which may differ from the tensors named in `xs` and `zs`.

    Returns:
        The name of `y` in the copy, and the names of the values that replace `xs`.
    """
    op = Emitter(model.graph, functions=model.functions)
    op.scope = f"{node.name or node.op_type}/"
    xs, zs = _sources(node)
    # Differentiate with respect to a copy of each input, so that other uses of the input on the path do not contribute.
    copies = [op.Identity(value) for value in node.inputs]
    originals = values_by_name(model.graph)
    twin = model.clone()
    values = values_by_name(twin.graph)
    nodes = _nodes_between(twin, next(other for other in twin.graph if _names(other) == _names(node)))
    twin.graph.outputs.clear()
    twin.graph.remove(nodes)
    inputs = [ir.Value(name=name, type=values[name].type, shape=values[name].shape) for name in (*xs, *zs)]
    ends = dict(zip((*xs, *zs), inputs, strict=True))
    for name, leaf in ends.items():
        values[name].replace_all_uses_with(leaf)
    for value in (*twin.graph.inputs, *twin.graph.initializers.values()):
        value.replace_all_uses_with(originals[str(value.name)])
    # y may be one of the xs; its gradient is then 1.
    output = ends.get(_target(node), values[_target(node)])
    part = ir.Graph(inputs, [output], nodes=nodes, opset_imports=model.graph.opset_imports, name="part")
    for leaf, value in zip(inputs, copies, strict=True):
        value.type, value.shape = leaf.type, leaf.shape
    (target,) = op.copy_of(part, copies)
    return str(target.name), [str(value.name) for value in copies[: len(xs)]]
