"""Trains small versions of real architectures in ORTModule, each in a process of its own, and says how it went.

Each takes two training steps in ORTModule, in eager PyTorch and in eager PyTorch in float64 (`measure.py`). Verdicts:
wholly (all graphs in ONNX Runtime and no code beside them), partly, PyTorch (no graph in ONNX Runtime), wrong (farther
from float64 than eager float32 allows), raises (where eager does not), timeout or memory (beyond the limits), eager
fails (nothing to compare with).

Usage: python sweep.py [NAME or part of it ...] [--seconds N] [--gigabytes N] [--workers N]
                       [--resume] [--not-wholly]
Writes results/architectures.json and notes/architectures.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from measure import verdict
from zoo import FAMILIES, load

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "architectures.json"
PAGE = HERE.parents[1] / "notes" / "architectures.md"
VERDICTS = ("wholly", "partly", "PyTorch", "wrong", "raises", "timeout", "memory", "eager fails")
LIBRARIES = (
    "torch", "onnxruntime", "transformers", "timm", "torchvision", "torch_geometric", "diffusers", "peft", "nflows",
    "normflows", "torchdiffeq", "u8darts", "segmentation_models_pytorch", "pykan", "vit-pytorch", "torchsde",
    "neuraloperator",
)  # fmt: skip


class Run:
    """`measure` of one architecture in a process of its own, within limits."""

    def __init__(self, name: str, seconds: float, gigabytes: float) -> None:
        self.name, self._seconds, self._gigabytes = name, seconds, gigabytes
        self._start = time.monotonic()
        self.answer, theirs = multiprocessing.Pipe(duplex=False)
        # Forked, so that the libraries are imported once; this process makes no session and starts no thread of
        # PyTorch's.
        self._process = multiprocessing.get_context("fork").Process(target=send, args=(theirs, verdict, name))
        self._process.start()
        theirs.close()

    def result(self) -> dict[str, Any] | None:
        """Returns what came out, or None as long as it runs."""
        found = self._found()
        if found is not None:
            self._process.kill()
            self._process.join()
            self.answer.close()
        return found

    def _found(self) -> dict[str, Any] | None:
        if self.answer.poll():
            try:
                return {"name": self.name, **self.answer.recv()}
            except EOFError:
                self._process.join()
                said = f"the process ended with {self._process.exitcode}"
                return {"name": self.name, "verdict": "raises", "reason": said}
        seconds, memory = _used(self._process.pid)
        if seconds > self._seconds or time.monotonic() - self._start > 20 * self._seconds:
            said = f"more than {self._seconds:.0f} s of processor time"
            return {"name": self.name, "verdict": "timeout", "reason": said}
        if memory > self._gigabytes * 2**30:
            return {"name": self.name, "verdict": "memory", "reason": f"more than {self._gigabytes:g} GB"}
        return None


NOTES = """\
DeepSeek-V3.2's sparse attention attends to the positions of the highest scores. In a small net with random weights
some scores are exactly equal, and PyTorch and ONNX Runtime take another one of them: the losses differ (by 0.0043 in
one net), and are equal once both break ties alike.

Nets as deep as DenseNet-121 with BatchNorm and ReLU over few samples have gradients of two kinds. In a net of its 121
layers (growth 8, images 32 x 32) the error against float64, relative to the norm of all gradients, is 2e-6 to 4e-6
where float32 leaves each ReLU on its side, and 1e-4 to 3e-2 where it does not. With two samples 8 of 20 seeds had a
ReLU on another side in eager float32, and 8 in ORTModule: the geometric mean of the ratio of their errors is 1.01.
With eight samples, which have more numbers near zero, 31 of 50 and 34 of 50: of the 21 seeds in which one of the two
alone had a ReLU on another side it was eager 9 times. With SiLU, which has no kink, the ratio is 0.98 with two
samples and 0.94 with eight (20 seeds each), and at most 1.12. So these errors are those of kinks, and eager's: a
comparison of such nets needs a smooth activation, or many seeds.
""".splitlines()
"""Remarks on single architectures, for the page."""


def measured(names: Sequence[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the results for these architectures as they come, of several at a time."""
    waiting, running = deque(names), list[Run]()
    while waiting or running:
        while waiting and len(running) < arguments.workers:
            running.append(Run(waiting.popleft(), arguments.seconds, arguments.gigabytes))
        multiprocessing.connection.wait([run.answer for run in running], 0.5)
        for run in list(running):
            result = run.result()
            if result is not None:
                running.remove(run)
                yield result


