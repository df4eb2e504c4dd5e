"""Defines `model.report()`: size, first-call time, engine and fallback reason of each captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Mode = Literal["training", "inference"]


@dataclass(frozen=True)
class PyTorchOp:
    """An operator that PyTorch runs in a mixed graph, whose other operators run in ONNX Runtime.

    Attributes:
        op: name of the ATen operator, e.g. "aten._linalg_svd.default".
        calls: number of times that the graph calls the operator, e.g. 2.
        reason: why ONNX Runtime doesn't run the operator, e.g. "aten._linalg_svd.default has no lowering to ONNX".
    """

    op: str
    calls: int
    reason: str


@dataclass(frozen=True)
class GraphRecord:
    """A row of the report: one captured graph, or uncaptured code that PyTorch runs.

    Attributes:
        name: identifies the graph within its model, e.g. "graph 0".
        mode: "training" if the graph has a backward graph in ONNX Runtime, or if the record describes a computation
            that PyTorch runs in some calls of a graph, e.g. "graph 0, second derivative"; otherwise "inference".
        device: device of the graph's tensors, e.g. "cpu" or "cuda:0"; "-" if PyTorch runs the graph.
        forward_nodes: number of ONNX nodes in the forward graph, e.g. 12. If PyTorch runs the graph or code, the number
            of operators.
        backward_nodes: number of ONNX nodes in the backward graph, e.g. 21; 0 for inference and in PyTorch.
        first_call_seconds: time from the start of compilation to the first result, in seconds, e.g. 0.25.
        fallback_reason: why PyTorch runs the graph or some of its operators, e.g. "aten.foo has no lowering to ONNX";
            None if ONNX Runtime runs the whole graph.
        break_reason: where and why a graph break ended the graph before the end of the function, e.g. "model.py:12:
            Unsupported Tensor.item() call"; None without a graph break. PyTorch runs the statement at a graph break.
        in_pytorch: the operators that PyTorch runs in a mixed graph, whose other operators run in ONNX Runtime; empty
            for all other graphs.
        calls: number of ATen calls in a mixed graph, e.g. 40; 0 for all other graphs. In a mixed graph, `forward_nodes`
            and `backward_nodes` count only nodes in ONNX Runtime.
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
        """The fraction of the graph's operator calls that ONNX Runtime runs, from 0 to 1, e.g. 0.95."""
        # ATen calls are counted, because one ATen call may become many ONNX nodes.
        if self.in_pytorch:
            return 1 - sum(op.calls for op in self.in_pytorch) / self.calls
        return 1.0 if self.fallback_reason is None else 0.0

    @property
    def engine(self) -> str:
        """The engine that runs the graph: "ONNX Runtime", "PyTorch", or both, e.g. "both, 95% ONNX Runtime"."""
        if self.in_pytorch:
            return f"both, {self.share:.0%} ONNX Runtime"
        return "ONNX Runtime" if self.fallback_reason is None else "PyTorch"

    @property
    def fallback(self) -> str | None:
        """The fallback message, e.g. "graph 0 runs in PyTorch: <reason>"; None if ONNX Runtime runs the whole graph."""
        if self.fallback_reason is None:
            return None
        return f"{self.name} runs in PyTorch{' in part' if self.in_pytorch else ''}: {self.fallback_reason}"


class Report:
    """Records of the graphs of one ORTModule, in the order of their first calls.

    Iterating yields :class:`GraphRecord` objects; `print(report)` prints a table.

    Attributes:
        calls_in_pytorch: number of calls that PyTorch ran, at least in part, because a new capture would not have
            paid off yet; see `capture_all` of :class:`DebugOptions`.

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
        self.calls_in_pytorch = 0

    def record(self, graph: GraphRecord) -> None:
        """Adds the record of a graph, or replaces the record with the same name and mode."""
        # Uncaptured code is recorded again when another of its operators runs for the first time.
        for index, record in enumerate(self._records):
            if (record.name, record.mode) == (graph.name, graph.mode):
                self._records[index] = graph
                return
        self._records.append(graph)

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """The records of all graphs, in the order of their first calls."""
        return tuple(self._records)

    @property
    def fallbacks(self) -> tuple[GraphRecord, ...]:
        """The graphs that fell back to PyTorch, entirely or for some operators (see `GraphRecord.in_pytorch`)."""
        return tuple(graph for graph in self._records if graph.fallback_reason is not None)

    @property
    def runs_in_onnxruntime(self) -> bool:
        """True if there is at least one graph, and ONNX Runtime runs every graph entirely."""
        # Before the first call there is no graph, and `assert report.runs_in_onnxruntime` must fail.
        return bool(self._records) and not self.fallbacks

    def __iter__(self) -> Iterator[GraphRecord]:
        return iter(self.graphs)

    def __len__(self) -> int:
        return len(self._records)

    # With `__len__` alone a report without graphs would be falsy, and `report or Report()` would replace it.
    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        mixed = sum(bool(graph.in_pytorch) for graph in self._records)
        both = f", {mixed} in both" if mixed else ""
        return f"<Report: {len(self)} graphs, {len(self.fallbacks) - mixed} of them in PyTorch{both}>"

    def __str__(self) -> str:
        if not self._records:
            return "no graph yet: the model has not been called"
        table: list[tuple[str, ...]] = [
            ("graph", "mode", "device", "runs in", "forward", "backward", "first call")
        ]
        table += [_row(graph) for graph in self._records]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        # Text columns are left-aligned, number columns right-aligned.
        text_columns = 4
        lines = [
            "  ".join(
                cell.ljust(width) if column < text_columns else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        # Reasons are too long for a column, and follow the table.
        reasons = [graph.fallback for graph in self.fallbacks if graph.fallback]
        reasons += [f"{g.name} ends at {g.break_reason}" for g in self._records if g.break_reason]
        if self.calls_in_pytorch:
            reasons.append(
                f"calls in PyTorch, because another capture did not pay yet: {self.calls_in_pytorch}"
            )
        return "\n".join([*lines, "", *reasons] if reasons else lines)


def _row(graph: GraphRecord) -> tuple[str, ...]:
    """Returns the cells of a graph's row in the table of the report."""
    return (
        graph.name,
        graph.mode,
        graph.device,
        graph.engine,
        str(graph.forward_nodes),
        str(graph.backward_nodes or "-"),
        f"{graph.first_call_seconds:.2f} s",
    )
