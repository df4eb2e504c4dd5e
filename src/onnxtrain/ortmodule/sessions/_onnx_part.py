"""Runs a captured graph, or a part of one, in ONNX Runtime."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.errors import OnnxTrainError
from onnxtrain.ortmodule._exceptions import ORTModuleFallbackException, ORTModuleONNXModelException
from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import GraphRecord
from onnxtrain.ortmodule.capture._signature import GraphOutput, GraphSignature
from onnxtrain.ortmodule.lowering._table import Lowered, UnsupportedATenOp
from onnxtrain.ortmodule.sessions._autograd import call
from onnxtrain.ortmodule.sessions._export import renamed
from onnxtrain.ortmodule.sessions._program import Program, TrainingStep
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Announce, Replay, ReplayedGraph
from onnxtrain.ortmodule.sessions._session import is_of_onnxruntime
from onnxtrain.passes import save_model


def output_of(kind: str, value: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """Returns the output of a captured graph for one pair (kind, value) in `Lowered.outputs` or `Steps.outputs`.

    Args:
        kind: "tensor", "complex", "number", "placeholder" or "constant".
        value: an index into `args` for the kind "placeholder", the Python value for "constant", and otherwise an index
            into `results`.
        args: the arguments of the captured graph.
        results: the results of the ONNX graph, or of the steps.
    """
    if kind == "constant":
        return value
    if kind == "placeholder":
        return args[value]
    return results[value].item() if kind == "number" else results[value]


class OnnxPart:
    """Runs a captured graph, or a part of one, in ONNX Runtime. The constructor creates the sessions.

    Args:
        lowered: the ONNX graph.
        signature: describes the inputs and outputs of the captured graph.
        plain: the captured graph in PyTorch, for derivatives that ONNX Runtime cannot compute.
        announce: warns that PyTorch, not ONNX Runtime, is about to run a computation.
        severity: minimum severity of the messages that ONNX Runtime prints, e.g. 3 for errors.
        run: runs `plain`; by default `restoring_modes(plain)`.
        args: example arguments of the captured graph. An `int` among them must have the same value in every call.

    Attributes:
        inputs: indices of the arguments that are inputs of the ONNX graph, e.g. [0, 2].
        outputs: for each output of the captured graph, the arguments `kind` and `value` of :func:`output_of`.
        mutated: pairs (index of an argument, index of the ONNX output that is copied into it after a run).
        program: the ONNX graph with its sessions.
        draws: True if a run draws random numbers.
        reads: indices into `inputs` of the inputs that the gradients depend on, e.g. (0, 1).
    """

    def __init__(
        self,
        lowered: Lowered,
        signature: GraphSignature,
        plain: fx.GraphModule,
        announce: Announce,
        severity: int,
        run: Callable[..., Any] | None = None,
        args: Sequence[Any] | None = None,
    ) -> None:
        self._lowered = lowered
        self._signature = signature
        self.inputs, self.outputs, self.mutated = lowered.inputs, lowered.outputs, lowered.mutated
        # Version counters are not checked if the graph writes to inputs: they don't tell its writes from the caller's.
        self.program = Program(
            lowered.model,
            _onnx_outputs(lowered, signature),
            signature.device,
            severity,
            checks=not lowered.mutated,
        )
        self._complex_inputs = [i for i, place in enumerate(lowered.inputs) if place in lowered.complex]
        self._complex_outputs = [index for kind, index in lowered.outputs if kind == "complex"]
        self._complex_outputs += [index for place, index in lowered.mutated if place in lowered.complex]
        self._returns_results = not (self._complex_inputs or self._complex_outputs or lowered.assertions)
        self._needs: tuple[bool, ...] | None = None
        self.draws = bool(lowered.random)
        self._has_outputs = bool(lowered.model.graph.outputs)
        self.reads = self._create_sessions()
        self._replayed = ReplayedGraph(plain, lowered, signature.device, run)
        self._announce = announce
        # A replay depends on the numbers among the arguments of a call. If they never change, one replay serves all
        # calls.
        same = args is not None and all(isinstance(args[index], int) for index in self._replayed.numbers)
        same = same or not self._replayed.numbers
        self._replay = Replay(self._replayed.of_call(args or ()), announce) if same else None

    @property
    def calls_operators(self) -> bool:
        """True if a run calls operators of PyTorch, unless PyTorch computes in place of ONNX Runtime."""
        return (
            self.draws
            or not self._returns_results
            or not set(self.inputs).isdisjoint(self._replayed.numbers)
            or any(kind == "number" for kind, _ in self.outputs)
            or any(
                output.dtype == ir.DataType.BOOL or 0 in (output.shape or ())
                for output in self._lowered.model.graph.outputs
            )
        )

    def _create_sessions(self) -> Sequence[int]:
        """Creates the sessions; returns the indices of the inputs that the gradients depend on."""
        # Sessions are not created lazily: a missing kernel must be found while the graph can still be cut into parts.
        lowered = self._lowered
        if not self._has_outputs:
            return ()
        needs = [self._signature.inputs[place].requires_grad for place in lowered.inputs]
        needs += [False] * len(lowered.random)
        if any(needs) and self.program.seeds:
            self._needs = tuple(needs)
            return self.program.training_step(self._needs).reads
        _ = self.program.inference
        return ()

    @property
    def step(self) -> TrainingStep | None:
        """The sessions for forward and backward, or None for inference."""
        return None if self._needs is None else self.program.training_step(self._needs)

    def results(self, args: Sequence[Any], tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the ONNX graph; returns its outputs, which :func:`output_of` maps to outputs of the captured graph.

        Args:
            args: the arguments of the captured graph.
            tensors: the arguments that are inputs of the ONNX graph, in the order of :attr:`inputs`. The list is
                modified: complex tensors are replaced with real views, and random numbers are appended.

        Raises:
            RuntimeError: an assertion of the graph failed.
        """
        if self._returns_results:
            return self._run(args, tensors)
        for index in self._complex_inputs:
            tensors[index] = torch.view_as_real(tensors[index].resolve_conj())
        results = self._run(args, tensors)
        for index, message in self._lowered.assertions:
            if not results[index].all():
                replay = Replay(self._replayed.of_call(args), self._announce)
                # The replay raises the error of eager PyTorch, which has more detail than `message`.
                replay.outputs(tensors)
                raise RuntimeError(message)
        if self._complex_outputs:
            results = list(results)
            for index in self._complex_outputs:
                parts = results[index]
                # `torch.view_as_complex` rejects the strides that DLPack gives tensors without elements.
                if not parts.numel():
                    parts = parts.clone(memory_format=torch.contiguous_format)
                results[index] = torch.view_as_complex(parts)
        return results

    def _run(self, args: Sequence[Any], tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Draws random numbers and runs the ONNX graph; if ONNX Runtime fails, reruns the graph in PyTorch."""
        if self.draws:
            device = self.program.device
            for random in self._lowered.random:
                drawn = random.draw(random.sizes(args))
                # A module on a GPU may draw random numbers on the CPU.
                tensors.append(drawn if device.type == "cpu" else drawn.to(device))
        if not self._has_outputs:
            return ()
        replay = self._replay or Replay(self._replayed.of_call(args), self._announce)
        try:
            return call(self.program, tensors, replay)
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            # If e.g. ONNX Runtime is out of memory, PyTorch computes the same results, with the same random numbers. If
            # e.g. an index is out of range, PyTorch raises its own error, which the caller may expect.
            try:
                outputs = replay.outputs(tensors)
            except Exception as pytorch_error:
                raise pytorch_error from error
            self._announce("forward", ORTModuleONNXModelException(f"ONNX Runtime failed: {error}"))
            return outputs

    def run(self, *args: Any) -> tuple[Any, ...]:
        """Runs a part of a captured graph; returns its outputs. Parts never write to their arguments."""
        tensors = [a if isinstance(a := args[i], torch.Tensor) else _scalar(a) for i in self.inputs]
        results = self.results(args, tensors)
        return tuple(output_of(kind, value, args, results) for kind, value in self.outputs)

    def record(self, name: str) -> GraphRecord:
        """Returns the graph's record for the report, without `first_call_seconds`."""
        device = str(self.program.device)
        if self.step is None:
            return GraphRecord(name, "inference", device, self._lowered.model.graph.num_nodes())
        return GraphRecord(
            name, "training", device, self.step.forward.nodes, self.step.backward.session.nodes
        )

    def ops(self) -> Counter[str]:
        """Counts the nodes of the lowered forward graph by op, e.g. {"MatMul": 2}."""
        return Counter(node.op_type for node in self._lowered.model.graph)

    def executed(self) -> Iterator[tuple[str, ir.Model]]:
        """Yields (kind, model) for each model that ONNX Runtime runs; a kind is e.g. "forward"."""
        names = [value.name for value in self._signature.inputs]
        if self._has_outputs:
            for kind, model in self.program.executed(self._needs).items():
                yield kind, renamed(model, names)

    def save(self, options: DebugOptions, name: str) -> None:
        """Writes the lowered model and, in training, the model with gradients.

        The file names are e.g. "net_graph_0_training.onnx" and "net_graph_0_gradient_training.onnx".
        """
        mode = "inference" if self._needs is None else "training"
        stem = f"{options.onnx_prefix}_{name.replace(' ', '_')}"
        save_model(self._lowered.model, options.save_path / f"{stem}_{mode}.onnx")
        if self._needs is not None:
            save_model(
                self.program.joint_model(self._needs), options.save_path / f"{stem}_gradient_{mode}.onnx"
            )


def _onnx_outputs(lowered: Lowered, signature: GraphSignature) -> list[GraphOutput]:
    """Describes the outputs of the ONNX graph: results of the captured graph, and new values of mutated inputs.

    Args:
        lowered: the ONNX graph.
        signature: describes the inputs and outputs of the captured graph.
    """
    # Indices in the signature refer to inputs of the captured graph. Not all of them are inputs of the ONNX graph.
    index_of = {place: index for index, place in enumerate(lowered.inputs)}
    # Random numbers count as saved: the caller cannot write to them, so they need no check.
    random = range(len(lowered.inputs), len(lowered.model.graph.inputs))

    def indices(places: frozenset[int]) -> frozenset[int]:
        return frozenset(index_of[place] for place in places if place in index_of)

    def saved_indices(places: frozenset[int] | None) -> frozenset[int] | None:
        return None if places is None else indices(places).union(random)

    onnx_outputs = [GraphOutput()] * len(lowered.model.graph.outputs)
    for (kind, index), output in zip(lowered.outputs, signature.outputs, strict=True):
        if kind in ("tensor", "complex"):
            layout = output.layout
            # The ONNX output has real and imaginary part as an additional last axis. It is the fastest one in memory.
            if layout is not None and kind == "complex":
                layout = (*layout, len(layout))
            onnx_outputs[index] = GraphOutput(
                output.requires_grad, layout, indices(output.zero_grads), saved_indices(output.saves)
            )
    for place, index in lowered.mutated:
        written = signature.inputs[place]
        onnx_outputs[index] = GraphOutput(
            written.written_with_grad, None, indices(written.zero_grads), saved_indices(written.saves)
        )
    return onnx_outputs


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Context manager that turns errors in lowering, differentiation or session creation into fallbacks to PyTorch.

    Raises:
        ORTModuleFallbackException: raised by the `with` block; re-raised unchanged.
        ORTModuleONNXModelException: the `with` block raised any other exception. The message is the reason for the
            fallback.
    """
    try:
        yield
    except UnsupportedATenOp as error:
        raise ORTModuleONNXModelException(str(error)) from error
    except ORTModuleFallbackException:
        raise
    except OnnxTrainError as error:
        raise ORTModuleONNXModelException(f"building the gradient failed: {error}") from error
    except Exception as error:
        if is_of_onnxruntime(error):
            raise ORTModuleONNXModelException(f"ONNX Runtime cannot run the graph: {error}") from error
        # A bug in onnxtrain: training continues in PyTorch, with a warning that asks for a bug report.
        raise ORTModuleONNXModelException(
            f"building its ONNX graph failed ({type(error).__name__}: {error}); please report it"
        ) from error


def _scalar(number: bool | int | float) -> torch.Tensor:
    """Returns a Python number as a scalar tensor: bool, int64 or float64."""
    # Python floats are float64 in the functional graph. By default `torch.tensor` would return float32.
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)
