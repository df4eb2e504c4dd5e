"""Rejects operator calls that raise in eager PyTorch but not with fake tensors.

Examples: a float64 input to a float32 `Linear` without bias (PyTorch 2.13), which Dynamo captures and ONNX Runtime
would compute in float64; or `min()` of an empty tensor, for which ONNX Runtime returns infinity.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain.ortmodule._torch import (
    disable_current_modes,
    is_functorch_wrapped_tensor,
    pytree,
)
from onnxtrain.ortmodule.capture._errors import RefusedByPyTorch
from onnxtrain.ortmodule.capture._nodes import name_of

# Functions of other packages may have side effects: they must not be called a second time.
_MODULES = ("torch", "_operator", "builtins")
"""Modules whose functions may be called on zeros to test whether PyTorch raises."""

# Kernel sizes and numbers of groups or axes are rarely larger. If they changed, they would no longer fit the tensors.
_MAX_KEPT_SIZE = 16
"""The largest size that :meth:`_Call.smaller` keeps."""

# oneDNN's backward pass of an LSTM crashes the process for some dtypes (PyTorch 2.13). `aten/recurrent.py` checks the
# dtypes of the forward pass with PyTorch.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

_ASSUMED_COUNT = 3
"""Value assumed for a data-dependent number, e.g. the number of elements that a mask selects."""

_MAX_ALLOCATED_ELEMENTS = 1 << 20
"""Number of elements up to which a tensor is allocated. Larger tensors are expanded from one element."""


_error_cache: dict[Any, str | None] = {}
"""Cache of `_mixed_dtypes`, by operator, dtypes, ranks and autocast mode: PyTorch's error message, or None."""


def refuse_call(node: fx.Node) -> None:
    """Raises RefusedByPyTorch if eager PyTorch rejects a call with mixed dtypes, or `max` or `min` of an empty tensor.

    Args:
        node: a node of a Dynamo graph; nodes that don't call a function or method are ignored.
    """
    if node.op not in ("call_function", "call_method"):
        return
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("example_value"))
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    dtypes = tuple(tensor.dtype for tensor in tensors)
    has_mixed_dtypes = len(set(dtypes)) > 1
    # Only for tensors: `max` may also take two sizes.
    is_extremum = len(tensors) == 1 and name_of(node) in ("max", "min")
    if not (has_mixed_dtypes or is_extremum) or not _is_plain(node, tensors):
        return
    trained = any(
        isinstance(value, torch.Tensor) and value.requires_grad
        for value in pytree.tree_leaves(node.meta.get("example_value"))
    )
    call = _Call(_callable(node), args, kwargs, trained)
    message = None
    if has_mixed_dtypes:
        message = _mixed_dtypes(node, call, tensors)
    elif any(size == 0 for size in map(_assumed_size, tensors[0].shape)):
        with disable_current_modes():
            message = call.error(dtypes)
    if message is not None:
        raise RefusedByPyTorch(message)


def _mixed_dtypes(node: fx.Node, call: _Call, tensors: Sequence[torch.Tensor]) -> str | None:
    """Returns eager PyTorch's error message if it rejects the dtypes of a call; None if it accepts them.

    Runs forward and backward on zeros. The dtypes are rejected if the call raises with them but succeeds with others.
    The result is cached by operator, dtypes, ranks and autocast mode.
    """
    dtypes = tuple(tensor.dtype for tensor in tensors)
    device = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    ranks = tuple((tensor.dim(), tensor.requires_grad) for tensor in tensors)
    key = (node.target, dtypes, ranks, call.trained, autocast)
    if key not in _error_cache:
        _error_cache[key] = _eager_error(call, dtypes)
    return _error_cache[key]


def _is_plain(node: fx.Node, tensors: list[torch.Tensor]) -> bool:
    """True if a node calls a PyTorch or Python operator that can be tested on zeros of the same shapes."""
    if node.op == "call_function":
        if getattr(node.target, "__name__", "") in _RECURRENT:
            return False
        module = getattr(node.target, "__module__", None) or type(node.target).__module__
        namespace = getattr(node.target, "namespace", "aten")
        if module.partition(".")[0] not in _MODULES or namespace != "aten":
            return False
    return all(
        tensor.layout == torch.strided
        and not is_functorch_wrapped_tensor(tensor)
        and all(_has_assumed_size(size) for size in tensor.shape)
        for tensor in tensors
    )


