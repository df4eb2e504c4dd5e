"""Writes the page of the documentation from the results."""

from __future__ import annotations

import re
from collections import Counter
from importlib import metadata
from typing import Any

from tools import VARIANTS

from models import EXPORTERS, MODELS

Row = dict[str, Any]
LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime")
HEAD = """\
# Hugging Face models, from files

Tiny configurations of Hugging Face architectures with random weights, exported by both of PyTorch's exporters, as they
are and behind onnxruntime's tools: its offline optimization at levels 1 to 3, its transformer optimizer, dynamic
quantization, and static quantization in both formats. `generate_artifacts` builds the training of each file, three
steps are taken with the on-device API, and the gradients are compared with finite differences of what the *given* file
computes: along random directions that cover all parameters, in float64, by onnxruntime or by ONNX's reference evaluator
with onnxruntime's ops written in numpy. The loss is the mean squared difference from random numbers. Quantized files
are trained with `straight_through=True`, and their differences are those of the numbers before rounding, what rounding
added for the given inputs left as it is. `benchmarks/hugging_face/sweep.py` writes this page; the judge is that of
[other files](files.md).
"""
MEANING = """\
- **right**: built, trained, and each slope is within 1 % (3 % where numbers are rounded) of the size that it has along
  a random direction on average; most are within 1e-6.
- **float32**: the same, where nothing computes the file in float64: by runs on onnxruntime.
- **unsure**: built and trained, but float32 and float64 round to different integers, so that differences tell nothing.
- **refused**: an error says why, and what to do instead.
- **no file**: the tool fails, or writes a file that onnxruntime does not run or whose scales are infinite.
"""
_WORDS = ("right", "float32", "unsure", "refused", "wrong")


def written(results: dict[str, Row]) -> str:
    """Returns the page."""
    rows = [row for row in results.values() if row["variant"] in VARIANTS]
    counts = Counter(_word(row) for row in rows)
    files = sum(counts.values()) - counts["no file"]
    trained = sum(counts[word] for word in ("right", "float32"))
    names = {row["name"] for row in rows if _word(row) in ("right", "float32")}
    both = [name for name in names if all(_trained(rows, name, exporter) for exporter in EXPORTERS)]
    opsets = sorted({row["opset"] for row in rows})
    told = ", ".join(f"{counts[word]} {word}" for word in _WORDS if counts[word])
    lines = [
        HEAD,
        f"Of {files} files of {len(names)} architectures, {len(both)} of them from both exporters, in opsets",
        f"{opsets[0]} to {opsets[-1]} ({len(opsets)} of them): {told}. {trained} train.",
        "",
        f"Versions: {', '.join(f'{name} {metadata.version(name)}' for name in LIBRARIES)}.",
        "",
        MEANING,
        f"| architecture | exporter | opset | {' | '.join(VARIANTS)} |",
        f"|---|---|---|{'---|' * len(VARIANTS)}",
    ]
    for name in MODELS:
        for exporter in EXPORTERS:
            lines.append(_line(rows, results, name, exporter))
    return "\n".join([*filter(None.__ne__, lines), "", *_reasons(rows), "", *_fused(rows), ""])


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


def _reasons(rows: list[Row]) -> list[str]:
    counts = Counter((_word(row), _reason(row["reason"])) for row in rows if row["verdict"] != "right")
    lines = ["## What is not right, by reason", "", "| | reason | files |", "|---|---|---|"]
    return [*lines, *(f"| {word} | {reason} | {n} |" for (word, reason), n in sorted(counts.items()))]


def _reason(text: str) -> str:
    """The beginning, without the names of values."""
    text = re.sub(r"\{[^}]*\}|\(node '[^)]*\)|\"[^\"]*\"|'[^']*'|the scale \S+,", "…", " ".join(text.split()))
    return text[:200].replace("|", "/")


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
    return ["## Ops of onnxruntime in the files that train", "", f"By the number of files: {told}."]
