"""Runs a captured graph in ONNX Runtime, with the views and in-place writes of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad

from onnxtrain.errors import OnnxTrainError
from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._torch import foreach_copy
from onnxtrain.ortmodule.capture._modes import restoring_modes
from onnxtrain.ortmodule.capture._signature import GraphSignature
from onnxtrain.ortmodule.capture.graph._aliases import Views
from onnxtrain.ortmodule.capture.graph._assertions import AssumptionError, Check
from onnxtrain.ortmodule.module._pytorch_work import unwatched
from onnxtrain.ortmodule.sessions._mixed_graph import Steps
from onnxtrain.ortmodule.sessions._onnx_part import OnnxPart, output_of
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Announce


class CompiledGraph:
    """A captured graph. Dynamo's generated code calls :attr:`run` with the graph's inputs.

    Args:
        body: computes the outputs and the new values of mutated inputs. Its outputs are the outputs of the captured
            graph, then the conditions of `checks`, then the bases of views.
        signature: describes the inputs and outputs.
        plain: the graph in PyTorch, with its assertions. It runs after an error, and if `body` is not valid for the
            inputs of a call.
        checks: the checks of the graph's assertions. Their conditions are not returned to the caller.
        announce: warns of computations that PyTorch is about to run.
    """

    def __init__(
        self,
        body: OnnxPart | Steps,
        signature: GraphSignature,
        plain: fx.GraphModule,
        checks: Sequence[Check],
        announce: Announce,
    ) -> None:
        self.body = body
        self._plain = partial(unwatched, restoring_modes(plain))
        self._returned = signature.returned - len(checks)
        self._checks = list(zip(body.outputs[self._returned : signature.returned], checks, strict=True))
        self._announce = announce
        self._device = signature.device
        self._views = signature.views
        overlaps = signature.overlaps
        self._overlaps = overlaps if overlaps is not None and overlaps.looked_for else None
        # The watch calls a Python function per operator. Leaving and entering it takes 2 us, and most graphs call none.
        self._calls_operators = (
            not isinstance(body, OnnxPart)
            or body.calls_operators
            or bool(body.mutated or self._checks or self._views)
        )
        self._in_order = body.outputs == [("tensor", index) for index in range(len(body.outputs))]
        changed = {place for place, _ in body.mutated}
        self._reassigned = frozenset(place for place in changed if signature.inputs[place].reassigned)
        self._unnoticed = frozenset(place for place in changed if not signature.inputs[place].counts_writes)
        written = {place for place in changed if signature.inputs[place].written_with_grad}
        # Inputs that are cloned before the run, because backward needs their values from before the write. Besides, if
        # the write gives an input a `grad_fn` of this graph, saving the input would create a reference cycle.
        reads = body.reads
        self._copied = [
            index
            for index, place in enumerate(body.inputs)
            if reads and place in changed and (index in reads or place in written)
        ]

    @property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The function that runs the graph and writes mutated inputs back. It returns the graph's outputs."""
        return self._run_unwatched if self._calls_operators else self._compute

    def _run_unwatched(self, *args: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = unwatched(self._compute, *args)
        return outputs

    def _compute(self, *args: Any) -> tuple[Any, ...]:
        body = self.body
        # Numbers among the arguments are symbolic sizes that the ONNX graph takes as int64 scalars.
        tensors = [a if isinstance(a := args[i], torch.Tensor) else torch.tensor(a) for i in body.inputs]
        # ONNX Runtime has no forward-mode differentiation: it would silently drop the tangent.
        if forward_ad._current_level >= 0 and any(map(_is_dual, tensors)):
            why = (
                "an input has a tangent (torch.autograd.forward_ad); torch.autograd.functional.jvp needs none"
            )
            self._announce("forward-mode derivative", ORTModuleTorchModelException(why))
            return tuple(self._plain(*args))
        if self._overlaps is not None and self._overlaps.found(args):
            why = (
                "two inputs share memory, of which the graph writes to one; when it was captured they did not"
            )
            self._announce("overlapping inputs", ORTModuleTorchModelException(why))
            return tuple(self._plain(*args))
        for index in self._copied:
            tensors[index] = tensors[index].clone()
        before = _random_states(self._device) if body.draws else ()
        try:
            results = body.results(args, tensors)
            for (kind, value), (check, message) in self._checks:
                check(output_of(kind, value, args, results), message)
        except OnnxTrainError:
            raise
        except AssumptionError as error:
            for restore, state in before:
                restore(state)
            outputs = tuple(self._plain(*args))
            self._announce("data-dependent size", ORTModuleTorchModelException(str(error)))
            return outputs
        # What PyTorch's operators and assertions raise. Saved-tensor hooks raise others, e.g. to stop a recomputation.
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
            # PyTorch runs the graph up to the error, so that buffers and random generators are as in eager mode. The
            # error may be an earlier one: e.g. an `assert` about an index that ONNX Runtime found out of range.
            for restore, state in before:
                restore(state)
            self._plain(*args)
            raise
        if body.mutated:
            self._write_back(args, results)
        if self._in_order:
            outputs = tuple(results[: len(body.outputs)])
        else:
            outputs = tuple([output_of(kind, value, args, results) for kind, value in body.outputs])
        if self._views is None:
            return outputs[: self._returned] if self._checks else outputs
        return self._with_views(self._views, outputs, args)

    def _write_back(self, args: tuple[Any, ...], results: Sequence[torch.Tensor]) -> None:
        """Copies the new values of mutated inputs into the inputs."""
        targets, sources = [], []
        for placeholder, output in self.body.mutated:
            # As in eager PyTorch, a write through `.data` doesn't increment the version counter.
            target = args[placeholder].data if placeholder in self._unnoticed else args[placeholder]
            source = results[output]
            if placeholder in self._reassigned:
                args[placeholder].data = source.detach()
            elif source.requires_grad:
                with torch.enable_grad():
                    target.copy_(source)
            else:
                targets.append(target)
                sources.append(source)
        # One call for all tensors: the running statistics of BatchNorm are three small tensors per layer.
        if targets:
            with torch.no_grad():
                foreach_copy(targets, sources)

    def _with_views(self, views: Views, outputs: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
        """Creates the outputs that are views; returns all outputs of the captured graph.

        Args:
            views: the views.
            outputs: the outputs of the graph after `split_views`.
            args: the inputs of the graph.
        """
        filled = list(outputs[: self._returned])
        made_views = views.graph.forward(*args, *(outputs[index] for index in views.bases))
        for (index, requires_grad), view in zip(views.outputs.items(), made_views, strict=True):
            # The view was created under `no_grad`, or detached, and its base requires a gradient.
            filled[index] = view if requires_grad or not view.requires_grad else view.detach()
        return tuple(filled)


def _random_states(device: torch.device) -> list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
    """Returns (restore function, random state) for the CPU and, if `device` is a GPU, for the device."""
    states: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]
    states = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type == "cuda":
        states.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    return states


def _is_dual(tensor: torch.Tensor) -> bool:
    """True if a tensor has a forward-mode tangent."""
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
