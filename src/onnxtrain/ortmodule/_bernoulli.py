"""Draws the same Bernoulli numbers as PyTorch's CPU generator, several times faster."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from onnxtrain.runtime.kernels import kernel_library

__all__ = ["draws_masks", "fill_mask"]

# Smaller tensors are left to PyTorch, because reading and writing the generator's state takes 1 microsecond.
_SMALLEST = 2048
# How often a draw is repeated because another thread has used the generator meanwhile, before PyTorch draws.
_ATTEMPTS = 3


def draws_masks() -> bool:
    """True if native kernels are installed, and draw the same numbers as the installed PyTorch."""
    library = kernel_library()
    return library is not None and _agrees_with_pytorch(library)


def fill_mask(mask: torch.Tensor, p: float) -> torch.Tensor:
    """Does the same as `mask.bernoulli_(p)`, with PyTorch's default generator.

    May be called only if `draws_masks()` is true.

    Args:
        mask: a tensor of dtype bool on the CPU. Its elements lie in memory without gaps, in any order of axes.
        p: probability of True.

    Returns:
        The same tensor.
    """
    # PyTorch raises its error for another probability.
    if mask.numel() < _SMALLEST or not 0 <= p <= 1:
        return mask.bernoulli_(p)
    generator = torch.default_generator
    for _ in range(_ATTEMPTS):
        before = generator.get_state()
        after = before.clone()
        _draw(after, p, mask)
        # Another thread that has drawn from the generator would otherwise get the same numbers again.
        if torch.equal(generator.get_state(), before):
            generator.set_state(after)
            return mask
    return mask.bernoulli_(p)


def _draw(state: torch.Tensor, p: float, mask: torch.Tensor) -> bool:
    """Draws a mask, and advances the state of a generator.

    Returns:
        True, or False if the kernels don't support this processor.
    """
    kernels: Any = importlib.import_module("onnxtrain_kernels")
    drawn: bool = kernels.draw_bernoulli(state.data_ptr(), p, mask.data_ptr(), mask.numel())
    return drawn


@functools.cache
def _agrees_with_pytorch(library: str) -> bool:
    """True if the kernels draw the same numbers as PyTorch.

    PyTorch doesn't document how it draws, and may do it in another way on another platform or in another version.

    Args:
        library: path of the kernels' library.
    """
    generator = torch.Generator()
    generator.manual_seed(0)
    state = generator.get_state()
    # An odd number, and more than the generator computes at once.
    expected, mask = (torch.empty(1251, dtype=torch.bool) for _ in range(2))
    for p in (0.9, 1 / 3):
        expected.bernoulli_(p, generator=generator)
        if state.numel() != _STATE_BYTES or not _draw(state, p, mask) or not torch.equal(mask, expected):
            return False
    return torch.equal(generator.get_state(), state)


_STATE_BYTES = 5056
"""Size of the state of PyTorch's CPU generator (2.13)."""
