"""Trains ten nets for 50 steps from the same feeds in every host that is to be had here, and compares them with Python.

    python benchmarks/every_host.py [--nets mlp cnn ...] [--hosts cpp node ...] [--values] [--write]

The nets are those of web/test/reference.py: networks of seven kinds, and adapters over bases in float32 and in 4 bits.
Each host trains them from a command line, in turns. It saves a checkpoint in one round and a delta in the next. The
program ends with an error if a loss differs from Python's by more than 1e-5, or a saved tensor by more than 1e-4. On a
GPU, which adds in another order, the losses of the first 25 steps may differ by 1e-4.

Steps per second are those of the steps 2 to 50 of the fastest round, with what a host does to print a loss. The time of
saving is the least of all rounds, from the last loss until the file has its name, with one step of the optimizer in it;
in Chromium that of `saveCheckpoint`, which writes no file. Native hosts have as many threads as ONNX Runtime starts,
WebAssembly has one. Take times on a machine that does nothing else; `--values` takes none.

Hosts need what their tests need: web/node_modules (`npm ci`), CMake, Chromium; Java the environment variable
ONNXRUNTIME_JAR, the class path of ONNX Runtime's package (CONTRIBUTING.md). What a host lacks is printed.

Writes benchmarks/results/every_host.json; what was measured before on the same machine stays in it. `--write` puts the
tables into notes/web.md.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from steps.machine import about_machine

sys.path += [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parent / "common")]
import page_tables
from turns import gflops

from hosts.programs import PROGRAMS, NotHere, Program, compile_web, need

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = ROOT / "notes" / "web.md"
NETS = (
    *("mlp", "dropout", "cnn", "transformer", "lstm", "embedding", "shared", "frozen"),
    *("adapter", "adapter-int4"),
)
IN_JAVASCRIPT = ("wasm", "chromium", "webgpu")
"""Runtimes of web/scripts/train_nets.mjs; the other hosts are programs."""
HOSTS = {
    "python": "Python, `onnxtrain.api`",
    "device": "Python, `device.py`",
    "node": "Node, native",
    "wasm": "Node, WebAssembly",
    "chromium": "Chromium, WebAssembly",
    "webgpu": "Chromium, WebGPU in software",
    "cpp": "C++",
    "java": "Java",
    "csharp": "C#",
}
STEPS = 50
LIMITS = dict.fromkeys(HOSTS, 1e-5) | {"webgpu": 1e-4}
"""The greatest difference of a loss from Python's. On a GPU, sums are added up in another order."""
COMPARED = dict.fromkeys(HOSTS, STEPS) | {"webgpu": 25}
"""Number of steps that are compared. After some 30 steps, other sums can turn a ReLU on or off."""
TENSOR_LIMIT = 1e-4
ROUNDING = 1e-8
"""Gradients of this size, as AdamW remembers them, are sums of rounding errors."""

Result = dict[str, Any]


def reference() -> Path:
    """Returns the folder of the nets, which Python writes and trains if they are not there yet."""
    folder = Path(os.environ.get("ONNXTRAIN_WEB_REFERENCE", ROOT / "build" / "web-reference"))
    # The last file that the script writes.
    if not (folder / NETS[-1] / "exported.onnx").exists():
        subprocess.run([sys.executable, ROOT / "web" / "test" / "reference.py", folder], check=True)
    return folder


def difference(losses: list[float], net: Path) -> float:
    """Returns the greatest difference of losses from those of Python, infinite if one is NaN."""
    expected = json.loads((net / "losses.json").read_text())["losses"][: len(losses)]
    if not losses or len(losses) > len(expected):
        raise SystemExit(f"{net.name}: {len(losses)} losses of {STEPS}")
    return float(np.nan_to_num(np.abs(np.subtract(losses, expected)), nan=np.inf).max())


def written_difference(data: bytes, net: Path, kind: str) -> float:
    """Returns the greatest difference of a tensor from Python's file of the same kind, infinite if one is missing.

    Parameters whose gradients are 0 but for rounding are left out, such as the bias of an attention's keys: AdamW
    divides such a gradient by its own size, so the parameter moves at random.
    """
    from safetensors.numpy import load, load_file

    expected, found = load_file(net / ("trained" if kind == "checkpoint" else kind)), load(data)
    if expected.keys() != found.keys():
        return np.inf
    differences = []
    for key, value in expected.items():
        off = np.nan_to_num(np.abs(found[key].astype(np.float64) - value), nan=np.inf)
        squares = expected.get(key.replace("parameter/", "momentum1/", 1), np.zeros(()))
        differences.append(np.where((squares > 0) & (squares < ROUNDING**2), 0.0, off).max(initial=0))
    return float(max(differences))


