"""What the generator leaves out because it is known to differ."""

from __future__ import annotations

__all__ = ["OFF"]

OFF = frozenset(
    {
        "several results without grad",
        "write without grad",
        "overlap",
        "write after break",
        "checkpoint",
        "cond",
        "negative indices",
    }
)
"""Names that `Writer.off` is asked for, see `statements`."""
