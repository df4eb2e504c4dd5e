"""Inlines model-local functions."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx import inliner
from onnx_ir.passes.common import InlinePass

from onnxtrain.errors import ModelError
from onnxtrain.passes.io.attribute_types import mistyped_attribute
from onnxtrain.passes.io.without_weights import lean_proto, restore
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.unique_names import name_apart
from onnxtrain.runtime.function_calls import inlined_sizes

MOST_NODES = 100_000
"""Maximum number of nodes after inlining, unless the model had more than half as many before. A language model of 80
blocks has about 20,000."""


def inline_functions(model: ir.Model, criteria: Callable[[ir.Function], bool] | None = None) -> ir.Model:
    """Returns `model` with calls to its functions replaced by the function bodies; may modify `model`.

    Args:
        model: any model.
        criteria: returns True for functions to inline, e.g. `lambda function: function.domain == "pkg"`. Default: all.

    Raises:
        ModelError: a function calls itself, has a graph as an attribute, or imports an opset that cannot be converted;
            a call sets an attribute of the wrong type; or inlining nested calls would create too many nodes.
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
    # A value of the caller and a value of a body may have the same name, which is invalid within one graph.
    name_apart(inlined)
    # The file was checked when it was loaded, but a call sets attributes in the body, possibly with the wrong type.
    if problem := mistyped_attribute(inlined):
        raise ModelError(f"The model is not valid ONNX: after inlining its functions, {problem}.")
    return inlined


def _check_number(model: ir.Model, criteria: Callable[[ir.Function], bool]) -> None:
    """Checks how many nodes inlining would create, and removes functions that are never called, in place.

    Args:
        model: the model.
        criteria: returns True for the functions to inline.

    Raises:
        ModelError: inlining would create too many nodes.
    """
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
            f"Cannot inline the model's functions: their nested calls would expand to {number:,} nodes, "
            f"more than the limit of {limit:,}. Export the model with fewer function calls."
        )
    reached = inlined_sizes(calls, dict.fromkeys(calls, 1), [None])
    for key in set(model.functions) - set(reached):
        del model.functions[key]


def _other_opset(model: ir.Model, function: ir.Function) -> bool:
    """True if a function imports a different version of some domain than the model does."""
    # onnx_ir's InlinePass (1.1) copies bodies unchanged, whatever opset they import.
    imports = model.graph.opset_imports
    return any(imports.get(domain, version) != version for domain, version in function.opset_imports.items())


def _inline_other_opsets(model: ir.Model) -> ir.Model:
    """Inlines all functions with onnx's inliner, which converts the bodies to the model's opset."""
    # The version converter needs the input types of a body.
    infer_shapes(model)
    try:
        inlined = ir.from_proto(inliner.inline_local_functions(lean_proto(model), convert_version=True))
    except Exception as error:
        raise ModelError(
            f"Cannot inline functions that import a different opset than the model: {error}"
        ) from error
    restore(inlined, model)
    return inlined


def _prepare(model: ir.Model) -> None:
    """Prepares functions and calls for InlinePass, which gives the outputs of a body the names that the call uses.

    This must not rename a value of the caller, so a function output that is also an input, or is returned twice, is
    replaced with an Identity of the value. Omitted outputs of a call are named None instead of "", because the body may
    itself read the value, which must not be renamed to "".
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
