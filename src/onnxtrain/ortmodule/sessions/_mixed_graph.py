"""A captured graph of which ONNX Runtime runs all but some operators, and PyTorch these."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException, ORTModuleTorchModelException
from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import GraphRecord, PyTorchOp
from onnxtrain.ortmodule.lowering._graph_lowering import lower_graph, refused_nodes
from onnxtrain.ortmodule.lowering._partition import Part, calls, mutations, partition
from onnxtrain.ortmodule.lowering._table import DRAWN_BETWEEN_PARTS, memory_order
from onnxtrain.ortmodule.sessions._in_pytorch import differentiable_nodes, runnable
from onnxtrain.ortmodule.sessions._layout import Layout
from onnxtrain.ortmodule.sessions._onnx_part import OnnxPart, building
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Announce


@dataclass(frozen=True)
class Gradients:
    """Where a graph has gradients.

    Attributes:
        inputs: per input, whether it requires one.
        carried: per input, whether what the graph writes to it may have one.
        outputs: per output, whether it has one.
        links: for some outputs, the inputs whose gradient is zero, and not nothing, where nothing comes through;
            what the graph itself shows need not be said.
        written_links: the same for what is written to some inputs.
    """

    inputs: Sequence[bool]
    carried: Sequence[bool]
    outputs: Sequence[bool]
    links: Mapping[int, frozenset[int]] = field(default_factory=dict)
    written_links: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A part of a graph, in its place.

    Attributes:
        run: takes and returns values.
        takes: where the values that it takes are.
        gives: where those that it returns go.
        drops: places that nothing behind it reads.
        onnx: the part, if ONNX Runtime runs it.
        plain: its graph, then.
    """

    run: Callable[..., Sequence[Any]]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    onnx: OnnxPart | None = None
    plain: fx.GraphModule | None = None


