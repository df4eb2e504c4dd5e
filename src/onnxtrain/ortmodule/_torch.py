"""Imports all private parts of PyTorch that ORTModule uses.

If the installed PyTorch lacks one of them, importing this module raises an ImportError that names the missing part.
Parts that are missing from a supported version, e.g. :data:`set_isolated_recompiles`, are optional: the code that uses
them also works without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

# Tests check that no other module uses PyTorch's private names. They are imported here, so that a PyTorch version
# that lacks one of them fails at import, not during a user's training.
try:
    import torch._decomp
    import torch._dynamo
    import torch._dynamo.exc

    # Imported only to fill the table of decompositions.
    import torch._refs
    from torch import _dynamo as dynamo
    from torch._C._dynamo import eval_frame as c_eval_frame
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
    from torch._C._dynamo.eval_frame import set_eval_frame
    from torch._C._dynamo.guards import GuardManager, compute_overlapping_tensors
    from torch._C._functorch import (
        get_dynamic_layer_stack_depth,
        get_unwrapped,
        is_functorch_wrapped_tensor,
        is_legacy_batchedtensor,
        peek_interpreter_stack,
        pop_dynamic_layer_stack_and_undo_to_depth,
        unwrap_if_dead,
    )
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import OptimizedModule, eval_frame, graph_region_tracker, symbolic_convert, trace_rules
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import guards as dynamo_guards
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.decorators import skip
    from torch._dynamo.exc import (
        InternalTorchDynamoError,
        ShortenTraceback,
        TorchRuntimeError,
        UncapturedHigherOrderOpError,
        Unsupported,
        UserError,
    )
    from torch._dynamo.exc import unimplemented as graph_break
    from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder
    from torch._dynamo.mutation_guard import GenerationTracker, install_generation_tagging_init
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslator
    from torch._dynamo.types import ConvertFrameReturn
    from torch._dynamo.utils import get_metrics_context
    from torch._dynamo.variables import builder as dynamo_builder
    from torch._dynamo.variables import lists as dynamo_lists
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.misc import AutogradFunctionVariable, RandomVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
    from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
    from torch._functorch.predispatch import _enter_dual_level as enter_dual_level
    from torch._functorch.predispatch import _exit_dual_level as exit_dual_level
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._guards import ChainedSource, CompileContext
    from torch._ops import HigherOrderOperator
    from torch._subclasses import fake_impls
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx._symbolic_trace import is_fx_symbolic_tracing
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size as constrain_range_for_size
    from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    # Dynamo (PyTorch 2.13) inserts this function into a graph for `with torch.no_grad()`.
    set_grad_enabled = torch._C._set_grad_enabled
    set_deterministic_algorithms = torch._C._set_deterministic_algorithms
    # C++ guards, and the functions beneath Python context managers, whose overhead would slow down each call.
    DisableAutocast = torch._C._DisableAutocast
    DisableTorchDispatch = torch._C._DisableTorchDispatch
    push_dispatch_mode = torch._C._push_on_torch_dispatch_stack
    pop_dispatch_mode = torch._C._pop_torch_dispatch_stack
    get_dispatch_mode = torch._C._get_dispatch_mode
    count_dispatch_modes = torch._C._len_torch_dispatch_stack
    dispatch_mode_at = torch._C._get_dispatch_stack_at
    FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
    is_tracing = torch._C._is_tracing
    # `TracingContext.try_get` reads this attribute of it: a Python function less in each call.
    guards_of_thread = torch._guards._TLS
    # Returns the id of the current thread's backward pass, or -1 outside backward.
    current_graph_task_id = torch._C._current_graph_task_id
    # Returns True during a backward pass with `retain_graph=True`, and outside backward.
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
    functorch_transforms_active = torch._C._are_functorch_transforms_active
    # The legacy vmap, which `is_grads_batched` uses.
    enter_vmap = torch._C._vmapmode_increment_nesting
    leave_vmap = torch._C._vmapmode_decrement_nesting
    # Compiles the code of a graph that FX would compile in its first call.
    compile_now = _LazyGraphModule.force_recompile
    # Functions that Dynamo inserts into graphs in place of context managers.
    enter_autocast, exit_autocast = (
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
    )
    enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
    exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode
    is_fwd_grad_enabled, set_fwd_grad_enabled = torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled
    get_inplace_requires_grad_allowed = torch._C._functorch.get_inplace_requires_grad_allowed
    set_inplace_requires_grad_allowed = torch._C._functorch.set_inplace_requires_grad_allowed
    saved_tensors_hooks_error = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
    _disable_saved_tensors_hooks = torch._C._autograd._saved_tensors_hooks_disable
    _enable_saved_tensors_hooks = torch._C._autograd._saved_tensors_hooks_enable
    sdpa_settings: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
        *(
            (getattr(torch._C, f"_get_{kind}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{kind}"))
            for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
        ),
        (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    )
    # Their getters, with the functions that a user calls.
    sdpa_switches: dict[Callable[[], Any], Callable[[bool], None]] = {
        getattr(torch._C, f"_get_{kind}_sdp_enabled"): getattr(torch.backends.cuda, f"enable_{kind}_sdp")
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    }
    # Dynamo (PyTorch 2.13) inserts this function into a graph for `tensor.data`.
    get_data = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
    saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    defer_saved_tensors_hooks = torch._C._autograd._saved_tensors_hooks_set_tracing
    # `apply` of the C class. `torch.autograd.Function.apply` first prepares each call for `torch.func` transforms.
    apply_function: Any = torch._C._FunctionBase.__dict__["apply"]
    # The C functions are used, because they are called once per tensor. `torch.from_dlpack` is a Python wrapper.
    to_dlpack = torch._C._to_dlpack
    from_dlpack = torch._C._from_dlpack
    # Operators without a public name in Python, which occur in captured graphs or are called by lowerings.
    foreach_copy = torch._foreach_copy_
    one_hot = torch._C._nn.one_hot
    assert_async = torch._assert_async
    assert_scalar = torch.ops.aten._assert_scalar.default
    torch_check = torch._check
    linalg_check_errors = torch._linalg_check_errors
    decompositions = torch._decomp.decomposition_table
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"ORTModule cannot run on PyTorch {torch.__version__}, which lacks a part that it needs: {error}. "
        "Install a version that onnxtrain's [torch] extra allows: pip install 'onnxtrain[torch]'"
    ) from error


def set_backward(function: Any, backward: Callable[..., Any]) -> None:
    """Makes the autograd engine call `backward` without PyTorch's wrapper around it.

    Args:
        function: a subclass of `torch.autograd.Function`.
        backward: called with the context and the cotangents.
    """
    function._backward_cls.apply = backward


def set_saved_tensors_hooks_error(message: str | None) -> None:
    """Disallows saved-tensor hooks: registering one raises an error with `message`. None allows them again."""
    if message is None:
        _enable_saved_tensors_hooks()
    else:
        _disable_saved_tensors_hooks(message)


DYNAMIC_AXES = "_dynamo_propagated_dynamic_indices"
"""Name of a tensor attribute with the axes, e.g. {0}, whose sizes Dynamo captures as symbols if possible, as after
`torch._dynamo.maybe_mark_dynamic`. No guard depends on the attribute. PyTorch versions that don't know it capture fixed
sizes."""

MARKED_AXES = (
    "_dynamo_dynamic_indices",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_static_indices",
    DYNAMIC_AXES,
)
"""Names of tensor attributes with axes that the user or PyTorch's own compiler has marked as dynamic or static."""

