"""Cuts a captured graph that ONNX Runtime cannot run entirely into steps for ONNX Runtime and steps for PyTorch.

Operators without a lowering are known in advance. A missing gradient rule or kernel is found only when the gradient is
built or a session is created: the error names a node, which is then assigned to PyTorch, and the graph is cut again.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException, ORTModuleTorchModelException
from onnxtrain.ortmodule.capture._signature import GraphInput, GraphOutput, GraphSignature
from onnxtrain.ortmodule.lowering._graph_lowering import lower_graph
from onnxtrain.ortmodule.lowering._partition import Part, mutations, partition
from onnxtrain.ortmodule.lowering._table import memory_order
from onnxtrain.ortmodule.lowering._unsupported_nodes import unsupported_nodes
from onnxtrain.ortmodule.sessions._in_pytorch import differentiable_nodes, runnable
from onnxtrain.ortmodule.sessions._mixed_graph import Step, Steps
from onnxtrain.ortmodule.sessions._onnx_part import OnnxPart, building
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Announce
from onnxtrain.passes import inverse_permutation

_MAX_CUTS = 8
"""Maximum number of attempts to cut a graph. An attempt, i.e. lowering, gradients and sessions, takes seconds."""


def compile_in_steps(
    graph_module: fx.GraphModule,
    error: ORTModuleONNXModelException,
    signature: GraphSignature,
    announce: Announce,
    severity: int,
) -> Steps:
    """Compiles a graph as steps: ONNX Runtime runs all operators that it supports, PyTorch the others.

    Args:
        graph_module: a functional ATen graph.
        error: why ONNX Runtime cannot run the entire graph.
        signature: describes the inputs and outputs of the graph.
        announce: warns of computations, e.g. second derivatives, that PyTorch is about to run for a part that was
            compiled for ONNX Runtime.
        severity: minimum severity of the messages that ONNX Runtime prints, e.g. 3 for errors.

    Raises:
        ORTModuleONNXModelException: `error` is raised again, because all attempts failed, an error named no further
            operator to assign to PyTorch, too little work was left for ONNX Runtime to be worth a session, or PyTorch
            cannot differentiate an operator assigned to it.
    """
    with building():
        in_pytorch = _with_views(unsupported_nodes(graph_module))
    reason = error
    for _ in range(_MAX_CUTS):
        count = len(in_pytorch)
        in_pytorch = {**_with_views(_nodes_named_in(graph_module.graph, reason)), **in_pytorch}
        # The error names no new node: another attempt would fail in the same way.
        if len(in_pytorch) == count and reason is not error:
            break
        try:
            with building():
                steps = _compiled_steps(graph_module, dict(in_pytorch), signature, announce, severity)
        except ORTModuleONNXModelException as next_reason:
            reason = next_reason
            continue
        # PyTorch has no derivative of a traced operator. Then PyTorch must run the whole graph, as captured by Dynamo.
        except ORTModuleTorchModelException as no_derivative:
            raise error from no_derivative
        if steps is None:
            break
        return steps
    raise error


def _with_views(in_pytorch: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """Adds the views on which `as_strided` nodes in `in_pytorch` are based, so that PyTorch computes them, too.

    ONNX Runtime would copy a view, without the other elements of the storage that `as_strided` reads.

    Args:
        in_pytorch: maps each node that PyTorch runs to the reason.

    Returns:
        `in_pytorch` and the views. The reason for a view is the reason for the `as_strided` node.
    """
    # A view computed by ONNX Runtime has separate memory, without the other elements that `as_strided` addresses.
    with_views = dict(in_pytorch)
    for node, reason in in_pytorch.items():
        source = node.args[0] if "as_strided" in str(node.target) else None
        # Views may be elements of a list, e.g. of the result of `chunk`.
        while isinstance(source, fx.Node) and (
            source.target is operator.getitem or getattr(source.target, "is_view", False)
        ):
            with_views.setdefault(source, reason)
            source = source.args[0]
    return with_views


def _nodes_named_in(graph: fx.Graph, error: ORTModuleONNXModelException) -> dict[fx.Node, str]:
    """Finds the ATen node that an error message names, so that PyTorch can run it.

    The message contains the name of an ONNX node, e.g. "grad/convolution_1/Conv/ConvTranspose". The first component
    other than "grad" is the name of the ATen node.

    Returns:
        The node, mapped to the first line of the message. If a kernel or gradient rule is missing, all nodes with the
        same operator and dtypes are included. Empty if the message names no node of the graph.
    """
    by_name = {node.name: node for node in graph.nodes if node.op == "call_function"}
    for path in re.findall(r"[\w.]+(?:/[\w.]+)+", str(error)):
        node = by_name.get(next(name for name in path.split("/") if name != "grad"))
        if node is not None:
            # If one node lacks a kernel or gradient rule, so do all nodes with the same operator and dtypes.
            nodes = [node]
            if "no kernel" in str(error) or "no VJP rule" in str(error):
                kind = _operator_and_dtypes(node)
                nodes = [other for other in by_name.values() if _operator_and_dtypes(other) == kind]
            return dict.fromkeys(nodes, str(error).splitlines()[0])
    return {}


def _operator_and_dtypes(node: fx.Node) -> tuple[Any, ...]:
    """Returns the operator of a node and the dtypes of its arguments."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return node.target, *(getattr(value, "dtype", None) for value in values)


