"""Runs a captured graph in steps: parts in ONNX Runtime alternate with parts in PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import GraphRecord, PyTorchOp
from onnxtrain.ortmodule.capture._signature import GraphSignature
from onnxtrain.ortmodule.lowering._partition import calls, is_random, mutations
from onnxtrain.ortmodule.lowering._table import DRAWN_BETWEEN_PARTS
from onnxtrain.ortmodule.sessions._onnx_part import OnnxPart


@dataclass(frozen=True)
class Step:
    """One part of a graph. Values are numbered: first the arguments of the graph, then the results of the parts.

    Attributes:
        run: runs the part on the values `inputs`, and returns the values `outputs`.
        inputs: numbers of the values that the part takes, e.g. (0, 3).
        outputs: numbers of the values that the part returns, e.g. (4,).
        frees: numbers of the values that can be freed after this step, e.g. (3,).
        onnx: the part in ONNX Runtime, or None if PyTorch runs the part.
    """

    run: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    onnx: OnnxPart | None = None


class Steps:
    """A graph whose parts run alternately in ONNX Runtime and in PyTorch. Autograd records each part separately.

    Args:
        graph_module: the whole graph, a functional ATen graph.
        value_numbers: maps each node to the number of its value: first the arguments of the graph, then the results of
            the parts.
        steps: the parts, in order of execution.
        signature: describes the inputs and outputs of the graph.
        reasons: maps each node that PyTorch runs to the reason for the fallback.

    Attributes:
        inputs: indices of the arguments that are tensors, e.g. [0, 1].
        outputs: for each output of the graph, a pair (kind, value). The value is an index into the result of `results`
            for the kind "tensor", the index of an argument for "placeholder", and a Python value for "constant".
        mutated: pairs (index of an argument, index into the result of `results`). The result is copied into the
            argument after a run.
        reads: indices in `inputs` of the inputs that gradients may depend on.
        draws: True if a run may draw random numbers.
        in_pytorch: the operators that fall back to PyTorch, e.g. `PyTorchOp("aten.poisson.default", 1, "... has no
            lowering")`. Draws of random numbers with data-dependent shapes are not included.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        value_numbers: dict[fx.Node, int],
        steps: Sequence[Step],
        signature: GraphSignature,
        reasons: dict[fx.Node, str],
    ) -> None:
        self.draws = any(map(is_random, graph_module.graph.nodes)) or any(
            s.onnx is not None and s.onnx.draws for s in steps
        )
        graph = graph_module.graph
        placeholders = graph.find_nodes(op="placeholder")
        self._value_count, self._steps, self._device = len(value_numbers), steps, signature.device
        self._calls = len(calls(graph.nodes))
        # PyTorch draws all random numbers, either before the graph runs or, if their shape is data-dependent, between
        # two parts. In both cases ONNX Runtime runs the rest of e.g. a dropout, so this is not a fallback.
        in_pytorch = [node for node in calls(reasons) if not reasons[node].endswith(DRAWN_BETWEEN_PARTS)]
        self.in_pytorch = _count_by_reason(in_pytorch, reasons)
        self.inputs = [i for i, n in enumerate(placeholders) if isinstance(n.meta["val"], torch.Tensor)]
        # It is unknown which inputs the operators in PyTorch save, so all inputs count.
        self.reads = range(len(self.inputs)) if any(value.requires_grad for value in signature.inputs) else ()
        self.outputs: list[tuple[str, Any]] = []
        self.mutated: list[tuple[int, int]] = []
        self._results: list[tuple[int, bool]] = []
        written = mutations(graph)
        output = graph.find_nodes(op="output")[0]
        for item, returned in zip(output.args[0], signature.outputs, strict=True):
            if not isinstance(item, fx.Node):
                self.outputs.append(("constant", item))
            elif item.op == "placeholder" and item not in written:
                self.outputs.append(("placeholder", placeholders.index(item)))
            else:
                self.outputs.append(
                    ("tensor", self._result(value_numbers[written.get(item, item)], returned.requires_grad))
                )
        for node, value in written.items():
            index = placeholders.index(node)
            self.mutated.append(
                (index, self._result(value_numbers[value], signature.inputs[index].written_with_grad))
            )

    def _result(self, number: int, differentiable: bool) -> int:
        """Adds a value to the results that :meth:`results` returns.

        Args:
            number: number of the value.
            differentiable: True if the result requires a gradient.

        Returns:
            The index of the result.
        """
        self._results.append((number, differentiable))
        return len(self._results) - 1

    def results(self, args: Sequence[Any], tensors: list[torch.Tensor]) -> Sequence[Any]:
        """Runs the steps; returns the results that `outputs` and `mutated` refer to by index.

        Args:
            args: the arguments of the graph.
            tensors: the arguments with indices `inputs`, which replace the tensors in `args`.
        """
        values: list[Any] = [*args, *[None] * (self._value_count - len(args))]
        for index, tensor in zip(self.inputs, tensors, strict=True):
            values[index] = tensor
        for step in self._steps:
            results = step.run(*[values[number] for number in step.inputs])
            for number, value in zip(step.outputs, results, strict=True):
                values[number] = value
            # Otherwise a large value of the first step would stay in memory until the end of the call.
            for number in step.frees:
                values[number] = None
        return [_with_grad_flag(values[number], differentiable) for number, differentiable in self._results]

    def record(self, name: str) -> GraphRecord:
        """Returns the graph's record for the report, without `first_call_seconds`."""
        records = [step.onnx.record(name) for step in self._steps if step.onnx is not None]
        training = any(record.mode == "training" for record in records)
        return GraphRecord(
            name,
            "training" if training else "inference",
            str(self._device),
            sum(record.forward_nodes for record in records),
            sum(record.backward_nodes for record in records),
            fallback_reason=_reason(self.in_pytorch, self._calls) if self.in_pytorch else None,
            in_pytorch=self.in_pytorch,
            calls=self._calls,
        )

    def ops(self) -> Counter[str]:
        """Counts the nodes of the lowered forward graphs by op, e.g. {"MatMul": 2}."""
        return sum((step.onnx.ops() for step in self._steps if step.onnx is not None), Counter())

    def executed(self) -> Iterator[tuple[str, ir.Model]]:
        """Yields (kind, model) for each model that ONNX Runtime runs; a kind is e.g. "part_0_forward"."""
        for number, step in enumerate(self._steps):
            if step.onnx is not None:
                for kind, model in step.onnx.executed():
                    yield f"part_{number}_{kind}", model

    def save(self, options: DebugOptions, name: str) -> None:
        """Writes the ONNX models of all parts to files, e.g. "net_graph_0_part_1_training.onnx"."""
        for number, step in enumerate(self._steps):
            if step.onnx is not None:
                step.onnx.save(options, f"{name} part {number}")


