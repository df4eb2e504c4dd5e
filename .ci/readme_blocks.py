"""Runs what README.md shows, in an environment into which onnxtrain is installed: `python readme_blocks.py README.md`.

Every Python block and every `onnxtrain` command of a shell block runs in a process of its own, in one new folder, in
the order of the page. It needs the extras [demo], [torch] and [kernels], and fails if native kernels are not used.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK = re.compile(r"^```(python|sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Runs behind the blocks in a process of its own: ONNX Runtime's profile names the kernels that ran.
KERNELS_OF_A_STEP = """
import json, numpy, onnxruntime, onnxtrain_kernels
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(str(onnxtrain_kernels.library()))
options.enable_profiling = True
session = onnxruntime.InferenceSession("artifacts/training_model.onnx", options)
values = {}
for x in session.get_inputs():
    dtype = {"tensor(float)": numpy.float32, "tensor(int64)": numpy.int64}[x.type]
    values[x.name] = numpy.zeros([n if isinstance(n, int) else 8 for n in x.shape], dtype)
session.run(None, values)
events = json.load(open(session.end_profiling()))
ran = {e["args"]["op_name"] for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")}
kernels = sorted(name for name in ran if name.endswith("_float"))
assert kernels, f"no native kernel ran in a training step, but {sorted(ran)}"
print("level", onnxtrain_kernels.level() + "; kernels of a training step:", ", ".join(kernels))
"""


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Lists what a page shows as (first line of the block, arguments of the process)."""
    found = []
    for language, text in BLOCK.findall(page):
        if language == "python":
            found.append((text.partition("\n")[0] + " ...", [sys.executable, "-c", text]))
            continue
        for line in text.splitlines():
            command = line.partition("#")[0].strip()
            if command.startswith("onnxtrain "):
                found.append((command, ["sh", "-c", command]))
    return found


def main(path: Path) -> None:
    """Runs all of a page and prints the seconds of each process; ends with a message if one fails."""
    beside_python = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{beside_python}{os.pathsep}{os.environ['PATH']}",
        "ONNXTRAIN_KERNELS": "on",
    }
    shown = commands(path.read_text(encoding="utf-8"))
    # The first lines of the page are `make demo`, which needs the repository; this is what it runs.
    shown = [("onnxtrain demo", ["sh", "-c", "onnxtrain demo"]), *shown]
    shown.append(("kernels of a training step", [sys.executable, "-c", KERNELS_OF_A_STEP]))
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in shown:
            start = time.monotonic()
            done = subprocess.run(
                arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            print(f"{time.monotonic() - start:6.1f} s  {name}", flush=True)
            if done.returncode:
                sys.exit(f"{done.stdout}{done.stderr}{name} failed with status {done.returncode}")
            if name.startswith("kernels"):
                print(done.stdout.strip())
    print(f"{len(shown)} commands and blocks of {path.name} run")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
