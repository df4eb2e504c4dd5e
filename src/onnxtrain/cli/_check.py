"""Runs `onnxtrain check`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import onnx_ir as ir

from onnxtrain.cli._command_options import CheckOptions
from onnxtrain.cli._data import Arrays, load_arrays
from onnxtrain.cli._options import parse_dims
from onnxtrain.cli._output import print_json, print_next, print_table, table
from onnxtrain.errors import InputError
from onnxtrain.functional import GradientCheck, check_gradients
from onnxtrain.passes import TrainingModePass, canonicalize, load_model
from onnxtrain.selection import select_parameters


def run_command(options: CheckOptions) -> None:
    """Checks the gradients and prints one row per parameter; exits with code 1 if a gradient is wrong."""
    # Gradients are built for the canonical form, so the finite differences must use it, too.
    loaded = canonicalize(load_model(options.model))
    # Dropout would draw a new mask for each evaluation, and the differences would measure the masks.
    TrainingModePass(dropout="inference")(loaded)
    names = select_parameters(loaded, options.parameter or None, None).trainable
    inputs = _inputs(loaded, options.data) if options.data is not None else None
    results = check_gradients(
        loaded,
        of=options.of,
        wrt=names,
        inputs=inputs,
        dims=parse_dims(options.dim or ()),
        seed=options.seed,
    )
    wrong = sum(1 for result in results if result.verdict == "differs")
    if options.json:
        rows = [asdict(result) | {"passed": result.passed} for result in results]
        print_json({"model": str(options.model), "passed": not wrong, "parameters": rows})
    else:
        _print(options.model, results, wrong)
    if wrong:
        # The exit code lets a build fail on a wrong gradient.
        sys.exit(1)


def _inputs(model: ir.Model, path: Path) -> Arrays:
    """Loads the arrays for a model's inputs from an .npz file, by name. Other arrays in the file are ignored.

    If the model has only one input, its array may also be named `x`.

    Raises:
        InputError: no array in the file has the name of an input.
    """
    arrays = load_arrays(path)
    names = [str(value.name) for value in model.graph.inputs]
    # As for `train`, where the array of a single input may be called `x`.
    if len(names) == 1 and names[0] not in arrays and "x" in arrays:
        return {names[0]: arrays["x"]}
    chosen = {name: arrays[name] for name in names if name in arrays}
    if not chosen:
        raise InputError(
            f"The data '{path}' contains {', '.join(arrays) or 'nothing'}, but the model's inputs are "
            f"{', '.join(names)}. Name the arrays after the inputs."
        )
    return chosen


def _print(model: Path, results: Sequence[GradientCheck], wrong: int) -> None:
    rows = [
        (
            result.name,
            "x".join(map(str, result.shape)) or "scalar",
            f"{result.norm:.4g}",
            f"{result.derivative:.6g}",
            f"{result.difference:.6g}",
            f"{result.error:.1e}",
            {"agrees": "ok", "differs": "WRONG", "inconclusive": "inconclusive"}[result.verdict],
        )
        for result in results
    ]
    columns = ("parameter", "shape", "|gradient|", "directional derivative", "finite difference", "error", "")
    print_table(table(f"Gradients of {model.name}", columns, rows, right=(2, 3, 4, 5)))
    precision = results[0].precision if results else "float64"
    # ONNX Runtime evaluates models with ops that the reference evaluator lacks, with a tolerance for float32.
    how = "the ONNX reference evaluator in float64" if precision == "float64" else "ONNX Runtime in float32"
    # Inconclusive rows are not failures: at a kink, a finite difference proves nothing.
    open_ = [result for result in results if result.verdict == "inconclusive"]
    agree = len(results) - wrong - len(open_)
    counts = [f"{agree if wrong or open_ else f'all {agree}'} agree"]
    counts += [f"{wrong} differ"] * bool(wrong) + [f"{len(open_)} inconclusive"] * bool(open_)
    print_table(
        f"{', '.join(counts)}: finite differences by {how}, tolerance {results[0].tolerance if results else 0:g}"
    )
    for result in open_:
        print_table(f"{result.name}: {result.reason}; another --seed takes another direction")
    if not wrong:
        print_next("train", model, "--data", "FILE", "--loss", "NAME")