def _compiled_steps(
    graph_module: fx.GraphModule,
    in_pytorch: dict[fx.Node, str],
    signature: GraphSignature,
    announce: Announce,
    severity: int,
) -> Steps | None:
    """Cuts a graph into parts and compiles them.

    Args:
        graph_module: a functional ATen graph.
        in_pytorch: maps each node that PyTorch must run to the reason. Nodes that aren't worth a session are added.
        signature: describes the inputs and outputs of the graph.
        announce: warns of computations, e.g. second derivatives, that PyTorch is about to run for a part that was
            compiled for ONNX Runtime.
        severity: minimum severity of the messages that ONNX Runtime prints, e.g. 3 for errors.

    Returns:
        The steps, or None if too little work is left for ONNX Runtime to be worth a session.
    """
    parts = partition(graph_module, in_pytorch)
    if not parts:
        return None
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    value_numbers = {
        node: number for number, node in enumerate([*placeholders, *(n for p in parts for n in p.outputs)])
    }
    kept = set(mutations(graph).values())
    output = graph.find_nodes(op="output")[0]
    kept.update(output.all_input_nodes)
    last_use = {node: number for number, part in enumerate(parts) for node in (*part.outputs, *part.inputs)}
    signature_of = _part_signatures(graph_module, signature, value_numbers, in_pytorch)
    steps = []
    for number, part in enumerate(parts):
        if part.in_pytorch:
            contiguous = {node for other in parts if not other.in_pytorch for node in other.outputs}
            orders = [memory_order(_fake(node)) if node in contiguous else [] for node in part.inputs]
            onnx, run = None, _with_layouts(runnable(part.graph_module), orders)
        else:
            # Lowering consumes the graph. A deep copy of the whole module would also copy its constant tensors.
            plain = copy.copy(part.graph_module)
            plain.graph = copy.deepcopy(part.graph_module.graph)
            lowered = lower_graph(part.graph_module)
            onnx = OnnxPart(lowered, signature_of(part), plain, announce, severity, runnable(plain))
            run = onnx.run
        step = Step(
            run,
            tuple(value_numbers[node] for node in part.inputs),
            tuple(value_numbers[node] for node in part.outputs),
            tuple(
                value_numbers[node] for node, end in last_use.items() if end == number and node not in kept
            ),
            onnx,
        )
        steps.append(step)
    return Steps(graph_module, value_numbers, steps, signature, in_pytorch)


