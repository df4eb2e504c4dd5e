"""Programs that the generator leaves out, or the judge forgives, because they are known to differ."""

from __future__ import annotations

__all__ = ["OFF", "ZERO_SECOND_DERIVATIVES"]

OFF: frozenset[str] = frozenset()
"""Names that `Writer.off` is asked for, see `statements`."""

ZERO_SECOND_DERIVATIVES = ("mode='replicate'", "mode='reflect'")
"""Texts of paddings whose gradient eager PyTorch (2.13) gives a derivative of zeros, and ORTModule none.

With `create_graph=True` the gradient of their input says that it requires a gradient in eager PyTorch alone.
"""
