"""Runs the command `onnxtrain`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `onnxtrain` command: runs it, or prints a hint if a package from the `build` extra is missing.

    Exits with code 1 if a package is missing, and with code 130 if Ctrl-C is pressed before a command starts.
    """
    try:
        try:
            from onnxtrain.cli._app import run
        except ImportError as error:
            print(
                f"onnxtrain: the command line needs packages that are missing ({error}). "
                "Run: pip install 'onnxtrain[build]'",
                file=sys.stderr,
            )
            # A missing package is an installation error, for which one line without a traceback is enough.
            sys.exit(1)
        run()
    except KeyboardInterrupt:
        # Ctrl-C came while modules were imported, which takes a second, or while options were read.
        print("Interrupted. No file was written.", file=sys.stderr)
        sys.exit(130)
