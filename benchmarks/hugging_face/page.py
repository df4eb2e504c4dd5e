"""Writes the page of the documentation from the results."""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from typing import Any

from tools import VARIANTS

from models import EXPORTERS, MODELS

Row = dict[str, Any]
LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime")
HEAD = """\
# Which Hugging Face models train

This page shows which architectures of Hugging Face onnxtrain can train from an `.onnx` file. The files come from both
exporters of PyTorch, and from the tools of onnxruntime that publishers run on files. To check a file of your own, run
`onnxtrain ops model.onnx`.
"""
MEANING = """\
## The table

A row is one architecture, e.g. BERT, exported by one exporter. A column is a tool of onnxruntime that has changed the
file: its optimizer at level 1 (basic), 2 (extended) or 3 (all), its transformer optimizer, dynamic quantization, or
static quantization in one of two formats, QDQ and QOperator. Each cell has one of these verdicts:

- **right**: the file trains, and its gradients are right. Along random directions the slope by the gradient and the
  slope by finite differences in float64 differ by at most 1 %, in files with rounded numbers by at most 3 %. In most
  files they differ by less than 1e-6. The percentages are relative to the average size of a slope along a random
  direction.
- **float32**: the file trains, and the slopes differ by at most 3 %. ONNX Runtime computes the finite differences in
  float32. No program computes these files in float64.
- **unsure**: the file trains. Its numbers round to other integers in float64 than in float32, so finite differences
  cannot tell whether the gradients are right.
- **refused**: onnxtrain raises an error that says why, and what to do instead.
- **no file**: the tool raises an error, or it writes a file that ONNX Runtime does not run or that has an infinite
  scale.
- **no export**: PyTorch's exporter raises an error.
"""
METHOD = """\
## How a file is tested

Each network is small and has random weights. From its file

1. `generate_artifacts` builds the training, with the mean squared difference between prediction and target as the
   loss. The targets are the predictions of the file plus random noise. Quantized files are built with
   `straight_through=True`.
2. `Module` and `Optimizer` take three steps.
3. The gradients of all parameters are compared with finite differences of the *given* file along random directions.
   ONNX Runtime computes the differences in float64, or ONNX's reference evaluator does, with the ops of onnxruntime
   written in numpy.

The finite differences of a quantized file are those of the file without rounding: the amount that rounding has added
to each number for the given inputs is added as a constant. [Which files train](files.md) describes the same test for
files of other sources.

This command exports the files, tests them, and writes this page. With `--page` it writes the page alone, from the
results of the last sweep:

```sh
python benchmarks/hugging_face/sweep.py
```
"""
REASONS = {
    "which is not finite": (
        "the static quantizer writes an infinite scale: the numbers that it quantizes, e.g. masked scores "
        "of attention, reach to infinity"
    ),
    "unknown initializers/tensors": (
        "the static quantizer ends with the error `Invalid model with unknown initializers/tensors`"
    ),
    "Unable to find data type": (
        "the dynamic quantizer cannot tell the dtype of a value, as shape inference fails"
    ),
    "to be an initializer": (
        "the dynamic quantizer expects a weight to be an initializer, and the file computes the weight"
    ),
    "positional_encoder/Add": (
        "TorchScript's exporter writes an Add whose shapes do not fit: ONNX Runtime does not load the file"
    ),
    "RotaryEmbedding node": (
        "the Dynamo exporter writes a RotaryEmbedding whose caches do not fit its input: ONNX Runtime does "
        "not run the file"
    ),
    "QAttention": (
        "the dynamic quantizer takes the standard op Attention of opset 23 for com.microsoft.Attention: "
        "ONNX Runtime does not load the file"
    ),
    "Failed to export the model with torch.export": "`torch.export` cannot trace the network",
    "aten::diff": "TorchScript's exporter does not know the operator `diff`",
    "num_samples": "TorchScript's exporter expects a constant number of samples for `multinomial`",
}
"""Per pattern in a recorded reason, the sentence for readers. The first pattern that occurs counts."""
_WORDS = ("right", "float32", "unsure", "refused", "wrong")


def installed_versions() -> dict[str, str]:
    """Returns the versions of the libraries that the results depend on, e.g. {"torch": "2.13.0"}."""
    return {name: metadata.version(name) for name in LIBRARIES}