def in_turn(names: Iterable[str]) -> list[str]:
    """Returns the names with one of each family after the other, so that a part of the sweep is of all families."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.partition("/")[0], []).append(name)
    for family in families.values():
        random.Random(0).shuffle(family)
    rounds = itertools.zip_longest(*families.values())
    return [name for names in rounds for name in names if name is not None]


def send(connection: Any, measure: Callable[[str], dict[str, Any]], name: str) -> None:
    """Sends what was measured of an architecture, and prints nothing."""
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        connection.send(measure(name))


def _used(pid: int | None) -> tuple[float, int]:
    """The processor time of a process, in seconds, and its memory in bytes."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0.0, 0


def loaded() -> list[str]:
    """Imports the libraries, once for all processes, and returns the names of the architectures.

    Not PyTorch Geometric, which replaces functions of PyTorch: the names of its models come from another process.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        names = pool.apply(_names)
    for family, (prefix, *_) in FAMILIES.items():
        if family != "graphs":
            load(f"{prefix}/")
    return names


def _names() -> list[str]:
    return list(load())


def table(results: dict[str, dict[str, Any]], known: int) -> str:
    """Returns the page of the documentation; `known` is the number of architectures in the zoo."""
    rows = sorted(results.values(), key=lambda r: (VERDICTS.index(r["verdict"]), r["name"]))
    counts = Counter(row["verdict"] for row in rows)
    compared = sum(counts.values()) - counts["eager fails"]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES if _installed(name))
    lines = [
        "# Real architectures in ORTModule",
        "",
        "Small versions of published architectures, with random weights, take two training steps in ORTModule and are",
        "compared with eager PyTorch, the judge being eager PyTorch in float64: outputs, gradients and buffers may be",
        "no farther from it than ten times what eager float32 is. Where float32 itself is far off (random numbers that",
        "depend on the precision, ties, chaos), eager float32 is the judge. Where that is exceeded, ours may be as far",
        "off as three times what eager float32 is with parameters that are off by 2^-17, six times tried: in deep",
        "networks rounding decides on which side of zero some ReLUs are. `benchmarks/architectures/sweep.py` writes",
        "this page.",
        "",
        f"Of the {compared} architectures that have been measured, of {known} in the zoo: "
        + ", ".join(f"{counts[v]} {_said(v)}" for v in VERDICTS if counts[v] and v != "eager fails")
        + ".",
        "",
        f"Versions: {versions}.",
        "",
        *NOTES,
        "",
        "| architecture | verdict | graphs | why not wholly |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row["verdict"] == "eager fails":
            continue
        reasons = [*row.get("wrong", ())[:2], *row.get("fallbacks", ()), *row.get("breaks", ())]
        reasons += [row["reason"]] if "reason" in row else []
        why = "; ".join(_short(reason) for reason in reasons)
        lines.append(f"| {row['name']} | {row['verdict']} | {row.get('graphs', '')} | {why} |")
    return "\n".join([*lines, ""])


def _said(verdict: str) -> str:
    return {"wholly": "wholly in ONNX Runtime", "partly": "partly", "PyTorch": "in PyTorch"}.get(
        verdict, verdict
    )


def _short(reason: str) -> str:
    return " ".join(reason.split())[:160].replace("|", "/")


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Sweeps, prints a line per architecture, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="all whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=300, help="of processor time")
    parser.add_argument("--gigabytes", type=float, default=6)
    parser.add_argument("--workers", type=int, default=1, help="how many at a time")
    parser.add_argument("--resume", action="store_true", help="leave out what the results have already")
    parser.add_argument("--not-wholly", action="store_true", help="only what was not wholly in ONNX Runtime")
    arguments = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    zoo = loaded()
    names = [n for n in zoo if not arguments.names or any(part in n for part in arguments.names)]
    if arguments.resume:
        names = [name for name in names if name not in known]
    if arguments.not_wholly:
        names = [name for name in names if known.get(name, {}).get("verdict") != "wholly"]
    torch.set_num_threads(1)
    for result in measured(in_turn(names), arguments):
        name = result["name"]
        known[name] = result
        why = [*result.get("wrong", ())[:1], *result.get("fallbacks", ())[:2], *result.get("breaks", ())[:1]]
        print(name, result["verdict"], result.get("reason", ""), *map(_short, why), sep=" | ", flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    PAGE.write_text(table(known, len(zoo)))


if __name__ == "__main__":
    main()
