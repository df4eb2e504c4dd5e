"""Replace calls of model-local functions by the bodies of the functions."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx import inliner
from onnx_ir.passes.common import InlinePass

from onnxtrain.errors import ModelError
from onnxtrain.passes.io.without_weights import lean_proto, restore
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.unique_names import name_apart
from onnxtrain.runtime.function_calls import inlined_sizes

MOST_NODES = 100_000
"""Nodes that inlining may make of a smaller model. A language model of 80 blocks has some 20,000."""


def inline_functions(model: ir.Model, criteria: Callable[[ir.Function], bool] | None = None) -> ir.Model:
    """Return `model` with the bodies of its functions in place of the calls; may change `model`.

    Args:
        model: Any model.
        criteria: True for functions to inline, e.g. `lambda function: function.domain == "pkg"`; None inlines all.

    Raises:
        ModelError: A function calls itself, takes graphs as attributes, or imports an opset that cannot be
            converted; or the functions, which may call one another twice each, would become too many nodes.
    """
    if not model.functions:
        return model
    _check_number(model, criteria or (lambda function: True))
    if any(_other_opset(model, function) for function in model.functions.values()):
        model = _inline_other_opsets(model)
    _prepare(model)
    try:
        inlined = InlinePass(criteria)(model).model
    except (ir.passes.PassError, ir.passes.PreconditionError, ValueError) as error:
        raise ModelError(f"Cannot inline the model's functions: {error.__cause__ or error}") from error
    # A caller's value may have the name of a value in a body: two values of one name make one graph invalid.
    name_apart(inlined)
    return inlined


def _check_number(model: ir.Model, criteria: Callable[[ir.Function], bool]) -> None:
    """Raise ModelError if inlining would make too many nodes; remove functions that nothing calls, in place."""
    nodes = {None: list(model.graph.all_nodes())} | {
        key: list(function.all_nodes()) for key, function in model.functions.items()
    }
    calls = {
        key: [node.op_identifier() for node in body if node.op_identifier() in model.functions]
        for key, body in nodes.items()
    }
    inlined = {
        key: [callee for callee in called if criteria(model.functions[callee])]
        for key, called in calls.items()
    }
    number = inlined_sizes(inlined, {key: len(body) for key, body in nodes.items()}, [None])[None]
    limit = max(MOST_NODES, 2 * sum(map(len, nodes.values())))
    if number > limit:
        raise ModelError(
            "Cannot inline the model's functions: they call one another so often that the graph would have "
            f"{number:,} nodes, and at most {limit:,} are built. Export the model with fewer calls of functions."
        )
    reached = inlined_sizes(calls, dict.fromkeys(calls, 1), [None])
    for key in set(model.functions) - set(reached):
        del model.functions[key]


def _other_opset(model: ir.Model, function: ir.Function) -> bool:
    """Tell if a function imports a domain in another version than the model."""
    # onnx_ir's InlinePass (1.1) copies bodies as they are, whatever opset they were written for.
    imports = model.graph.opset_imports
    return any(imports.get(domain, version) != version for domain, version in function.opset_imports.items())


def _inline_other_opsets(model: ir.Model) -> ir.Model:
    """Inline all functions with onnx's inliner, which converts bodies to the opset of the model."""
    # The converter needs the types of the inputs of a body.
    infer_shapes(model)
    try:
        inlined = ir.from_proto(inliner.inline_local_functions(lean_proto(model), convert_version=True))
    except Exception as error:
        raise ModelError(
            f"Cannot inline functions that import another opset than the model: {error}"
        ) from error
    restore(inlined, model)
    return inlined


def _prepare(model: ir.Model) -> None:
    """Prepare functions and calls for InlinePass, which gives each output of a body its name at the call.

    The renaming must not hit a value of the caller, so an output that is an input of the function, or is returned
    twice, becomes an Identity. A value that the body itself reads must not get the empty name of an omitted output, so
    omitted outputs get the name None.
    """
    for function in model.functions.values():
        taken = set(function.inputs)
        for index, output in enumerate(function.outputs):
            if output in taken:
                identity = ir.node("Identity", [output])
                function.append(identity)
                function.outputs[index] = identity.outputs[0]
            taken.add(function.outputs[index])
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            callee = model.functions.get(node.op_identifier())
            if callee is None:
                continue
            node.resize_outputs(len(callee.outputs))
            for output in node.outputs:
                output.name = output.name or None
