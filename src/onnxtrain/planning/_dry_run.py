"""Trains a few steps as a device does, and prints the memory and the time that they took.

`_measure` runs this file in a process of its own: `python _dry_run.py DIR STEPS LIMIT THREADS`. It imports the same as
a device, so that its memory is that of a training there.
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
"""Exit code of a process that has used more memory than its limit; that of EX_TEMPFAIL, which Python has no use for."""


def peak_memory() -> int:
    """Returns the largest memory that this process has had at one time, in bytes (resident set size)."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not `getrusage`, which on Linux begins with the peak of the process that has started this one.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    # Windows has no `resource`.
    import resource

    # On macOS in bytes; on the other systems in kilobytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def watch(limit: int) -> None:
    """Ends the process as soon as it has used more memory than `limit` bytes."""
    # A limit of the address space would count files that are mapped and not read, and memory that is only reserved.
    while peak_memory() <= limit:
        time.sleep(0.01)
    # Not `sys.exit`, which ends the thread alone.
    os._exit(STOPPED)


def main(directory: Path, steps: int, limit: int, threads: int) -> None:
    """Trains, evaluates and saves once, and prints {"peak": bytes, "seconds": median time of a step} as JSON."""
    threading.Thread(target=watch, args=(limit,), daemon=True).start()
    import numpy as np

    from onnxtrain.api import CheckpointState, Module, Optimizer
    from onnxtrain.runtime.session_settings import SessionSettings

    # None, as most callers have it, is not the same as options with 0 threads: the session may choose its own then.
    options = SessionSettings(threads=threads).options() if threads else None
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    paths = [directory / f"{kind}_model.onnx" for kind in ("training", "eval", "optimizer")]
    module = Module(paths[0], state, paths[1], session_options=options)
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
    # A run on a device ends with both. They belong to its peak if the batch is small beside the parameters.
    module.eval()
    module(*arrays)
    CheckpointState.save_checkpoint(state, directory / "trained", include_optimizer_state=True)
    # The first step allocates memory and starts threads.
    result = {"peak": peak_memory(), "seconds": statistics.median(seconds[1:] or seconds)}
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
