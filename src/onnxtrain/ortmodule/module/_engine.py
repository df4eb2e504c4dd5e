"""Compiles captured graphs for ONNX Runtime: describes them, lowers them and creates their sessions.

:meth:`_GraphCompiler.backend` is the backend that Dynamo calls with a graph. It uses the packages `capture`, `lowering`
and `sessions`, in this order.
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
from onnxtrain.ortmodule.capture._break_even import BreakEven
from onnxtrain.ortmodule.capture._errors import RefusedByPyTorch, SymbolicBatchRefused
from onnxtrain.ortmodule.capture._modes import leaving_modes, restoring_modes
from onnxtrain.ortmodule.capture._nodes import example_values, tensors_in
from onnxtrain.ortmodule.capture._signature import GraphSignature, describe
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow
from onnxtrain.ortmodule.capture.autograd._gradients import unseen_by_hooks
from onnxtrain.ortmodule.capture.autograd._rehearsal import note_inputs
from onnxtrain.ortmodule.capture.dynamo._batch_axis import batch_symbols, has_symbolic_batch
from onnxtrain.ortmodule.capture.dynamo._calling import call_directly
from onnxtrain.ortmodule.capture.dynamo._capture import capture
from onnxtrain.ortmodule.capture.graph._assertions import (
    Check,
    assertions_to_outputs,
    mark_assertions,
    without_assumptions,
)
from onnxtrain.ortmodule.capture.graph._batch import (
    batch_of,
    recorded_guards,
    specialized_values,
    with_batch_size,
)
from onnxtrain.ortmodule.capture.graph._breaks import break_reason, may_depend_on_symbols
from onnxtrain.ortmodule.capture.graph._checkpoint import inline_checkpoints, preserve_random_state
from onnxtrain.ortmodule.capture.graph._data_setting import copy_set_data
from onnxtrain.ortmodule.capture.graph._no_grad import correct_requires_grad
from onnxtrain.ortmodule.capture.graph._refused_shards import refuse_shards
from onnxtrain.ortmodule.capture.graph._split import (
    differentiated_outputs,
    has_custom_function,
    keep_from_global_hooks,
    split_graph,
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

# Imported only to fill the table of lowerings.
del _aten

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compile_module(
    module: torch.nn.Module,
    options: DebugOptions,
    report: Report,
    graphs: CompiledGraphs,
    break_even: BreakEven,
) -> Callable[..., Any]:
    """Returns a callable equivalent to `module(*args, **kwargs)`, hooks included, that runs in ONNX Runtime.

    Args:
        module: the module.
        options: what to log and save, and which graphs may fall back to PyTorch.
        report: receives a record of each captured graph.
        graphs: receives each graph that ONNX Runtime runs, for `export_training_graph`.
        break_even: estimates whether another capture pays off.
    """
    return capture(module, onnxruntime_backend(options, report, graphs, break_even), break_even)


def onnxruntime_backend(
    options: DebugOptions | None = None,
    report: Report | None = None,
    graphs: CompiledGraphs | None = None,
    break_even: BreakEven | None = None,
    *,
    fallback: bool = True,
) -> Backend:
    """Returns a backend for `torch.compile` that runs graphs in ONNX Runtime.

    Args:
        options: what to log and save, and which graphs may fall back to PyTorch.
        report: receives a record of each captured graph.
        graphs: receives each graph that ONNX Runtime runs, for `export_training_graph`.
        break_even: estimates whether another compilation pays off. By default, graphs are compiled for a new batch size
            immediately.
        fallback: False to forbid fallbacks to PyTorch, regardless of `options`.
    """
    options = options or DebugOptions()
    policy = options.fallback_policy if fallback else FallbackPolicy.DISABLE
    return _GraphCompiler(
        options, report if report is not None else Report(), graphs, policy, break_even or BreakEven(False)
    ).backend


@dataclasses.dataclass(frozen=True)
class _Captured:
    """A graph that Dynamo has captured, with everything that doesn't depend on the batch size.

    Attributes:
        graph_module: the graph, with the conditions of its assertions as its last outputs.
        plain: a copy of the graph for PyTorch, with its assertions.
        unchecked: a copy of `graph_module` for PyTorch; `plain` if the graph has no assertions.
        checks: the checks of the assertions.
        break_reason: where and why a graph break ended the graph, or None if none did.
        announce: warns of computations that PyTorch is about to run, once for all batch sizes.
    """

    graph_module: fx.GraphModule
    plain: fx.GraphModule
    unchecked: fx.GraphModule
    checks: list[Check]
    break_reason: str | None
    announce: Announce

    @functools.cached_property
    def described(self) -> tuple[GraphSignature, GradientFlow, fx.GraphModule]:
        """The signature of the graph, its gradient flow, and a copy of the graph for derivatives in PyTorch.

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
            # Views were removed from the outputs, and their bases were appended, which a replay must return, too.
            replayed = _shallow_copy(graph_module)
            _forget_arguments(replayed)
        return signature, flow, replayed


