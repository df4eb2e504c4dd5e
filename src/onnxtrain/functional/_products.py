"""Appends products of Jacobians and Hessians with vectors to a model, by one or two walks of the gradient driver.

vjp: one walk gives uᵀJ.    jvp: a second walk, over uᵀJ, gives J·t.    Hessian: a second walk over the gradient.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import overload

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
    as_given,
    canonicalize,
    inline_functions,
    lift_constants,
    load_model,
    mark_gradients,
    settle_shapes,
    suit_runtime,
)


# Overloads: a caller gets back the kind of model that it passed, and a type checker knows which.
@overload
def vjp(
    model: ir.Model, of: Sequence[str], wrt: Sequence[str], *, straight_through: bool = False
) -> ir.Model: ...
@overload
def vjp(
    model: str | os.PathLike[str] | onnx.ModelProto,
    of: Sequence[str],
    wrt: Sequence[str],
    *,
    straight_through: bool = False,
) -> onnx.ModelProto: ...


@without_collection()
def vjp(
    model: ModelSource, of: Sequence[str], wrt: Sequence[str], *, straight_through: bool = False
) -> onnx.ModelProto | ir.Model:
    """Returns the model with vector-Jacobian products: for cotangents u of `of`, uᵀ·∂(of)/∂(wrt).

    As `torch.func.vjp` and `jax.vjp`, but the result is an ordinary ONNX model and not a function.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not changed.
        of: names of the values to differentiate, floating point, of any shape.
        wrt: names of parameters (initializers), inputs or intermediate values, floating point.
        straight_through: as for :func:`onnxtrain.differentiate`.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its inputs are those of `model`, then
        `<name>_cotangent` for every name in `of`, of its shape and dtype. Its outputs are those of `model`, then the
        values in `of` that are not among them, then `<name>_grad` for every name in `wrt`, of its shape and dtype: the
        sum over all of `of`. Names that are taken get a number.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown, not floating point, or named twice.
        NoGradientRule: an op in between has no gradient rule.
        TypeError: `of` or `wrt` is one string, or no collection.

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
    # The rules must be registered when `_append_products` runs, which inlines the bodies of ops without a rule.
    with straight_through_rules(straight_through):
        graph = prepared(model, of, wrt)
        seeds = dict(zip(of, _add_inputs(graph, of, "_cotangent"), strict=True))
        graph, products = _append_products(graph, seeds, wrt)
    _keep_outputs(graph, of)
    append_outputs(graph, wrt, products)
    return finished(graph, model)


@overload
def jvp(
    model: ir.Model, of: Sequence[str], wrt: Sequence[str], *, straight_through: bool = False
) -> ir.Model: ...
@overload
def jvp(
    model: str | os.PathLike[str] | onnx.ModelProto,
    of: Sequence[str],
    wrt: Sequence[str],
    *,
    straight_through: bool = False,
) -> onnx.ModelProto: ...


@without_collection()
def jvp(
    model: ModelSource, of: Sequence[str], wrt: Sequence[str], *, straight_through: bool = False
) -> onnx.ModelProto | ir.Model:
    """Returns the model with Jacobian-vector products: for tangents t of `wrt`, ∂(of)/∂(wrt)·t.

    Forward-mode differentiation, as `torch.func.jvp` and `jax.jvp`. It costs one more forward computation, however many
    elements `of` has. The vector-Jacobian product uᵀJ is linear in u, so its own vector-Jacobian product with respect
    to u is J·t. Both walks use the rules of reverse mode; nodes that only uᵀJ needs are removed.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not changed.
        of: names of the values to differentiate, floating point, of any shape.
        wrt: names of parameters (initializers), inputs or intermediate values, floating point.
        straight_through: as for :func:`onnxtrain.differentiate`.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its inputs are those of `model`, then
        `<name>_tangent` for every name in `wrt`, of its shape and dtype. Its outputs are those of `model`, then the
        values in `of` that are not among them, then `<name>_tangent` for every name in `of`, of its shape and dtype.
        Names that are taken get a number.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown, not floating point, or named twice.
        NoGradientRule: an op in between has no gradient rule, or its gradient has none.
        TypeError: `of` or `wrt` is one string, or no collection.

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
        # Inputs for now: from constant zeros, constant folding would make zeros of all that is computed from them.
        cotangents = _add_inputs(graph, of, "_cotangent")
        graph, products = _append_products(graph, dict(zip(of, cotangents, strict=True)), wrt)
        graph, names = _differentiable_again(graph, products)
        graph, derivatives = _append_products(graph, dict(zip(names, tangents, strict=True)), cotangents)
    _drop_cotangents(graph, of, cotangents)
    _keep_outputs(graph, of)
    append_outputs(graph, of, derivatives, "_tangent")
    # Removes the nodes of uᵀJ, which J·t does not need: that costs one more forward computation and no backward one.
    CleanupPass()(graph)
    # The zeros in place of cotangents were appended after the nodes that read them.
    common.TopologicalSortPass()(graph)
    return finished(graph, model)


@overload
def hessian_vector_product(
    model: ir.Model, of: str, wrt: Sequence[str], *, straight_through: bool = False
) -> ir.Model: ...
@overload
def hessian_vector_product(
    model: str | os.PathLike[str] | onnx.ModelProto,
    of: str,
    wrt: Sequence[str],
    *,
    straight_through: bool = False,
) -> onnx.ModelProto: ...


@without_collection()
def hessian_vector_product(
    model: ModelSource, of: str, wrt: Sequence[str], *, straight_through: bool = False
) -> onnx.ModelProto | ir.Model:
    """Returns the model with products of the Hessian of a scalar: for vectors v of `wrt`, ∂²(of)/∂(wrt)²·v.

    Computed as the gradient of the sum of gradient · v (Pearlmutter, Fast Exact Multiplication by the Hessian, 1994),
    at about twice the cost of the gradient. All names in `wrt` together are one variable: the products contain the
    mixed second derivatives.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not changed.
        of: name of a floating-point scalar.
        wrt: names of parameters (initializers), inputs or intermediate values, floating point.
        straight_through: as for :func:`onnxtrain.differentiate`.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its inputs are those of `model`, then
        `<name>_vector` for every name in `wrt`, of its shape and dtype. Its outputs are those of `model`, then `of` if
        it is not among them, then `<name>_grad` for every name in `wrt`, and then `<name>_hvp` for every name in
        `wrt`, of its shape and dtype. Names that are taken get a number.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown, not floating point, or named twice, or `of` is no scalar.
        NoGradientRule: an op in between has no gradient rule, or its gradient has none.
        TypeError: `wrt` is one string, or no collection.

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
    _keep_outputs(graph, [of])
    values = values_by_name(graph.graph)
    append_outputs(graph, wrt, [values[name] for name in names])
    append_outputs(graph, wrt, products, "_hvp")
    CleanupPass()(graph)
    return finished(graph, model)


