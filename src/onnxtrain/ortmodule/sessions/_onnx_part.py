"""A captured graph, or a part of one, as ONNX Runtime runs it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.errors import OnnxTrainError
from onnxtrain.ortmodule._exceptions import ORTModuleFallbackException, ORTModuleONNXModelException
from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import GraphRecord
from onnxtrain.ortmodule.capture._saved import SavedArguments
from onnxtrain.ortmodule.lowering._table import Lowered, UnsupportedATenOp
from onnxtrain.ortmodule.sessions._autograd import call
from onnxtrain.ortmodule.sessions._export import renamed
from onnxtrain.ortmodule.sessions._layout import Layout
from onnxtrain.ortmodule.sessions._program import Program, TrainingStep
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Announce, CapturedGraph, Replay
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
        differentiable: per output of the ONNX graph, whether it can have a cotangent.
        device: of the tensors.
        links: see `Program`.
        severity: the least severity of what ONNX Runtime prints.
        layouts: per output of the graph, how it lies in memory in eager PyTorch; None where it is contiguous.
        saved: what eager PyTorch saves for backward; None if that is not known.

    Attributes:
        inputs: indices of the arguments that are tensors in the ONNX graph.
        outputs: see `Lowered`.
        mutated: see `Lowered`.
    """

    def __init__(
        self,
        lowered: Lowered,
        differentiable: Sequence[bool],
        device: torch.device,
        links: Mapping[int, Iterable[int]],
        severity: int,
        layouts: Sequence[Layout | None],
        saved: SavedArguments | None = None,
    ) -> None:
        self._lowered = lowered
        self._needs: tuple[bool, ...] | None = None
        self.inputs, self.outputs, self.mutated = lowered.inputs, lowered.outputs, lowered.mutated
        by_result = {
            index: (*order, len(order)) if kind == "complex" else order
            for (kind, index), order in zip(lowered.outputs, layouts, strict=True)
            if order is not None and kind in ("tensor", "complex")
        }
        saves = None if saved is None else _saves(lowered, saved)
        self.program = Program(
            lowered.model,
            differentiable,
            device,
            links,
            severity,
            by_result,
            saves,
            checks=not lowered.mutated,
        )
        self._complex_inputs = [i for i, place in enumerate(lowered.inputs) if place in lowered.complex]
        self._complex_outputs = [index for kind, index in lowered.outputs if kind == "complex"]
        self._complex_outputs += [index for place, index in lowered.mutated if place in lowered.complex]
        self._as_they_are = not (self._complex_inputs or self._complex_outputs or lowered.assertions)

    def prepare(self, requires_grad: Sequence[bool]) -> Sequence[int]:
        """Makes the sessions; returns which of `inputs` the gradients depend on.

        Args:
            requires_grad: per argument of the graph, whether it does.
        """
        lowered = self._lowered
        if not lowered.model.graph.outputs:
            return ()
        needs = tuple([requires_grad[index] for index in lowered.inputs] + [False] * len(lowered.random))
        if any(needs) and self.program.seeds:
            self._needs = needs
            return self.program.training_step(needs).reads
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
                replay = Replay(self._captured.of_call(args), self._announce)
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
        replay = self._replay or Replay(self._captured.of_call(args), self._announce)
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

    def replay_by(
        self, graph_module: fx.GraphModule, announce: Announce, run: Callable[..., Any] | None = None
    ) -> None:
        """Takes the same in PyTorch, for what ONNX Runtime does not give. To be called before the first run.

        Args:
            graph_module: the graph that was lowered, or Dynamo's of it.
            announce: says what PyTorch is about to compute.
            run: does what the graph does, if it is not the graph itself that is to be run.
        """
        self._captured = CapturedGraph(graph_module, self._lowered, self.program.device, run)
        self._announce = announce
        # Without numbers among the arguments it is the same in each call.
        self._replay = None if self._captured.numbers else Replay(self._captured.of_call(()), announce)

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

    def executed(self, names: Sequence[str]) -> Iterator[tuple[str, ir.Model]]:
        """Yields the models that ONNX Runtime runs, each with what it is; `names` are those of the arguments."""
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


def _saves(lowered: Lowered, saved: SavedArguments) -> dict[int, frozenset[int]]:
    """Returns `Program`'s `saves`: per output of the ONNX graph, the inputs of it that are saved.

    The random numbers among these inputs count as saved, as do numbers: nobody writes to them.
    """
    random = range(len(lowered.inputs), len(lowered.model.graph.inputs))
    by_result = {
        index: saved.outputs[output]
        for output, (kind, index) in enumerate(lowered.outputs)
        if kind in ("tensor", "complex")
    }
    by_result |= {index: saved.written[place] for place, index in lowered.mutated}
    return {
        result: frozenset(
            index for index, place in enumerate(lowered.inputs) if place in places | saved.constants
        ).union(random)
        for result, places in by_result.items()
    }


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