def _with_grad_flag(value: Any, differentiable: bool) -> Any:
    """Returns a result with its `requires_grad` set to `differentiable`, as in eager PyTorch."""
    if not isinstance(value, torch.Tensor) or value.requires_grad == differentiable:
        return value
    if not differentiable:
        return value.detach()
    # In eager PyTorch, a product with a view created under `no_grad` requires a gradient, which reaches no input.
    return _WithoutGradient.apply(value, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]


class _WithoutGradient(torch.autograd.Function):
    """Makes a tensor require a gradient that reaches no input, like some results in eager PyTorch.

    An example is a product with a view that was created under `no_grad`.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[None, None]:
        return None, None


def _count_by_reason(nodes: Sequence[fx.Node], reasons: dict[fx.Node, str]) -> tuple[PyTorchOp, ...]:
    """Counts nodes by operator and by the reason why PyTorch runs them."""
    counts = Counter((str(node.target), reasons[node]) for node in nodes)
    return tuple(PyTorchOp(op, count, reason) for (op, reason), count in counts.items())


def _reason(in_pytorch: Sequence[PyTorchOp], calls: int) -> str:
    """Returns the fallback reason of a graph, e.g. "2 of 40 operators: aten.poisson.default has no lowering to ONNX".

    Args:
        in_pytorch: the operators that PyTorch runs.
        calls: number of operator calls in the whole graph.
    """
    reasons: dict[str, None] = {}
    for op in in_pytorch:
        # Most reasons begin with the operator's name already.
        is_named = op.reason.startswith(op.op)
        reasons[op.reason if is_named else f"{op.op}: {op.reason}"] = None
    count = sum(op.calls for op in in_pytorch)
    return f"{count} of {calls} operators: {'; '.join(reasons)}"
