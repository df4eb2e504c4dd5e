"""Makes a program, i.e. a graph in ONNX Runtime, differentiable by PyTorch's autograd.

Forward runs one session and saves the tensors that backward needs; backward runs another session. For derivatives that
ONNX Runtime cannot compute, PyTorch recomputes the graph (:class:`Replay`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException, ORTModuleTorchModelException
from onnxtrain.ortmodule.capture.dynamo._calling import without_capture
from onnxtrain.ortmodule.sessions._program import Program, TrainingStep
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Replay
from onnxtrain.ortmodule.sessions._session import is_of_onnxruntime

# These are used in every call: looking them up in their modules would take longer than calling them.
_grad_enabled = torch.is_grad_enabled
_saved_tensors_hooks = _torch.saved_tensors_hooks
_transforms_active = _torch.functorch_transforms_active
_is_wrapped = _torch.is_functorch_wrapped_tensor
_is_batched = _torch.is_legacy_batchedtensor
_unwrap = _torch.unwrap_if_dead
_keeps_graph = _torch.keeps_graph
# Maps of these take less time than comprehensions, which are Python functions (Python 3.11).
_requires_grad, _version = map(operator.attrgetter, ("requires_grad", "_version"))


class _CallState(NamedTuple):
    """The state of a call that backward needs in addition to the saved tensors.

    Attributes:
        program: the graph in ONNX Runtime.
        replay: the same graph in PyTorch.
        step: the sessions of the call.
        all_recorded: True if all inputs are tensor arguments of `_Step`, False if only `step.recorded` are.
        inputs: all inputs, from which PyTorch may recompute the outputs.
        versions: version counters in forward of the inputs that the gradients depend on, e.g. [0, 3].
        results: for each saved output of the program, its index, an alias of it, and its version counter.
        checked: triples (input, version counter in forward, indices of outputs). Eager PyTorch saves the input for the
            gradients of these outputs.
        residuals: residuals that are kept as OrtValues instead of saved tensors.
        shapes: shape, dtype and device of each output; empty if a single output takes a cotangent.
        hooked: True if the user's saved-tensor hooks have received the saved tensors.
    """

    program: Program
    replay: Replay
    step: TrainingStep
    all_recorded: bool
    inputs: Sequence[torch.Tensor]
    versions: Sequence[int]
    results: Sequence[tuple[int, torch.Tensor, int]]
    checked: Sequence[tuple[torch.Tensor, int, frozenset[int]]]
    residuals: Sequence[Any]
    shapes: Sequence[Any]
    hooked: bool


def call(program: Program, tensors: list[torch.Tensor], replay: Replay) -> tuple[torch.Tensor, ...]:
    """Runs a program, and records it in PyTorch's autograd graph if an input requires a gradient.

    Args:
        program: the graph in ONNX Runtime.
        tensors: its inputs.
        replay: the same graph in PyTorch, for derivatives that ONNX Runtime cannot compute.

    Returns:
        The outputs of the program.
    """
    if _grad_enabled() and program.seeds:
        needs = tuple(map(_requires_grad, tensors))
        if True in needs:
            step = program.training_step(needs)
            # PyTorch's autograd engine would call the hooks of an input that gets no gradient with None.
            if step.unreached:
                tensors = _detached(tensors, step.unreached, step.unreached_alone)
            outputs: tuple[torch.Tensor, ...]
            # `torch.func` transforms unwrap only tensors that are arguments themselves, so all inputs are arguments.
            if _transforms_active():
                outputs = _Step.apply(program, replay, step, None, *map(_unwrap, tensors))  # type: ignore[no-untyped-call]
                return outputs
            tensors = list(map(_unwrap, tensors))
            # Autograd spends time on each tensor argument, even on the weights of a frozen backbone.
            outputs = _apply(program, replay, step, tensors, *map(tensors.__getitem__, step.recorded))
            return outputs
    # E.g. a custom function in `torch.func.vjp` has saved a wrapper, which outlives the transform and has no memory.
    return tuple(program.inference.run(list(map(_unwrap, tensors))))


def _detached(tensors: list[torch.Tensor], unreached: Sequence[int], alone: bool) -> list[torch.Tensor]:
    """Detaches the inputs that no gradient reaches, because autograd would call their hooks with None.

    Args:
        tensors: the inputs.
        unreached: indices of the inputs to detach.
        alone: True if no gradient reaches any input. Then the first detached tensor is set to require a gradient, so
            that the outputs still require one; under a `torch.func` transform, nothing is detached.
    """
    # `torch.func` transforms don't support `requires_grad_` below.
    if alone and _transforms_active():
        return tensors
    tensors = list(tensors)
    for index in unreached:
        tensors[index] = tensors[index].detach()
    # The outputs must require a gradient nevertheless: in eager PyTorch a product with a view that was created under
    # `no_grad` does, although its gradient reaches no input. A detached tensor without hooks receives the gradient.
    if alone:
        tensors[unreached[0]].requires_grad_()
    return tensors


def _versions(
    step: TrainingStep, tensors: Sequence[torch.Tensor]
) -> tuple[list[int], list[tuple[torch.Tensor, int, frozenset[int]]]]:
    """Reads the version counters of a program's inputs.

    Returns:
        The fields `versions` and `checked` of `_CallState`.
    """
    versions = list(map(_version, map(tensors.__getitem__, step.reads)))
    if not step.checked:
        return versions, []
    return versions, [(tensors[i], tensors[i]._version, outputs) for i, outputs in step.checked]


def _refuse_inference_tensors(saved: Sequence[torch.Tensor]) -> None:
    """Raises PyTorch's error if one of the tensors was created under `inference_mode`.

    Args:
        saved: the inputs that eager PyTorch saves for backward.
    """
    for tensor in saved:
        if tensor.is_inference():
            with torch.enable_grad():
                torch.ones((), requires_grad=True, device=tensor.device) * tensor


class _Step(torch.autograd.Function):
    """Autograd function that runs the forward and the backward session of a program."""

    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        replay: Replay,
        step: TrainingStep,
        inputs: Sequence[torch.Tensor] | None,
        *recorded: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        tensors = recorded if inputs is None else inputs
        # A tensor that was created under `inference_mode` has no version counter and cannot be saved for backward.
        try:
            versions, checked = _versions(step, tensors)
        except RuntimeError:
            _refuse_inference_tensors([tensors[index] for index in program.saved_in_eager])
            tensors = tuple([t.clone() if t.is_inference() else t for t in tensors])
            versions, checked = _versions(step, tensors)
        hooked = _saved_tensors_hooks(True) is not None
        count = program.count
        residuals: list[Any] = []
        # The user's saved-tensor hooks must receive every saved tensor, so no residuals are kept as OrtValues.
        if step.keeps_values and not hooked:
            results, residuals = step.forward.run_keeping(tensors, count)
        else:
            results = step.forward.run(tensors)
        outputs = results[:count]
        # For an output that the loss doesn't use, a zero cotangent could become NaN, e.g. in the derivative of sqrt(0).
        # Setting the attributes takes less time than the methods of `ctx` that do only this.
        ctx.materialize_grads = False
        if program.constants:
            ctx.mark_non_differentiable(*[outputs[index] for index in program.constants])
        # `_cotangent` creates zeros of these shapes. Keeping the outputs themselves would keep their memory.
        several = len(program.seeds) > 1
        shapes = [(out.shape, out.dtype, out.device) for out in outputs] if several else ()
        saved = list(map(tensors.__getitem__, step.saved_inputs))
        saved_results = _share_outputs(step, saved, results) if step.shared else ()
        saved += results[count:]
        for place in step.unchecked:
            with _torch.DisableTorchDispatch():
                saved[place] = saved[place].data
        ctx.to_save = tuple(saved)
        # The inputs are not saved tensors, because the caller may write to an input that the gradients don't depend on.
        # Not `_CallState(...)`, whose constructor is a Python function.
        ctx.kept = tuple.__new__(
            _CallState,
            (
                program,
                replay,
                step,
                inputs is None,
                tensors,
                versions,
                saved_results,
                checked,
                residuals,
                shapes,
                hooked,
            ),
        )
        return tuple(outputs)

    # Called by `_apply_backward`, and by PyTorch itself under `torch.func` transforms.
    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, *cotangents)  # type: ignore[no-any-return]


def _share_outputs(
    step: TrainingStep, saved: list[torch.Tensor], results: Sequence[torch.Tensor]
) -> list[tuple[int, torch.Tensor, int]]:
    """Appends the outputs that backward reads to the saved tensors.

    Args:
        step: the sessions of the call.
        saved: the saved tensors; changed in place.
        results: the results of the forward session.

    Returns:
        The field `results` of `_CallState`.
    """
    # The caller may write to such an output. PyTorch would raise for every write to a saved tensor, whereas eager
    # PyTorch raises only if an operator's backward reads the output. So the output is saved without its version
    # counter, and `_backward` compares versions. The watch for PyTorch operators (`_pytorch_work.py`) is bypassed,
    # because it would slow down each call.
    with _torch.DisableTorchDispatch():
        shared = [(index, results[index].detach(), results[index]._version) for _, index in step.shared]
        saved += [results[index].data for _, index in step.shared]
    return shared


# `_Step.apply` for calls outside `torch.func` transforms. PyTorch's own `apply` (2.13) looks for `setup_context` in
# each call, which takes time.
_apply: Callable[..., Any] = _torch.apply_function.__get__(None, _Step)


# If a captured forward computes gradients, Dynamo must not capture this function.
@without_capture
def _backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Implements `_Step.backward`: returns the gradients of the arguments of `_Step.forward`."""
    kept: _CallState | None = ctx.kept
    if kept is None:
        received: tuple[int, ...] = ()
    elif len(cotangents) == 1:
        received = () if cotangents[0] is None else kept.program.seeds
    else:
        received = tuple([i for i in kept.program.seeds if cotangents[i] is not None])
    # No cotangent was received, e.g. from a later call that read a buffer which this call has written to. The saved
    # tensors must not be read: they may have been freed.
    if not received and not any(ct is not None for ct in cotangents):
        gradients: Sequence[torch.Tensor | None] = [None] * (len(ctx.needs_input_grad) - _OTHER_ARGUMENTS)
        _keep_from_hooks(ctx, gradients)
    else:
        # Raises if an earlier backward has freed the saved tensors, and the state.
        saved = ctx.saved_tensors
        assert kept is not None
        gradients = _gradients(kept, saved, cotangents, received)
        if not kept.all_recorded:
            gradients = list(map(gradients.__getitem__, kept.step.recorded))
        if received != kept.program.seeds:
            _keep_from_hooks(ctx, gradients)
    # PyTorch is about to free the saved tensors, whereas `ctx` lives as long as the outputs.
    if not _keeps_graph():
        ctx.kept = None
    return (*_NO_GRADIENTS, *gradients)


