"""Programs that the generator leaves out because they are known to differ."""

from __future__ import annotations

__all__ = ["OFF"]

OFF: frozenset[str] = frozenset()
"""Names that `Writer.off` is asked for, see `statements`."""