def _callable(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _eager_error(call: _Call, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Returns eager PyTorch's error message if it rejects these dtypes of the tensors; None if it accepts them.

    Runs the call and its backward pass on zeros, and compares with runs in which the tensors have other dtypes.
    """
    with disable_current_modes(), torch.random.fork_rng(), warnings.catch_warnings():
        # PyTorch warns when the module itself runs.
        warnings.simplefilter("ignore")
        # Small tensors first, because the logits over a vocabulary can take gigabytes. If the operator raises on small
        # tensors with all dtypes, its other arguments don't fit the reduced sizes.
        for sized in (call.smaller(), call):
            message = sized.error(dtypes)
            if message is None:
                return None
            if any(sized.error(others) is None for others in _other_dtypes(dtypes)):
                return message
        return None


def _other_dtypes(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[torch.dtype, ...]]:
    """Yields alternative dtypes for the tensors of a call, to find out if eager PyTorch accepts any of them.

    At first each tensor has the default dtype of its kind: float32 for floating-point dtypes, int64 for integers.
    Complex dtypes and bool are unchanged. Then one tensor at a time is float32, int64 or bool instead.
    Finally all tensors are float32.
    """
    kinds = tuple(
        torch.float32
        if dtype.is_floating_point
        else dtype
        if dtype.is_complex or dtype == torch.bool
        else torch.int64
        for dtype in dtypes
    )
    yield kinds
    for place, other in itertools.product(range(len(dtypes)), (torch.float32, torch.int64, torch.bool)):
        yield (*kinds[:place], other, *kinds[place + 1 :])
    yield (torch.float32,) * len(dtypes)


@dataclass(frozen=True)
class _Call:
    """A call to an operator, which can be repeated on zeros with different dtypes and smaller sizes.

    Attributes:
        function: the operator, e.g. `torch.nn.functional.linear`.
        args: its positional arguments, with fake tensors.
        kwargs: its keyword arguments, with fake tensors.
        trained: True if its result requires a gradient.
        sizes: maps each large size to the smaller size that replaces it, e.g. {50257: 17}.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trained: bool
    sizes: Mapping[int, int] = field(default_factory=dict)

    def smaller(self) -> _Call:
        """Returns a copy of the call with sizes above `_MAX_KEPT_SIZE` reduced; distinct sizes stay distinct."""
        tensors = (v for v in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(v, torch.Tensor))
        large = sorted(
            {size for tensor in tensors for size in map(_assumed_size, tensor.shape) if size > _MAX_KEPT_SIZE}
        )
        return replace(self, sizes={size: _MAX_KEPT_SIZE + place for place, size in enumerate(large, 1)})

    def error(self, dtypes: Sequence[torch.dtype]) -> str | None:
        """Runs the call and its backward pass on zeros of these dtypes.

        Returns:
            The error message; None on success.
        """
        following = iter(dtypes)

        def real(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                shape = [self.sizes.get(size, size) for size in map(_assumed_size, value.shape)]
                return _zeros(value, shape, next(following))
            if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
                return self.sizes.get(_assumed_size(value), _assumed_size(value))
            return value

        try:
            with torch.set_grad_enabled(self.trained):
                args, kwargs = pytree.tree_map(real, (self.args, self.kwargs))
                results = pytree.tree_leaves(self.function(*args, **kwargs))
                scores = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
                if scores:
                    torch.autograd.backward(scores, [torch.zeros_like(score) for score in scores])
        # PyTorch's operators raise exceptions of any type.
        except Exception as error:
            return str(error)
        return None


def _zeros(fake: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros on the device of `fake`. They require a gradient if `fake` does and the dtype is differentiable."""
    one = torch.zeros((), dtype=dtype, device=fake.device)
    if fake.requires_grad and (dtype.is_floating_point or dtype.is_complex):
        with torch.enable_grad():
            # The call may write to the tensor in place: it must not be a leaf, nor a view of one.
            one = one.requires_grad_().clone()
            return _expanded(one, shape)
    return _expanded(one, shape)


def _expanded(one: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns the scalar tensor `one` expanded to a shape. The elements share memory only if the result is large."""
    tensor = one.expand(shape)
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        if tensor.numel() <= _MAX_ALLOCATED_ELEMENTS
        else tensor
    )


def _has_assumed_size(size: int | torch.SymInt) -> bool:
    """True if `_assumed_size` can evaluate a size: it must not depend on both data and the shapes of the inputs."""
    if isinstance(size, int):
        return True
    unbacked = free_unbacked_symbols(size)
    return not unbacked or size.node.expr.free_symbols == unbacked


def _assumed_size(size: int | torch.SymInt) -> int:
    """Returns the value of a size in the captured call, with `_ASSUMED_COUNT` in place of data-dependent symbols."""
    if isinstance(size, int):
        return size
    if unbacked := free_unbacked_symbols(size):
        return int(size.node.expr.subs(dict.fromkeys(unbacked, _ASSUMED_COUNT)))
    # `int(size)` would add a guard, and each size would be captured separately. A size that was data-dependent when it
    # was computed, and turned out to equal an input's size, has no hint.
    return _ASSUMED_COUNT if size.node.hint is None else int(size.node.hint)
