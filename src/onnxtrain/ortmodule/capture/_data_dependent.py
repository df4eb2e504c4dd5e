"""What PyTorch's fake tensors do not know of operators whose results have sizes that depend on the data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxtrain.ortmodule._torch import constrain_range_for_size, fake_impls, isolates_recompiles


@contextlib.contextmanager
def data_dependent_results() -> Iterator[None]:
    """Lets Dynamo capture `bincount`, CTC losses and `cummax`, where it would end a graph, meanwhile.

    Other backends are not asked: they may rely on what is said here of results that no gradient is computed from.
    """
    known = fake_impls.op_implementations_dict
    replaced = {op: known[op] for op in _WRONG if op in known}
    added = {op: fake for op, fake in _FAKES.items() if op not in known or op in replaced}
    known.update(added)
    try:
        yield
    finally:
        for op in added:
            known.pop(op, None)
        known.update(replaced)


def unnoted_sizes(fake_mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile, sizes that depend on the data are not those of a result that is being traced.

    PyTorch otherwise looks for each new one in the next result of a trace, and raises where it is not.
    """
    shapes = getattr(fake_mode, "shape_env", None)
    return contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()


def without_tracebacks() -> contextlib.AbstractContextManager[None]:
    """Keeps PyTorch from printing the traceback of an operator that fails here; its error is raised, or dealt with."""
    return _without_messages("torch._subclasses.fake_tensor", "failed while attempting to run meta")


def without_advice() -> contextlib.AbstractContextManager[None]:
    """Keeps Dynamo from advising `capture_scalar_outputs` where ORTModule itself has switched that off."""
    return _without_messages("torch._dynamo.variables.tensor", "Graph break from `Tensor.item()`")


@contextlib.contextmanager
def _without_messages(logger_name: str, beginning: str) -> Iterator[None]:
    """Drops the messages of a logger that begin so, meanwhile."""

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
    """The forward variables are as many as the longest target needs, at most as many as all elements of the targets."""
    batched = log_probs.dim() == 3
    batch = [log_probs.shape[1]] if batched else []
    longest = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty([*batch, log_probs.shape[0], 2 * longest + 1])


def _bincount(
    fake_mode: Any, func: Any, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    size = fake_mode.shape_env.create_unbacked_symint()
    constrain_range_for_size(size, min=minlength)
    if weights is None:
        return x.new_empty([size], dtype=torch.int64)
    return weights.new_empty([size], dtype=torch.float32 if weights.dtype == torch.float32 else torch.float64)


def _cumulative(fake_mode: Any, func: Any, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's own asks whether there is any element."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


_FAKES: dict[Any, Callable[..., torch.Tensor | Sequence[torch.Tensor]]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten.bincount.default: _bincount,
    torch.ops.aten.cummax.default: _cumulative,
    torch.ops.aten.cummin.default: _cumulative,
}

_WRONG = () if isolates_recompiles else (torch.ops.aten.bincount.default,)
"""PyTorch 2.12 takes a sum of weights for a whole number."""
