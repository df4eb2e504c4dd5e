"""`torch.compile` with a backend that runs each captured graph in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule import aten as _aten  # fills the lowering table
from onnxtrain.ortmodule._autograd import call
from onnxtrain.ortmodule._capture import functional_graph
from onnxtrain.ortmodule._lowering import Lowered, lower_graph
from onnxtrain.ortmodule._program import Program

__all__ = ["CompiledGraph", "compile_module", "onnxruntime_backend"]

del _aten

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compile_module(module: torch.nn.Module, options: Any, report: Any) -> Callable[..., Any]:
    """Returns `module` as a callable whose graphs run in ONNX Runtime."""
    compiled: Callable[..., Any] = torch.compile(module, backend=onnxruntime_backend(fallback=True))
    return compiled


def onnxruntime_backend(*, fallback: bool) -> Backend:
    """Returns a backend for `torch.compile`.

    Args:
        fallback: whether a graph that ONNX Runtime cannot run goes to PyTorch; otherwise it is an error.
    """

    def backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        outputs = _outputs_requiring_grad(graph_module)
        lowered = lower_graph(functional_graph(graph_module))
        return CompiledGraph(lowered, outputs, torch.device("cpu"))

    return backend


def _outputs_requiring_grad(graph_module: fx.GraphModule) -> list[bool]:
    node = next(n for n in graph_module.graph.nodes if n.op == "output")
    flags = []
    for item in node.args[0]:
        value = item.meta.get("example_value") if isinstance(item, fx.Node) else None
        flags.append(isinstance(value, torch.Tensor) and value.requires_grad)
    return flags


class CompiledGraph:
    """One captured graph: takes what Dynamo passes, returns what the graph returns."""

    def __init__(self, lowered: Lowered, requires_grad: list[bool], device: torch.device) -> None:
        self._lowered = lowered
        differentiable = [False] * len(lowered.model.graph.outputs)
        for (kind, index), flag in zip(lowered.outputs, requires_grad, strict=True):
            if kind == "tensor":
                differentiable[index] = flag
        self.program = Program(lowered.model, differentiable, device)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Runs the graph, writes mutated inputs back, and returns its outputs."""
        lowered = self._lowered
        tensors = [a if isinstance(a := args[i], torch.Tensor) else torch.tensor(a) for i in lowered.inputs]
        tensors += [random.draw(random.sizes(args)) for random in lowered.random]
        results = call(self.program, tensors)
        for placeholder, output in lowered.mutated:
            with torch.no_grad():
                args[placeholder].copy_(results[output])
        return tuple(_output(kind, value, args, results) for kind, value in lowered.outputs)


def _output(kind: str, value: Any, args: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> Any:
    if kind == "constant":
        return value
    if kind == "placeholder":
        return args[value]
    return int(results[value].item()) if kind == "integer" else results[value]