_OTHER_ARGUMENTS = 4
"""Number of arguments of `_Step.forward` that precede the recorded tensors."""
_NO_GRADIENTS = (None,) * _OTHER_ARGUMENTS
# PyTorch's own wrapper looks for a `vjp` method in each call.
_torch.set_backward(_Step, _backward)


def _gradients(
    kept: _CallState,
    tensors: tuple[torch.Tensor, ...],
    cotangents: Sequence[torch.Tensor | None],
    received: tuple[int, ...],
) -> Sequence[torch.Tensor | None]:
    """Returns the gradients of all inputs of a call, with None for inputs without a gradient.

    Args:
        kept: the state of the call.
        tensors: the saved tensors.
        cotangents: for each output, its cotangent or None.
        received: indices of the outputs that received a cotangent.
    """
    program, replay, step = kept.program, kept.replay, kept.step
    needs = step.needs
    present = [ct for ct in cotangents if ct is not None]
    if kept.checked:
        _check_versions(kept.checked, received)
    written: list[int] = []
    if kept.results:
        written = [index for index, result, version in kept.results if result._version != version]
    # In the replay PyTorch raises if one of its operators has saved an output that was written to.
    if written:
        inputs = _unchanged_inputs(kept, step.reads)
        by_output = dict(zip(received, present, strict=True))
        gradients: Sequence[torch.Tensor | None] = replay.gradients(inputs, needs, by_output, written)
        replay.announce(
            "gradient",
            ORTModuleTorchModelException(
                "the caller has written to a result that backward reads; write to a clone of it"
            ),
        )
        return gradients
    # With `create_graph=True` PyTorch enables gradients in backward.
    if _grad_enabled() or True in map(_is_wrapped, present) or True in map(_is_batched, present):
        inputs = _unchanged_inputs(kept, step.reads)
        return _differentiable(program, replay, needs, inputs, received, present)
    backward = step.backward
    if received != program.seeds:
        backward = program.backward(needs, received)
        present = [_cotangent(cotangents[i], kept.shapes[i]) for i in backward.seeds]
    saved = (*tensors, *kept.residuals)
    values = [*map(saved.__getitem__, backward.takes), *present]
    try:
        # If saved-tensor hooks returned new tensors, these may reuse the memory of earlier tensors.
        results = backward.session.run(values, trusted=not kept.hooked)
    # E.g. ONNX Runtime is out of memory.
    except Exception as error:
        if not is_of_onnxruntime(error):
            raise
        inputs = _unchanged_inputs(kept, step.reads)
        replay.announce("gradient", ORTModuleONNXModelException(f"ONNX Runtime failed: {error}"))
        by_output = {index: ct for index in received if (ct := cotangents[index]) is not None}
        return replay.gradients(inputs, needs, by_output)
    return list(map((*results, None).__getitem__, backward.places))


