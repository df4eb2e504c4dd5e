"""A captured graph of which ONNX Runtime runs all but some operators, and PyTorch these."""

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
from onnxtrain.ortmodule.lowering._partition import calls, mutations
from onnxtrain.ortmodule.lowering._table import DRAWN_BETWEEN_PARTS
from onnxtrain.ortmodule.sessions._onnx_part import OnnxPart


@dataclass(frozen=True)
class Step:
    """A part of a graph, in its place.

    Attributes:
        run: takes and returns values.
        takes: where the values that it takes are.
        gives: where those that it returns go.
        drops: places that nothing behind it reads.
        onnx: the part, if ONNX Runtime runs it.
    """

    run: Callable[..., Sequence[Any]]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    onnx: OnnxPart | None = None


class Steps:
    """A graph of which PyTorch runs some parts, one after the other; autograd follows from part to part.

    Args:
        graph_module: the whole graph.
        places: of its nodes that one step gives to another, or that are given or returned.
        steps: in the order of computation.
        signature: what the inputs and outputs of the graph are.
        refused: the nodes that PyTorch runs, with the reasons.

    Attributes:
        inputs: indices of the arguments that are tensors.
        outputs: see `Lowered`.
        mutated: see `Lowered`.
        reads: which of `inputs` the gradients may depend on.
        in_pytorch: the operators that PyTorch runs, e.g. `PyTorchOp("aten.poisson.default", 1, "... has no lowering")`,
            without those that draw as many random numbers as the data ask for and do nothing else.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        places: dict[fx.Node, int],
        steps: Sequence[Step],
        signature: GraphSignature,
        refused: dict[fx.Node, str],
    ) -> None:
        graph = graph_module.graph
        placeholders = graph.find_nodes(op="placeholder")
        self._places, self._steps, self._device = len(places), steps, signature.device
        self._calls = len(calls(graph.nodes))
        # PyTorch always draws what a dropout multiplies by: before the graph runs, or between two parts where the
        # number of elements depends on the data. The rest of the dropout runs in ONNX Runtime in both cases.
        in_pytorch = [node for node in calls(refused) if not refused[node].endswith(DRAWN_BETWEEN_PARTS)]
        self.in_pytorch = _counted(in_pytorch, refused)
        self.inputs = [i for i, n in enumerate(placeholders) if isinstance(n.meta["val"], torch.Tensor)]
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
                    ("tensor", self._result(places[written.get(item, item)], returned.requires_grad))
                )
        for node, value in written.items():
            place = placeholders.index(node)
            self.mutated.append(
                (place, self._result(places[value], signature.inputs[place].written_with_grad))
            )

    def _result(self, place: int, differentiable: bool) -> int:
        self._results.append((place, differentiable))
        return len(self._results) - 1

    def results(self, args: Sequence[Any], tensors: list[torch.Tensor]) -> Sequence[Any]:
        """Returns what the steps compute of the results, in the order that `outputs` and `mutated` speak of."""
        values: list[Any] = [*args, *[None] * (self._places - len(args))]
        for index, tensor in zip(self.inputs, tensors, strict=True):
            values[index] = tensor
        for step in self._steps:
            given = step.run(*[values[place] for place in step.takes])
            for place, value in zip(step.gives, given, strict=True):
                values[place] = value
            for place in step.drops:
                values[place] = None
        return [_kept(values[place], differentiable) for place, differentiable in self._results]

    def record(self, name: str) -> GraphRecord:
        """What the report says of the graph, without the time of its first call."""
        records = [step.onnx.record(name) for step in self._steps if step.onnx is not None]
        training = any(record.mode == "training" for record in records)
        return GraphRecord(
            name,
            "training" if training else "inference",
            str(self._device),
            sum(record.forward_nodes for record in records),
            sum(record.backward_nodes for record in records),
            fallback_reason=_said(self.in_pytorch, self._calls) if self.in_pytorch else None,
            in_pytorch=self.in_pytorch,
            calls=self._calls,
        )

    def ops(self) -> Counter[str]:
        """The operators of the forward graphs, as they were lowered."""
        return sum((step.onnx.ops() for step in self._steps if step.onnx is not None), Counter())

    def executed(self) -> Iterator[tuple[str, ir.Model]]:
        """Yields the models that ONNX Runtime runs, each with what it is."""
        for number, step in enumerate(self._steps):
            if step.onnx is not None:
                for kind, model in step.onnx.executed():
                    yield f"part_{number}_{kind}", model

    def save(self, options: DebugOptions, name: str) -> None:
        """Writes the ONNX models where the options say."""
        for number, step in enumerate(self._steps):
            if step.onnx is not None:
                step.onnx.save(options, f"{name} part {number}")


def _kept(value: Any, differentiable: bool) -> Any:
    if not isinstance(value, torch.Tensor) or value.requires_grad == differentiable:
        return value
    if not differentiable:
        return value.detach()
    # As in eager PyTorch where nothing comes through: behind a view that was made under no_grad.
    return _Ended.apply(value, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]


class _Ended(torch.autograd.Function):
    """A tensor that requires a gradient and passes none on."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[None, None]:
        return None, None


def _counted(nodes: Sequence[fx.Node], reasons: dict[fx.Node, str]) -> tuple[PyTorchOp, ...]:
    found = Counter((str(node.target), reasons[node]) for node in nodes)
    return tuple(PyTorchOp(op, count, reason) for (op, reason), count in found.items())


def _said(in_pytorch: Sequence[PyTorchOp], calls: int) -> str:
    reasons: dict[str, None] = {}
    for op in in_pytorch:
        named = op.reason.startswith(op.op)
        reasons[op.reason if named else f"{op.op}: {op.reason}"] = None
    count = sum(op.calls for op in in_pytorch)
    return f"{count} of {calls} operators: {'; '.join(reasons)}"