isolates_recompiles = "isolate_recompiles" in inspect.signature(eval_frame._optimize).parameters
"""True since PyTorch 2.13: Dynamo stores and counts graphs per compiled function, not per code object as before."""

set_isolated_recompiles: Callable[[int], int] | None = getattr(
    c_eval_frame, "set_eval_frame_isolate_recompiles_id", None
)
"""Sets the id of the compiled function that later calls belong to; returns the previous id.

None before PyTorch 2.13.
"""


def _bounds_pass_gradients() -> bool:
    """True if the installed PyTorch's `torch.clamp` propagates the gradient of elements that equal a bound."""
    # This module may be imported under `no_grad` or `inference_mode`.
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        return bool(torch.autograd.grad(x.clamp(0, 1).sum(), x)[0])


bounds_pass_gradients = _bounds_pass_gradients()
"""True if `torch.clamp` propagates the gradient of elements that equal a bound, as in PyTorch 2.13 but not in 2.15."""


def dynamo_optimize(backend: Callable[..., Any], recompile_limit: int) -> Any:
    """Returns the Dynamo context that captures functions for `backend`.

    Args:
        backend: called with each captured graph.
        recompile_limit: maximum number of graphs per function, e.g. 256. If a function needs another graph, it runs in
            eager PyTorch. Ignored before PyTorch 2.13.
    """
    if isolates_recompiles:
        return torch._dynamo.optimize(backend, isolate_recompiles=True, recompile_limit=recompile_limit)
    # PyTorch 2.12 has one limit per code object, which `capture` sets in `torch._dynamo.config`.
    return torch._dynamo.optimize(backend)


def pop_function_modes() -> list[Any]:
    """Exits all `__torch_function__` modes, e.g. from `torch.set_default_device`; returns them, outermost first."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]


def push_function_modes(modes: list[Any]) -> None:
    """Re-enters the modes returned by :func:`pop_function_modes`."""
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def current_trace() -> Any:
    """Returns Dynamo's `OutputGraph` of the current thread's capture, or None outside a capture."""
    try:
        return InstructionTranslator.current_tx().output
    # PyTorch reads an attribute that it creates only when the first capture of a thread begins.
    except AttributeError:
        return None


def is_of_module(placeholder: fx.Node) -> bool:
    """True if an input of a captured graph is a parameter or buffer of a module."""
    source: Any = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return False
    # `guard_source` is a method up to PyTorch 2.9, and a property in later versions.
    kind = source.guard_source() if callable(source.guard_source) else source.guard_source
    return bool(kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module())
