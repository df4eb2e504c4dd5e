"""The page of the documentation, from the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

__all__ = ["page"]

Results = dict[str, dict[str, Any]]
VERDICTS = {
    "trained": "trains three steps, and its gradient is that of finite differences",
    "no parameter": "holds no tensor of floating point: layers without weights, trees, tables",
    "constant": "computes a piecewise constant function: small changes of its numbers change no output",
    "no output": "has no output of floating point",
    "not finite": "computes infinities or NaN with these inputs, before anything is trained",
    "not run": "ONNX Runtime cannot load or run it, or it declares another shape than it computes",
    "refused": "is refused by an error of onnxtrain that says why, and what to do",
    "unsettled": "trains, but the differences are too inexact to tell, in the precision that ONNX Runtime has",
    "timeout": "is too large for the limits of the sweep",
    "memory": "is too large for the limits of the sweep",
    "crashed": "fails otherwise",
    "wrong": "has another gradient or loss than the file",
}
VARIANTS = {
    "": "as exported",
    "level1": "onnxruntime's optimizer, basic",
    "level2": "onnxruntime's optimizer, extended",
    "level3": "onnxruntime's optimizer, all",
    "transformers": "onnxruntime's transformer optimizer",
    "float16": "float16",
    "float16-inside": "float16, inputs and outputs float32",
    "dynamic": "dynamic quantisation",
    "qdq": "static quantisation, QDQ",
    "qdq-channels": "static quantisation, QDQ by channels",
    "qoperator": "static quantisation, QOperator",
}
SOURCES = {
    "torch-dynamo": "PyTorch, Dynamo exporter, opsets 18 to 23",
    "torch-torchscript": "PyTorch, TorchScript exporter, opsets 11 to 20",
    "torch-control-flow": "PyTorch, scripted loops and ifs, cond and scan",
    "graphs": "graphs with Loop, sequences, DeformConv, RoiAlign, STFT, GridSample, ...",
    "tf2onnx": "Keras by tf2onnx, opsets 11 to 18",
    "keras": "Keras, its own export",
    "skl2onnx": "scikit-learn by skl2onnx, with and without ZipMap",
    "onnxmltools": "LightGBM and XGBoost by onnxmltools",
    "light": "the nine nets in `onnx/backend/test/data/light`, as they are and with random weights",
    "pytorch-converted": "`onnx/backend/test/data/pytorch-converted`",
    "pytorch-operator": "`onnx/backend/test/data/pytorch-operator`",
    "simple": "`onnx/backend/test/data/simple`",
    "onnxruntime": "examples of onnxruntime",
}
LIBRARIES = ("onnx", "onnxruntime", "torch")
_BEFORE = """# Which files train

This page tells for files of many exporters, and for what onnxruntime's optimizers and quantizers make of them, whether
onnxtrain trains them, and why not. Each file is trained as a user does it: `generate_artifacts(file, loss="mse",
optimizer="sgd")`, then three steps with the on-device API. A file counts as trained if

- the loss is that of the file itself, and
- the gradient of every parameter, along random directions, is that of finite differences of the file.

ONNX Runtime or ONNX's reference evaluator computes the differences in float64, or ONNX Runtime in float32 with steps of
several sizes. Some files need a comparison of their own:

- Exporters have merged or transposed parameters, training takes them apart again, and the file has no copy of them: the
  differences are those of `inference_model.onnx`.
- float16: the same numbers in wider floats are compared.
- Kinks, where the slopes to the two sides differ (a quantised value is the 0 of a Relu, or two values are the largest
  of a pool): the gradient must lie between the two slopes.
- Quantised files, which are built with `straight_through=True`: the differences are those of the file without its
  jumps. The amount that rounding has added for the given inputs stays added (`benchmarks/files/surrogate.py`).

Weights are random, or fitted to random data. `benchmarks/files/make.py` and `variants.py` make the files; `sweep.py`
trains the files of any folder and writes this page:

