"""`model.report()`: which graphs run where, how large they are, what their first call cost, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Mode = Literal["training", "inference"]


@dataclass(frozen=True)
class PyTorchOp:
    """An operator that PyTorch runs in a graph of which ONNX Runtime runs the rest.

    Attributes:
        op: its name, `aten._linalg_svd.default`.
        calls: how many of its calls in the graph.
        reason: why.
    """

    op: str
    calls: int
    reason: str


@dataclass(frozen=True)
class GraphRecord:
    """One captured graph.

    Attributes:
        name: what tells it from the other graphs of the model.
        mode: "training" when a backward graph goes with it, else "inference".
        device: the device its tensors are on, as in `str(tensor.device)`.
        forward_nodes: ONNX nodes of the forward graph, or ATen calls if it runs in PyTorch.
        backward_nodes: ONNX nodes of the backward graph; 0 in inference and in PyTorch.
        first_call_seconds: time from capture to the first result, in seconds.
        fallback_reason: why the graph, or a part of it, runs in PyTorch; None when ONNX Runtime runs all of it.
        break_reason: where and why Dynamo ended the graph before the function's end; None if it did not. What it
            stopped at runs in PyTorch.
        in_pytorch: the operators that PyTorch runs, if ONNX Runtime runs the rest.
        calls: ATen calls of the graph, then; `forward_nodes` and `backward_nodes` are those in ONNX Runtime.
    """

    name: str
    mode: Mode
    device: str
    forward_nodes: int
    backward_nodes: int = 0
    first_call_seconds: float = 0.0
    fallback_reason: str | None = None
    break_reason: str | None = None
    in_pytorch: tuple[PyTorchOp, ...] = ()
    calls: int = 0

    @property
    def share(self) -> float:
        """The share of the graph's operators that ONNX Runtime runs, from 0 to 1."""
        if self.in_pytorch:
            return 1 - sum(op.calls for op in self.in_pytorch) / self.calls
        return 1.0 if self.fallback_reason is None else 0.0

    @property
    def engine(self) -> str:
        """What runs the graph: "ONNX Runtime", "PyTorch", or both."""
        if self.in_pytorch:
            return f"both, {self.share:.0%} ONNX Runtime"
        return "ONNX Runtime" if self.fallback_reason is None else "PyTorch"

    @property
    def fallback(self) -> str | None:
        """What runs in PyTorch, and why; None if nothing does."""
        if self.fallback_reason is None:
            return None
        return f"{self.name} runs in PyTorch{' in part' if self.in_pytorch else ''}: {self.fallback_reason}"


class Report:
    """The graphs of one ORTModule, in the order in which they were captured.

    Iterating gives :class:`GraphRecord` objects; `print(report)` a table.

    Example:
        >>> report = Report()
        >>> report.record(GraphRecord("graph 0", "training", "cpu", 12, 21, 0.25))
        >>> report.record(GraphRecord("graph 1", "inference", "cpu", 3, fallback_reason="aten.foo: no form"))
        >>> print(report)
        graph    mode       device  runs in       forward  backward  first call
        graph 0  training   cpu     ONNX Runtime       12        21      0.25 s
        graph 1  inference  cpu     PyTorch             3         -      0.00 s
        <BLANKLINE>
        graph 1 runs in PyTorch: aten.foo: no form
        >>> report.runs_in_onnxruntime
        False
    """

    def __init__(self) -> None:
        self._records: list[GraphRecord] = []

    def record(self, graph: GraphRecord) -> None:
        """Adds a graph; one of the same name and mode takes the old one's place."""
        for index, known in enumerate(self._records):
            if (known.name, known.mode) == (graph.name, graph.mode):
                self._records[index] = graph
                return
        self._records.append(graph)

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """All graphs."""
        return tuple(self._records)

    @property
    def fallbacks(self) -> tuple[GraphRecord, ...]:
        """The graphs that run in PyTorch, some of them only in part (`in_pytorch`)."""
        return tuple(graph for graph in self._records if graph.fallback_reason is not None)

    @property
    def runs_in_onnxruntime(self) -> bool:
        """Whether there is a graph, and ONNX Runtime runs all of every one."""
        return bool(self._records) and not self.fallbacks

    def __iter__(self) -> Iterator[GraphRecord]:
        return iter(self.graphs)

    def __len__(self) -> int:
        return len(self._records)

    def __bool__(self) -> bool:
        return True  # an empty report is still a report

    def __repr__(self) -> str:
        partly = sum(bool(graph.in_pytorch) for graph in self._records)
        both = f", {partly} in both" if partly else ""
        return f"<Report: {len(self)} graphs, {len(self.fallbacks) - partly} of them in PyTorch{both}>"

    def __str__(self) -> str:
        if not self._records:
            return "no graph yet: the model has not been called"
        table: list[tuple[str, ...]] = [
            ("graph", "mode", "device", "runs in", "forward", "backward", "first call")
        ]
        table += [_row(graph) for graph in self._records]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        left_aligned = 4
        lines = [
            "  ".join(
                cell.ljust(width) if column < left_aligned else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        reasons = [graph.fallback for graph in self.fallbacks if graph.fallback]
        reasons += [f"{g.name} ends at {g.break_reason}" for g in self._records if g.break_reason]
        return "\n".join([*lines, "", *reasons] if reasons else lines)


def _row(graph: GraphRecord) -> tuple[str, ...]:
    backward = str(graph.backward_nodes) if graph.backward_nodes else "-"
    first_call = f"{graph.first_call_seconds:.2f} s"
    return (
        graph.name,
        graph.mode,
        graph.device,
        graph.engine,
        str(graph.forward_nodes),
        backward,
        first_call,
    )
