"""`torch.compile` with a backend that runs each captured graph in ONNX Runtime."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime as ort
import torch
from torch import fx
from torch.autograd import forward_ad

from onnxtrain.ortmodule._exceptions import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from onnxtrain.ortmodule._options import DebugOptions, FallbackPolicy, LogLevel, module_logger
from onnxtrain.ortmodule._report import GraphRecord, Report
from onnxtrain.ortmodule._torch import CompileContext, foreach_copy
from onnxtrain.ortmodule.capture._aliases import Aliases, Overlaps, split_aliases
from onnxtrain.ortmodule.capture._assertions import checked, mark_assertions, take_assertions
from onnxtrain.ortmodule.capture._breaks import break_reason
from onnxtrain.ortmodule.capture._calling import call_directly
from onnxtrain.ortmodule.capture._checkpoint import inline_checkpoints
from onnxtrain.ortmodule.capture._data_setting import copy_set_data, refuse_set_data
from onnxtrain.ortmodule.capture._dynamo import capture
from onnxtrain.ortmodule.capture._gradients import (
    GradientFlow,
    example_values,
    flow_of,
    note_inputs,
    unseen_by_hooks,
)
from onnxtrain.ortmodule.capture._mixed_dtypes import RefusedByPyTorch
from onnxtrain.ortmodule.capture._no_grad import correct_requires_grad
from onnxtrain.ortmodule.capture._refused_gradients import refuse_missing_gradients
from onnxtrain.ortmodule.capture._saved import SavedArguments, saved_arguments
from onnxtrain.ortmodule.capture._split import (
    has_custom_function,
    keep_from_global_hooks,
    split_at_custom_functions,
)
from onnxtrain.ortmodule.lowering import aten as _aten
from onnxtrain.ortmodule.lowering._functional_graph import functional_graph
from onnxtrain.ortmodule.lowering._graph_lowering import lower_graph
from onnxtrain.ortmodule.module._pytorch_work import unwatched
from onnxtrain.ortmodule.sessions._export import CompiledGraphs, argument_names
from onnxtrain.ortmodule.sessions._layout import Layout, layouts_of
from onnxtrain.ortmodule.sessions._mixed_graph import Gradients, Steps, compile_in_steps
from onnxtrain.ortmodule.sessions._onnx_part import OnnxPart, building, output_of
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Announce
from onnxtrain.ortmodule.sessions._session import is_of_onnxruntime

del _aten

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compile_module(
    module: torch.nn.Module, options: DebugOptions, report: Report, graphs: CompiledGraphs
) -> Callable[..., Any]:
    """Returns `module` as a callable whose graphs run in ONNX Runtime, hooks and all."""
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
        report: where captured graphs are recorded.
        graphs: where those that ONNX Runtime runs are kept, to be written.
        fallback: False forbids every fallback, whatever the options say.
    """
    options = options or DebugOptions()
    report = report if report is not None else Report()
    policy = options.fallback_policy if fallback else FallbackPolicy.DISABLE
    log = module_logger(options.log_level)
    numbers = itertools.count()
    captures: Counter[Any] = Counter()

    def compile_graph(
        graph_module: fx.GraphModule, plain: fx.GraphModule | None = None
    ) -> Callable[..., Any]:
        start = time.perf_counter()
        name = f"graph {next(numbers)}"
        plain = plain or _copied(graph_module)
        log.log(LogLevel.VERBOSE.logging_level, "%s: captured\n%s", name, plain.graph)
        messages = take_assertions(graph_module)
        unchecked = _copied(graph_module) if messages else plain
        names = argument_names(plain)
        _forget_arguments(plain, unchecked)
        try:
            compiled = _compile(graph_module, policy, options.log_level.onnxruntime_severity)
        except ORTModuleFallbackException as error:
            if not policy.allows(error):
                raise
            log.info("%s: runs in PyTorch: %s", name, error)
            calls = sum(node.op.startswith("call") for node in plain.graph.nodes)
            record = GraphRecord(
                name,
                "inference",
                "-",
                calls,
                fallback_reason=str(error),
                break_reason=break_reason(graph_module),
            )
            return _FirstCall(plain.forward, report, record, start, log)
        compiled.replay_by(plain, unchecked, _Derivatives(name, plain, report, policy).announce)
        if graphs is not None:
            graphs.add(compiled.body, names)
        if options.save_onnx:
            compiled.body.save(options, name)
        record = dataclasses.replace(compiled.body.record(name), break_reason=break_reason(graph_module))
        log.info(
            "%s: compiled for %s on %s in %.2f s: %d nodes forward, %d backward",
            name, record.mode, record.device, time.perf_counter() - start, record.forward_nodes, record.backward_nodes,
        )  # fmt: skip
        if record.fallback is not None:
            log.info("%s", record.fallback)
        log.debug("%s: %s", name, ", ".join(f"{op} {count}" for op, count in compiled.body.ops().items()))
        return _FirstCall(checked(compiled, messages), report, record, start, log)

    def backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        with unseen_by_hooks():
            return compile_captured(graph_module, example_inputs)

    def compile_captured(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        _warn_of_many_captures(captures)
        keep_from_global_hooks(graph_module)
        note_inputs(graph_module, example_inputs)
        correct_requires_grad(graph_module)
        mark_assertions(graph_module)
        copy_set_data(graph_module)
        plain = _copied(graph_module)
        inline_checkpoints(graph_module)
        if not has_custom_function(graph_module):
            return compile_graph(graph_module, plain)
        return split_at_custom_functions(graph_module, compile_graph).forward

    return backend


def _copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    result = copy.copy(graph_module)
    result.graph = copy.deepcopy(graph_module.graph)
    return result


def _forget_arguments(*graph_modules: fx.GraphModule) -> None:
    """Removes what Dynamo notes of arguments from graphs that are kept.

    The note has a weak reference to the tensor, and a parameter with one cannot be swapped
    (`torch.__future__.set_swap_module_params_on_conversion`).
    """
    for graph_module in graph_modules:
        for node in graph_module.graph.nodes:
            node.meta.pop("grapharg", None)


class _Derivatives:
    """Announces derivatives of a graph that PyTorch computes, once per kind."""

    def __init__(self, name: str, plain: fx.GraphModule, report: Report, policy: FallbackPolicy) -> None:
        self._name = name
        self._calls = sum(node.op.startswith("call") for node in plain.graph.nodes)
        self._report = report
        self._policy = policy
        self._said: set[str] = set()

    def announce(self, kind: str, error: ORTModuleFallbackException) -> None:
        """Warns of one, and reports it; raises `error` if the policy forbids it."""
        if not self._policy.allows(error):
            raise error
        if kind in self._said:
            return
        self._said.add(kind)
        record = GraphRecord(
            f"{self._name}, {kind}", "training", "-", self._calls, fallback_reason=str(error)
        )
        self._report.record(record)
        _warn_of_pytorch(record)


def _warn_of_pytorch(record: GraphRecord) -> None:
    warnings.warn(f"ORTModule: {record.fallback}", stacklevel=3)


_MANY = 64


def _warn_of_many_captures(captures: Counter[Any]) -> None:
    """Counts a capture, and warns if a function has had 64 before; at 256 Dynamo would capture no more."""
    current = CompileContext.current_compile_id()
    function = None if current is None else current.frame_id
    captures[function] += 1
    if captures[function] == _MANY + 1:
        warnings.warn(
            f"ORTModule: a function has been captured {_MANY} times. A number or a string that is another one in each "
            "call (an argument, or an attribute that counts or anneals) does that: make it a tensor. "
            "TORCH_LOGS=recompiles in the environment names it",
            stacklevel=2,
        )


def _compile(graph_module: fx.GraphModule, policy: FallbackPolicy, severity: int) -> CompiledGraph:
    """Raises ORTModuleFallbackException where ONNX Runtime cannot run the graph; it prints what has `severity`."""
    device = _common_device(graph_module)
    values = example_values(graph_module)
    needs = [isinstance(v, torch.Tensor) and v.requires_grad for v in values]
    try:
        refuse_set_data(graph_module)
        refuse_missing_gradients(graph_module)
        carries = [_carries_gradient(value) for value in values]  # which raises for what autograd has lost
        overlaps = Overlaps(graph_module)
        aliases = split_aliases(graph_module)
        flow = flow_of(graph_module)
        carries = [flag and place not in flow.kept for place, flag in enumerate(carries)]
        gradients = Gradients(
            needs, carries, _outputs_requiring_grad(graph_module), *_links(graph_module, flow)
        )
        saved = saved_arguments(graph_module)
        layouts = layouts_of(graph_module)
        functional = functional_graph(graph_module, flow)
    except RefusedByPyTorch:
        raise
    except Exception as error:  # tracing runs the user's code and PyTorch's, which raise anything
        raise ORTModuleTorchModelException(
            f"capturing the graph failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    try:
        with building():
            return CompiledGraph(
                _whole(functional, gradients, device, severity, layouts, saved), gradients, aliases, overlaps
            )
    except ORTModuleONNXModelException as error:
        steps = compile_in_steps(functional, error, gradients, device, severity, layouts)
        if steps.in_pytorch and not policy.allows(error):
            raise
        return CompiledGraph(steps, gradients, aliases, overlaps)


def _whole(
    functional: fx.GraphModule,
    gradients: Gradients,
    device: torch.device,
    severity: int,
    layouts: Sequence[Layout | None],
    saved: SavedArguments | None,
) -> OnnxPart:
    lowered = lower_graph(functional)
    differentiable = [False] * len(lowered.model.graph.outputs)
    for (kind, index), flag in zip(lowered.outputs, gradients.outputs, strict=True):
        if kind in ("tensor", "complex"):
            differentiable[index] = flag
    for placeholder, index in lowered.mutated:
        differentiable[index] |= gradients.carried[placeholder]
    linked = {
        index: gradients.links[output]
        for output, (_, index) in enumerate(lowered.outputs)
        if output in gradients.links
    }
    linked |= {index: gradients.written_links.get(place, frozenset()) for place, index in lowered.mutated}
    inputs = {place: index for index, place in enumerate(lowered.inputs)}
    links = {
        index: [inputs[place] for place in places if place in inputs] for index, places in linked.items()
    }
    return OnnxPart(lowered, differentiable, device, links, severity, layouts, saved)


def _common_device(graph_module: fx.GraphModule) -> torch.device:
    devices = {v.device for v in example_values(graph_module) if isinstance(v, torch.Tensor)}
    kinds = {device.type for device in devices}
    if len(devices) > 1 or not kinds <= {"cpu", "cuda"}:
        names = ", ".join(sorted(map(str, devices)))
        raise ORTModuleDeviceException(
            f"its tensors are on {names}; ONNX Runtime sessions run on one CPU or CUDA device"
        )
    if "cuda" in kinds and "CUDAExecutionProvider" not in ort.get_available_providers():
        raise ORTModuleDeviceException(
            f"its tensors are on {next(iter(devices))}, and this onnxruntime has no CUDA provider; "
            "install onnxruntime-gpu in its place"
        )
    return next(iter(devices), torch.device("cpu"))


def _outputs_requiring_grad(graph_module: fx.GraphModule) -> list[bool]:
    node = next(n for n in graph_module.graph.nodes if n.op == "output")
    flags = []
    for item in node.args[0]:
        value = item.meta.get("example_value") if isinstance(item, fx.Node) else None
        flags.append(isinstance(value, torch.Tensor) and value.requires_grad)
    return flags


def _links(
    graph_module: fx.GraphModule, flow: GradientFlow
) -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
    """What `Gradients` calls so."""
    returned = next(node for node in graph_module.graph.nodes if node.op == "output").args[0]
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return (
        {index: flow.links[node] for index, node in enumerate(returned) if node in flow.links},
        {place: flow.links[node] for place, node in enumerate(placeholders) if node in flow.links},
    )


def _carries_gradient(value: Any) -> bool:
    """Whether an input, when the graph is done, is a result of it that has a gradient: `x.mul_(weight)`."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def _is_dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class CompiledGraph:
    """One captured graph: takes what Dynamo passes, returns what the graph returns.

    Args:
        body: computes its results.
        gradients: where the graph has gradients.
        aliases: the outputs that share memory, with inputs or with each other.
        overlaps: finds inputs that share memory in a way that the graph is not made for.
    """

    def __init__(
        self, body: OnnxPart | Steps, gradients: Gradients, aliases: Aliases | None, overlaps: Overlaps
    ) -> None:
        self.body = body
        self._aliases = aliases
        self._overlaps = overlaps
        self._in_order = body.outputs == [("tensor", index) for index in range(len(body.outputs))]
        changed = {place for place, _ in body.mutated}
        self._unnoticed = frozenset(changed - overlaps.noticed)
        written = {place for place in changed if gradients.carried[place]}
        # Backward wants what was there before the graph changed it. What carries a gradient afterwards would,
        # kept there, keep its own graph alive.
        reads = body.prepare(gradients.inputs)
        self._copied = [
            index
            for index, place in enumerate(body.inputs)
            if reads and place in changed and (index in reads or place in written)
        ]

    def replay_by(self, plain: fx.GraphModule, unchecked: fx.GraphModule, announce: Announce) -> None:
        """Takes the graph in PyTorch, for derivatives and for messages that ONNX Runtime does not give.

        Args:
            plain: with its assertions.
            unchecked: with the conditions of these as results.
            announce: says what PyTorch is about to compute.
        """
        self._plain = plain.forward
        self._unchecked = unchecked.forward
        self._announce = announce
        self.body.replay_by(unchecked, announce)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Runs the graph, writes mutated inputs back, and returns its outputs."""
        outputs: tuple[Any, ...] = unwatched(self._compute, args)
        return outputs

    def _compute(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        body = self.body
        tensors = [a if isinstance(a := args[i], torch.Tensor) else torch.tensor(a) for i in body.inputs]
        if forward_ad._current_level >= 0 and any(map(_is_dual, tensors)):
            why = (
                "an input has a tangent (torch.autograd.forward_ad); torch.autograd.functional.jvp needs none"
            )
            self._announce("forward-mode derivative", ORTModuleTorchModelException(why))
            return tuple(self._unchecked(*args))
        if self._overlaps.looked_for and self._overlaps.found(args):
            why = (
                "two inputs share memory, of which the graph writes to one; when it was captured they did not"
            )
            self._announce("overlapping inputs", ORTModuleTorchModelException(why))
            return tuple(self._plain(*args))
        for index in self._copied:
            tensors[index] = tensors[index].clone()
        try:
            results = body.results(args, tensors)
        except Exception as error:
            if error.__cause__ is not None and is_of_onnxruntime(error.__cause__):
                self._plain(*args)  # its assertions come first
            raise
        if body.mutated:
            self._write_back(args, results)
        if self._in_order:
            outputs = tuple(results[: len(body.outputs)])
        else:
            outputs = tuple([output_of(kind, value, args, results) for kind, value in body.outputs])
        return outputs if self._aliases is None else self._aliases.fill(outputs, args)

    def _write_back(self, args: tuple[Any, ...], results: Sequence[torch.Tensor]) -> None:
        """Copies what the graph computes of inputs that it changes into these."""
        targets, sources = [], []
        for placeholder, output in self.body.mutated:
            target = args[placeholder].data if placeholder in self._unnoticed else args[placeholder]
            source = results[output]
            if source.requires_grad:
                with torch.enable_grad():
                    target.copy_(source)
            else:
                targets.append(target)
                sources.append(source)
        if targets:
            with torch.no_grad():
                foreach_copy(targets, sources)


class _FirstCall:
    """Records a graph together with the time from its capture to its first result.

    Warns if it runs in PyTorch, but not before it has: what PyTorch cannot run either is the caller's error.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        report: Report,
        record: GraphRecord,
        start: float,
        log: logging.Logger,
    ) -> None:
        self._run = run
        self._report = report
        self._record: GraphRecord | None = record
        self._start = start
        self._log = log

    def __call__(self, *args: Any) -> Any:
        if self._record is None:
            return self._run(*args)
        result = self._run(*args)
        if self._record is not None:  # one that was first called in this call may be the same graph
            seconds = time.perf_counter() - self._start
            self._report.record(dataclasses.replace(self._record, first_call_seconds=seconds))
            self._log.info("%s: first call after %.2f s", self._record.name, seconds)
            if self._record.fallback_reason is not None:
                _warn_of_pytorch(self._record)
            self._record = None
            call_directly(self, sys._getframe(2).f_globals)
        return result
