"""Runs drawn jobs and judges them: each command ends with a result, or with one message of what to do."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest

import models
from onnxtrain.cli import main
from onnxtrain.cli._declared import options_of
from onnxtrain.cli._train_options import TrainOptions

# Exit codes: a result, a message of onnxtrain, a usage message of the command line's parser.
DONE, REFUSED, USAGE = 0, 1, 2

# What Python code writes in place of an option; `weight_decay=0.01` also is a setting of `--optimizer-option`.
_PYTHON = re.compile(
    "|".join(
        rf"(?<![\w./-]){name}\b"
        for field, option in options_of(TrainOptions).items()
        for name in (field, option.rule.python)
        if "_" in name and name != "weight_decay"
    )
    + r"|\.astype|NoneType|=True\b"
)


def make_files(folder: Path) -> None:
    """Writes the models and the data that jobs name."""
    rng = np.random.default_rng(0)
    onnx.save(models.mlp(), folder / "mlp.onnx")
    onnx.save(models.mlp(features=4, classes=3, seed=1), folder / "table.onnx")
    onnx.save(models.mlp(features=4, classes=1, seed=2), folder / "amount.onnx")
    onnx.save(models.conv_bn(), folder / "images.onnx")
    x = rng.standard_normal((60, 4)).astype(np.float32)
    weight = rng.random(60).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=x[:, :3].argmax(1), weight=weight)
    np.savez(folder / "amounts.npz", x=x, y=(x[:, :3] * 2).astype(np.float32), weight=weight)
    shape = [
        size.dim_value if size.dim_value else 24
        for size in onnx.load(folder / "images.onnx").graph.input[0].type.tensor_type.shape.dim
    ]
    np.savez(folder / "images.npz", x=rng.standard_normal(shape).astype(np.float32), y=np.arange(24) % 3)
    table = pd.DataFrame(
        {
            "age": np.where(rng.random(60) < 0.05, np.nan, rng.integers(18, 80, 60)),
            "weight": rng.normal(70, 9, 60).round(2),
            "town": rng.choice(["Rome", "Oslo", "Lima"], 60),
            "number": rng.integers(0, 4, 60),
            "flag": rng.random(60) < 0.5,
            "label": rng.choice(["a", "b", "c"], 60),
            "kind": rng.integers(0, 3, 60),
            "amount": rng.normal(size=60).round(3),
        }
    )
    for with_gaps, name in ((table, "gaps"), (table.fillna({"age": 30}), "table")):
        with_gaps.to_csv(folder / f"{name}.csv", index=False)
        with_gaps.to_parquet(folder / f"{name}.parquet", index=False)


def _run(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Runs a command in this process; -1 stands for an exception that is not documented."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["onnxtrain", *arguments])
        try:
            main()
            code = -1
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else -1
        except Exception:
            traceback.print_exc()
            code = -1
    return code, out.getvalue(), err.getvalue()


def judge(job: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """Runs the commands of a job in a folder; returns a text for each fault of a command."""
    found = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for arguments in job:
            if ("run" in arguments[1:2] or "again" in arguments) and not Path("run/checkpoint").exists():
                continue
            code, out, err = _run(arguments)
            problem = _problem(arguments, code, out, err)
            if problem:
                found.append(f"onnxtrain {' '.join(map(repr, arguments))}\n  {problem}")
    finally:
        os.chdir(before)
    return found


def _problem(arguments: Sequence[str], code: int, out: str, err: str) -> str:
    """Returns what is wrong with the end of a command; empty for nothing."""
    if code not in (DONE, REFUSED, USAGE):
        return f"exit code {code}:\n{err}"
    if "Traceback" in err:
        return f"a traceback:\n{err}"
    if code != DONE:
        message = "error:" if code == REFUSED else "Usage:"
        if code == REFUSED and arguments[0] == "check" and not err:
            return ""  # It has found a wrong gradient, which its table names.
        if message not in err:
            return f"exit code {code} without a message, but {err!r}"
        if arguments[0] in ("inspect", "export"):
            return f"a run that was trained cannot be opened: {err}"
        python = _PYTHON.search(err.partition(message)[2])
        return f"{python[0]!r} in a shell: {err}" if python and python[0] not in " ".join(arguments) else ""
    document = None
    if "--json" in arguments:
        try:
            document = json.loads(out)
        except ValueError as error:
            return f"no JSON document ({error}): {out!r}"
    if "again" in arguments:
        return _differs()
    if arguments[0] == "train":
        return _untrained()
    if arguments[0] == "evaluate" and document:
        return _other_accuracy(document, arguments[3])
    return ""


def _untrained() -> str:
    """Says if the model that a training wrote does not load or holds numbers that are not finite."""
    ort.InferenceSession("run/trained.onnx")
    for tensor in onnx.load("run/trained.onnx").graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return f"trained.onnx: {tensor.name} is not finite"
    return ""


def _differs() -> str:
    """Compares the weights of a run with those of the run that its options were read for."""
    first, second = (
        {
            tensor.name: onnx.numpy_helper.to_array(tensor).tobytes()
            for tensor in onnx.load(f"{run}/trained.onnx").graph.initializer
        }
        for run in ("run", "again")
    )
    return "" if first == second else "the run that run.toml repeats has other weights"


def _other_accuracy(document: dict[str, Any], data: str) -> str:
    """Compares the accuracy with that of a plain session over the arrays of an .npz file."""
    # A training that diverged leaves a run without an exported model.
    if "accuracy" not in document or not data.endswith(".npz") or not Path("run/trained.onnx").exists():
        return ""
    with np.load(data) as arrays:
        session = ort.InferenceSession("run/trained.onnx")
        logits = session.run(["logits"], {"x": arrays["x"]})[0]
        expected = float((logits.argmax(1) == arrays["y"]).mean()) if logits.shape[1] > 1 else None
    if expected is None or abs(document["accuracy"] - expected) < 1e-6:
        return ""
    return f"accuracy {document['accuracy']}, of a plain session {expected}"
