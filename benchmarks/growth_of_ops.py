"""Compare how memory and work of every lowering and every gradient rule grow, in onnxtrain and in eager PyTorch.

The cases of `tests/ortmodule/aten_cases`, `tests/ortmodule/sized_cases.py` and `tests/autodiff/cases` at sizes n, 2n
and 4n, along each axis in turn, forward and gradient, without native kernels. Memory is the peak of all allocations,
work the number of elements that are read and written, plus the multiplications of products. No clock is used.

Usage: python benchmarks/growth_of_ops.py [--size 128] [--only NAME ...] [--write]
Prints the exponents that are above eager mode's; `--write` puts the table into notes/growth.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notes" / "growth.md"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks" / "common")]


def parts() -> Iterator[str]:
    """Yields the names of the files of cases, e.g. "ortmodule.aten_cases.pooling"."""
    yield "ortmodule.sized_cases"
    for package in ("ortmodule.aten_cases", "autodiff.cases"):
        path = importlib.import_module(package).__path__
        yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(path))


def measure(part: str, size: int, dynamic: bool) -> None:
    """Prints a line for each case of a file that grows faster than in eager mode, and how many there are."""
    import torch

    from autodiff.growing import grown_rules
    from ortmodule.growing import Growing, Grown, grown

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count = 0
    for case in importlib.import_module(part).CASES:
        if isinstance(case, Grown):
            candidates: Iterator[Growing] = iter([replace(case, dynamic=dynamic)])
        else:
            candidates = (grown_rules if part.startswith("autodiff") else grown)(case, dynamic)
        for candidate in candidates:
            count += 1
            found = candidate.finding(size)
            if found is not None:
                numbers = [number for growth in found for number in (growth.memory, growth.work)]
                print(
                    "finding", candidate.name, *(f"{number:.1f}" for number in numbers), sep="\t", flush=True
                )
    print("count", count, sep="\t")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128, help="the smallest of three sizes (default: 128)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="files of cases, e.g. pooling")
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    parser.add_argument("--write", action="store_true", help="put the table into notes/growth.md")
    parser.add_argument("--part", help="what a process of its own measures")
    options = parser.parse_args()
    if options.part is not None:
        measure(options.part, options.size, options.dynamic)
        return
    from page_tables import lines, place

    counts, rows, failed = {}, [], []
    for part in parts():
        if options.only and part.rpartition(".")[2] not in options.only:
            continue
        command = [sys.executable, __file__, "--part", part, "--size", str(options.size)]
        command += ["--dynamic"] if options.dynamic else []
        # The native kernels compute some functions in other, linear ways.
        environment = os.environ | {"ONNXTRAIN_KERNELS": "off"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            failed.append(part)
            print(part, done.stderr[-2000:], file=sys.stderr)
        for line in done.stdout.splitlines():
            kind, *fields = line.split("\t")
            if kind == "finding":
                rows.append([f"`{part.rpartition('.')[2]}`", *fields])
                print(*rows[-1], flush=True)
            elif kind == "count":
                counts[part] = int(fields[0])
    print(f"{sum(counts.values())} axes and numbers; not measured: {failed}")
    head = ["file", "case, arguments and axes", "memory", "work", "memory, eager", "work, eager"]
    print(lines(head, rows))
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(place("growth").sub(lambda _: f"\n{lines(head, rows)}\n\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