def train(program: Program, net: Path, out: Path, kind: str) -> Result:
    """Runs a program once: its losses, the seconds of each step but the first, and those of saving `kind` to `out`."""
    out.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*program.command, net, net, out, *(["--delta"] if kind == "delta" else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | program.environment,
    )
    assert process.stdout is not None
    losses, times = [], []
    while len(losses) < STEPS and (line := process.stdout.readline()):
        times.append(time.perf_counter())
        losses.append(float(line))
    while not out.exists() and process.poll() is None:
        time.sleep(2e-4)
    saved = time.perf_counter()
    _, errors = process.communicate(timeout=1500)
    if process.returncode or not out.exists():
        raise SystemExit(f"{net.name}: {program.command}: {errors[-2000:]}")
    return {
        "losses": losses,
        "seconds": times[-1] - times[0],
        "saving": {kind: 1e3 * (saved - times[-1])},
        "written": {kind: out.read_bytes()},
    }


def in_programs(
    programs: dict[str, Program], nets: list[str], rounds: int, folder: Path, out: Path
) -> Iterator[tuple[str, str, Result]]:
    """Trains in each program in turns; the files that they write go to `out`."""
    for name, round_ in itertools.product(nets, range(rounds)):
        for host, program in programs.items():
            kind = ("checkpoint", "delta")[round_ % 2]
            yield name, host, train(program, folder / name, out, kind)