def prepared(model: ModelSource, of: Sequence[str], wrt: Sequence[str]) -> ir.Model:
    """Copies a model into canonical form and checks that `of` and `wrt` name floating-point values of it."""
    # Before the model is loaded, which takes long for a large one.
    check_names(of, "of")
    check_names(wrt, "wrt")
    # The model may hold gradients of this package itself, as for third derivatives. Their masks must select before they
    # are differentiated, and their functions be inlined: they have bodies but no rules.
    graph = canonicalize(with_exact_masks(load_model(model)), wrt)
    typed_values(graph.graph, of, "of")
    typed_values(graph.graph, wrt, "wrt")
    return graph


def finished(graph: ir.Model, given: ModelSource) -> onnx.ModelProto | ir.Model:
    """Rewrites a model with derivatives for stock runtimes; returns it as a proto or IR model, as `given` was."""
    # Loaded again, this model must keep its parameters as they are: its gradients are those of the merged ones.
    mark_gradients(graph)
    graph = suit_runtime(graph)
    FloatDequantizedPass()(graph)
    LongSumsPass()(graph)
    lift_constants(graph)
    return as_given(graph, given)


def _add_inputs(model: ir.Model, names: Sequence[str], suffix: str) -> list[str]:
    """Adds one graph input per named value, of its shape and dtype; returns the names of the inputs."""
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
    """Appends the vector-Jacobian product of some values to a copy of a model.

    Args:
        model: the model, in canonical form.
        seeds: per value to differentiate, the input that is its cotangent, e.g. {"y": "y_cotangent"}; None for ones.
        wrt: names of the values to differentiate with respect to.

    Returns:
        The copy, and one product per name in `wrt`.
    """
    model = expand_path(model, list(seeds), wrt)
    values, op = values_by_name(model.graph), Emitter(model.graph, functions=model.functions)
    leaves = [values[name] for name in wrt]
    # After expand_path, which removes constants that nothing reads yet.
    cotangents = {
        values[name]: op.ones_like(values[name]) if seed is None else values[seed]
        for name, seed in seeds.items()
    }
    products = pull_back(op, cotangents, leaves)
    # As torch.func, which gives zeros where nothing depends on a variable.
    return model, [
        op.zeros_like(leaf) if product is None else product
        for leaf, product in zip(leaves, products, strict=True)
    ]


def _differentiable_again(model: ir.Model, values: Sequence[ir.Value]) -> tuple[ir.Model, list[str]]:
    """Prepares a model with gradients for a second walk: inlines composite ops, which have bodies but no rules.

    Args:
        model: the model after the first walk.
        values: the gradients that the second walk starts from.

    Returns:
        The model, and the names that the values have in it.
    """
    op = Emitter(model.graph, functions=model.functions)
    # The gradients of a and b in a + b are one value, but each needs a cotangent of its own.
    copies = [op.Identity(value) for value in values]
    for copy, value in zip(copies, values, strict=True):
        copy.shape = value.shape
    # Outputs for now, so that the passes below do not remove values that nothing reads yet.
    model.graph.outputs.extend(copies)
    model = inline_functions(with_exact_masks(model))
    # Bodies hold Constant nodes, and rules look for their tensors among the initializers.
    settle_shapes(lift_constants(model))
    outputs = list(model.graph.outputs)
    model.graph.outputs.clear()
    model.graph.outputs.extend(outputs[: -len(copies)])
    return model, [str(value.name) for value in outputs[-len(copies) :]]


def _drop_cotangents(model: ir.Model, of: Sequence[str], cotangents: Sequence[str]) -> None:
    """Removes the cotangent inputs u of uᵀJ: their values do not matter for J·t, the derivative of uᵀJ by u."""
    values, op = values_by_name(model.graph), Emitter(model.graph)
    for name, cotangent in zip(of, cotangents, strict=True):
        model.graph.inputs.remove(values[cotangent])
        # Nodes that compute shapes of gradients may still read a cotangent; zeros have the same shape.
        users = values[cotangent].uses()
        if users:
            values[cotangent].replace_all_uses_with(op.zeros_like(values[name]))


def _keep_outputs(model: ir.Model, of: Sequence[str]) -> None:
    """Appends the differentiated values to the outputs unless they are there."""
    values = values_by_name(model.graph)
    for name in of:
        if values[name] not in model.graph.outputs:
            model.graph.outputs.append(values[name])
