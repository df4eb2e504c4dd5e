"""Trains every `.onnx` file in some folders, each in a process of its own, and says how it went.

`judge.py` is what is done with each, and says what the verdicts are; further ones are timeout and memory (beyond the
limits). Files are made by `make.py`; any other folder will do. The first folder inside of a folder is called the
source of the files in it; a file `NAME@VARIANT.onnx` is a variant of `NAME.onnx`, and `NAME.npz` has their inputs.

Usage: python sweep.py FOLDER [--only PART ...] [--seconds N] [--gigabytes N] [--resume] [--verdict V ...]
                       [--results NAME]
Writes results/NAME.json, and notes/files.md from all results.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
from judge import judge
from page import page

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parents[1] / "notes" / "files.md"


def judged(path: Path, seconds: float, gigabytes: float) -> dict[str, Any]:
    """Returns the verdict on a file, from a process of its own within limits."""
    answer, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(theirs, path))
    process.start()
    theirs.close()
    try:
        while not answer.poll(0.2):
            used, memory = _used(process.pid)
            if used > seconds:
                return {"verdict": "timeout", "reason": f"more than {seconds:.0f} s of processor time"}
            if memory > gigabytes * 2**30:
                return {"verdict": "memory", "reason": f"more than {gigabytes:g} GB"}
        try:
            return answer.recv()  # type: ignore[no-any-return]
        except EOFError:
            process.join()
            if _ends_processes(path):
                said = "ONNX Runtime ends the process when it loads the file as it stands, with its default options"
                return {"verdict": "not run", "reason": said}
            return {"verdict": "crashed", "reason": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        answer.close()


def _ends_processes(path: Path) -> bool:
    """Tell whether a plain session of a file ends the process."""
    code = "import sys, onnxruntime; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=False).returncode < 0


def _send(connection: Any, path: Path) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("onnxtrain").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        connection.send(judge(path))


def _used(pid: int | None) -> tuple[float, int]:
    """The processor time of a process, in seconds, and its memory in bytes."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0.0, 0


def _without_places(text: str, folder: Path) -> str:
    """Remove the folders of files and artifacts from texts of errors."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+/", "", text.replace(f"{folder}/", ""))


def main() -> None:
    """Sweeps, prints a line per file, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="only files whose paths contain one of these")
    parser.add_argument("--seconds", type=float, default=300, help="of processor time")
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--resume", action="store_true", help="leave out what the results have already")
    parser.add_argument("--results", default="files", help="name of the file of results")
    parser.add_argument("--verdict", nargs="*", default=[], help="only what had one of these verdicts")
    arguments = parser.parse_args()
    results = RESULTS / f"{arguments.results}.json"
    known = json.loads(results.read_text()) if results.exists() else {}
    order = {
        path: (path.stat().st_size > 2**24, "@" in path.name, path)
        for path in arguments.folder.rglob("*.onnx")
    }
    for path in sorted(order, key=lambda p: order[p]):
        name = str(path.relative_to(arguments.folder).with_suffix(""))
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        if arguments.resume and name in known:
            continue
        if arguments.verdict and known.get(name, {}).get("verdict") not in arguments.verdict:
            continue
        start = time.monotonic()
        known[name] = judged(path, arguments.seconds, arguments.gigabytes)
        print(name, known[name]["verdict"], known[name].get("reason", ""), sep=" | ", flush=True)
        if known[name]["verdict"] == "trained":
            known[name].pop("tried", None)
        known[name]["seconds"] = round(time.monotonic() - start, 1)
        RESULTS.mkdir(exist_ok=True)
        results.write_text(
            _without_places(json.dumps(dict(sorted(known.items())), indent=1), arguments.folder) + "\n"
        )
    everything: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        everything |= json.loads(path.read_text())
    PAGE.write_text(page(everything))


if __name__ == "__main__":
    main()
