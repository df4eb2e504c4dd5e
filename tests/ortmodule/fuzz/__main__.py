"""Long runs: `PYTHONPATH=src:tests python -m ortmodule.fuzz --modules 2000 --workers 2`; `--help` says the rest."""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ortmodule.fuzz.judge import FINDINGS

__all__ = ["main"]

# As in `tests/conftest.py`. With 0 in the environment, PyTorch runs most calls after the first.
os.environ.setdefault("ORTMODULE_CAPTURE_ALL", "1")

_SECONDS = 120
"""Of computation, after which a module is taken to hang; a machine may be busy."""

_SECONDS_OF_WAITING = 3600

_MODULES_OF_A_PROCESS = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ortmodule.fuzz", description=__doc__)
    parser.add_argument("--modules", type=int, default=100, help="how many")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--show", metavar="SEED", help="print the program of a seed, and its verdict")
    parser.add_argument(
        "--shrink", metavar="SEED", help="print the program of a seed without what does not matter"
    )
    parser.add_argument("--log", type=Path, help="a file to which a line of JSON per module is appended")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work()
    if options.show or options.shrink:
        return _show(options.show or options.shrink, bool(options.shrink))
    return _supervise(options)


def _show(seed: str, small: bool) -> int:
    from ortmodule.fuzz.generate import generate
    from ortmodule.fuzz.judge import judge
    from ortmodule.fuzz.shrink import shrink

    program = generate(seed)
    program = shrink(program) if small else program
    print(program.text)
    print(judge(program.text, program.features))
    return 0


def _work() -> int:
    """Judges the seeds that come on the standard input."""
    from ortmodule.fuzz.generate import generate
    from ortmodule.fuzz.judge import judge

    gc.freeze()  # what is imported: looking through it again and again takes a sixth of the time
    gc.set_threshold(200_000, 20, 20)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print
    for line in sys.stdin:
        seed = line.strip()
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # whose signal ends the process, in native code too
        start = time.perf_counter()
        program = generate(seed)
        verdict = judge(program.text, program.features)
        answer = vars(verdict) | {"seed": seed, "seconds": round(time.perf_counter() - start, 2)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


class _Worker:
    """A process that judges modules, started again when it crashes or hangs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._done = 0

    def judge(self, seed: int) -> dict[str, Any]:
        if self._process is None or self._done >= _MODULES_OF_A_PROCESS:
            self.stop()
            command = [sys.executable, "-m", "ortmodule.fuzz", "--worker"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._done = 0
        process = self._process
        self._done += 1
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_SECONDS_OF_WAITING, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            waited = not timer.is_alive()
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        try:
            code: int | None = process.wait(10)
        except subprocess.TimeoutExpired:
            code = None
        self.stop()
        hung = waited or code == -signal.SIGPROF
        return {
            "seed": str(seed),
            "kind": "hangs" if hung else "crashes",
            "where": "",
            "detail": f"exit {code}",
        }

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _supervise(options: argparse.Namespace) -> int:
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for seed in range(options.start, options.start + options.modules):
        seeds.put(seed)

    def serve() -> None:
        worker = _Worker()
        try:
            while True:
                answers.put(worker.judge(seeds.get_nowait()))
        except queue.Empty:
            worker.stop()

    for _ in range(options.workers):
        threading.Thread(target=serve, daemon=True).start()
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    whole = 0
    for _ in range(options.modules):
        answer = answers.get()
        kinds[answer["kind"]] += 1
        whole += not answer.get("fallbacks")
        reasons.update({reason[:70] for reason in answer.get("fallbacks", ())})
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(answer) + "\n")
        if answer["kind"] not in ("same", "refused"):
            print(
                f"{answer['seed']}: {answer['kind']} {answer['where']} {answer['detail'][:300]}", flush=True
            )
    print(f"{options.modules} modules, {whole} wholly in ONNX Runtime: {dict(kinds.most_common())}")
    for reason, count in reasons.most_common(15):
        print(f"  {count} in PyTorch: {reason}")
    return int(any(kinds[kind] for kind in (*FINDINGS, "crashes", "hangs")))


if __name__ == "__main__":
    sys.exit(main())
