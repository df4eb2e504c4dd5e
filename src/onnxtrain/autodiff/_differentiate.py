"""Adds gradients to a model: `differentiate` returns an ONNX model with gradients as additional outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from onnxtrain._building import without_collection
from onnxtrain.emitter import Emitter, static_dims, values_by_name
from onnxtrain.errors import DifferentiationError
from onnxtrain.functions import with_exact_masks
from onnxtrain.op_bodies import has_own_gradient
from onnxtrain.passes import (
    FloatDequantizedPass,
    FloatProductsPass,
    LongSumsPass,
    ModelSource,
    RacingScatterPass,
    apply_workarounds,
    as_given,
    canonicalize,
    inline_schema_functions,
    lift_constants,
    load_model,
    mark_gradients,
    same_kind,
    simplify_gradients,
    why_untyped,
)

from ._activity import active_values, is_differentiable_dtype
from ._driver import pull_back
from ._registry import reason_not_yet, rule_for
from ._straight_through import straight_through_rules


@same_kind
@without_collection()
def differentiate(
    model: ModelSource,
    of: str,
    wrt: Sequence[str],
    *,
    cotangent: str | None = None,
    straight_through: bool = False,
) -> onnx.ModelProto | ir.Model:
    """Returns the model with an additional output `<name>_grad` per name in `wrt`: the gradient of `of`.

    The result is an ordinary ONNX model: any stock runtime can run it, and it can be differentiated again.

    Args:
        model: path of a `.onnx` file, `ModelProto`, or `onnx_ir.Model`; it is not modified.
        of: name of the value to differentiate: a floating-point scalar, or, with `cotangent`, any floating-point
            tensor.
        wrt: names of parameters (initializers), inputs or intermediate values, floating point.
        cotangent: name for a new input with the shape and dtype of `of`. The gradients are then the vector-Jacobian
            products with that input.
        straight_through: True passes gradients through Round, Ceil, Floor, QuantizeLinear and DynamicQuantizeLinear as
            if they did not round. Values outside the range of the integers get a zero gradient.

    Returns:
        An `onnx_ir.Model` if `model` is one, else a `ModelProto`. Its outputs are those of `model`, then `of` if it is
        not an output already, then the gradients. Each gradient has the shape and dtype of its value, and is zero if
        `of` does not depend on the value. If the name `<name>_grad` is taken, the output is `<name>_grad_1`.

    Raises:
        ModelError: the model cannot be loaded or converted.
        DifferentiationError: a name is unknown or not floating point, `of` is not a scalar and `cotangent` is not
            given, or `cotangent` is the name of an existing value.
        NoGradientRule: an op between `wrt` and `of` has no gradient rule.
        TypeError: `wrt` is a string, or not a collection.

    Example:
        >>> import onnx, onnxruntime, numpy as np
        >>> from onnxtrain.autodiff import differentiate
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   cube (float[n] x) => (float y) { e = Constant<value_float=3.0>()  p = Pow(x, e)
        ...                                    y = ReduceSum<keepdims=0>(p) }''')
        >>> step = differentiate(model, of="y", wrt=["x"])
        >>> session = onnxruntime.InferenceSession(step.SerializeToString())
        >>> session.run(["x_grad"], {"x": np.array([1.0, 2.0], np.float32)})[0].tolist()
        [3.0, 12.0]
    """
    check_names(wrt, "wrt")
    # `wrt` are excluded from constant folding: a folded parameter could not be differentiated.
    with straight_through_rules(straight_through):
        canonical = canonicalize(with_exact_masks(load_model(model)), wrt)
        result, gradients = add_gradients(canonical, of, wrt, cotangent=cotangent)
    outputs = result.graph.outputs
    value = _find(result.graph, of, "of")
    # Users who run a gradient model nearly always want the loss as well.
    if value not in outputs:
        outputs.append(value)
    append_outputs(result, wrt, gradients)
    mark_gradients(result)
    result = apply_workarounds(result)
    simplify_gradients(result)
    FloatDequantizedPass()(result)
    LongSumsPass()(result)
    RacingScatterPass()(result)
    lift_constants(result)
    return as_given(result, model)


def add_gradients(
    model: ir.Model,
    of: str,
    wrt: Sequence[str],
    *,
    cotangent: str | None = None,
    float_products: bool = True,
) -> tuple[ir.Model, list[ir.Value]]:
    """Appends the gradient computation to a copy of a canonical model.

    Args:
        model: canonical model; not modified.
        of: as for :func:`differentiate`.
        wrt: as for :func:`differentiate`.
        cotangent: as for :func:`differentiate`.
        float_products: as for :func:`expand_path`.

    Returns:
        The model, and one gradient per name in `wrt`, with the value's shape and dtype; zeros if `of` does not depend
        on the value. The gradients are not graph outputs yet.

    Raises:
        DifferentiationError: as for :func:`differentiate`.
        NoGradientRule: an op between `wrt` and `of` has no gradient rule.
    """
    # Checked before the model is copied, so that a wrong name is reported at once.
    target = typed_values(model.graph, [of], "of")[0]
    typed_values(model.graph, wrt, "wrt")
    if cotangent is None:
        check_scalar(target)
    model = expand_path(model, [of], wrt, float_products=float_products)
    target, leaves = _find(model.graph, of, "of"), find_values(model.graph, wrt, "wrt")
    op = Emitter(model.graph, functions=model.functions)
    if cotangent is None:
        seed = op.ones_like(target)
    else:
        seed = ir.Value(name=cotangent, shape=target.shape, type=target.type)
        # The caller binds the input by this name, so a number must not be appended to it.
        if op.unique_name(cotangent) != cotangent:
            raise DifferentiationError(
                f"adding the cotangent input {cotangent!r}: the model already has a value of that name; "
                "choose another name"
            )
        model.graph.inputs.append(seed)
    gradients = pull_back(op, {target: seed}, leaves)
    return model, [
        op.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]


def without_gradient(model: ir.Model, of: str, wrt: Sequence[str]) -> list[str]:
    """Returns the names in `wrt` that get no gradient because a user's formula returns None for an input.

    Formulas of other ops return None only for inputs that are not active.

    Args:
        model: canonical model; not modified.
        of: name of a floating-point scalar.
        wrt: names of values on which `of` depends.
    """
    if not any(
        has_own_gradient((node.domain, node.op_type))
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
    ):
        return []
    copy = expand_path(model, [of], wrt)
    op, target = Emitter(copy.graph, functions=copy.functions), _find(copy.graph, of, "of")
    gradients = pull_back(op, {target: op.ones_like(target)}, find_values(copy.graph, wrt, "wrt"))
    return [name for name, gradient in zip(wrt, gradients, strict=True) if gradient is None]


def append_outputs(
    model: ir.Model, wrt: Sequence[str], gradients: Sequence[ir.Value], suffix: str = "_grad"
) -> None:
    """Appends gradients to the outputs of `model`, named `<name><suffix>`, e.g. "x_grad", or "x_grad_1" if taken.

    Args:
        model: the model.
        wrt: names of the values that the gradients belong to.
        gradients: one gradient per name, as returned by :func:`add_gradients`.
        suffix: suffix of the output names.
    """
    writer = Emitter(model.graph)
    primals = find_values(model.graph, wrt, "wrt")
    for name, primal, gradient in zip(wrt, primals, gradients, strict=True):
        # Renaming an output needs a value of its own: x + y has one gradient value for x and y, and a gradient may be a
        # graph input or a constant.
        if gradient.is_graph_output() or gradient.is_graph_input() or gradient.is_initializer():
            gradient = writer.Identity(gradient)
        gradient.name = writer.unique_name(f"{name}{suffix}")
        gradient.shape, gradient.type = primal.shape, primal.type
        model.graph.outputs.append(gradient)


def expand_path(
    model: ir.Model, of: Sequence[str], wrt: Sequence[str], *, float_products: bool = True
) -> ir.Model:
    """Returns a copy of a model in which active ops without a rule are replaced by their function bodies.

    Args:
        model: canonical model.
        of: names of the differentiated values.
        wrt: names of the values that get gradients. Ops between these and `of` are active.
        float_products: True computes matrix products with quantized weights (MatMulNBits) in floating point. False
            keeps the activation rounding that the file specifies; gradients pass straight through this rounding.
    """
    targets, leaves = find_values(model.graph, of, "of"), find_values(model.graph, wrt, "wrt")
    active = {value.name for value in active_values(model.graph, targets, leaves)}
    # All values in branches and loop bodies count as active here: the rule of the control-flow node finds the active
    # ones.
    active |= {value.name for graph in model.graph.subgraphs() for node in graph for value in node.outputs}

    def keep(node: ir.Node) -> bool:
        declared = rule_for(node) is not None or reason_not_yet(node) is not None
        return declared or not any(v.name in active for v in node.outputs)

    expanded = inline_schema_functions(model, keep)
    if float_products:
        FloatProductsPass()(expanded)
    return expanded


def check_names(names: object, role: str) -> None:
    """Checks that an argument is a collection of names.

    Raises:
        TypeError: the argument is a single string, or not a collection.
    """
    # A str is a collection too: of single letters.
    if isinstance(names, str):
        raise TypeError(f"differentiating: {role} is the str {names!r}; pass a list of names")
    if not isinstance(names, Collection):
        raise TypeError(f"differentiating: {role} is {names!r}; pass a list of names")


def differentiable_values(graph: ir.Graph, names: Sequence[str], role: str) -> list[ir.Value]:
    """Returns the values with these names.

    Raises:
        DifferentiationError: a name is unknown, not floating point, or listed twice.
    """
    values = find_values(graph, names, role)
    for value in values:
        if not is_differentiable_dtype(value):
            raise DifferentiationError(
                f"differentiating: {role} {value.name!r} is {value.dtype}; "
                "only floating-point values have gradients"
            )
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise DifferentiationError(f"differentiating: {role} names {', '.join(duplicates)} more than once")
    return values


def typed_values(graph: ir.Graph, names: Sequence[str], role: str) -> list[ir.Value]:
    """Returns the values with these names, after checking that their dtypes are known and floating point.

    Raises:
        DifferentiationError: as for `differentiable_values`, or a dtype is unknown: the model does not declare it, and
            shape inference does not support the op that computes the value or an op before it.
    """
    values = differentiable_values(graph, names, role)
    for value in values:
        if value.dtype is None and (why := why_untyped(value)):
            raise DifferentiationError(
                f"differentiating: {role} names {value.name!r}, of unknown dtype.{why}"
            )
    return values


def check_scalar(value: ir.Value) -> None:
    """Checks that a value has exactly one element.

    Raises:
        DifferentiationError: the value has more elements, or its shape is unknown.
    """
    dims = static_dims(value)
    if dims is None or any(dim != 1 for dim in dims):
        raise DifferentiationError(
            f"differentiating {value.name!r}: its shape is {value.shape}, not a scalar; reduce it to a scalar, "
            f"or name a cotangent input (cotangent=...).{why_untyped(value) if dims is None else ''}"
        )


def _find(graph: ir.Graph, name: str, role: str) -> ir.Value:
    return find_values(graph, [name], role)[0]


def find_values(graph: ir.Graph, names: Sequence[str], role: str) -> list[ir.Value]:
    """Returns the values with these names.

    Raises:
        DifferentiationError: a name is unknown. The message refers to the argument as `role`, e.g. "wrt".
    """
    # One dictionary for all names: a graph may have 100,000 values.
    values = values_by_name(graph)
    for name in names:
        if name not in values:
            candidates = [str(v.name) for v in (*graph.inputs, *graph.initializers.values(), *graph.outputs)]
            more = ", ..." if len(candidates) > 20 else ""
            raise DifferentiationError(
                f"differentiating: {role} names {name!r}, which is not a value of the graph; "
                f"inputs, parameters and outputs are {', '.join(candidates[:20])}{more}"
            )
    return [values[name] for name in names]