def _keep_from_hooks(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    """Keeps tensor hooks from being called with None.

    Args:
        ctx: the context of the backward call.
        gradients: the gradients that backward is about to return.
    """
    # If a loss uses only some outputs of a call, no gradient may reach a parameter. Eager PyTorch doesn't visit such a
    # parameter. Here, PyTorch's autograd engine (2.13) does, and would call the parameter's hooks with None.
    functions = [function for function, _ in ctx.next_functions[-len(gradients) :]]
    for gradient, function in zip(gradients, functions, strict=True):
        hooks = getattr(getattr(function, "variable", None), "_backward_hooks", None)
        if gradient is None and hooks:
            hooks.update(
                {
                    key: _HookOfGradients(hook)
                    for key, hook in hooks.items()
                    if type(hook) is not _HookOfGradients
                }
            )


class _HookOfGradients:
    """Wraps a tensor hook, and does not call it if the gradient is None.

    Args:
        hook: the hook that the user registered, e.g. `lambda gradient: gradient * 2`.
    """

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self._hook(gradient)


def _is_transformed(tensor: torch.Tensor) -> bool:
    """True if a tensor is wrapped by a `torch.func` transform, or by the legacy vmap of `is_grads_batched`.

    ONNX Runtime cannot read the memory of such a tensor.
    """
    return _is_wrapped(tensor) or _is_batched(tensor)


def _cotangent(received: torch.Tensor | None, shape: Any) -> torch.Tensor:
    """Returns the cotangent that an output received, or zeros if it received none.

    Args:
        received: the cotangent, or None.
        shape: shape, dtype and device of the output.
    """
    if received is not None:
        return received
    size, dtype, device = shape
    return torch.zeros(size, dtype=dtype, device=device)


def _check_versions(
    checked: Sequence[tuple[torch.Tensor, int, frozenset[int]]], received: Sequence[int]
) -> None:
    """Raises if the caller has modified an input that eager PyTorch would have saved for the requested gradients.

    Args:
        checked: triples (input, version counter in forward, indices of outputs). Eager PyTorch saves the input for the
            gradients of these outputs.
        received: indices of the outputs that received a cotangent.

    Raises:
        RuntimeError: such an input was modified in place; eager PyTorch raises the same error.
    """
    for tensor, version, outputs in checked:
        if tensor._version != version and not outputs.isdisjoint(received):
            # PyTorch's message, which programs may match and users know.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead"
            )