def in_javascript(host: str, nets: list[str], rounds: int) -> Iterator[tuple[str, str, Result]]:
    """Trains on onnxruntime-web."""
    script = ["node", str(ROOT / "web" / "scripts" / "train_nets.mjs"), host, str(STEPS)]
    for _ in range(rounds):
        with subprocess.Popen([*script, *nets], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                result = json.loads(line)
                if "error" in result:
                    raise SystemExit(f"{result['net']} in {HOSTS[host]}: {result['error']}")
                result["seconds"] = sum(result["times"][1:]) / 1e3
                files = result["written"].items()
                result["written"] = {kind: base64.b64decode(url.partition(",")[2]) for kind, url in files}
                yield result["net"], host, result
        if process.returncode:
            raise SystemExit(f"{' '.join(script)} ended with {process.returncode}")


def add(found: Result, host: str, result: Result, net: Path, *, values: bool) -> None:
    """Compares a round with Python, and adds it to what is known of a net."""
    entry = found.setdefault("hosts", {}).setdefault(host, {})
    off = difference(result["losses"][: COMPARED[host]], net)
    if off > LIMITS[host]:
        raise SystemExit(f"{net.name} in {HOSTS[host]}: losses differ from Python's by {off:.1e}")
    for kind, data in result["written"].items():
        saved_off = written_difference(data, net, kind)
        # On a GPU, Adam divides differences in rounding by small numbers.
        if saved_off > TENSOR_LIMIT and host != "webgpu":
            raise SystemExit(f"{net.name} in {HOSTS[host]}: tensors of the {kind} differ by {saved_off:.1e}")
        entry[f"{kind}_bytes"] = len(data)
    entry["difference"] = max(off, entry.get("difference", 0))
    if "downloaded" in result:
        found["downloaded"] = result["downloaded"]
    if values:
        return
    entry["steps_per_s"] = max((STEPS - 1) / result["seconds"], entry.get("steps_per_s", 0))
    for kind, milliseconds in result["saving"].items():
        entry[f"{kind}_ms"] = min(milliseconds, entry.get(f"{kind}_ms", np.inf))


def build(hosts: list[str], folder: Path) -> tuple[dict[str, Program], list[str], dict[str, str]]:
    """Builds programs: returns them, the hosts in JavaScript, and why others cannot be run."""
    programs, javascript, missing = {}, [], {}
    for host in hosts:
        try:
            if host in IN_JAVASCRIPT:
                compile_web(ROOT / "web" / "dist")
                if host != "wasm":
                    need(os.environ.get("CHROMIUM", "chromium"))
                javascript.append(host)
                continue
            (folder / host).mkdir()
            program = PROGRAMS[host](folder / host)
            if program.stand_in:
                raise NotHere("ONNX Runtime's package for this language is not here")
            programs[host] = program
        except NotHere as reason:
            missing[host] = str(reason)
    return programs, javascript, missing


def shown(number: float) -> str:
    """Writes a number with two digits at least."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def tables(results: Result) -> dict[str, str]:
    """Returns the tables of the page: losses and sizes, and times where they were measured."""
    nets = {name: found for name, found in results["nets"].items() if found.get("hosts")}
    hosts = [host for host in HOSTS if any(host in found["hosts"] for found in nets.values())]

    def table(title: str, cell: Any, *more: tuple[str, Any]) -> str:
        head = ["net", *(name for name, _ in more), *(HOSTS[host] for host in hosts)]
        rows = (
            [
                name,
                *(text(found) for _, text in more),
                *(cell(found, found["hosts"].get(host, {})) for host in hosts),
            ]
            for name, found in nets.items()
        )
        return f"{title}\n\n{page_tables.lines(head, rows)}"

    def off(_: Result, entry: Result) -> str:
        return f"{entry['difference']:.1e}" if entry.get("difference") else "0" if entry else ""

    def speed(found: Result, entry: Result) -> str:
        if "steps_per_s" not in entry:
            return ""
        native = found["hosts"].get("node", {}).get("steps_per_s")
        ratio = f" ({entry['steps_per_s'] / native:.2f})" if native else ""
        return f"{entry['steps_per_s']:,.0f}{ratio}"

    def saving(_: Result, entry: Result) -> str:
        return " / ".join(
            shown(entry[f"{kind}_ms"]) for kind in ("checkpoint", "delta") if f"{kind}_ms" in entry
        )

    def size(kind: str) -> Any:
        def text(found: Result) -> str:
            sizes = [entry[f"{kind}_bytes"] for entry in found["hosts"].values() if f"{kind}_bytes" in entry]
            return shown(min(sizes) / 1e3) if sizes else ""

        return text

    def downloaded(found: Result) -> str:
        return shown(found["downloaded"] / 1e3) if "downloaded" in found else ""

    made = {
        "hosts-losses": table(
            "The greatest difference of a loss from Python's over 50 steps, and the kilobytes that "
            "`TrainingSession.create` downloads:",
            off,
            ("downloaded, kB", downloaded),
        )
    }
    timed = any("steps_per_s" in e for found in nets.values() for e in found["hosts"].values())
    if timed:
        machine = f"{results['machine'].get('processor')}, {results['machine'].get('cores')} cores, "
        machine += f"{results['gflops']} GFLOP/s"
        made["hosts-speed"] = table(
            f"Steps per second, and in brackets divided by those of Node, native ({machine}):", speed
        )
        made["hosts-saving"] = table(
            f"Kilobytes of a checkpoint with the optimizer's state and of a delta, and milliseconds of saving them "
            f"({machine}):",
            saving,
            ("checkpoint, kB", size("checkpoint")),
            ("delta, kB", size("delta")),
        )
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), metavar="NET")
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS), metavar="HOST")
    parser.add_argument("--rounds", type=int, default=6, help="at least two, for a checkpoint and a delta")
    parser.add_argument("--values", action="store_true", help="compare values only, in two rounds")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "every_host.json")
    parser.add_argument("--write", action="store_true", help="put the tables into notes/web.md")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    rounds = 2 if arguments.values else max(2, arguments.rounds)
    path, about = arguments.results, about_machine()
    results = json.loads(path.read_text()) if path.exists() else {}
    if results.get("machine") != about:
        results = {"machine": about, "nets": {}}
    results |= {"gflops": gflops(), "onnxruntime": version("onnxruntime")}
    # Old figures of what is measured now are not mixed with the new ones.
    for name, host in itertools.product(arguments.nets, arguments.hosts):
        results["nets"].get(name, {}).get("hosts", {}).pop(host, None)
    folder = reference()
    with tempfile.TemporaryDirectory() as built:
        programs, javascript, missing = build(arguments.hosts, Path(built))
        runs = itertools.chain(
            in_programs(programs, arguments.nets, rounds, folder, Path(built) / "written"),
            *(in_javascript(host, arguments.nets, rounds // 2) for host in javascript),
        )
        for name, host, result in runs:
            found = results["nets"].setdefault(name, {})
            add(found, host, result, folder / name, values=arguments.values)
            print(name, host, found["hosts"][host], flush=True)
            results["nets"] = {name: results["nets"][name] for name in NETS if name in results["nets"]}
            path.write_text(json.dumps(results, indent=1) + "\n")
    for host, reason in missing.items():
        print(f"{HOSTS[host]} was not run: {reason}")
    page_tables.write(PAGE, tables(results), into_page=arguments.write)


if __name__ == "__main__":
    main()
