"""Capture operators whose results have sizes that depend on the data, where PyTorch's fake tensors give up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxtrain.ortmodule._torch import constrain_range_for_size, fake_impls, isolates_recompiles
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide


def _replace_fakes() -> Callable[[], None]:
    """Gives Dynamo fakes of `bincount`, CTC losses and `cummax`; returns the function that takes them away."""
    known = fake_impls.op_implementations_dict
    before = {op: known.get(op) for op in _FAKES if op not in known or op in _WRONG}
    known.update({op: _FAKES[op] for op in before})

    def put_back() -> None:
        for op, fake in before.items():
            if fake is None:
                del known[op]
            else:
                known[op] = fake

    return put_back


data_dependent_results = ProcessWide(_replace_fakes)
"""Lets Dynamo capture `bincount`, CTC losses and `cummax` while it is open; else the graph would end there.

Not for ever: other backends may rely on the sizes that PyTorch gives results without a gradient, such as the forward
variables of a CTC loss.
"""


def unnoted_sizes(fake_mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Lets operators run on fake tensors, outside of a trace, although their sizes depend on the data."""
    # PyTorch (2.13) expects each new unbacked symbol in the next result of a trace, and raises where it is not there.
    shapes = getattr(fake_mode, "shape_env", None)
    return contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()


def without_tracebacks() -> contextlib.AbstractContextManager[None]:
    """Keeps PyTorch from logging the traceback of an operator that fails here; its error is raised anyway."""
    return _without_messages("torch._subclasses.fake_tensor", "failed while attempting to run meta")


def without_advice() -> contextlib.AbstractContextManager[None]:
    """Keeps Dynamo from advising `capture_scalar_outputs` where ORTModule itself has switched that off."""
    return _without_messages("torch._dynamo.variables.tensor", "Graph break from `Tensor.item()`")


@contextlib.contextmanager
def _without_messages(logger_name: str, beginning: str) -> Iterator[None]:
    """Drops the messages of a logger that begin with a text, while it is open."""

    def is_another(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(beginning)

    logger = logging.getLogger(logger_name)
    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


def _ctc_loss(
    fake_mode: Any,
    func: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fake results: the losses, and forward variables `[batch, time, 2 * longest target + 1]`."""
    # The length of the longest target depends on the data. That of `targets` is a bound, and no gradient of ONNX's
    # reads the forward variables.
    batched = log_probs.dim() == 3
    batch = [log_probs.shape[1]] if batched else []
    longest = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty([*batch, log_probs.shape[0], 2 * longest + 1])


def _bincount(
    fake_mode: Any, func: Any, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Returns a fake result of a size that only the data tell, at least `minlength`."""
    size = fake_mode.shape_env.create_unbacked_symint()
    constrain_range_for_size(size, min=minlength)
    if weights is None:
        return x.new_empty([size], dtype=torch.int64)
    return weights.new_empty([size], dtype=torch.float32 if weights.dtype == torch.float32 else torch.float64)


def _cumulative(fake_mode: Any, func: Any, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fake results of `cummax` or `cummin`: values and indices, of the shape of `x`."""
    # PyTorch's own (2.13) asks whether `x` has any element, which ends the graph where its size depends on the data.
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


_FAKES: dict[Any, Callable[..., torch.Tensor | Sequence[torch.Tensor]]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten.bincount.default: _bincount,
    torch.ops.aten.cummax.default: _cumulative,
    torch.ops.aten.cummin.default: _cumulative,
}

# PyTorch 2.12 has a fake for `bincount` that gives sums of weights the dtype int64.
_WRONG = () if isolates_recompiles else (torch.ops.aten.bincount.default,)
