"""A captured graph, or a part of one, as ONNX Runtime runs it."""

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
    """Returns an output that `Lowered.outputs` describes."""
    if kind == "constant":
        return value
    if kind == "placeholder":
        return args[value]
    return results[value].item() if kind == "integer" else results[value]


class OnnxPart:
    """A graph, or a part of one, in ONNX Runtime.

    Args:
        lowered: the graph.
        signature: what its inputs and outputs are.
        plain: the same in PyTorch, for what ONNX Runtime does not give: the graph that was lowered, or Dynamo's of it.
        announce: says what PyTorch is about to compute.
        severity: the least severity of what ONNX Runtime prints.
        run: does what `plain` does, if it is not the graph itself that is to be run.

    Attributes:
        inputs: indices of the arguments that are tensors in the ONNX graph.
        outputs: see `Lowered`.
        mutated: see `Lowered`.
        reads: which of `inputs` the gradients depend on.
    """

    def __init__(
        self,
        lowered: Lowered,
        signature: GraphSignature,
        plain: fx.GraphModule,
        announce: Announce,
        severity: int,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self._lowered = lowered
        self._signature = signature
        self.inputs, self.outputs, self.mutated = lowered.inputs, lowered.outputs, lowered.mutated
        # What the graph itself writes to is no longer what the caller gave: only PyTorch could tell whose write it was.
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
        self._as_they_are = not (self._complex_inputs or self._complex_outputs or lowered.assertions)
        self._needs: tuple[bool, ...] | None = None
        self.reads = self._prepare()
        self._replayed = ReplayedGraph(plain, lowered, signature.device, run)
        self._announce = announce
        # Without numbers among the arguments it is the same in each call.
        self._replay = None if self._replayed.numbers else Replay(self._replayed.of_call(()), announce)

    def _prepare(self) -> Sequence[int]:
        """Makes the sessions; returns `reads`."""
        lowered = self._lowered
        if not lowered.model.graph.outputs:
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
        """The sessions of a training step; None in inference."""
        return None if self._needs is None else self.program.training_step(self._needs)

    def results(self, args: Sequence[Any], tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the outputs of the ONNX graph.

        Args:
            args: the arguments of the graph.
            tensors: those of `inputs`.

        Raises:
            RuntimeError: what the graph asserts does not hold.
        """
        if self._as_they_are:
            return self._run(args, tensors)
        for index in self._complex_inputs:
            tensors[index] = torch.view_as_real(tensors[index].resolve_conj())
        results = self._run(args, tensors)
        for index, message in self._lowered.assertions:
            if not results[index].all():
                replay = Replay(self._replayed.of_call(args), self._announce)
                replay.outputs(tensors)  # raises with PyTorch's words
                raise RuntimeError(message)
        if self._complex_outputs:
            results = list(results)
            for index in self._complex_outputs:
                results[index] = torch.view_as_complex(results[index])
        return results

    def _run(self, args: Sequence[Any], tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        lowered, device = self._lowered, self.program.device
        for random in lowered.random:
            drawn = random.draw(random.sizes(args))
            # On a GPU the numbers are as random, but not those of eager PyTorch, which draws them there.
            tensors.append(drawn if device.type == "cpu" else drawn.to(device))
        if not lowered.model.graph.outputs:
            return ()
        replay = self._replay or Replay(self._replayed.of_call(args), self._announce)
        try:
            return call(self.program, tensors, replay)
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            try:
                outputs = replay.outputs(tensors)
            except Exception as own:  # an index out of range, for example
                raise own from error
            self._announce("forward", ORTModuleONNXModelException(f"ONNX Runtime failed: {error}"))
            return outputs

    def run(self, *args: Any) -> tuple[Any, ...]:
        """Returns the outputs of a part that writes to no argument."""
        tensors = [a if isinstance(a := args[i], torch.Tensor) else _scalar(a) for i in self.inputs]
        results = self.results(args, tensors)
        return tuple(output_of(kind, value, args, results) for kind, value in self.outputs)

    def record(self, name: str) -> GraphRecord:
        """What the report says of the graph, without the time of its first call."""
        device = str(self.program.device)
        if self.step is None:
            return GraphRecord(name, "inference", device, self._lowered.model.graph.num_nodes())
        return GraphRecord(
            name, "training", device, self.step.forward.nodes, self.step.backward.session.nodes
        )

    def ops(self) -> Counter[str]:
        """The operators of the forward graph, as it was lowered."""
        return Counter(node.op_type for node in self._lowered.model.graph)

    def executed(self) -> Iterator[tuple[str, ir.Model]]:
        """Yields the models that ONNX Runtime runs, each with what it is."""
        names = [value.name for value in self._signature.inputs]
        if self._lowered.model.graph.outputs:
            for kind, model in self.program.executed(self._needs).items():
                yield kind, renamed(model, names)

    def save(self, options: DebugOptions, name: str) -> None:
        """Writes the ONNX models where the options say."""
        mode = "inference" if self._needs is None else "training"
        stem = f"{options.onnx_prefix}_{name.replace(' ', '_')}"
        save_model(self._lowered.model, options.save_path / f"{stem}_{mode}.onnx")
        if self._needs is not None:
            save_model(
                self.program.joint_model(self._needs), options.save_path / f"{stem}_gradient_{mode}.onnx"
            )


def _onnx_outputs(lowered: Lowered, signature: GraphSignature) -> list[GraphOutput]:
    """Returns what the outputs of the ONNX graph are: results of the captured graph, and what it writes to inputs."""
    own_index = {place: index for index, place in enumerate(lowered.inputs)}

    # Random numbers count as saved: nobody writes to them.
    random = range(len(lowered.inputs), len(lowered.model.graph.inputs))

    def own_indices(places: frozenset[int]) -> frozenset[int]:
        return frozenset(own_index[place] for place in places if place in own_index)

    def own_saves(places: frozenset[int] | None) -> frozenset[int] | None:
        return None if places is None else own_indices(places).union(random)

    found = [GraphOutput()] * len(lowered.model.graph.outputs)
    for (kind, index), output in zip(lowered.outputs, signature.outputs, strict=True):
        if kind in ("tensor", "complex"):
            layout = output.layout
            if layout is not None and kind == "complex":
                layout = (*layout, len(layout))
            found[index] = GraphOutput(
                output.requires_grad, layout, own_indices(output.zero_grads), own_saves(output.saves)
            )
    for place, index in lowered.mutated:
        written = signature.inputs[place]
        found[index] = GraphOutput(
            written.written_with_grad, None, own_indices(written.zero_grads), own_saves(written.saves)
        )
    return found


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Turns what goes wrong while a graph is lowered, differentiated or given sessions into a reason for PyTorch.

    Raises:
        ORTModuleONNXModelException: something went wrong.
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
        raise ORTModuleONNXModelException(
            f"building its ONNX graph failed ({type(error).__name__}: {error}); please report it"
        ) from error


def _scalar(number: bool | int | float) -> torch.Tensor:
    """Returns a number as a tensor of the dtype that graphs have for it: a float is float64."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)
