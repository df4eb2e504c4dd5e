"""Appends Jacobian and Hessian products with vectors to a model, with one or two reverse-mode passes.

vjp: one pass gives uᵀJ.    jvp: a second pass, over uᵀJ, gives J·t.    Hessian: a second pass, over the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain._building import without_collection
from onnxtrain.autodiff import (
    append_outputs,
    check_names,
    check_scalar,
    expand_path,
    pull_back,
    straight_through_rules,
    typed_values,
)
from onnxtrain.emitter import Emitter, values_by_name
from onnxtrain.errors import DifferentiationError
from onnxtrain.functions import with_exact_masks
from onnxtrain.passes import (
    CleanupPass,
    FloatDequantizedPass,
    LongSumsPass,
    ModelSource,
    RacingScatterPass,
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

# Overloads, so that type checkers know: the result is of the same kind as the model passed.


@same_kind
@without_collection()
def vjp(
    model: ModelSource, of: Sequence[str], wrt: Sequence[str], *, straight_through: bool = False
) -> onnx.ModelProto | ir.Model:
    """Returns the model with vector-Jacobian products: for cotangents u of `of`, uᵀ·∂(of)/∂(wrt).

    Like `torch.func.vjp` and `jax.vjp`, but the result is an ordinary ONNX model rather than a function.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not modified.
        of: names of the values to differentiate, floating point, of any shape.
        wrt: names of parameters (initializers), inputs or intermediate values, floating point.
        straight_through: as for :func:`onnxtrain.differentiate`.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its inputs are those of `model`, then
        `<name>_cotangent` for every name in `of`, with the same shape and dtype. Its outputs are those of `model`, then
        the values in `of` that are not outputs already, then `<name>_grad` for every name in `wrt`, with the same shape
        and dtype, summed over all values in `of`. If a name is taken, a number is appended to it.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown, not floating point, or listed twice.
        NoGradientRule: an op between `wrt` and `of` has no gradient rule.
        TypeError: `of` or `wrt` is a string, or not a collection.

    Example:
        >>> import onnx, onnxruntime, numpy as np
        >>> import onnxtrain
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n] x) => (float[n] y) { y = Mul(x, x) }''')
        >>> session = onnxruntime.InferenceSession(onnxtrain.vjp(model, ["y"], ["x"]).SerializeToString())
        >>> x, u = np.array([1.0, 2.0], np.float32), np.array([3.0, 5.0], np.float32)
        >>> session.run(["x_grad"], {"x": x, "y_cotangent": u})[0].tolist()
        [6.0, 20.0]
    """
    # `_append_products` inlines the bodies of ops without a rule, so the rules must be registered before it runs.
    with straight_through_rules(straight_through):
        graph = prepared(model, of, wrt)
        seeds = dict(zip(of, _add_inputs(graph, of, "_cotangent"), strict=True))
        graph, products = _append_products(graph, seeds, wrt)
    _append_outputs(graph, of)
    append_outputs(graph, wrt, products)
    return finished(graph, model)


@same_kind
@without_collection()
def jvp(
    model: ModelSource, of: Sequence[str], wrt: Sequence[str], *, straight_through: bool = False
) -> onnx.ModelProto | ir.Model:
    """Returns the model with Jacobian-vector products: for tangents t of `wrt`, ∂(of)/∂(wrt)·t.

    Forward-mode differentiation, like `torch.func.jvp` and `jax.jvp`. It costs about one additional forward pass,
    regardless of the number of elements of `of`. The vector-Jacobian product uᵀJ is linear in u, so its own
    vector-Jacobian product with respect to u is J·t. Both passes use the reverse-mode rules; nodes that only uᵀJ needs
    are removed.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not modified.
        of: names of the values to differentiate, floating point, of any shape.
        wrt: names of parameters (initializers), inputs or intermediate values, floating point.
        straight_through: as for :func:`onnxtrain.differentiate`.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its inputs are those of `model`, then
        `<name>_tangent` for every name in `wrt`, with the same shape and dtype. Its outputs are those of `model`, then
        the values in `of` that are not outputs already, then `<name>_tangent` for every name in `of`, with the same
        shape and dtype. If a name is taken, a number is appended to it.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown, not floating point, or listed twice.
        NoGradientRule: an op between `wrt` and `of`, or an op in the gradient graph, has no gradient rule.
        TypeError: `of` or `wrt` is a string, or not a collection.

    Example:
        >>> import onnx, onnxruntime, numpy as np
        >>> import onnxtrain
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n] x) => (float[n] y) { y = Mul(x, x) }''')
        >>> session = onnxruntime.InferenceSession(onnxtrain.jvp(model, ["y"], ["x"]).SerializeToString())
        >>> x, t = np.array([1.0, 2.0], np.float32), np.array([3.0, 5.0], np.float32)
        >>> session.run(["y_tangent"], {"x": x, "x_tangent": t})[0].tolist()
        [6.0, 20.0]
    """
    with straight_through_rules(straight_through):
        graph = prepared(model, of, wrt)
        tangents = _add_inputs(graph, wrt, "_tangent")
        # Temporary inputs rather than constant zeros, which constant folding would propagate.
        cotangents = _add_inputs(graph, of, "_cotangent")
        graph, products = _append_products(graph, dict(zip(of, cotangents, strict=True)), wrt)
        graph, names = _differentiable_again(graph, products)
        graph, derivatives = _append_products(graph, dict(zip(names, tangents, strict=True)), cotangents)
    _drop_cotangents(graph, of, cotangents)
    _append_outputs(graph, of)
    append_outputs(graph, of, derivatives, "_tangent")
    # Removes the nodes of uᵀJ that J·t does not need: this makes the cost one forward pass, without a backward pass.
    CleanupPass()(graph)
    # The zeros that replace the cotangents were appended after the nodes that read them.
    common.TopologicalSortPass()(graph)
    return finished(graph, model)


@same_kind
@without_collection()
def hessian_vector_product(
    model: ModelSource, of: str, wrt: Sequence[str], *, straight_through: bool = False
) -> onnx.ModelProto | ir.Model:
    """Returns the model with Hessian-vector products of a scalar: for vectors v of `wrt`, ∂²(of)/∂(wrt)²·v.

    Computed as the gradient of sum(gradient · v) (Pearlmutter, Fast Exact Multiplication by the Hessian, 1994), at
    about twice the cost of the gradient. All names in `wrt` together form one variable: the products include mixed
    second derivatives.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not modified.
        of: name of a floating-point scalar.
        wrt: names of parameters (initializers), inputs or intermediate values, floating point.
        straight_through: as for :func:`onnxtrain.differentiate`.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its inputs are those of `model`, then `<name>_vector`
        for every name in `wrt`, with the same shape and dtype. Its outputs are those of `model`, then `of` if it is not
        an output already, then `<name>_grad` for every name in `wrt`, and then `<name>_hvp` for every name in `wrt`,
        with the same shape and dtype. If a name is taken, a number is appended to it.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown, not floating point, or listed twice, or `of` is not a scalar.
        NoGradientRule: an op between `wrt` and `of`, or an op in the gradient graph, has no gradient rule.
        TypeError: `wrt` is a string, or not a collection.

    Example:
        >>> import onnx, onnxruntime, numpy as np
        >>> import onnxtrain
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n] x) => (float y) { s = Mul(x, x)  c = Mul(s, x)  y = ReduceSum<keepdims=0>(c) }''')
        >>> step = onnxtrain.hessian_vector_product(model, "y", ["x"])
        >>> session = onnxruntime.InferenceSession(step.SerializeToString())
        >>> x, v = np.array([1.0, 2.0], np.float32), np.array([1.0, 10.0], np.float32)
        >>> session.run(["x_hvp"], {"x": x, "x_vector": v})[0].tolist()
        [6.0, 120.0]
    """
    with straight_through_rules(straight_through):
        graph = prepared(model, [of], wrt)
        check_scalar(values_by_name(graph.graph)[of])
        vectors = _add_inputs(graph, wrt, "_vector")
        graph, gradients = _append_products(graph, {of: None}, wrt)
        graph, names = _differentiable_again(graph, gradients)
        graph, products = _append_products(graph, dict(zip(names, vectors, strict=True)), wrt)
    _append_outputs(graph, [of])
    values = values_by_name(graph.graph)
    append_outputs(graph, wrt, [values[name] for name in names])
    append_outputs(graph, wrt, products, "_hvp")
    CleanupPass()(graph)
    return finished(graph, model)


def prepared(model: ModelSource, of: Sequence[str], wrt: Sequence[str]) -> ir.Model:
    """Returns a canonical copy of a model, after checking that `of` and `wrt` name floating-point values in it."""
    # Checked first, because loading a large model takes long.
    check_names(of, "of")
    check_names(wrt, "wrt")
    # The model may contain gradients made by this package, e.g. for third derivatives. Their masks must select instead
    # of multiply before they are differentiated, and their composite ops must be inlined: these have bodies but no
    # rules.
    graph = canonicalize(with_exact_masks(load_model(model)), wrt)
    typed_values(graph.graph, of, "of")
    typed_values(graph.graph, wrt, "wrt")
    return graph


def finished(graph: ir.Model, given: ModelSource) -> onnx.ModelProto | ir.Model:
    """Rewrites a model with derivatives so that stock runtimes can run it.

    Args:
        graph: the model with derivatives.
        given: the model that the user passed.

    Returns:
        An `onnx_ir.Model` if `given` is one, else a `ModelProto`.
    """
    # The mark keeps parameters unmerged when this model is loaded again: its gradients belong to the parameters as they
    # are.
    mark_gradients(graph)
    graph = apply_workarounds(graph)
    FloatDequantizedPass()(graph)
    LongSumsPass()(graph)
    RacingScatterPass()(graph)
    lift_constants(graph)
    return as_given(graph, given)


def _add_inputs(model: ir.Model, names: Sequence[str], suffix: str) -> list[str]:
    """Appends an input `<name><suffix>` for each named value, with its shape and dtype; returns the inputs' names."""
    values, op = values_by_name(model.graph), Emitter(model.graph)
    added = []
    for name in names:
        # An ONNX input must declare its dtype.
        if values[name].type is None:
            raise DifferentiationError(
                f"differentiating: the dtype of {name!r} is not known; declare it in the model's value_info"
            )
        added.append(op.unique_name(name + suffix))
        model.graph.inputs.append(ir.Value(name=added[-1], shape=values[name].shape, type=values[name].type))
    return added


def _append_products(
    model: ir.Model, seeds: Mapping[str, str | None], wrt: Sequence[str]
) -> tuple[ir.Model, list[ir.Value]]:
    """Appends a vector-Jacobian product to a copy of a model.

    Args:
        model: canonical model.
        seeds: for each value to differentiate, the name of the input that is its cotangent, e.g. {"y": "y_cotangent"},
            or None for a cotangent of ones.
        wrt: names of the values to differentiate with respect to.

    Returns:
        The copy, and one product per name in `wrt`: zeros if the value does not influence the values in `seeds`.
    """
    model = expand_path(model, list(seeds), wrt)
    values, op = values_by_name(model.graph), Emitter(model.graph, functions=model.functions)
    leaves = [values[name] for name in wrt]
    # Created after expand_path, which would remove constants that nothing reads yet.
    cotangents = {
        values[name]: op.ones_like(values[name]) if seed is None else values[seed]
        for name, seed in seeds.items()
    }
    products = pull_back(op, cotangents, leaves)
    # Zeros for independent variables, as in torch.func.
    return model, [
        op.zeros_like(leaf) if product is None else product
        for leaf, product in zip(leaves, products, strict=True)
    ]


def _differentiable_again(model: ir.Model, values: Sequence[ir.Value]) -> tuple[ir.Model, list[str]]:
    """Prepares a model with gradients for a second differentiation: inlines composite ops, which lack gradient rules.

    Args:
        model: the model with gradients.
        values: the gradients to differentiate.

    Returns:
        The model, and the names of copies of the gradients in it, one per gradient. Each copy is a separate value even
        if two gradients are the same value.
    """
    op = Emitter(model.graph, functions=model.functions)
    # In a + b, the gradients of a and b are the same value, but each needs its own cotangent.
    copies = [op.Identity(value) for value in values]
    for copy, value in zip(copies, values, strict=True):
        copy.shape = value.shape
    # Temporary outputs, so that the passes below do not remove values that nothing reads yet.
    model.graph.outputs.extend(copies)
    model = inline_functions(with_exact_masks(model))
    # Function bodies contain Constant nodes, but rules look for constants among the initializers.
    settle_shapes(lift_constants(model))
    outputs = list(model.graph.outputs)
    model.graph.outputs.clear()
    model.graph.outputs.extend(outputs[: -len(copies)])
    return model, [str(value.name) for value in outputs[-len(copies) :]]


def _drop_cotangents(model: ir.Model, of: Sequence[str], cotangents: Sequence[str]) -> None:
    """Removes the cotangent inputs u from a model that computes J·t as the derivative of uᵀJ·t with respect to u.

    J·t does not depend on u.

    Args:
        model: the model.
        of: names of the differentiated values.
        cotangents: names of their cotangents u, in the same order.
    """
    values, op = values_by_name(model.graph), Emitter(model.graph)
    for name, cotangent in zip(of, cotangents, strict=True):
        model.graph.inputs.remove(values[cotangent])
        # Nodes that compute shapes of gradients may still read a cotangent, whose shape zeros can provide.
        users = values[cotangent].uses()
        if users:
            values[cotangent].replace_all_uses_with(op.zeros_like(values[name]))


def _append_outputs(model: ir.Model, of: Sequence[str]) -> None:
    """Adds the values named in `of` to the outputs of the graph, unless they are outputs already."""
    values = values_by_name(model.graph)
    for name in of:
        if values[name] not in model.graph.outputs:
            model.graph.outputs.append(values[name])
