"""Runs what README.md shows with an installed onnxtrain and native kernels: `python .ci/readme_blocks.py`.

The blocks run from the first to the last in one folder, and must print what the page shows (tests/pages.py). It needs
the extras [demo], [torch] and [kernels], and fails if no native kernel runs in a training step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from pages import difference, read_blocks, run_block  # noqa: E402 - found by the line before


def run_page() -> None:
    """Runs the blocks and prints the seconds of each; ends with a message if one prints what the page does not show."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in read_blocks("README.md"):
        start = time.monotonic()
        printed = run_block(block, names)
        print(f"{time.monotonic() - start:6.1f} s  {block.code.splitlines()[0][:80]} ...", flush=True)
        if message := difference(block.shown, printed, block.marks):
            sys.exit(message)


def kernels_of_a_step(model: str) -> list[str]:
    """Lists the native kernels that run in a training step, as ONNX Runtime's profile names them.

    Args:
        model: path of a training model, e.g. "artifacts/training_model.onnx".
    """
    import numpy as np
    import onnxruntime
    import onnxtrain_kernels

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnxtrain_kernels.library()))
    options.enable_profiling = True
    session = onnxruntime.InferenceSession(model, options)
    feeds = {}
    for feed in session.get_inputs():
        dtype = {"tensor(float)": np.float32, "tensor(int64)": np.int64}[feed.type]
        feeds[feed.name] = np.zeros([size if isinstance(size, int) else 8 for size in feed.shape], dtype)
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = [
        event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    return sorted({op for node in nodes if (op := node["args"]["op_name"]).endswith("_float")})


def main() -> None:
    """Runs the page in an empty folder; ends with a message if its training step runs no native kernel."""
    os.environ |= {"ONNXTRAIN_KERNELS": "on", "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run_page()
        kernels = kernels_of_a_step("artifacts/training_model.onnx")
        os.chdir(ROOT)
    if not kernels:
        sys.exit("no native kernel ran in the training step of artifacts/training_model.onnx")
    print(f"All blocks of README.md run. Kernels of a training step: {', '.join(kernels)}")


if __name__ == "__main__":
    main()
