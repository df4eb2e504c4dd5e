"""Writes notes/files.md from the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

__all__ = ["page"]

Results = dict[str, dict[str, Any]]
VERDICTS = {
    "trained": "trains: three steps run, and the gradient equals finite differences",
    "no parameter": "has no tensor in floating point to train: layers without weights, decision trees, lookup tables",
    "constant": "has no gradient: small changes of its parameters change no output",
    "no output": "has no output in floating point",
    "not finite": "computes infinity or NaN before any training",
    "not run": "is not run by ONNX Runtime, or has an output of another shape than it declares",
    "refused": "is refused by an error of onnxtrain that says why, and what to do",
    "unsettled": "trains, but rounding makes the finite differences too inexact to judge the gradient",
    "timeout": "takes more time than the test allows",
    "memory": "takes more memory than the test allows",
    "crashed": "fails otherwise",
    "wrong": "trains with another gradient or loss than the file has",
}
REASONS = {
    "^{": "no program computes the differences exactly enough",
    "^it holds no tensor of floating point": "the file has no tensor in floating point",
    "^small changes of what it holds": "small changes of the parameters change no output",
    "^nothing of floating point comes out": "no output is in floating point",
    "^the file itself computes values": "the file computes infinity or NaN",
    "^it declares its output": "the file declares another shape of its output than it computes",
    "NOT_IMPLEMENTED : Could not find an implementation for \\w+\\([1-6]\\)": "ONNX Runtime has no kernels for ops of "
    "opset 6, which the file has",
    "DequantizeLinear": "the quantizer has written DequantizeLinear by channels, which needs opset 13",
    "Type ?(Inference)?Error": "the conversion to float16 has left an op with a dtype that the op does not take",
    "No Op reg": "the converter writes an op that ONNX does not have, e.g. Erfc",
    "preview.training": "the file has an op of ai.onnx.preview.training, which ONNX Runtime lacks",
    "Failed to construct locale": "StringNormalizer asks for a locale that is not installed",
    "ScatterND with|with ScatterND": "ONNX Runtime's ScatterND cannot add in float16",
    "running (Expand|Resize) node": "ONNX Runtime fails in Expand or in Resize",
    "^ONNX Runtime ends the process": "ONNX Runtime ends the process when it loads the file",
    "^ONNX Runtime cannot load it": "ONNX Runtime does not load the file",
    "^ONNX Runtime cannot run it": "ONNX Runtime fails while it runs the file",
    "^NothingToTrain": "no number of the file is a parameter: its numbers set up ops, or belong to formulas",
    "^ModelLoadError.*no opset": "the file imports no opset of the standard domain",
    "^cannot: an op between integers": "an op on integers rounds inside, too: no version of the file without rounding "
    "exists to compare with",
    "^there is no file without its jumps": "ONNX Runtime does not load the version of the file without rounding, to "
    "compare with: a name is twice in it",
    "^it quantises over an endless range": "a mask of -3e38 is quantised together with other numbers, which are lost",
    "^the steps are lost in rounding: they": "the gradient is so small that a step changes no parameter",
    "^the steps are lost in rounding: its": "the gradient is so small that it consists of rounding errors",
    "^its gradient is right in float64": "the gradient is right in float64. In the dtype of the file rounding hides it",
}
"""Per pattern in a reason that `judge.py` records, the sentence for readers. The first pattern that occurs counts."""
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

This page shows which `.onnx` files onnxtrain can train: files of PyTorch, Keras, scikit-learn and others, as exported,
and after onnxruntime's optimizers and quantizers. To check a file of your own, run `onnxtrain ops model.onnx`.
"""
_TEST = """## How a file is tested

Each file is trained as a user would train it: `generate_artifacts(file, loss="mse", optimizer="sgd")`, then three steps
with the on-device API. Weights are random, or fitted to random data. A file counts as trained if

- the loss equals that of the file, and
- the gradient of every parameter, along random directions, equals finite differences of the file.

ONNX Runtime or ONNX's reference evaluator computes the differences in float64. Where neither can, ONNX Runtime computes
them in float32, with steps of several sizes. Some files need another comparison:

- **Merged or transposed parameters.** An exporter has changed parameters, and training changes them back. If the file
  has no copy of the original parameters, the differences are those of `inference_model.onnx`.
- **float16.** The differences are those of the same numbers in wider floats.
- **Kinks.** At a kink the slopes on both sides differ, e.g. if a value is exactly 0 before a Relu, or two values are
  the largest of a pool. The gradient must lie between the two slopes.
- **Quantised files** are trained with `straight_through=True`. The differences are those of the file without rounding:
  what rounding has added to each value for the given inputs is added as a constant (`benchmarks/files/surrogate.py`).

These commands make the files, train them, and write this page. `sweep.py` also takes a folder with other files:

```sh
python benchmarks/files/make.py build/files          # files of scikit-learn and Keras if these are installed
python benchmarks/files/variants.py build/files
python benchmarks/files/sweep.py build/files
```
"""


def page(results: Results) -> str:
    """Returns the page."""
    counts = Counter(row["verdict"] for row in results.values())
    lines = [
        _BEFORE,
        f"Of {len(results)} files, {counts['trained']} train:",
        "",
        "| verdict | the file | files |",
        "|---|---|---|",
        *(
            f"| {verdict} | {said} | {counts[verdict]} |"
            for verdict, said in VERDICTS.items()
            if counts[verdict]
        ),
        "",
        f"Versions: {', '.join(f'{name} {metadata.version(name)}' for name in LIBRARIES)}.",
        "",
        "## By exporter",
        "",
        *_table("source", results, lambda name: name.split("/")[0], SOURCES),
        "",
        "## By tool that has changed the file",
        "",
        *_table("variant", results, lambda name: name.partition("@")[2], VARIANTS),
        "",
        "## Why the other files do not train",
        "",
        "`benchmarks/files/results/files.json` has the error messages of each file.",
        "",
        "| verdict | reason | files | one of them |",
        "|---|---|---|---|",
        *_reasons(results),
        "",
        *_light(results),
        "",
        _TEST.rstrip(),
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
    """Returns a reason in words for readers, without what is different from file to file."""
    for pattern, sentence in REASONS.items():
        if re.search(pattern, reason):
            return sentence
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
        "ONNX's own tests have nine well-known nets. ConstantOfShape computes most weights in these files, all of one",
        "value, so that only the others, such as biases, are trained. The files `-weights` hold random weights, all of",
        "which are trained. An empty cell means that this file was not tested.",
        "",
        f"| net | {' | '.join(VARIANTS[v] for v in variants)} |",
        "|---" * (len(variants) + 1) + "|",
    ]
    for base in bases:
        cells = [rows.get(f"{base}@{v}" if v else base, {}).get("verdict", "") for v in variants]
        lines.append(f"| {base.removeprefix('light/')} | {' | '.join(cells)} |")
    return lines