def _part_signatures(
    graph_module: fx.GraphModule,
    whole: GraphSignature,
    value_numbers: Mapping[fx.Node, int],
    in_pytorch: dict[fx.Node, str],
) -> Callable[[Part], GraphSignature]:
    """Returns a function that returns the signature of a part of a graph.

    Args:
        graph_module: the whole graph.
        whole: signature of the whole graph.
        value_numbers: maps each node to the number of its value, e.g. 3 for the value that is named "value3".
        in_pytorch: maps each node that PyTorch runs to the reason.
    """
    differentiable = _with_gradients(graph_module, whole, in_pytorch)
    inputs = dict(zip((n for n in value_numbers if n.op == "placeholder"), whole.inputs, strict=True))
    written = {node for node in mutations(graph_module.graph) if inputs[node].written_with_grad}
    returned = graph_module.graph.find_nodes(op="output")[0].args[0]
    layouts = {node: output.layout for node, output in zip(returned, whole.outputs, strict=True)}

    def signature_of(part: Part) -> GraphSignature:
        part_inputs = [
            GraphInput(
                inputs[node].name if node in inputs else f"value{value_numbers[node]}", node in differentiable
            )
            for node in part.inputs
        ]
        # As in eager PyTorch: an input with a `grad_fn` that the graph overwrites gets a zero gradient, not None.
        zero_grads = frozenset(index for index, node in enumerate(part.inputs) if node in written)
        part_outputs = [
            GraphOutput(node in differentiable, layouts.get(node), zero_grads) for node in part.outputs
        ]
        return GraphSignature(tuple(part_inputs), tuple(part_outputs), len(part_outputs), whole.device)

    return signature_of


def _fake(node: fx.Node) -> torch.Tensor:
    """Returns the fake tensor of a node, or an empty tensor if its result is a number."""
    fake = node.meta["val"]
    return fake if isinstance(fake, torch.Tensor) else torch.empty(0)


def _with_layouts(run: Callable[..., Any], orders: Sequence[Sequence[int]]) -> Callable[..., Any]:
    """Wraps `run` to convert its arguments to the memory layout of eager PyTorch.

    Args:
        run: runs a part in PyTorch. Its arguments are contiguous if a part in ONNX Runtime has computed them.
        orders: for each argument, its axes in memory order, slowest first, e.g. [0, 2, 3, 1]; [] for an argument that
            is passed unchanged.
    """
    # Whether a view is possible, and the order in which a random operator fills a tensor, depend on the layout.
    changed = [
        (index, tuple(order), tuple(inverse_permutation(order)))
        for index, order in enumerate(orders)
        if list(order) != sorted(order)
    ]
    if not changed:
        return run

    def run_with_layouts(*args: Any) -> Any:
        laid_out = list(args)
        for index, order, back in changed:
            laid_out[index] = laid_out[index].permute(order).contiguous().permute(back)
        return run(*laid_out)

    return run_with_layouts


def _with_gradients(
    graph_module: fx.GraphModule, signature: GraphSignature, in_pytorch: dict[fx.Node, str]
) -> set[fx.Node]:
    """Returns the nodes that a gradient reaches.

    These nodes require a gradient, and an output or mutated input that requires a gradient depends on them.

    Args:
        graph_module: the whole graph.
        signature: signature of the whole graph.
        in_pytorch: maps each node that PyTorch runs to the reason.
    """
    graph = graph_module.graph
    differentiable = differentiable_nodes(
        graph_module, [i.requires_grad for i in signature.inputs], in_pytorch
    )
    output = graph.find_nodes(op="output")[0]
    stack = [node for node, out in zip(output.args[0], signature.outputs, strict=True) if out.requires_grad]
    placeholders = graph.find_nodes(op="placeholder")
    inputs = dict(zip(placeholders, signature.inputs, strict=True))
    stack += [value for node, value in mutations(graph).items() if inputs[node].written_with_grad]
    reached: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in differentiable and node not in reached:
            reached.add(node)
            stack += node.all_input_nodes
    return reached
