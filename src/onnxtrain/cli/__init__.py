"""Runs the command `onnxtrain`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line; without the packages of the extra `build` prints how to install them."""
    try:
        try:
            from onnxtrain.cli._app import run
        except ImportError as error:
            print(
                f"onnxtrain: the command line needs packages that are missing ({error}). "
                "Run: pip install 'onnxtrain[build]'",
                file=sys.stderr,
            )
            # A missing package is an error of the installation: one line, and no traceback of imports.
            sys.exit(1)
        run()
    except KeyboardInterrupt:
        # Ctrl-C while modules are imported, which takes a second, or while options are read.
        print("Interrupted. No file was written.", file=sys.stderr)
        sys.exit(130)
