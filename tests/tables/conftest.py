"""The command line, which encodes tables by options."""

from __future__ import annotations

from cli.conftest import run

__all__ = ["run"]
