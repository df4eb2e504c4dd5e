"""One lowered graph as ONNX Runtime runs it: forward alone, or forward and backward with residuals in between."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain._building import without_collection
from onnxtrain.autodiff import expand_path, pull_back
from onnxtrain.emitter import Emitter
from onnxtrain.errors import OnnxTrainError
from onnxtrain.functions import with_exact_masks
from onnxtrain.fusion import fuse_kernels
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException
from onnxtrain.ortmodule._options import LogLevel
from onnxtrain.ortmodule.capture._layout import Layout
from onnxtrain.ortmodule.capture._signature import GraphOutput
from onnxtrain.ortmodule.sessions._forward_backward import Halves, cut, sources
from onnxtrain.ortmodule.sessions._session import Session, is_of_onnxruntime, suited
from onnxtrain.passes import (
    infer_shapes,
    inline_functions,
    is_stop_gradient,
    lift_constants,
    settle_shapes,
    simplify_gradients,
)


@dataclass(frozen=True)
class Backward:
    """A backward session for one choice of outputs that received a cotangent.

    Attributes:
        session: takes what is saved and the cotangents, in this order; returns the gradients.
        takes: which of the saved inputs and residuals the session takes.
        seeds: indices of the outputs whose cotangents it takes; one that was not received is zero.
        gradients: per input of the program, index of its gradient among the outputs of the session, or None.
    """

    session: Session
    takes: tuple[int, ...]
    seeds: tuple[int, ...]
    gradients: tuple[int | None, ...]


@dataclass(frozen=True)
class TrainingStep:
    """A forward and a backward session for one choice of inputs that need a gradient.

    Attributes:
        forward: returns the program's outputs, then the residuals.
        backward: for cotangents of all outputs.
        saved_inputs: indices of the program's inputs that are saved for backward, before the residuals.
        residuals: indices of the results of `forward` that are saved.
        saved: the names of both.
        reads: indices of the inputs that the gradients depend on, directly or by way of residuals.
        unreached: indices of the inputs that need a gradient and that none comes to.
        unreached_alone: whether no gradient comes to any input that needs one.
        shared: (place in `saved`, index) of the residuals that are outputs of the program, too.
        keeper: place in `saved` of a residual that is none; behind them if there is none.
        unchecked: places in `saved` of inputs that PyTorch must not check, as `checked` says when it is to be done.
        checked: (index of an input, outputs): the caller may not write to the input before one of these outputs gets
            a cotangent, as eager PyTorch has saved the input for their gradients.
    """

    forward: Session
    backward: Backward
    saved_inputs: tuple[int, ...]
    residuals: tuple[int, ...]
    saved: tuple[str, ...]
    reads: tuple[int, ...]
    unreached: tuple[int, ...]
    unreached_alone: bool
    shared: tuple[tuple[int, int], ...]
    keeper: int
    unchecked: tuple[int, ...]
    checked: tuple[tuple[int, frozenset[int]], ...]


_MAX_BACKWARDS = 64


class Program:
    """An ONNX graph with sessions made when they are first needed.

    Args:
        model: the graph.
        outputs: what its outputs are; `zero_grads` are indices of its own inputs.
        device: of the tensors.
        severity: the least severity of what ONNX Runtime prints.
        checks: whether to raise where the caller has written to an input that eager PyTorch saves. Not where the graph
            itself writes to inputs.

    Attributes:
        count: how many outputs there are.
        seeds: indices of the outputs that take a cotangent.
        constants: indices of the others.
        differentiable_again: what PyTorch says of the gradients for a choice of inputs, outputs, and what is wanted of
            second derivatives; see `Replay.differentiable_gradients`.
    """

    def __init__(
        self,
        model: ir.Model,
        outputs: Sequence[GraphOutput],
        device: torch.device,
        severity: int = LogLevel.WARNING.onnxruntime_severity,
        checks: bool = False,
    ) -> None:
        self.model = model
        self._outputs = outputs
        self.count = len(outputs)
        self.seeds = tuple(index for index, output in enumerate(outputs) if output.requires_grad)
        self.constants = tuple(index for index, output in enumerate(outputs) if not output.requires_grad)
        self.device = device
        self.severity = severity
        self._layouts = {
            index: output.layout for index, output in enumerate(outputs) if output.layout is not None
        }
        saves = {index: outputs[index].saves for index in self.seeds}
        known = {index: saved for index, saved in saves.items() if saved is not None}
        self._saves = known if len(known) == len(saves) else None
        self._checks = checks
        self._unsaved = cache(self._find_unsaved)
        self.differentiable_again: dict[Any, list[bool] | None] = {}
        self.training_step = cache(self._training_step)
        # Each choice of outputs has a session of its own: a zero cotangent would be NaN behind the square root of 0.
        self.backward = lru_cache(_MAX_BACKWARDS)(self._backward)
        self.vjp = lru_cache(_MAX_BACKWARDS)(self._vjp)
        self.differentiable_vjp = lru_cache(_MAX_BACKWARDS)(self._differentiable_vjp)

    @cached_property
    def inference(self) -> Session:
        """The forward graph alone."""
        return self._session(self.model.clone(), self._layouts)

    def _joint(
        self, needs: tuple[bool, ...], received: tuple[int, ...]
    ) -> tuple[ir.Model, list[ir.Value], list[ir.Value | None]]:
        """The graph with its gradients: the model, the cotangents of `received`, a gradient per needed input."""
        names = [str(value.name) for value in self.model.graph.inputs]
        wanted = {name: index for index, (name, need) in enumerate(zip(names, needs, strict=True)) if need}
        targets = [str(self.model.graph.outputs[index].name) for index in self.seeds]
        model = expand_path(self.model, targets, list(wanted))
        op = Emitter(model.graph, functions=model.functions)
        by_name = {str(v.name): v for v in (*model.graph.inputs, *model.graph.outputs)}
        seeds: dict[ir.Value, ir.Value] = {}
        for index in received:
            name = str(self.model.graph.outputs[index].name)
            target = by_name[name]
            seeds[target] = ir.Value(name=op.unique_name(f"{name}_ct"), shape=target.shape, type=target.type)
        model.graph.inputs.extend(seeds.values())
        leaves = [by_name[name] for name in wanted]
        linked = _linked(seeds)
        zero_grads = frozenset[int]().union(*(self._outputs[index].zero_grads for index in received))
        gradients: list[ir.Value | None] = []
        for leaf, gradient in zip(leaves, pull_back(op, seeds, leaves), strict=True):
            # Behind sign, floor or fill_: zero, and not nothing, as PyTorch has it.
            if gradient is None and (leaf in linked or wanted[str(leaf.name)] in zero_grads):
                gradient = op.zeros_like(leaf)
            # A runtime wants no input, constant or repeated value as an output.
            if gradient is not None and (gradient.producer() is None or gradient in gradients):
                gradient = op.Identity(gradient)
            gradients.append(gradient)
        if _lacks_types(model.graph):
            infer_shapes(model)
        return model, list(seeds.values()), gradients

    def joint_model(self, needs: tuple[bool, ...]) -> ir.Model:
        """The graph with gradients, before it is cut into forward and backward."""
        model, _, gradients = self._joint(needs, self.seeds)
        model.graph.outputs.extend(gradient for gradient in gradients if gradient is not None)
        return model

    def executed(self, needs: tuple[bool, ...] | None) -> dict[str, ir.Model]:
        """Returns the models that the sessions run, by what they are: forward and backward, or inference.

        A gradient is named after its input, `<input>_grad`.

        Args:
            needs: per input, whether it needs a gradient; None for inference.
        """
        if needs is None:
            return {"inference": self._suited(self.model.clone(), self._layouts)}
        joint, cotangents, gradients = self._joint(needs, self.seeds)
        infer_shapes(joint)  # of what is saved for backward, too
        halves = Halves(joint, len(needs), cotangents, gradients, self._unsaved(needs))
        models = {"forward": self._suited(halves.forward(), self._layouts)}
        if halves.present:
            backward = models["backward"] = self._suited(halves.backward())
            writer = Emitter(backward.graph)
            for leaf, slot in zip(halves.inputs, _slots(needs, gradients), strict=True):
                if slot is not None:
                    gradient = backward.graph.outputs[slot]
                    gradient.name, gradient.shape = writer.unique_name(f"{leaf.name}_grad"), leaf.shape
        return models

    def _suited(self, model: ir.Model, layouts: Mapping[int, Layout] | None = None) -> ir.Model:
        return suited(self._rewritten(model), self.device, layouts)

    def _rewritten(self, model: ir.Model) -> ir.Model:
        simplify_gradients(model)
        if self.device.type == "cpu":
            fuse_kernels(model)
        return model

    @without_collection()
    def _training_step(self, needs: tuple[bool, ...]) -> TrainingStep:
        joint, cotangents, gradients = self._joint(needs, self.seeds)
        halves = Halves(joint, len(needs), cotangents, gradients, self._unsaved(needs))
        inputs, outputs, saved = halves.inputs, halves.outputs, halves.saved
        slots = _slots(needs, gradients)
        behind = sources(halves.present)
        indices = [halves.results.index(value) for value in halves.residuals]
        places = list(enumerate(indices, start=len(saved) - len(indices)))
        own = [place for place, index in places if index >= len(outputs)]
        saved_inputs = tuple(index for index, value in enumerate(inputs) if value in halves.read)
        checked = self._checked(saved_inputs) if halves.present else {}
        return TrainingStep(
            forward=self._session(halves.forward(), self._layouts),
            backward=Backward(self._session(halves.backward()), tuple(range(len(saved))), self.seeds, slots),
            saved_inputs=saved_inputs,
            residuals=tuple(indices),
            saved=tuple(str(value.name) for value in saved),
            reads=tuple(index for index, value in enumerate(inputs) if value in behind),
            unreached=tuple(i for i, need in enumerate(needs) if need and slots[i] is None),
            unreached_alone=not halves.present,
            shared=tuple((place, index) for place, index in places if index < len(outputs)),
            keeper=own[0] if own else len(saved),
            unchecked=tuple(place for place, index in enumerate(saved_inputs) if index in checked),
            checked=tuple(checked.items()),
        )

    def _find_unsaved(self, needs: tuple[bool, ...]) -> tuple[int, ...]:
        """The inputs that backward must not read, as eager PyTorch has not saved them for the gradient of some output.

        Only where that gradient reads them here; else versions are looked at (`TrainingStep.checked`).
        """
        if self._saves is None:
            return ()
        inputs = self.model.graph.inputs
        saved_for_one = frozenset[int]().union(*self._saves.values())
        unsaved = set(range(len(inputs))) - saved_for_one
        for output, saves in self._saves.items():
            behind = sources([self.model.graph.outputs[output]])
            if all(inputs[index] not in behind for index in saved_for_one - saves - unsaved):
                continue
            joint, cotangents, gradients = self._joint(needs, (output,))
            halves = Halves(joint, len(needs), cotangents, gradients, sorted(unsaved))
            read = {index for index, value in enumerate(halves.inputs) if value in halves.read}
            unsaved |= read - saves
        return tuple(sorted(unsaved))

    def _checked(self, saved_inputs: Collection[int]) -> dict[int, frozenset[int]]:
        """See `TrainingStep`: PyTorch itself checks inputs that are saved for whatever output gets a cotangent."""
        if not self._saves or not self._checks:
            return {}
        checked = {}
        for index in sorted(frozenset[int]().union(*self._saves.values())):
            outputs = frozenset(output for output, saves in self._saves.items() if index in saves)
            if index not in saved_inputs or len(outputs) < len(self._saves):
                checked[index] = outputs
        return checked

    @without_collection()
    def _backward(self, needs: tuple[bool, ...], received: tuple[int, ...]) -> Backward:
        """What leads from the cotangents of some outputs to the gradients of what these depend on."""
        step = self.training_step(needs)
        joint, cotangents, gradients = self._joint(needs, received)
        slots = _slots(needs, gradients)
        halves = Halves(joint, len(needs), cotangents, gradients, self._unsaved(needs))
        saved = [str(value.name) for value in halves.saved]
        if not halves.present or not set(saved) <= set(step.saved):
            # It reads what the gradients of all outputs do not, for zeros of its shape: let these be cotangents.
            whole = step.backward
            reached = [
                slot if own is not None else None for slot, own in zip(whole.gradients, slots, strict=True)
            ]
            return Backward(whole.session, whole.takes, whole.seeds, tuple(reached))
        takes = tuple(map(step.saved.index, saved))
        return Backward(self._session(halves.backward()), takes, received, slots)

    @without_collection()
    def _vjp(
        self, needs: tuple[bool, ...], received: tuple[int, ...]
    ) -> tuple[Program, tuple[int | None, ...]]:
        """The gradients as a program of their own, which can be differentiated again.

        Its inputs are those of this program, then the cotangents of the outputs `received`.
        """
        joint, _, gradients = self._joint(needs, received)
        present = [gradient for gradient in gradients if gradient is not None]
        # The composite ops of gradients have no rules, their bodies have; these ask for ranks and constants.
        model = inline_functions(with_exact_masks(cut(joint, list(joint.graph.inputs), present)))
        settle_shapes(lift_constants(model))
        program = Program(model, [GraphOutput(requires_grad=True)] * len(present), self.device, self.severity)
        return program, _slots(needs, gradients)

    def _session(self, model: ir.Model, layouts: Mapping[int, Layout] | None = None) -> Session:
        return Session(self._rewritten(model), self.device, self.severity, layouts)

    def _differentiable_vjp(
        self, needs: tuple[bool, ...], received: tuple[int, ...], wanted: tuple[bool, ...]
    ) -> tuple[Program, tuple[int | None, ...], tuple[bool, ...]] | str:
        """Returns `vjp` when ONNX Runtime can run its gradients for the inputs `wanted`, else the reason it cannot.

        And per gradient whether it depends on these inputs.
        """
        try:
            vjp, slots = self.vjp(needs, received)
            graph = vjp.model.graph
            sources = {value for value, flag in zip(graph.inputs, wanted, strict=True) if flag}
            dependent = tuple(not sources.isdisjoint(_linked([output])) for output in graph.outputs)
            if any(dependent):
                vjp.training_step(wanted)
        except ORTModuleONNXModelException as error:
            return str(error)
        except OnnxTrainError as error:
            return f"building the second derivative failed: {error}"
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            return f"ONNX Runtime cannot run the second derivative: {error}"
        return vjp, slots, dependent


def _linked(targets: Iterable[ir.Value]) -> set[ir.Value]:
    """What the targets depend on through floating-point values, whether or not a gradient comes through."""
    linked: set[ir.Value] = set()
    stack = list(targets)
    while stack:
        value = stack.pop()
        node = value.producer()
        if value in linked or (value.dtype is not None and not value.dtype.is_floating_point()):
            continue
        linked.add(value)
        if node is not None and not is_stop_gradient(node):
            stack += [source for source in node.inputs if source is not None]
    return linked


def _lacks_types(graph: ir.Graph) -> bool:
    """Whether a saved output has no type yet, or a Scan no shapes, which ONNX Runtime wants to know."""
    return any(
        node.op_type == "Scan" or any(value.name and value.type is None for value in node.outputs)
        for node in graph
    )


def _slots(needs: Sequence[bool], gradients: Sequence[ir.Value | None]) -> tuple[int | None, ...]:
    """Per input, which of the gradients that are there is its own; `gradients` has an entry per needed one."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    of_needed = iter(present.index(i) if i in present else None for i in range(len(gradients)))
    return tuple(next(of_needed) if need else None for need in needs)