def _unchanged_inputs(kept: _CallState, reads: Sequence[int]) -> Sequence[torch.Tensor]:
    """Returns the inputs of a call, after checking that the caller has not modified them.

    Args:
        kept: the state of the call.
        reads: indices of the inputs that the gradients depend on. Only these inputs are checked.

    Raises:
        RuntimeError: the caller has modified one of these inputs in place.
    """
    inputs = kept.inputs
    for tensor, version in zip([inputs[i] for i in reads], kept.versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(
                f"computing the outputs again for a derivative: an input of shape {list(tensor.shape)} has been "
                f"modified by an inplace operation (version {tensor._version}, expected {version}); "
                "change a clone of it instead"
            )
    return inputs


def _differentiable(
    program: Program,
    replay: Replay,
    needs: tuple[bool, ...],
    inputs: Sequence[torch.Tensor],
    received: tuple[int, ...],
    cotangents: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor | None]:
    """Returns gradients that can be differentiated again, or gradients for a batch of cotangents.

    ONNX Runtime computes differentiable gradients if the gradient graph is itself differentiable. In all other cases
    PyTorch computes them.

    Args:
        program: the graph in ONNX Runtime.
        replay: the same graph in PyTorch.
        needs: for each input, True if it requires a gradient.
        inputs: the inputs of the program.
        received: indices of the outputs that received a cotangent.
        cotangents: the cotangents of these outputs; under `torch.vmap` they are batched.

    Returns:
        For each input, its gradient, or None if it requires no gradient or no gradient reaches it.
    """
    by_output = dict(zip(received, cotangents, strict=True))
    if any(map(_is_transformed, cotangents)):
        why = ORTModuleTorchModelException(
            "torch.vmap, is_grads_batched and vectorize=True differentiate for a batch of cotangents; "
            "in a loop over them the graph runs in ONNX Runtime"
        )
        replay.announce("batched gradient", why)
        return replay.gradients(inputs, needs, by_output)
    tensors = [*inputs, *cotangents]
    wanted = tuple([t.requires_grad for t in tensors])
    vjp_or_reason = program.differentiable_vjp(needs, received, wanted)
    if isinstance(vjp_or_reason, str):
        replay.announce("second derivative", ORTModuleONNXModelException(vjp_or_reason))
        return replay.gradients(inputs, needs, by_output)
    vjp, slots, dependent = vjp_or_reason
    if not vjp.seeds:
        return [None] * len(needs)
    # `requires_grad` in eager PyTorch doesn't follow from dependence: the gradient of a convolution's weight requires a
    # gradient although it doesn't depend on the weight, and a gradient through a path of zeros doesn't require one. So
    # PyTorch is asked, once per case.
    answers = program.differentiable_again
    if (needs, received, wanted) not in answers:
        answers[needs, received, wanted] = replay.differentiable_gradients(inputs, needs, by_output)
    flags = answers[needs, received, wanted]
    if flags is not None:
        by_slot = {slot: flag for slot, flag in zip(slots, flags, strict=True) if slot is not None}
        dependent = tuple(by_slot[slot] for slot in range(len(dependent)))
    with torch.set_grad_enabled(any(dependent)):
        results = call(vjp, tensors, replay.derivative(needs, received, slots))
    gradients = [g if flag else g.detach() for g, flag in zip(results, dependent, strict=True)]
    return [None if slot is None else gradients[slot] for slot in slots]
