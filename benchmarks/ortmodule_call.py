"""Measure the cost of a call of ORTModule beside the computation, against other engines with the same nets.

Engines run in processes of their own, which take turns: PyTorch eager; the on-device API, which computes the same
graphs in one session and without PyTorch; ORTModule; and PyTorch's loop around a captured graph of which nothing is
computed.
The last one is what Dynamo and autograd take themselves, so that of a call of ORTModule

    ORTModule - on-device API - nothing computed

is its own. One case has so few numbers that hardly anything else is left. Peak memory is that of the processes.

Usage: python benchmarks/ortmodule_call.py [NET ...] [--threads 2] [--rounds 8] [--seconds 0.4]
Writes benchmarks/results/ortmodule_call.json; nets that were measured before on the same machine stay in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from steps.engines import ENGINES, EngineSpec
from steps.machine import about_machine
from steps.processes import EngineProcess, Settings, prepare

HERE = Path(__file__).parent
MEASURED = {
    "eager": ENGINES["torch"],
    "on-device": ENGINES["device"],
    "ORTModule": ENGINES["ortmodule"],
    "nothing computed": EngineSpec("nothing computed", "without_work"),
}
WARM_UP = 20


def measure(case: str, settings: Settings, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Returns times (ms) of forward and backward, and peak memory (MB), of every engine."""
    prepare(case, settings, again=False)
    cache = settings.files / case / "compiled"
    running = {name: EngineProcess(spec, case, settings, cache) for name, spec in MEASURED.items()}
    times: dict[str, list[float]] = {name: [] for name in running}
    peaks: dict[str, float] = {}
    try:
        steps = {
            name: max(3, round(1000 * seconds / min(_both(process.measure(WARM_UP)))))
            for name, process in running.items()
        }
        for _ in range(rounds):
            for name, process in running.items():
                answer = process.measure(steps[name])
                times[name] += answer["gradients_ms"]
                peaks[name] = answer["peak_mb"]
    finally:
        for process in running.values():
            process.close()
    return {
        name: {
            "min_ms": round(min(values), 4),
            "median_ms": round(statistics.median(values), 4),
            "steps": len(values),
            "peak_mb": peaks[name],
        }
        for name, values in times.items()
    }


def _both(answer: dict[str, list[float]]) -> list[float]:
    return [sum(halves) for halves in zip(answer["gradients_ms"], answer["update_ms"], strict=True)]


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns minima in ms, what ORTModule takes above others, and peak memory in MB, as Markdown."""
    lines = [
        f"| net | {' | '.join(MEASURED)} | above on-device | own | peak memory, MB: eager / on-device / ORTModule |",
        "|---" * (len(MEASURED) + 4) + "|",
    ]
    for net, found in results.items():
        least = {name: found[name]["min_ms"] for name in MEASURED}
        above = least["ORTModule"] - least["on-device"]
        cells = [f"{value:.3f}" for value in (*least.values(), above, above - least["nothing computed"])]
        peaks = [f"{found[name]['peak_mb']:.0f}" for name in ("eager", "on-device", "ORTModule")]
        lines.append(f"| {net} | {' | '.join(cells)} | {' / '.join(peaks)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", default=["tiny", "mlp"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a turn")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir(), "onnxtrain-benchmark"))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "ortmodule_call.json")
    arguments = parser.parse_args()
    settings = Settings(arguments.threads, arguments.files, {"": Path(sys.executable)})
    results = {net: measure(net, settings, arguments.rounds, arguments.seconds) for net in arguments.nets}
    about = about_machine() | {"threads": arguments.threads}
    arguments.results.parent.mkdir(exist_ok=True)
    earlier = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    nets = earlier["nets"] if earlier.get("machine") == about else {}
    arguments.results.write_text(json.dumps({"machine": about, "nets": nets | results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