```sh
python benchmarks/files/make.py build/files          # scikit-learn's and Keras's sources where those are installed
python benchmarks/files/variants.py build/files
python benchmarks/files/sweep.py build/files
```
"""


def page(results: Results) -> str:
    """Returns the page."""
    counts = Counter(row["verdict"] for row in results.values())
    lines = [
        _BEFORE,
        f"{len(results)} files: "
        + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        + f". Versions: {', '.join(f'{name} {metadata.version(name)}' for name in LIBRARIES)}.",
        "",
        *_table("source", results, lambda name: name.split("/")[0], SOURCES),
        "",
        *_table("variant", results, lambda name: name.partition("@")[2], VARIANTS),
        "",
        "| verdict | what the file is or does | files |",
        "|---|---|---|",
        *(
            f"| {verdict} | {said} | {counts[verdict]} |"
            for verdict, said in VERDICTS.items()
            if counts[verdict]
        ),
        "",
        "## Why the others do not",
        "",
        "| verdict | reason | files | one of them |",
        "|---|---|---|---|",
        *_reasons(results),
        "",
        *_light(results),
    ]
    return "\n".join(lines) + "\n"


def _table(head: str, results: Results, key: Callable[[str], str], known: dict[str, str]) -> list[str]:
    """Counts of verdicts by what a file's name says."""
    counted: dict[str, Counter[str]] = {}
    for name, row in results.items():
        counted.setdefault(key(name), Counter())[row["verdict"]] += 1
    verdicts = [v for v in VERDICTS if any(c[v] for c in counted.values())]
    rows = [*(k for k in known if k in counted), *sorted(counted.keys() - known.keys())]
    return [
        f"| {head} | files | {' | '.join(verdicts)} |",
        "|---" * (len(verdicts) + 2) + "|",
        *(f"| {known.get(k, k)} | {counted[k].total()} | {_cells(counted[k], verdicts)} |" for k in rows),
    ]


def _cells(counted: Counter[str], verdicts: list[str]) -> str:
    return " | ".join(str(counted[verdict] or "") for verdict in verdicts)


def _reasons(results: Results) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, row in sorted(results.items()):
        if row["verdict"] != "trained":
            found.setdefault((row["verdict"], _general(row.get("reason", ""))), []).append(name)
    order = list(VERDICTS)
    return [
        f"| {verdict} | {reason} | {len(names)} | `{names[0]}` |"
        for (verdict, reason), names in sorted(
            found.items(), key=lambda f: (order.index(f[0][0]), -len(f[1]))
        )
    ]


def _general(reason: str) -> str:
    """A reason without what is different from file to file."""
    reason = re.sub(r"\(node '[^']*'[^)]*\)|\([^()]*\)", "", reason)
    reason = re.sub(r"'[^']*[/.:_\d][^']*'|\"[^\"]*\"|\[[^\]]*\]|\S*/\S*", "…", reason)
    reason = re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "…", reason)
    reason = re.sub(r"(… ?)+", "… ", " ".join(reason.split())).replace("|", "/")
    return reason[:140].strip()


def _light(results: Results) -> list[str]:
    rows = {name: row for name, row in results.items() if name.startswith("light/")}
    if not rows:
        return []
    bases = sorted({name.partition("@")[0] for name in rows})
    variants = [v for v in VARIANTS if any(name.partition("@")[2] == v for name in rows)]
    lines = [
        "## The nine nets",
        "",
        "Of the files as they are, most weights are constants that a ConstantOfShape makes, all of one value; the",
        "others, such as biases, are trained. With random weights in their place every weight is.",
        "",
        f"| net | {' | '.join(VARIANTS[v] for v in variants)} |",
        "|---" * (len(variants) + 1) + "|",
    ]
    for base in bases:
        cells = [rows.get(f"{base}@{v}" if v else base, {}).get("verdict", "") for v in variants]
        lines.append(f"| {base.removeprefix('light/')} | {' | '.join(cells)} |")
    return lines
