"""Times one training step of each net in every engine: one command, every engine in a process of its own.

Engines take turns; the first one runs twice, so that the difference tells what is noise. All start from the same
weights, and the run fails unless their losses agree over the first steps. Results are merged into the JSON of earlier
runs, so that nets can be run one by one; `--report` writes the table and the chart of notes/performance.md from them.

Usage: python benchmarks/run.py [NET ...] [--engine NAME ...] [--first] [--report]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

from steps import results
from steps.engines import ENGINES
from steps.machine import about_machine, busy_processes
from steps.measure import CONTROL, LossesDiffer, measure, measure_first
from steps.nets import CASES
from steps.processes import EngineStopped, Settings, prepare
from steps.report import one_case, summary, write_report

HERE = Path(__file__).parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=list(ENGINES), dest="engines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--device", default="cpu", help='"cpu", or "cuda" with onnxruntime-gpu and a PyTorch for CUDA'
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--first", action="store_true", help="time the first step instead, without code compiled before"
    )
    parser.add_argument("--again", action="store_true", help="write artifacts again that are there already")
    parser.add_argument("--prepare-only", action="store_true", help="write the artifacts and stop")
    parser.add_argument(
        "--busy", choices=["refuse", "warn"], default="refuse", help="on a machine that works"
    )
    parser.add_argument(
        "--ort-training", type=Path, metavar="PYTHON", help="with onnxruntime-training 1.19.2"
    )
    parser.add_argument("--onnxsim", type=Path, metavar="PYTHON", help="with onnxsim 0.8.1")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir(), "onnxtrain-benchmark"))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "steps.json")
    parser.add_argument("--no-save", action="store_true", help="leave the results as they are")
    parser.add_argument("--report", action="store_true", help="write the documentation page from the results")
    parser.add_argument(
        "--summary", action="store_true", help="print a table of ratios from the results, and measure nothing"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.nets if name not in CASES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if not arguments.nets and not arguments.report and not arguments.summary:
        arguments.nets = [name for name in CASES if name != "tiny"]
    return arguments


def usable(arguments: argparse.Namespace, case: str, said: set[str]) -> list[str]:
    """Returns the engines that can run, and says once why others cannot."""
    names = []
    for name in arguments.engines:
        spec = ENGINES[name]
        missing = None
        if spec.needs and importlib.util.find_spec(spec.needs) is None:
            missing = f"{spec.needs} is not installed"
        if spec.python and getattr(arguments, spec.python.replace("-", "_")) is None:
            missing = f"give the Python of its environment: --{spec.python}"
        if arguments.device != "cpu" and not spec.on_cuda:
            missing = "it runs on the CPU only"
        if missing and name not in said:
            print(f"{name} is left out: {missing}", file=sys.stderr)
            said.add(name)
        if not missing and (CASES[case].net.images or not spec.only_images):
            names.append(name)
    return names


def check_idle(busy: str) -> list[str]:
    """Returns what else works on the machine; ends the program where that is refused."""
    found = busy_processes()
    if found and busy == "refuse":
        sys.exit("the machine is not idle (--busy warn measures all the same): " + "; ".join(found))
    for text in found:
        print(f"not idle: {text}", file=sys.stderr)
    return found


def run_case(case: str, arguments: argparse.Namespace, settings: Settings, engines: list[str]) -> None:
    about = prepare(case, settings, arguments.again)
    if arguments.prepare_only:
        return
    busy = check_idle(arguments.busy)
    if arguments.first:
        measured = {name: _first(case, name, settings) for name in engines}
    else:
        if len(engines) > 1:
            engines = [*engines, engines[0] + CONTROL]
        measured = measure(case, engines, settings, arguments.rounds)
    setting = {
        "threads": settings.threads,
        "device": settings.device,
        "rounds": arguments.rounds,
        "busy": busy,
    }
    setting |= about_machine()
    print(one_case(case, measured), flush=True)
    if not arguments.no_save:
        kind = "first" if arguments.first else "steps"
        results.merge(arguments.results, case, kind, measured, setting, about)


def _first(case: str, name: str, settings: Settings) -> dict[str, object]:
    try:
        return measure_first(case, name, settings)
    except EngineStopped as stopped:
        if ENGINES[name].ours:
            raise
        return {"failed": str(stopped)}


def main() -> None:
    arguments = parse()
    if arguments.summary:
        print(summary(arguments.results, arguments.nets))
        return
    pythons = {"": Path(sys.executable), "ort-training": arguments.ort_training, "onnxsim": arguments.onnxsim}
    settings = Settings(arguments.threads, arguments.files, pythons, arguments.device)
    said: set[str] = set()
    try:
        for case in arguments.nets:
            run_case(case, arguments, settings, usable(arguments, case, said))
    except (EngineStopped, LossesDiffer) as error:
        sys.exit(str(error))
    if arguments.report:
        write_report(arguments.results, HERE.parent / "notes")


if __name__ == "__main__":
    main()
