"""Creates ONNX Runtime sessions for a lowered graph: one for inference, or one each for forward and backward.

Terms: `needs` has an entry for each input, True if the input requires a gradient, e.g. (True, False). `received` lists
the indices of the outputs that received a cotangent, e.g. (0, 2). Residuals are forward results that backward needs,
i.e. saved tensors.
"""

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
from onnxtrain.ortmodule.capture._signature import GraphOutput
from onnxtrain.ortmodule.capture.graph._layout import Layout
from onnxtrain.ortmodule.sessions._forward_backward import Halves, cut, slots_of, sources
from onnxtrain.ortmodule.sessions._session import Session, is_of_onnxruntime, suited
from onnxtrain.passes import (
    LateExpandPass,
    infer_shapes,
    inline_functions,
    is_stop_gradient,
    lift_constants,
    settle_shapes,
    simplify_gradients,
)
from onnxtrain.runtime.kernels import kernel_library


@dataclass(frozen=True)
class Backward:
    """The backward session for one set of outputs that received a cotangent.

    Attributes:
        session: takes saved tensors, then cotangents; returns gradients.
        takes: indices of the saved tensors that the session takes, e.g. (0, 2).
        seeds: indices of the outputs whose cotangents the session takes, e.g. (0,). The caller passes zeros for a
            cotangent that was not received.
        gradients: for each input of the program, the index of its gradient among the session's results, or None if the
            input requires no gradient or no gradient reaches it, e.g. (0, None, 1).
    """

    session: Session
    takes: tuple[int, ...]
    seeds: tuple[int, ...]
    gradients: tuple[int | None, ...]

    @cached_property
    def places(self) -> tuple[int, ...]:
        """`gradients` with -1 in place of None."""
        return tuple(-1 if slot is None else slot for slot in self.gradients)


@dataclass(frozen=True)
class TrainingStep:
    """The forward and the backward session for one set of inputs that require a gradient.

    The values saved for backward are, in this order, inputs of the program, outputs, and residuals that are not
    outputs. The index of a value in this order is called its place.

    Attributes:
        needs: for each input, True if it requires a gradient, e.g. (True, False).
        forward: returns the program's outputs, then residuals that are not outputs.
        backward: takes the cotangents of all outputs that require a gradient.
        saved_inputs: indices of the inputs that are saved, e.g. (0, 2).
        saved: names of the saved values in the graph, e.g. ("input0", "input2", "val_0", "val_7").
        reads: indices of the inputs that the gradients depend on, directly or through residuals.
        unreached: indices of the inputs that require a gradient but that no gradient reaches.
        unreached_alone: True if no gradient reaches any input.
        recorded: indices of the inputs that autograd records: the inputs that a gradient reaches or, if there are none,
            one input that requires a gradient.
        shared: pairs (place, index of the output) of the outputs that are saved, e.g. ((2, 0),).
        keeps_values: True if residuals are kept as OrtValues instead of saved tensors.
        unchecked: places of saved inputs whose version counters autograd must not check, because backward checks them
            with `checked`.
        checked: pairs (index of an input, indices of outputs), e.g. ((1, {0}),). Eager PyTorch saves the input for the
            gradients of these outputs. Its backward raises if the caller has written to the input and one of these
            outputs receives a cotangent.
    """

    needs: tuple[bool, ...]
    forward: Session
    backward: Backward
    saved_inputs: tuple[int, ...]
    saved: tuple[str, ...]
    reads: tuple[int, ...]
    unreached: tuple[int, ...]
    unreached_alone: bool
    recorded: tuple[int, ...]
    shared: tuple[tuple[int, int], ...]
    keeps_values: bool
    unchecked: tuple[int, ...]
    checked: tuple[tuple[int, frozenset[int]], ...]


_MANY_RESIDUALS = 8
"""Minimum number of residuals for which keeping OrtValues takes less time than saving tensors."""

_MAX_BACKWARDS = 64
"""Number of backward sessions that a program caches, one for each set of outputs that received a cotangent."""


