"""Compile each graph that Dynamo captures for ONNX Runtime: describe it, lower it, open its sessions.

:meth:`_GraphCompiler.backend` is the backend that Dynamo calls with a graph. The rooms follow in its order: capture,
lowering, sessions.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._exceptions import (
    ORTModuleFallbackException,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from onnxtrain.ortmodule._options import DebugOptions, FallbackPolicy, LogLevel, module_logger
from onnxtrain.ortmodule._report import GraphRecord, Report
from onnxtrain.ortmodule.capture._errors import RefusedByPyTorch, SymbolicBatchRefused
from onnxtrain.ortmodule.capture._nodes import example_values, tensors_in
from onnxtrain.ortmodule.capture._signature import GraphSignature, describe
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow
from onnxtrain.ortmodule.capture.autograd._gradients import unseen_by_hooks
from onnxtrain.ortmodule.capture.autograd._rehearsal import note_inputs
from onnxtrain.ortmodule.capture.dynamo._batch_axis import batch_symbols, has_symbolic_batch
from onnxtrain.ortmodule.capture.dynamo._calling import call_directly
from onnxtrain.ortmodule.capture.dynamo._capture import capture
from onnxtrain.ortmodule.capture.graph._assertions import Check, checked, mark_assertions, take_assertions
from onnxtrain.ortmodule.capture.graph._batch import batch_of, recorded_guards, settled, with_batch_size
from onnxtrain.ortmodule.capture.graph._breaks import break_reason, ends_for_a_symbol
from onnxtrain.ortmodule.capture.graph._checkpoint import inline_checkpoints, preserve_random_state
from onnxtrain.ortmodule.capture.graph._data_setting import copy_set_data
from onnxtrain.ortmodule.capture.graph._no_grad import correct_requires_grad
from onnxtrain.ortmodule.capture.graph._refused_shards import refuse_shards
from onnxtrain.ortmodule.capture.graph._split import (
    has_custom_function,
    keep_from_global_hooks,
    split_at_custom_functions,
)
from onnxtrain.ortmodule.lowering import aten as _aten
from onnxtrain.ortmodule.lowering._functional_graph import functional_graph
from onnxtrain.ortmodule.lowering._graph_lowering import lower_graph
from onnxtrain.ortmodule.module._announcements import Derivatives, FirstCall, warn_of_many_captures
from onnxtrain.ortmodule.module._compiled_graph import CompiledGraph
from onnxtrain.ortmodule.module._sizes import BySize, Size
from onnxtrain.ortmodule.sessions._cut_into_steps import compile_in_steps
from onnxtrain.ortmodule.sessions._export import CompiledGraphs
from onnxtrain.ortmodule.sessions._mixed_graph import Steps
from onnxtrain.ortmodule.sessions._onnx_part import OnnxPart, building
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Announce
from onnxtrain.ortmodule.sessions._session import common_device

# It was imported to fill the table of lowerings.
del _aten

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compile_module(
    module: torch.nn.Module, options: DebugOptions, report: Report, graphs: CompiledGraphs
) -> Callable[..., Any]:
    """Returns a callable that does what `module(*args, **kwargs)` does, hooks included, in ONNX Runtime."""
    return capture(module, onnxruntime_backend(options, report, graphs))


def onnxruntime_backend(
    options: DebugOptions | None = None,
    report: Report | None = None,
    graphs: CompiledGraphs | None = None,
    *,
    fallback: bool = True,
) -> Backend:
    """Returns a backend for `torch.compile`.

    Args:
        options: what to log and save, and which graphs may fall back to PyTorch.
        report: gets a record of each captured graph.
        graphs: gets each graph that ONNX Runtime runs, for `export_training_graph`.
        fallback: False forbids every fallback, whatever the options say.
    """
    options = options or DebugOptions()
    policy = options.fallback_policy if fallback else FallbackPolicy.DISABLE
    return _GraphCompiler(options, report if report is not None else Report(), graphs, policy).backend


@dataclasses.dataclass(frozen=True)
class _Captured:
    """A graph that Dynamo has captured, with all that is worked out once for all sizes of its batch.

    Attributes:
        graph_module: the graph, whose assertions have become outputs.
        plain: the graph as it was captured.
        unchecked: a copy of `graph_module`.
        checks: the assertions.
        break_reason: why Dynamo ended the graph; None if it did not.
        announce: warns of what PyTorch is about to compute, once for all sizes.
    """

    graph_module: fx.GraphModule
    plain: fx.GraphModule
    unchecked: fx.GraphModule
    checks: list[Check]
    break_reason: str | None
    announce: Announce

    @functools.cached_property
    def described(self) -> tuple[GraphSignature, GradientFlow, fx.GraphModule]:
        """The signature of the graph, where gradients stop in it, and the graph that PyTorch differentiates.

        Raises:
            ORTModuleFallbackException: ONNX Runtime cannot run the graph.
        """
        graph_module = self.graph_module
        refuse_shards(graph_module)
        device = common_device(tensors_in(example_values(graph_module)))
        with _capturing():
            signature, flow = describe(graph_module, device)
        replayed = self.unchecked
        if len(signature.outputs) > signature.returned:
            # Views that share the memory of a result were taken out of the graph: that result was added to its outputs.
            replayed = _copied(graph_module)
            _forget_arguments(replayed)
        return signature, flow, replayed


class _GraphCompiler:
    """Compiles the graphs of one ORTModule, or of one choice of options of `torch.compile`, and numbers them.

    Args:
        options: what to log and save.
        report: gets a record of each captured graph.
        graphs: gets each graph that ONNX Runtime runs, for `export_training_graph`.
        policy: which graphs may fall back to PyTorch.
    """

    def __init__(
        self, options: DebugOptions, report: Report, graphs: CompiledGraphs | None, policy: FallbackPolicy
    ) -> None:
        self._options = options
        self._report = report
        self._graphs = graphs
        self._policy = policy
        self._log = module_logger(options.log_level)
        self._numbers = itertools.count()
        self._free_names: list[str] = []
        self._captures: Counter[Any] = Counter()

    def backend(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Returns a callable that runs a graph, which Dynamo has captured; Dynamo calls this with each graph."""
        if has_symbolic_batch(graph_module) and ends_for_a_symbol(graph_module):
            raise SymbolicBatchRefused
        warn_of_many_captures(self._captures)
        with unseen_by_hooks():
            keep_from_global_hooks(graph_module)
            note_inputs(graph_module, example_inputs)
            correct_requires_grad(graph_module)
            mark_assertions(graph_module)
            copy_set_data(graph_module)
            # Before checkpoints are inlined: derivatives that PyTorch computes run this copy, regions and all.
            plain = _copied(graph_module)
            if inline_checkpoints(graph_module):
                preserve_random_state(plain)
            symbols = batch_symbols(graph_module, example_inputs)
            if has_custom_function(graph_module):
                compile_part = functools.partial(self._compile, symbols=symbols)
                return split_at_custom_functions(graph_module, compile_part).forward
            run = self._compile(graph_module, plain, symbols)
        call_directly(run)
        return run

    def _compile(
        self,
        graph_module: fx.GraphModule,
        plain: fx.GraphModule | None = None,
        symbols: frozenset[Any] = frozenset(),
    ) -> Callable[..., Any]:
        """Returns a callable that runs a graph without custom functions: in ONNX Runtime, or else in PyTorch.

        Args:
            graph_module: the graph; it is taken apart.
            plain: the graph as it was captured; a copy of `graph_module` if left out.
            symbols: of the size of the batch, if the graph may be compiled for each size by itself.

        Raises:
            ORTModuleFallbackException: ONNX Runtime cannot run the graph, and the policy forbids PyTorch.
        """
        start = time.perf_counter()
        plain = plain or _copied(graph_module)
        reason = break_reason(graph_module)
        checks = take_assertions(graph_module)
        unchecked = _copied(graph_module) if checks else plain
        _forget_arguments(plain, unchecked)
        name = self._next_name()
        announce = Derivatives(name, plain, self._report, self._policy).announce
        captured = _Captured(graph_module, plain, unchecked, checks, reason, announce)
        batch = batch_of(graph_module, symbols)
        if batch is None:
            return self._compiled(captured, name, start, settled(graph_module))
        values = with_batch_size(graph_module, batch, None)

        def compile_for(args: Sequence[Any]) -> Callable[..., Any]:
            start = time.perf_counter()
            return self._compiled(
                captured, self._next_name(), start, with_batch_size(graph_module, batch, args)
            )

        def compile_for_all() -> tuple[Callable[..., Any], Callable[[Size], bool]]:
            with recorded_guards(graph_module, batch) as holds:
                run = self._compiled(captured, self._next_name(), time.perf_counter(), settled(graph_module))
                return run, holds

        compiled = self._compiled(captured, name, start, values)
        return BySize(compiled, batch.value(values), batch, compile_for, compile_for_all)

    def _next_name(self) -> str:
        """Returns the name of the next graph, e.g. "graph 0"."""
        return self._free_names.pop() if self._free_names else f"graph {next(self._numbers)}"

    def _compiled(
        self, captured: _Captured, name: str, start: float, values: Sequence[Any]
    ) -> Callable[..., Any]:
        """Returns a callable that runs a graph, and adds it to the report.

        Args:
            captured: the graph.
            name: in the report, e.g. "graph 0".
            start: `time.perf_counter()` when the work on it began, in seconds.
            values: example values of its inputs, with numbers or symbols for their sizes.

        Raises:
            ORTModuleFallbackException: ONNX Runtime cannot run the graph, and the policy forbids PyTorch.
        """
        plain = captured.plain
        self._log.log(LogLevel.VERBOSE.logging_level, "%s: captured\n%s", name, plain.graph)
        try:
            compiled = self._in_onnxruntime(captured, values)
        except ORTModuleFallbackException as error:
            if has_symbolic_batch(captured.graph_module):
                self._free_names.append(name)
                raise SymbolicBatchRefused from error
            if not self._policy.allows(error):
                raise
            self._log.info("%s: runs in PyTorch: %s", name, error)
            calls = sum(node.op.startswith("call") for node in plain.graph.nodes)
            record = GraphRecord(
                name, "inference", "-", calls, fallback_reason=str(error), break_reason=captured.break_reason
            )
            return FirstCall(plain.forward, self._report, record, start, self._log)
        record = dataclasses.replace(compiled.body.record(name), break_reason=captured.break_reason)
        self._keep(compiled.body, record, time.perf_counter() - start)
        return FirstCall(checked(compiled, captured.checks), self._report, record, start, self._log)

    def _in_onnxruntime(self, captured: _Captured, values: Sequence[Any]) -> CompiledGraph:
        """Returns a graph compiled for ONNX Runtime: described, made functional, lowered, given sessions.

        Args:
            captured: the graph.
            values: see `_compiled`.

        Raises:
            ORTModuleFallbackException: ONNX Runtime cannot run the graph.
        """
        severity, announce = self._options.log_level.onnxruntime_severity, captured.announce
        signature, flow, replayed = captured.described
        with _capturing():
            functional = functional_graph(captured.graph_module, flow, values)
        body: OnnxPart | Steps
        try:
            with building():
                lowered = lower_graph(functional)
                body = OnnxPart(lowered, signature, replayed, announce, severity, args=values)
        # As a whole ONNX Runtime cannot run it: PyTorch runs the operators that it has no form or kernel for.
        except ORTModuleONNXModelException as error:
            body = compile_in_steps(functional, error, signature, announce, severity)
            if body.in_pytorch and not self._policy.allows(error):
                raise
        return CompiledGraph(body, signature, captured.plain, captured.unchecked, announce)

    def _keep(self, body: OnnxPart | Steps, record: GraphRecord, seconds: float) -> None:
        """Keeps a compiled graph for `export_training_graph`, writes it if that is asked for, and logs it."""
        if self._graphs is not None:
            self._graphs.add(body)
        if self._options.save_onnx:
            body.save(self._options, record.name)
        self._log.info(
            "%s: compiled for %s on %s in %.2f s: %d nodes forward, %d backward",
            record.name, record.mode, record.device, seconds, record.forward_nodes, record.backward_nodes,
        )  # fmt: skip
        if record.fallback is not None:
            self._log.info("%s", record.fallback)
        self._log.debug("%s: %s", record.name, ", ".join(f"{op} {count}" for op, count in body.ops().items()))


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Turns errors of describing and tracing a graph into a reason to run it in PyTorch.

    Raises:
        ORTModuleTorchModelException: an error was raised.
    """
    try:
        yield
    # Eager PyTorch raises there, too: no reason to fall back.
    except RefusedByPyTorch:
        raise
    # Tracing runs code of the user's and of PyTorch's, which raise anything.
    except Exception as error:
        raise ORTModuleTorchModelException(
            f"capturing the graph failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def _copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph with nodes of its own and the same attributes."""
    # A deep copy would copy tensors that the graph holds as constants.
    result = copy.copy(graph_module)
    result.graph = copy.deepcopy(graph_module.graph)
    return result


def _forget_arguments(*graph_modules: fx.GraphModule) -> None:
    """Removes Dynamo's notes of arguments from graphs that outlive the capture."""
    # A note (PyTorch 2.13) has a weak reference to the tensor. A parameter with one cannot be swapped
    # (`torch.__future__.set_swap_module_params_on_conversion`), so that `model.double()` could not swap it.
    for graph_module in graph_modules:
        for node in graph_module.graph.nodes:
            node.meta.pop("grapharg", None)
