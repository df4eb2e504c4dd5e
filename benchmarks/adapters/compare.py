"""Compares memory and time of LoRA on an int4 model here with PyTorch and PEFT, which train the float model.

Llamas with random weights of 113 and 502 million parameters; the model builder of onnxruntime-genai writes the int4
files. Rank 8 on all linear layers, batch 1, AdamW. Each measurement has a process of its own. Memory is the largest of
the process (VmHWM), with the runtime, its imports and, of PEFT, without what loading the model takes for a moment. Time
is the median of the steps after the first.

PEFT, transformers, onnxruntime-genai, onnx, onnx-ir, accelerate and, for NF4, bitsandbytes are in an environment of
their own, which `--peft-python` names. Native kernels are used where this environment has them.

Usage: python benchmarks/adapters/compare.py --peft-python ENV/bin/python [--files DIR] [--models 113M 502M]
       [--tokens 128 512] [--ways onnxtrain recompute float32 bfloat16 nf4] [--steps 6] [--rounds 1]
Prints a table and writes DIR/result.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shapes import SHAPES

HERE = Path(__file__).parent
OURS = {"onnxtrain": [], "recompute": ["--recompute"]}
WAYS = [*OURS, "float32", "bfloat16", "nf4"]


def output_of(command: list[Any], *, quiet: bool = False) -> str:
    """Runs a command; returns its last line, and ends the program if it failed."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        if quiet:
            return ""
        sys.exit(f"{command}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def prepare(peft: Path, name: str, files: Path) -> None:
    """Writes the model, its int4 file and our artifacts, unless they are there."""
    output_of([peft, HERE / "bases.py", name, files])
    for way, options in OURS.items():
        if not (files / way / "manifest.json").exists():
            output_of(
                [sys.executable, HERE / "our_files.py", files / "int4/model.onnx", files / way, *options]
            )


def measure(peft: Path, way: str, files: Path, tokens: int, steps: int) -> dict[str, Any] | None:
    """Returns what one process measured; None for NF4 where bitsandbytes cannot be used."""
    if way in OURS:
        line = output_of([sys.executable, HERE / "our_steps.py", files / way, tokens, steps])
    else:
        command = [peft, HERE / "peft_steps.py", files / "float", way, tokens, steps]
        line = output_of(command, quiet=way == "nf4")
    return json.loads(line) if line else None


def best_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the least memory and time of several processes: other programs only add to them."""
    return found[0] | {key: min(one[key] for one in found) for key in ("mb", "seconds")}


def print_row(name: str, tokens: int, row: dict[str, dict[str, Any]]) -> None:
    """Prints memory and time of each way, and both beside PEFT in float32."""
    reference = row.get("float32")
    cells = []
    for way, one in row.items():
        ratio = ""
        if reference and way != "float32":
            memory, time = one["mb"] / reference["mb"], one["seconds"] / reference["seconds"]
            ratio = f" ({memory:.2f}, {time:.2f})"
        cells.append(f"{one['mb']:,.0f} MB, {one['seconds']:.2f} s{ratio}")
    print(f"| {name}, {tokens} tokens | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peft-python", type=Path, required=True, help="Python of the environment with PEFT")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir(), "onnxtrain-adapters"))
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1, help="processes for each cell, which take turns")
    arguments = parser.parse_args()
    peft, results = arguments.peft_python.absolute(), {}
    print(f"| | {' | '.join(arguments.ways)} |\n|---|{'---|' * len(arguments.ways)}", flush=True)
    for name in arguments.models:
        files = arguments.files / name
        prepare(peft, name, files)
        for tokens in arguments.tokens:
            found: dict[str, list[dict[str, Any]]] = {}
            for _ in range(arguments.rounds):
                for way in arguments.ways:
                    one = measure(peft, way, files, tokens, arguments.steps)
                    found.setdefault(way, []).extend([] if one is None else [one])
            row = {way: best_of(measured) for way, measured in found.items() if measured}
            print_row(name, tokens, row)
            results[f"{name}, {tokens} tokens"] = row
    (arguments.files / "result.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