class Program:
    """An ONNX graph whose sessions are created lazily.

    Args:
        model: the graph.
        outputs: describes its outputs. Indices in `zero_grads` and `saves` refer to inputs of `model`.
        device: device of the tensors.
        severity: minimum severity of the messages that ONNX Runtime prints, e.g. 3 for errors.
        checks: True if backward must raise when the caller has written to an input that eager PyTorch saves. False if
            the captured graph itself writes to inputs.

    Attributes:
        model: the graph.
        count: number of outputs, e.g. 2.
        seeds: indices of the outputs that take a cotangent, e.g. (0,).
        constants: indices of the other outputs, e.g. (1,).
        differentiable_again: cached results of `Replay.differentiable_gradients`. The key is (`needs`, `received`,
            `wanted`), where `wanted` has an entry for each input and cotangent, True if it requires a gradient.
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
        saves = {index: saved for index in self.seeds if (saved := outputs[index].saves) is not None}
        self._saves = saves if len(saves) == len(self.seeds) else None
        self._checks = checks
        self._unsaved = cache(self._find_unsaved)
        self.differentiable_again: dict[Any, list[bool] | None] = {}
        self.training_step = cache(self._training_step)
        # Each value of `received` has its own session: a zero cotangent could become NaN, e.g. in the derivative of
        # sqrt(0).
        self.backward = lru_cache(_MAX_BACKWARDS)(self._backward)
        self.vjp = lru_cache(_MAX_BACKWARDS)(self._vjp)
        self.differentiable_vjp = lru_cache(_MAX_BACKWARDS)(self._differentiable_vjp)

    @cached_property
    def inference(self) -> Session:
        """The session for inference, which returns the outputs but no residuals."""
        return self._session(self.model.clone(), self._layouts)

    def _joint_graph(
        self, needs: tuple[bool, ...], received: tuple[int, ...]
    ) -> tuple[ir.Model, list[ir.Value], list[ir.Value | None]]:
        """Appends the gradients to a copy of the graph.

        Args:
            needs: for each input, True if it requires a gradient.
            received: indices of the outputs that received a cotangent.

        Returns:
            The copy; its new inputs, which are the cotangents; and, for each input that requires a gradient, the
            gradient, or None if no gradient reaches the input.
        """
        names = [str(value.name) for value in self.model.graph.inputs]
        index_of = {name: index for index, (name, need) in enumerate(zip(names, needs, strict=True)) if need}
        targets = [str(self.model.graph.outputs[index].name) for index in self.seeds]
        model = expand_path(self.model, targets, list(index_of))
        # Backward computes an Expand again, but reads the results of the ops after it.
        LateExpandPass()(model)
        op = Emitter(model.graph, functions=model.functions)
        by_name = {str(v.name): v for v in (*model.graph.inputs, *model.graph.outputs)}
        seeds: dict[ir.Value, ir.Value] = {}
        for index in received:
            name = str(self.model.graph.outputs[index].name)
            target = by_name[name]
            seeds[target] = ir.Value(name=op.unique_name(f"{name}_ct"), shape=target.shape, type=target.type)
        model.graph.inputs.extend(seeds.values())
        leaves = [by_name[name] for name in index_of]
        linked = _float_dependencies(seeds)
        zero_grads = frozenset[int]().union(*(self._outputs[index].zero_grads for index in received))
        gradients: list[ir.Value | None] = []
        for leaf, gradient in zip(leaves, pull_back(op, seeds, leaves), strict=True):
            # In PyTorch the gradient of sign, floor and fill_ is zero, not None.
            if gradient is None and (leaf in linked or index_of[str(leaf.name)] in zero_grads):
                gradient = op.zeros_like(leaf)
            # For ONNX Runtime an output must not be an input, a constant, or the same value as another output.
            if gradient is not None and (gradient.producer() is None or gradient in gradients):
                gradient = op.Identity(gradient)
            gradients.append(gradient)
        if _lacks_types(model.graph):
            infer_shapes(model)
        return model, list(seeds.values()), gradients

    def _halves(
        self, needs: tuple[bool, ...], received: tuple[int, ...], unsaved: Collection[int] | None = None
    ) -> Halves:
        """Returns the forward and the backward half of the joint graph.

        Args:
            needs: for each input, True if it requires a gradient.
            received: indices of the outputs that received a cotangent.
            unsaved: indices of inputs that backward must not read; the result of `_find_unsaved` by default.
        """
        return Halves(
            *self._joint_graph(needs, received),
            needs,
            self._unsaved(needs) if unsaved is None else unsaved,
            # Without native kernels, each op of a chain takes as long as reading what it would have saved.
            recompute=self.device.type == "cpu" and kernel_library() is not None,
        )

    def joint_model(self, needs: tuple[bool, ...]) -> ir.Model:
        """Returns the joint graph, i.e. the graph with its gradients, before it is cut into forward and backward."""
        model, _, gradients = self._joint_graph(needs, self.seeds)
        model.graph.outputs.extend(gradient for gradient in gradients if gradient is not None)
        return model

    def executed(self, needs: tuple[bool, ...] | None) -> dict[str, ir.Model]:
        """Returns the models that the sessions run.

        Args:
            needs: for each input, True if it requires a gradient; None for inference.

        Returns:
            {"inference": model} or {"forward": model, "backward": model}; without "backward" if there are no gradients.
            A gradient is named after its input, e.g. "input0_grad".
        """
        if needs is None:
            return {"inference": self._suited(self.model.clone(), self._layouts)}
        halves = self._halves(needs, self.seeds)
        # Residuals become inputs and outputs of the files, where their shapes are useful.
        infer_shapes(halves.joint)
        models = {"forward": self._suited(halves.forward(), self._layouts)}
        if halves.present:
            backward = models["backward"] = self._suited(halves.backward())
            writer = Emitter(backward.graph)
            for leaf, slot in zip(halves.inputs, halves.slots, strict=True):
                if slot is not None:
                    gradient = backward.graph.outputs[slot]
                    gradient.name, gradient.shape = writer.unique_name(f"{leaf.name}_grad"), leaf.shape
        return models

    def _suited(self, model: ir.Model, layouts: Mapping[int, Layout] | None = None) -> ir.Model:
        """Returns the model that ONNX Runtime would run in a session for `model`, which may be changed in place."""
        return suited(self._rewritten(model), self.device, layouts)

    def _rewritten(self, model: ir.Model) -> ir.Model:
        """Simplifies gradients and, on a CPU, fuses nodes into functions that have a native kernel.

        The model is changed in place and returned.
        """
        simplify_gradients(model)
        # The native kernels are for the CPU. On a GPU, ONNX Runtime would inline the function bodies.
        if self.device.type == "cpu":
            fuse_kernels(model)
        return model

    @without_collection()
    def _training_step(self, needs: tuple[bool, ...]) -> TrainingStep:
        """Creates the forward and the backward session for the inputs that require a gradient.

        Args:
            needs: for each input, True if it requires a gradient.
        """
        halves = self._halves(needs, self.seeds)
        inputs, outputs, saved = halves.inputs, halves.outputs, halves.saved
        depended_on = sources(halves.present)
        indices = [halves.results.index(value) for value in halves.residuals]
        places = list(enumerate(indices, start=len(saved) - len(indices)))
        saved_inputs = tuple(index for index, value in enumerate(inputs) if value in halves.read)
        checked = self._checked(saved_inputs) if halves.present else {}
        unreached = tuple(i for i, need in enumerate(needs) if need and halves.slots[i] is None)
        reached = tuple(i for i, slot in enumerate(halves.slots) if slot is not None)
        return TrainingStep(
            needs=needs,
            forward=self._session(halves.forward(), self._layouts),
            backward=Backward(
                self._session(halves.backward()), tuple(range(len(saved))), self.seeds, halves.slots
            ),
            saved_inputs=saved_inputs,
            saved=tuple(str(value.name) for value in saved),
            reads=tuple(index for index, value in enumerate(inputs) if value in depended_on),
            unreached=unreached,
            unreached_alone=not halves.present,
            recorded=reached or unreached[:1],
            shared=tuple((place, index) for place, index in places if index < len(outputs)),
            keeps_values=len(halves.results) - len(outputs) >= _MANY_RESIDUALS,
            unchecked=tuple(place for place, index in enumerate(saved_inputs) if index in checked),
            checked=tuple(checked.items()),
        )

    def _find_unsaved(self, needs: tuple[bool, ...]) -> tuple[int, ...]:
        """Returns the indices of the inputs that backward must not read, because the caller may write to them.

        Eager PyTorch raises if the caller writes to an input that it has saved. The caller may write to the other
        inputs: inputs that eager PyTorch saves for no output, e.g. because it saves a cast copy, and inputs that it
        doesn't save for one of the outputs, although the gradient graph of this output reads them. Empty if it is
        unknown which inputs eager PyTorch saves.
        """
        if self._saves is None:
            return ()
        inputs = self.model.graph.inputs
        saved_for_any = frozenset[int]().union(*self._saves.values())
        unsaved = set(range(len(inputs))) - saved_for_any
        # An input may be saved for one output and not for another. Then the gradient of the other output alone must not
        # read it. If this gradient doesn't read it anyway, comparing versions is enough (`TrainingStep.checked`).
        for output, saves in self._saves.items():
            ancestors_of_output = sources([self.model.graph.outputs[output]])
            if all(inputs[index] not in ancestors_of_output for index in saved_for_any - saves - unsaved):
                continue
            halves = self._halves(needs, (output,), sorted(unsaved))
            read = {index for index, value in enumerate(halves.inputs) if value in halves.read}
            unsaved |= read - saves
        return tuple(sorted(unsaved))

    @property
    def saved_in_eager(self) -> frozenset[int]:
        """Indices of the inputs that eager PyTorch saves for backward; empty if they are unknown."""
        return frozenset[int]().union(*self._saves.values()) if self._saves else frozenset()

    def _checked(self, saved_inputs: Collection[int]) -> dict[int, frozenset[int]]:
        """Finds the inputs saved by eager PyTorch whose version counters backward must compare itself.

        PyTorch checks the version of each tensor that this program saves, whichever outputs receive a cotangent.
        There is no such check for an input that the program doesn't save, and the check is too strict for an input
        that eager PyTorch saves for some outputs only.

        Args:
            saved_inputs: indices of the inputs that this program saves for backward.

        Returns:
            Maps the index of each such input to the indices of the outputs for whose gradients eager PyTorch saves
            it, e.g. {1: {0}}. Empty if it is unknown which inputs eager PyTorch saves, or if the program doesn't
            check writes.
        """
        # PyTorch itself checks the version of each tensor that this step saves, whatever output gets a cotangent. This
        # check is right only for an input that eager PyTorch saves for all outputs.
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
        """Creates a backward session that takes only the cotangents that were received.

        Args:
            needs: for each input, True if it requires a gradient.
            received: indices of the outputs that received a cotangent.

        Returns:
            The new session, or the session for all outputs if the new one would read values that forward has not saved.
        """
        step = self.training_step(needs)
        halves = self._halves(needs, received)
        saved = [str(value.name) for value in halves.saved]
        # This half may read a value that backward for all outputs doesn't, e.g. for the shape of zeros. Forward has not
        # saved that value. Then the session for all outputs is used, with zeros for the other cotangents.
        if not halves.present or not set(saved) <= set(step.saved):
            complete = step.backward
            reached = [
                slot if own_slot is not None else None
                for slot, own_slot in zip(complete.gradients, halves.slots, strict=True)
            ]
            return Backward(complete.session, complete.takes, complete.seeds, tuple(reached))
        takes = tuple(map(step.saved.index, saved))
        return Backward(self._session(halves.backward()), takes, received, halves.slots)

    @without_collection()
    def _vjp(
        self, needs: tuple[bool, ...], received: tuple[int, ...]
    ) -> tuple[Program, tuple[int | None, ...]]:
        """Returns the vector-Jacobian product as a program, which can be differentiated again.

        Args:
            needs: for each input, True if it requires a gradient.
            received: indices of the outputs that received a cotangent.

        Returns:
            The program, which takes this program's inputs, then the received cotangents; and, for each input of this
            program, the index of its gradient in the new program's outputs, or None.
        """
        joint, _, gradients = self._joint_graph(needs, received)
        present = [gradient for gradient in gradients if gradient is not None]
        # The functions in gradient graphs have no gradient rules, but the ops in their bodies do. These rules need
        # ranks, and the values of constants.
        model = inline_functions(with_exact_masks(cut(joint, list(joint.graph.inputs), present)))
        settle_shapes(lift_constants(model))
        program = Program(model, [GraphOutput(requires_grad=True)] * len(present), self.device, self.severity)
        return program, slots_of(needs, gradients)

    def _session(self, model: ir.Model, layouts: Mapping[int, Layout] | None = None) -> Session:
        """Creates a session for a model, whose outputs get the layouts of eager PyTorch."""
        return Session(self._rewritten(model), self.device, self.severity, layouts)

    def _differentiable_vjp(
        self, needs: tuple[bool, ...], received: tuple[int, ...], wanted: tuple[bool, ...]
    ) -> tuple[Program, tuple[int | None, ...], tuple[bool, ...]] | str:
        """Returns the vector-Jacobian product as a program, after creating its sessions for second derivatives.

        Args:
            needs: for each input of this program, True if it requires a gradient.
            received: indices of the outputs that received a cotangent.
            wanted: for each input of the vector-Jacobian product, True if a second derivative with respect to it is
                wanted.

        Returns:
            The program; for each input of this program, the index of its gradient in the new program's outputs, or
            None; and, for each gradient, True if it depends on a wanted input. If ONNX Runtime cannot compute second
            derivatives, a message that explains why.
        """
        try:
            vjp, slots = self.vjp(needs, received)
            graph = vjp.model.graph
            leaves = {value for value, flag in zip(graph.inputs, wanted, strict=True) if flag}
            dependent = tuple(
                not leaves.isdisjoint(_float_dependencies([output])) for output in graph.outputs
            )
            # The sessions are not created lazily: a missing rule or kernel must be found before a gradient is returned
            # as differentiable.
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


def _float_dependencies(targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Returns the targets and the floating-point values that they depend on, up to stop-gradient nodes.

    A gradient doesn't necessarily reach these values: e.g. Floor has no gradient.
    """
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
    """True if a graph needs shape inference before a session is created.

    This is the case if a value has no type, or if there is a Scan, for which ONNX Runtime needs all shapes.
    """
    # Gradient rules add optional outputs to forward nodes, e.g. the mean of LayerNormalization, without a type.
    return any(
        node.op_type == "Scan" or any(value.name and value.type is None for value in node.outputs)
        for node in graph
    )
