"""Trains a few steps as a device would, and prints the peak memory and the time per step.

`_measure` runs this file in a separate process: `python _dry_run.py DIR STEPS LIMIT THREADS`. It only imports modules
that training on a device also imports, because they count towards the memory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

STOPPED = 75
"""Exit code of a process that exceeded its memory limit: EX_TEMPFAIL, which Python itself doesn't use."""


def peak_memory() -> int:
    """Returns this process's peak memory in bytes (resident set size)."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not `getrusage`, whose value on Linux starts with the peak of the parent process.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    # Windows has no `resource`.
    import resource

    # In bytes on macOS, in kilobytes on other systems.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def watch(limit: int) -> None:
    """Polls the peak memory, and ends the process once it exceeds `limit` bytes. Run in a background thread."""
    # A limit on the address space would also count mapped files that are never read, and memory that is only reserved.
    while peak_memory() <= limit:
        time.sleep(0.01)
    # Not `sys.exit`, which would only end this thread.
    os._exit(STOPPED)


def main(directory: Path, steps: int, limit: int, threads: int) -> None:
    """Trains for `steps` steps, evaluates a batch and saves a checkpoint; prints peak memory and step time as JSON.

    The output is `{"peak": BYTES, "seconds": SECONDS}`, with the median step time. The first step is not timed, unless
    it is the only one.

    Args:
        directory: directory with the artifacts and `inputs.npz`.
        steps: number of training steps.
        limit: memory limit of the process in bytes.
        threads: number of threads per op; 0 for ONNX Runtime's default.
    """
    threading.Thread(target=watch, args=(limit,), daemon=True).start()
    import numpy as np

    from onnxtrain.api import CheckpointState, Module, Optimizer
    from onnxtrain.runtime.session_settings import SessionSettings

    # None, which most callers use, differs from options with 0 threads: with None, the session may choose its own
    # options.
    options = SessionSettings(threads=threads).options() if threads else None
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    paths = [directory / f"{kind}_model.onnx" for kind in ("training", "eval", "optimizer")]
    module = Module(paths[0], state, paths[1], session_options=options, error_if_nonfinite=False)
    optimizer = Optimizer(paths[2], module)
    with np.load(directory / "inputs.npz") as file:
        arrays = [file[name] for name in file.files]
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        module(*arrays)
        optimizer.step()
        module.lazy_reset_grad()
        seconds.append(time.perf_counter() - start)
    # A training run on a device ends with both. They determine its peak if the batch is small compared to the
    # parameters.
    module.eval()
    module(*arrays)
    CheckpointState.save_checkpoint(state, directory / "trained", include_optimizer_state=True)
    # Without the first step, which allocates memory and starts threads.
    result = {"peak": peak_memory(), "seconds": statistics.median(seconds[1:] or seconds)}
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
