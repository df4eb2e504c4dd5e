"""Makes `.onnx` files of many kinds, as people find them: exports, files of packages, and what tools make of these.

Usage: python make.py FOLDER [SOURCE ...]    (all sources whose packages are installed, or those named)
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
import warnings
from pathlib import Path

SOURCES = (
    "packaged",
    "torch_nets",
    "torch_flow",
    "hugging_face",
    "sklearn_models",
    "keras_models",
    "scripted",
)


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sources", nargs="*", choices=[[], *SOURCES], default=[])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in arguments.sources or SOURCES:
        try:
            source = importlib.import_module(f"sources.{name}")
        except ModuleNotFoundError as error:
            print(f"{name}: {error}; its files are left out", file=sys.stderr)
            continue
        try:
            source.make(arguments.folder)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