def written(results: dict[str, Row], versions: dict[str, str]) -> str:
    """Returns the page.

    Args:
        results: the rows of `results/hugging_face.json`.
        versions: versions of the libraries when the files were tested, of `results/versions.json`.
    """
    rows = [row for row in results.values() if row["variant"] in VARIANTS]
    counts = Counter(_word(row) for row in rows)
    files = sum(counts.values()) - counts["no file"]
    trained = sum(counts[word] for word in ("right", "float32", "unsure"))
    names = {row["name"] for row in rows if _word(row) in ("right", "float32")}
    both = [name for name in names if all(_trained(rows, name, exporter) for exporter in EXPORTERS)]
    opsets = sorted({row["opset"] for row in rows})
    told = ", ".join(f"{counts[word]} {word}" for word in _WORDS if counts[word])
    lines = [
        HEAD,
        f"The test made {files} files of {len(names)} architectures, in opsets {opsets[0]} to {opsets[-1]} "
        f"({len(opsets)} opsets). Both exporters wrote files",
        f"of {len(both)} architectures. {trained} files train. By verdict: {told}.",
        "",
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        MEANING,
        f"| architecture | exporter | opset | {' | '.join(VARIANTS)} |",
        f"|---|---|---|{'---|' * len(VARIANTS)}",
    ]
    for name in MODELS:
        for exporter in EXPORTERS:
            lines.append(_line(rows, results, name, exporter))
    return "\n".join([*filter(None.__ne__, lines), "", *_reasons(results), "", *_fused(rows), "", METHOD])


def _word(row: Row) -> str:
    if row["verdict"] == "right":
        return {"float64": "right", "float32": "float32", "none": "unsure"}[row["judge"]]
    return {"not ours": "no file", "no file": "no file", "refused": "refused"}.get(row["verdict"], "wrong")


def _trained(rows: list[Row], name: str, exporter: str) -> bool:
    return any(
        row["name"] == name and row["exporter"] == exporter and row["verdict"] == "right" for row in rows
    )


def _line(rows: list[Row], results: dict[str, Row], name: str, exporter: str) -> str | None:
    own = {row["variant"]: row for row in rows if row["name"] == name and row["exporter"] == exporter}
    failed = results.get(f"{name} | {exporter} | export")
    if not own:
        return (
            f"| {name} | {exporter} | {failed['opset']} |{' no export |' * len(VARIANTS)}" if failed else None
        )
    opset = next(iter(own.values()))["opset"]
    words = [_word(own[v]) if v in own else "" for v in VARIANTS]
    return f"| {name} | {exporter} | {opset} | {' | '.join(words)} |"


def _reasons(results: dict[str, Row]) -> list[str]:
    """Lists the reasons for which files were not made, the most frequent first, with one example each."""
    examples: dict[tuple[str, str], list[Row]] = {}
    for row in results.values():
        if row["verdict"] != "right":
            word = "no export" if row["variant"] == "export" else _word(row)
            examples.setdefault((word, _reason(row["reason"])), []).append(row)
    return [
        "## Why the other files are missing",
        "",
        "`benchmarks/hugging_face/results/hugging_face.json` has the error messages of each file.",
        "",
        "| verdict | reason | files | one of them |",
        "|---|---|---|---|",
        *(
            f"| {word} | {reason} | {len(rows)} | {rows[0]['name']}, {rows[0]['exporter']}, {rows[0]['variant']} |"
            for (word, reason), rows in sorted(examples.items(), key=lambda item: (item[0][0], -len(item[1])))
        ),
    ]


def _reason(text: str) -> str:
    """Returns a reason in words for readers; the beginning of the message if it has none."""
    for pattern, sentence in REASONS.items():
        if pattern in text:
            return sentence
    return " ".join(text.split())[:200].replace("|", "/")


def _fused(rows: list[Row]) -> list[str]:
    counts = Counter(
        op
        for row in rows
        if row["verdict"] == "right"
        for domain, ops in row["ops"].items()
        for op in ops
        if domain
    )
    told = ", ".join(f"{op} ({n})" for op, n in sorted(counts.items()))
    return [
        "## Ops of onnxruntime in the files that train",
        "",
        "The tools of onnxruntime replace standard ops by ops of their own. The number of files that have an op is in",
        f"parentheses: {told}.",
    ]
