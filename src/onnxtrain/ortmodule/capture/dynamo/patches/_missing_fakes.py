"""Adds fake implementations for operators that Dynamo cannot capture, at least with data-dependent sizes.

PyTorch (2.13) has none for CTC losses, whose second result has a data-dependent size. Its fake `cummax` and `cummin`
check whether the input is empty, which breaks the graph if the input's size is data-dependent. The fake `bincount` of
PyTorch 2.12 returns int64 for float weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.ortmodule._torch import constrain_range_for_size, fake_impls, isolates_recompiles
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide


def _register() -> Callable[[], None]:
    """Registers the fake implementations in `FAKES`; returns the undo function."""
    known = fake_impls.op_implementations_dict
    before = {op: known.get(op) for op in FAKES if op not in known or op in _WRONG_FAKES}
    known.update({op: FAKES[op] for op in before})

    def undo() -> None:
        for op, fake in before.items():
            if fake is None:
                del known[op]
            else:
                known[op] = fake

    return undo


# Not for the whole process: other backends may rely on the sizes of results without a gradient, such as the forward
# variables of a CTC loss.
missing_fakes = ProcessWide(_register)


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
    """Returns fake results of a CTC loss: the losses, and forward variables `[batch, time, 2 * longest target + 1]`."""
    # The length of the longest target is data-dependent. The length of `targets` is an upper bound, which will do: the
    # ONNX gradient doesn't read the forward variables.
    batched = log_probs.dim() == 3
    batch = [log_probs.shape[1]] if batched else []
    longest = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty([*batch, log_probs.shape[0], 2 * longest + 1])


def _bincount(
    fake_mode: Any, func: Any, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Returns a fake result of `bincount`, with a data-dependent size of at least `minlength`."""
    size = fake_mode.shape_env.create_unbacked_symint()
    constrain_range_for_size(size, min=minlength)
    if weights is None:
        return x.new_empty([size], dtype=torch.int64)
    return weights.new_empty([size], dtype=torch.float32 if weights.dtype == torch.float32 else torch.float64)


def _cumulative(fake_mode: Any, func: Any, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fake results of `cummax` or `cummin`: values and indices with the shape of `x`."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


FAKES: dict[Any, Callable[..., torch.Tensor | Sequence[torch.Tensor]]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten.bincount.default: _bincount,
    torch.ops.aten.cummax.default: _cumulative,
    torch.ops.aten.cummin.default: _cumulative,
}

_WRONG_FAKES = () if isolates_recompiles else (torch.ops.aten.bincount.default,)