class Steps:
    """A graph of which PyTorch runs some parts, one after the other; autograd follows from part to part.

    Args:
        graph_module: the whole graph.
        places: of its nodes that one step gives to another, or that are given or returned.
        steps: in the order of computation.
        gradients: where the graph has gradients.
        refused: the nodes that PyTorch runs, with the reasons.
        device: of the tensors.

    Attributes:
        inputs: indices of the arguments that are tensors.
        outputs: see `Lowered`.
        mutated: see `Lowered`.
        in_pytorch: the operators that PyTorch runs, e.g. `PyTorchOp("aten.poisson.default", 1, "... has no lowering")`,
            without those that draw as many random numbers as the data ask for and do nothing else.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        places: dict[fx.Node, int],
        steps: Sequence[Step],
        gradients: Gradients,
        refused: dict[fx.Node, str],
        device: torch.device,
    ) -> None:
        graph = graph_module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._places, self._steps, self._device = len(places), steps, device
        self._calls = len(calls(graph.nodes))
        # PyTorch always draws what a dropout multiplies by: before the graph runs, or between two parts where the
        # number of elements depends on the data. The rest of the dropout runs in ONNX Runtime in both cases.
        in_pytorch = [node for node in calls(refused) if not refused[node].endswith(DRAWN_BETWEEN_PARTS)]
        self.in_pytorch = _counted(in_pytorch, refused)
        self.inputs = [i for i, n in enumerate(placeholders) if isinstance(n.meta["val"], torch.Tensor)]
        self.outputs: list[tuple[str, Any]] = []
        self.mutated: list[tuple[int, int]] = []
        self._results: list[tuple[int, bool]] = []
        written = mutations(graph)
        output = next(node for node in graph.nodes if node.op == "output")
        for item, flag in zip(output.args[0], gradients.outputs, strict=True):
            if not isinstance(item, fx.Node):
                self.outputs.append(("constant", item))
            elif item.op == "placeholder" and item not in written:
                self.outputs.append(("placeholder", placeholders.index(item)))
            else:
                self.outputs.append(("tensor", self._result(places[written.get(item, item)], flag)))
        for node, value in written.items():
            place = placeholders.index(node)
            self.mutated.append((place, self._result(places[value], gradients.carried[place])))

    def _result(self, place: int, differentiable: bool) -> int:
        self._results.append((place, differentiable))
        return len(self._results) - 1

    def prepare(self, requires_grad: Sequence[bool]) -> Sequence[int]:
        """Returns which of `inputs` gradients may depend on; the sessions are there."""
        return range(len(self.inputs)) if any(requires_grad) else ()

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

    def replay_by(self, graph_module: fx.GraphModule, announce: Announce) -> None:
        """Takes what announces derivatives that PyTorch computes of the parts in ONNX Runtime."""
        for step in self._steps:
            if step.onnx is not None and step.plain is not None:
                step.onnx.replay_by(step.plain, announce, runnable(step.plain))

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

    def executed(self, names: Sequence[str]) -> Iterator[tuple[str, ir.Model]]:
        """Yields the models that ONNX Runtime runs, each with what it is; `names` are those of the arguments."""
        for number, step in enumerate(self._steps):
            if step.onnx is not None:
                taken = [names[place] if place < len(names) else f"value{place}" for place in step.takes]
                for kind, model in step.onnx.executed(taken):
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


_ROUNDS = 8


def compile_in_steps(
    graph_module: fx.GraphModule,
    error: ORTModuleONNXModelException,
    gradients: Gradients,
    device: torch.device,
    severity: int,
    layouts: Sequence[Layout | None],
) -> Steps:
    """Returns a graph that ONNX Runtime cannot run as a whole as steps, of which it runs what it can.

    Args:
        graph_module: a functional ATen graph.
        error: why it cannot be run as a whole.
        gradients: where the graph has gradients.
        device: of the tensors.
        severity: the least severity of what ONNX Runtime prints.
        layouts: per output of the graph, how it lies in memory in eager PyTorch; None where it is contiguous.

    Raises:
        ORTModuleONNXModelException: `error`, if nothing is left for ONNX Runtime, or it names no operator.
    """
    with building():
        refused = _with_memory(refused_nodes(graph_module))
    reason = error
    for _ in range(_ROUNDS):
        known = len(refused)
        refused = {**_with_memory(_named(graph_module.graph, reason)), **refused}
        if len(refused) == known and reason is not error:
            break
        try:
            with building():
                steps = _steps(graph_module, dict(refused), gradients, device, severity, layouts)
        except ORTModuleONNXModelException as next_reason:
            reason = next_reason
            continue
        except ORTModuleTorchModelException as why:
            raise error from why
        if steps is None:
            break
        return steps
    raise error


def _with_memory(refused: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """With the views that nodes address the memory of: what ONNX Runtime makes of a view has memory of its own."""
    found = dict(refused)
    for node, reason in refused.items():
        source = node.args[0] if "as_strided" in str(node.target) else None
        while isinstance(source, fx.Node) and getattr(source.target, "is_view", False):
            found.setdefault(source, reason)
            source = source.args[0]
    return found


def _named(graph: fx.Graph, error: ORTModuleONNXModelException) -> dict[fx.Node, str]:
    """The nodes that an error is about, all that are alike if it is about their dtypes or rules, with the reason.

    ONNX nodes have names like `grad/convolution_1/Conv/ConvTranspose`.
    """
    by_name = {node.name: node for node in graph.nodes if node.op == "call_function"}
    for path in re.findall(r"[\w.]+(?:/[\w.]+)+", str(error)):
        node = by_name.get(next(name for name in path.split("/") if name != "grad"))
        if node is not None:
            alike = "no kernel" in str(error) or "no VJP rule" in str(error)
            nodes = [other for other in by_name.values() if _kind(other) == _kind(node)] if alike else [node]
            return dict.fromkeys(nodes, str(error).splitlines()[0])
    return {}


def _kind(node: fx.Node) -> tuple[Any, ...]:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return node.target, *(getattr(value, "dtype", None) for value in values)


def _steps(
    graph_module: fx.GraphModule,
    refused: dict[fx.Node, str],
    gradients: Gradients,
    device: torch.device,
    severity: int,
    layouts: Sequence[Layout | None],
) -> Steps | None:
    parts = partition(graph_module, refused)
    if not parts:
        return None
    graph = graph_module.graph
    differentiable = _with_gradients(graph_module, gradients, refused)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    places = {node: place for place, node in enumerate([*placeholders, *(n for p in parts for n in p.gives)])}
    kept = set(mutations(graph).values())
    output = next(node for node in graph.nodes if node.op == "output")
    kept.update(output.all_input_nodes)
    laid_out = {
        node: layout for node, layout in zip(output.args[0], layouts, strict=True) if layout is not None
    }
    last = {node: number for number, part in enumerate(parts) for node in (*part.gives, *part.takes)}
    steps = []
    for number, part in enumerate(parts):
        step = Step(
            part.graph_module.forward,
            tuple(places[node] for node in part.takes),
            tuple(places[node] for node in part.gives),
            tuple(places[node] for node, end in last.items() if end == number and node not in kept),
        )
        if part.in_pytorch:
            contiguous = {node for other in parts if not other.in_pytorch for node in other.gives}
            orders = [memory_order(_fake(node)) if node in contiguous else [] for node in part.takes]
            steps.append(replace(step, run=_in_order(runnable(part.graph_module), orders)))
            continue
        written = [
            node in placeholders and node in mutations(graph) and gradients.carried[placeholders.index(node)]
            for node in part.takes
        ]
        plain = copy.copy(part.graph_module)
        plain.graph = copy.deepcopy(part.graph_module.graph)
        onnx = _onnx_part(
            part, differentiable, written, device, severity, [laid_out.get(node) for node in part.gives]
        )
        steps.append(replace(step, run=onnx.run, onnx=onnx, plain=plain))
    return Steps(graph_module, places, steps, gradients, refused, device)


def _fake(node: fx.Node) -> torch.Tensor:
    fake = node.meta["val"]
    return fake if isinstance(fake, torch.Tensor) else torch.empty(0)


def _in_order(run: Callable[..., Any], orders: Sequence[Sequence[int]]) -> Callable[..., Any]:
    """Returns `run` for tensors that ONNX Runtime has left contiguous, of which it takes some in another order.

    What can be viewed, and where in a tensor random numbers go, depends on it.

    Args:
        run: takes tensors and numbers.
        orders: per argument the axes, from the slowest in memory to the fastest; nothing where they are as they are.
    """
    changed = [
        (place, tuple(order), tuple(sorted(range(len(order)), key=order.__getitem__)))
        for place, order in enumerate(orders)
        if list(order) != sorted(order)
    ]
    if not changed:
        return run

    def run_in_order(*args: Any) -> Any:
        given = list(args)
        for place, order, back in changed:
            given[place] = given[place].permute(order).contiguous().permute(back)
        return run(*given)

    return run_in_order


def _onnx_part(
    part: Part,
    differentiable: set[fx.Node],
    written: Sequence[bool],
    device: torch.device,
    severity: int,
    layouts: Sequence[Layout | None],
) -> OnnxPart:
    lowered = lower_graph(part.graph_module)
    flags = [False] * len(lowered.model.graph.outputs)
    for (_, index), node in zip(lowered.outputs, part.gives, strict=True):
        flags[index] = node in differentiable
    overwritten = [index for index, place in enumerate(lowered.inputs) if written[place]]
    onnx = OnnxPart(lowered, flags, device, dict.fromkeys(range(len(flags)), overwritten), severity, layouts)
    onnx.prepare([node in differentiable for node in part.takes])
    return onnx


def _with_gradients(
    graph_module: fx.GraphModule, gradients: Gradients, refused: dict[fx.Node, str]
) -> set[fx.Node]:
    """The nodes that a gradient comes to."""
    graph = graph_module.graph
    found = differentiable_nodes(graph_module, gradients.inputs, refused)
    output = next(node for node in graph.nodes if node.op == "output")
    stack = [node for node, flag in zip(output.args[0], gradients.outputs, strict=True) if flag]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    stack += [
        value for node, value in mutations(graph).items() if gradients.carried[placeholders.index(node)]
    ]
    reached: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in found and node not in reached:
            reached.add(node)
            stack += node.all_input_nodes
    return reached
