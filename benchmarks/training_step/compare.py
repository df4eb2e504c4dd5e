"""Times one training step of each net on each engine, in processes that take turns, and prints the ratios.

The halves of a step (forward and backward; AdamW) are timed apart. With one thread it is CPU time, so that a
busy machine disturbs little; with more it is elapsed time and the machine must be quiet. The minimum counts.
The engines start from the same weights, and the run fails unless their losses agree over a few steps.

Usage: python benchmarks/training_step/compare.py [NET ...] [--threads N] [--rounds N] [--name RESULT]
Writes benchmarks/training_step/results/RESULT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nets import NETS, write_artifacts

HERE = Path(__file__).parent
ENGINES = {
    "torch": "engine_torch",
    "torch.compile": "engine_torch_compile",
    "onnxtrain": "engine_onnxtrain",
    "ORTModule": "engine_ortmodule",
}
TOLERANCE = 2e-3
"""Largest relative difference of losses: AdamW's first steps turn rounding of tiny gradients into full steps."""
HALVES = ("gradients_ms", "update_ms")


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, script: str, net: str, artifacts: Path, threads: int) -> None:
        count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [sys.executable, HERE / f"{script}.py", net, artifacts, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | count,
        )
        first = self._read()
        self.losses: list[float] = first["losses"]
        self.versions: dict[str, str] = first["versions"]
        self.times: dict[str, list[float]] = {half: [] for half in HALVES}

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"an engine stopped: {self._process.args}")
        return json.loads(line)

    def measure(self, steps: int) -> None:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        for half, values in self._read().items():
            self.times[half].extend(values)

    def close(self) -> None:
        self._process.communicate()


def compare(net: str, engines: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Returns losses, versions and times (ms) of every engine on one net."""
    with tempfile.TemporaryDirectory() as directory:
        write_artifacts(net, Path(directory))
        running = {name: EngineProcess(ENGINES[name], net, Path(directory), threads) for name in engines}
        reference = running[engines[0]].losses
        for name, engine in running.items():
            for ours, theirs in zip(engine.losses, reference, strict=True):
                if abs(ours - theirs) > TOLERANCE * abs(theirs):
                    sys.exit(f"{net}: losses of {name} {engine.losses} differ from {reference}")
        for engine in running.values():
            engine.measure(3)  # warm up
            engine.times = {half: [] for half in HALVES}
        for _ in range(rounds):
            for engine in running.values():
                engine.measure(_steps(engine))
        for engine in running.values():
            engine.close()
    return {
        name: {"versions": e.versions, "losses": e.losses}
        | {half: summary(values) for half, values in e.times.items()}
        for name, e in running.items()
    }


def _steps(engine: EngineProcess) -> int:
    """About half a second of steps for a round, at least two."""
    if not engine.times["gradients_ms"]:
        return 2
    return max(2, min(200, round(500 / sum(min(engine.times[half]) for half in HALVES))))


def summary(values: list[float]) -> dict[str, float]:
    return {
        "min": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "count": len(values),
    }


def table(results: dict[str, Any]) -> str:
    """Milliseconds (minimum), and in brackets how many times as long as the first engine."""
    engines = list(next(iter(results.values())))
    lines = []
    for half, title in zip(HALVES, ("forward + backward", "AdamW"), strict=True):
        lines += [f"| {title}, ms | " + " | ".join(engines) + " |", "|---" * (1 + len(engines)) + "|"]
        for net, measured in results.items():
            base = measured[engines[0]][half]["min"]
            times = [measured[engine][half]["min"] for engine in engines]
            lines.append(f"| {net} | " + " | ".join(f"{t:.2f} ({t / base:.2f})" for t in times) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", help=f"any of {', '.join(NETS)}; default: all")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--name", default=None, help="of the result file; default: threads-N")
    arguments = parser.parse_args()
    results = {}
    for net in arguments.nets or list(NETS):
        results[net] = compare(net, arguments.engines, arguments.threads, arguments.rounds)
        print(table({net: results[net]}), flush=True)
    setting = {
        "threads": arguments.threads,
        "clock": "CPU time" if arguments.threads == 1 else "elapsed time",
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    path = HERE / "results" / f"{arguments.name or f'threads-{arguments.threads}'}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
