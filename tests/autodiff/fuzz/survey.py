"""Judges a number of random graphs and counts the verdicts.

    python -m autodiff.fuzz.survey --graphs 500 --seed 1 --keep found > report.json

in the folder `tests`. Graph `number` of a run belongs to the seed `<seed>-<number>`, whatever came before it. They
are judged in another process, because kernels of ONNX Runtime can end theirs; the run continues after such a graph.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from autodiff.fuzz.graph import Graph
from autodiff.fuzz.judge import CRASH, FINDINGS, NOT_OURS, WAYS, Verdict, judge
from autodiff.fuzz.layers import random_graph

SECOND_SHARE = 4
"""Every fourth graph has derivatives behind its gradient judged, in one of `WAYS` after the other."""


def survey(
    numbers: range, seed: int, keep: Path | None = None, ops: list[str] | None = None
) -> dict[str, Any]:
    """Returns counts of verdicts, reasons and ops of these graphs, and the findings."""
    records: list[dict[str, Any]] = []
    while numbers:
        done, lost = _in_another_process(numbers, seed, ops)
        records += done
        if lost is None:
            break
        records.append(lost)
        numbers = range(lost["number"] + 1, numbers.stop)
    findings = [record for record in records if record["verdict"] in FINDINGS]
    for record in findings if keep is not None else ():
        _save(random_graph(record["id"], ops), keep / f"{record['verdict']}-{record['id']}")
    return {
        "seed": seed,
        "graphs": len(records),
        "verdicts": dict(collections.Counter(record["verdict"] for record in records)),
        "reasons": dict(
            collections.Counter(
                f"{record['verdict']}: {record['reason']}" for record in records if record["reason"]
            ).most_common()
        ),
        "ops": dict(collections.Counter(op for record in records for op in record["ops"])),
        "findings": findings,
    }


def _in_another_process(
    numbers: range, seed: int, ops: list[str] | None
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Returns the records of the graphs, and that of the one that ended the process."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "records"
        command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "autodiff.fuzz.survey"]
        command += ["--worker", str(log), "--first", str(numbers.start), "--graphs", str(len(numbers))]
        command += ["--seed", str(seed), *(["--ops", *ops] if ops else [])]
        code = subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    done = [line for line in lines if "verdict" in line]
    if code == 0:
        return done, None
    if not lines or "verdict" in lines[-1]:
        raise RuntimeError(
            f"the fuzz itself failed with exit code {code}, behind graph {len(done)} of seed {seed}"
        )
    last = lines[-1]
    kind = NOT_OURS if last["stage"] == "model" else CRASH
    graph = random_graph(f"{seed}-{last['number']}", ops)
    return done, _record(graph, Verdict(kind, f"exit code {code}: {last['stage']}"), seed, last["number"])


def _work(log: Path, numbers: Iterable[int], seed: int, ops: list[str] | None) -> None:
    with log.open("w") as stream:

        def write(**record: Any) -> None:
            stream.write(json.dumps(record) + "\n")
            stream.flush()

        for number in numbers:
            graph = random_graph(f"{seed}-{number}", ops)

            def tell(stage: str, number: int = number) -> None:
                write(number=number, stage=stage)

            turn, rest = divmod(number, SECOND_SHARE)
            verdict = judge(graph, second=None if rest else WAYS[turn % len(WAYS)], tell=tell)
            write(**_record(graph, verdict, seed, number))


def _record(graph: Graph, verdict: Verdict, seed: int, number: int) -> dict[str, Any]:
    return {
        "verdict": verdict.kind,
        "reason": verdict.reason,
        "id": f"{seed}-{number}",
        "number": number,
        "ops": graph.drawn_ops,
        "opset": graph.opset,
        "dtype": np.dtype(graph.dtype).name,
        "shapes": graph.shapes,
        **verdict.notes,
    }


def _save(graph: Graph, stem: Path) -> None:
    stem.with_suffix(".onnx").write_bytes(graph.model(graph.dtype).SerializeToString())
    np.savez(stem.with_suffix(".npz"), **graph.feeds(graph.dtype))


def main() -> None:
    """Prints the report as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--ops", nargs="*")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.graphs)
    if options.worker is not None:
        warnings.simplefilter("ignore")
        _work(options.worker, numbers, options.seed, options.ops)
        return
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    json.dump(survey(numbers, options.seed, options.keep, options.ops), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