class _GraphCompiler:
    """Compiles and numbers the graphs of one ORTModule, or of one set of `torch.compile` options.

    Args:
        options: what to log and save.
        report: receives a record of each captured graph.
        graphs: receives each graph that ONNX Runtime runs, for `export_training_graph`.
        policy: which graphs may fall back to PyTorch.
        break_even: estimates whether another compilation pays off; receives the cost of each compiled graph.
    """

    def __init__(
        self,
        options: DebugOptions,
        report: Report,
        graphs: CompiledGraphs | None,
        policy: FallbackPolicy,
        break_even: BreakEven,
    ) -> None:
        self._options = options
        self._report = report
        self._graphs = graphs
        self._policy = policy
        self._break_even = break_even
        self._log = module_logger(options.log_level)
        self._numbers = itertools.count()
        self._free_names: list[str] = []
        self._captures: Counter[Any] = Counter()

    def backend(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compiles a graph; Dynamo calls this method with each graph that it captures.

        Args:
            graph_module: the graph; changed in place.
            example_inputs: the inputs of the captured call.

        Returns:
            A callable that runs the graph.

        Raises:
            SymbolicBatchRefused: the graph must be captured again, with a fixed batch size.
            ORTModuleFallbackException: ONNX Runtime cannot run the graph, and the policy forbids PyTorch.
        """
        if has_symbolic_batch(graph_module) and may_depend_on_symbols(graph_module):
            raise SymbolicBatchRefused
        warn_of_many_captures(self._captures)
        with unseen_by_hooks():
            keep_from_global_hooks(graph_module)
            note_inputs(graph_module, example_inputs)
            correct_requires_grad(graph_module)
            mark_assertions(graph_module)
            # Copied before checkpoints are inlined: derivatives that PyTorch computes run this copy, with its regions.
            plain = _shallow_copy(graph_module)
            copy_set_data(graph_module)
            if inline_checkpoints(graph_module):
                preserve_random_state(plain)
            symbols = batch_symbols(graph_module, example_inputs)
            ends = differentiated_outputs(graph_module)
            if ends or has_custom_function(graph_module):
                compile_part = functools.partial(self._compile, symbols=symbols)
                split = restoring_modes(split_graph(graph_module, compile_part, ends))
                return leaving_modes(plain, split)
            run = leaving_modes(plain, self._compile(graph_module, plain, symbols))
        call_directly(run)
        return run

    def _compile(
        self,
        graph_module: fx.GraphModule,
        plain: fx.GraphModule | None = None,
        symbols: frozenset[Any] = frozenset(),
    ) -> Callable[..., Any]:
        """Returns a callable that runs a graph in ONNX Runtime, or in PyTorch as a fallback.

        Args:
            graph_module: the graph, which must not apply custom autograd functions; changed in place.
            plain: a copy of the graph for PyTorch; by default a copy of `graph_module`.
            symbols: the symbols of the batch size. Empty if no size is symbolic, or if other sizes are symbolic, too.

        Raises:
            SymbolicBatchRefused: ONNX Runtime cannot run the graph, which has a symbolic batch size.
            ORTModuleFallbackException: ONNX Runtime cannot run the graph, and the policy forbids PyTorch.
        """
        start = time.perf_counter()
        plain = without_assumptions(plain or _shallow_copy(graph_module))
        reason = break_reason(graph_module)
        checks = assertions_to_outputs(graph_module)
        unchecked = _shallow_copy(graph_module) if checks else plain
        _forget_arguments(plain, unchecked)
        name = self._next_name()
        announce = Derivatives(name, plain, self._report, self._policy).announce
        captured = _Captured(graph_module, plain, unchecked, checks, reason, announce)
        batch = batch_of(graph_module, symbols)
        if batch is None:
            return self._compiled(captured, name, start, specialized_values(graph_module))
        values = with_batch_size(graph_module, batch, None)

        def compile_for(args: Sequence[Any]) -> Callable[..., Any]:
            start = time.perf_counter()
            return self._compiled(
                captured, self._next_name(), start, with_batch_size(graph_module, batch, args)
            )

        def compile_for_all() -> tuple[Callable[..., Any], Callable[[Size], bool]]:
            with recorded_guards(graph_module, batch) as holds:
                run = self._compiled(
                    captured, self._next_name(), time.perf_counter(), specialized_values(graph_module)
                )
                return run, holds

        compiled = self._compiled(captured, name, start, values)
        return BySize(
            compiled,
            restoring_modes(plain),
            self._break_even,
            batch.value(values),
            batch,
            compile_for,
            compile_for_all,
        )

    def _next_name(self) -> str:
        """Returns the name of the next graph, e.g. "graph 0". A graph that is captured again keeps its name."""
        return self._free_names.pop() if self._free_names else f"graph {next(self._numbers)}"

    def _compiled(
        self, captured: _Captured, name: str, start: float, values: Sequence[Any]
    ) -> Callable[..., Any]:
        """Returns a callable that runs a graph and, in its first call, adds the graph to the report.

        Args:
            captured: the graph.
            name: the graph's name in the report, e.g. "graph 0".
            start: `time.perf_counter()` at the start of the compilation, in seconds.
            values: example values of the graph's inputs, with fixed or symbolic sizes.

        Raises:
            ORTModuleFallbackException: ONNX Runtime cannot run the graph, and the policy forbids PyTorch.
            SymbolicBatchRefused: ONNX Runtime cannot run the graph, which has a symbolic batch size.
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
            return FirstCall(restoring_modes(plain), self._report, record, start, self._log)
        record = dataclasses.replace(compiled.body.record(name), break_reason=captured.break_reason)
        self._register(compiled.body, record, time.perf_counter() - start)
        return FirstCall(compiled.run, self._report, record, start, self._log)

    def _in_onnxruntime(self, captured: _Captured, values: Sequence[Any]) -> CompiledGraph:
        """Compiles a graph for ONNX Runtime: describes it, makes it functional, lowers it and creates its sessions.

        Args:
            captured: the graph.
            values: example values of the graph's inputs, with fixed or symbolic sizes.

        Raises:
            ORTModuleFallbackException: ONNX Runtime cannot run the graph.
        """
        severity, announce = self._options.log_level.onnxruntime_severity, captured.announce
        signature, flow, replayed = captured.described
        with _capturing():
            functional = functional_graph(captured.graph_module, flow, values)
        self._break_even.add(functional)
        body: OnnxPart | Steps
        try:
            with building():
                lowered = lower_graph(functional)
                body = OnnxPart(lowered, signature, replayed, announce, severity, args=values)
        # ONNX Runtime cannot run the whole graph: PyTorch runs the operators without a lowering or kernel.
        except ORTModuleONNXModelException as error:
            body = compile_in_steps(functional, error, signature, announce, severity)
            if body.in_pytorch and not self._policy.allows(error):
                raise
        return CompiledGraph(body, signature, captured.plain, captured.checks, announce)

    def _register(self, body: OnnxPart | Steps, record: GraphRecord, seconds: float) -> None:
        """Registers a compiled graph for `export_training_graph`, saves it if `save_onnx` is set, and logs it.

        Args:
            body: the compiled graph.
            record: its record.
            seconds: the time that the compilation took.
        """
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
    """Context manager that turns errors in describing or tracing a graph into exceptions that trigger the fallback.

    Raises:
        RefusedByPyTorch: raised by the `with` block; re-raised unchanged, so that there is no fallback.
        ORTModuleTorchModelException: the `with` block raised any other exception.
    """
    try:
        yield
    # Eager PyTorch raises in this case, too, so this is no reason for a fallback.
    except RefusedByPyTorch:
        raise
    # Tracing runs user code and PyTorch code, which may raise any exception.
    except Exception as error:
        raise ORTModuleTorchModelException(
            f"capturing the graph failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def _shallow_copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph that shares its attributes, e.g. constant tensors."""
    # A deep copy would copy the constant tensors.
    result = copy.copy(graph_module)
    result.graph = copy.deepcopy(graph_module.graph)
    return result


def _forget_arguments(*graph_modules: fx.GraphModule) -> None:
    """Removes Dynamo's references to arguments from the node metadata of graphs that outlive the capture."""
    # The metadata (PyTorch 2.13) has a weak reference to the tensor. `model.double()` could not swap a parameter with a
    # weak reference (`torch.__future__.set_swap_module_params_on_conversion`).
    for graph_module in graph_modules:
        for node in graph_module.graph.nodes:
            node.meta.pop("grapharg", None)
