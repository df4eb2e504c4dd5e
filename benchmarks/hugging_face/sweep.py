"""Trains Hugging Face architectures from files of both PyTorch exporters, as they are and behind onnxruntime's tools.

Each file is exported from a tiny network with random weights and becomes the variants of `tools.py`; the judge of
`benchmarks/files` builds its training from it, takes three steps and compares the gradients with finite differences.
Every architecture and exporter has a process of its own. Opsets go round, so that all of 13 to 23 are among the files.

Usage: python sweep.py [NAME ...] [--exporter torchscript|dynamo] [--variants NAME ...] [--seconds N] [--files FOLDER]
                       [--resume] [--not-right] [--page]
Writes results/hugging_face.json, results/versions.json and notes/hugging-face.md (with --page, the page alone).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tools
import torch

# `tools` has put the folder of these on the path.
from files import said
from judge import judge
from page import installed_versions, written

from models import DYNAMO, MODELS, OPSETS, TORCHSCRIPT, export, load

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "hugging_face.json"
VERSIONS = HERE / "results" / "versions.json"
"""The versions that the results come from: `--page` must not write those of the present environment."""
PAGE = HERE.parents[1] / "notes" / "hugging-face.md"


VERDICTS = {
    "trained": "right",
    "unsettled": "right",
    "refused": "refused",
    "crashed": "crash",
    "wrong": "wrong",
}
"""The words of the page for those of the judge; of the others the file itself does not run or has nothing to train."""


def short(error: BaseException) -> str:
    """Return an error in one line, without the places of temporary files."""
    return f"{type(error).__name__}: {re.sub(rf'{re.escape(tempfile.gettempdir())}[^ ]*/', '', said(error))[:300]}"


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a verdict: `judge` is the precision of the differences, "none" where they tell nothing."""
    by = found.get("judge", "none")
    return {
        "verdict": VERDICTS.get(found["verdict"], "not ours"),
        "reason": found.get("reason", ""),
        "judge": next((precision for precision in ("float64", "float32") if precision in by), "none"),
        "parameters": found.get("parameters", 0),
        "losses": found.get("losses", []),
        "worst": found.get("error", 0.0),
    }


def opset_of(name: str, exporter: str) -> int:
    """The opset that an architecture is exported with: they go round."""
    opsets = [o for o in OPSETS[exporter] if exporter == TORCHSCRIPT or o not in MODELS[name].not_at]
    return opsets[list(MODELS).index(name) % len(opsets)]


def measured(name: str, exporter: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the result of each variant; where the process ends, of that which it was at."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_work, args=(sender, name, exporter, arguments)
    )
    process.start()
    sender.close()
    at, deadline = "export", time.monotonic() + arguments.seconds
    while True:
        if not receiver.poll(max(deadline - time.monotonic(), 0)):
            process.kill()
            yield {"variant": at, "verdict": "crash", "reason": f"more than {arguments.seconds:g} s"}
            break
        try:
            said = receiver.recv()
        except EOFError:
            process.join()
            if process.exitcode:
                reason = f"the process ended with {process.exitcode}"
                yield {"variant": at, "verdict": "crash", "reason": reason}
            break
        if isinstance(said, str):
            at, deadline = said, time.monotonic() + arguments.seconds
        else:
            yield said
    process.join()


def _work(sender: Any, name: str, exporter: str, arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    if not arguments.verbose:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  lives as long as the process
        os.dup2(sys.stderr.fileno(), 2)
    opset = opset_of(name, exporter)
    path = arguments.files / f"{name}-{exporter}-{opset}.onnx"
    kept = path.with_suffix(".npz")
    common: dict[str, Any] = {"opset": opset}
    try:
        if not kept.exists():
            feeds, symbolic = export(MODELS[name], exporter, opset, path)
            np.savez(kept, **feeds, __symbolic__=symbolic)
    except Exception as error:
        sender.send({"variant": "export", "verdict": "export fails", "reason": short(error), **common})
        return
    feeds = dict(np.load(kept))
    common["symbolic"] = bool(feeds.pop("__symbolic__"))
    judged: dict[str, dict[str, Any]] = {}
    for variant in arguments.variants:
        sender.send(variant)
        target = path.with_name(f"{path.stem}-{variant.replace(' ', '_').replace(',', '')}.onnx")
        try:
            tools.write(variant, path, target, feeds, MODELS[name].optimizer)
        except Exception as error:
            sender.send({"variant": variant, "verdict": "no file", "reason": short(error), **common})
            continue
        contents = tools.fingerprint(target)
        if contents not in judged:
            judged[contents] = outcome(judge(target, feeds=feeds))
        found = {key: value for key, value in tools.ops(target).items() if key != "ai.onnx"}
        sender.send({"variant": variant, **judged[contents], "ops": found, **common})


def main() -> None:
    """Sweeps, prints a line per file, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--exporter", nargs="+", choices=list(OPSETS), default=[TORCHSCRIPT, DYNAMO])
    parser.add_argument(
        "--variants", nargs="+", choices=tools.VARIANTS, default=tools.VARIANTS, metavar="NAME"
    )
    parser.add_argument("--seconds", type=float, default=600, help="of one file")
    parser.add_argument("--files", type=Path, default=HERE / "files", help="where they are kept")
    parser.add_argument("--resume", action="store_true", help="leave out what the results have already")
    parser.add_argument("--not-right", action="store_true", help="only what was not right")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.page:
        arguments.files.mkdir(exist_ok=True, parents=True)
        torch.set_num_threads(1)
        load("transformers/")  # once, for all processes
        VERSIONS.write_text(json.dumps(installed_versions(), indent=1) + "\n")
        _sweep(arguments, known)
    PAGE.write_text(written(known, json.loads(VERSIONS.read_text())))


def _sweep(arguments: argparse.Namespace, known: dict[str, Any]) -> None:
    asked = arguments.variants
    for exporter in arguments.exporter:
        for name in arguments.names or MODELS:
            arguments.variants = [
                v for v in asked if _wanted(known.get(f"{name} | {exporter} | {v}"), arguments)
            ]
            if not arguments.variants or (arguments.resume and f"{name} | {exporter} | export" in known):
                continue
            for result in measured(name, exporter, arguments):
                key = f"{name} | {exporter} | {result['variant']}"
                known[key] = {"name": name, "exporter": exporter, **result}
                print(key, result["verdict"], result.get("reason", ""), sep=" | ", flush=True)
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def _wanted(before: dict[str, Any] | None, arguments: argparse.Namespace) -> bool:
    if arguments.resume:
        return before is None
    return not arguments.not_right or (before is not None and before["verdict"] != "right")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
