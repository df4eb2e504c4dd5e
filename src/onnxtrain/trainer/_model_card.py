"""Writes model cards: a README.md that describes a model, its training and its results."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain._printable import printable
from onnxtrain._settings import settings_text
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._show.report import format_value

# Characters that begin code, emphasis, HTML, a formula or a link; underscores inside words are text.
_MARKDOWN = re.compile(r"[\\`*<>&~$]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(\[]")
# Settings that have their own row, or do not interest readers.
_TOLD = frozenset({"prediction", "random", "samples", "validation", "threads", "metrics"})


def write_model_card(
    state: TrainingState,
    path: str | os.PathLike[str],
    title: str,
    *,
    description: str,
    license: str | None,
    tags: Sequence[str],
    results: Mapping[str, Mapping[str, float]] | None,
    model: str,
) -> None:
    """Writes a model card to a file; see :meth:`Trainer.model_card` for the arguments."""
    lines = [
        *_front_matter(title, license, tags, results or {}),
        f"# {_text(title)}",
        "",
        *([description, ""] if description else []),
        *_of_model(state, model),
        *_of_training(state),
        *_of_results(state, results or {}),
        *_versions(),
    ]
    # The name that the Hugging Face Hub expects.
    target = Path(path)
    target = target / "README.md" if target.is_dir() else target
    keep_inside(target, state.directory)
    with replace_file(target) as file:
        file.write("\n".join(lines).encode())


def _front_matter(
    title: str, license: str | None, tags: Sequence[str], results: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Returns the lines of the YAML metadata at the top of the card, which the Hugging Face Hub reads."""
    # JSON is valid YAML, and quotes any title correctly.
    entries: dict[str, Any] = {"library_name": "onnx", "tags": ["onnx", "onnxtrain", *tags]}
    if license is not None:
        entries["license"] = license
    measured = [
        {
            "task": {"type": "other"},
            "dataset": {"name": name, "type": name},
            # The Hub accepts only finite numbers, and NaN is not JSON.
            "metrics": [{"type": key, "value": v} for key, v in values.items() if math.isfinite(v)],
        }
        for name, values in results.items()
    ]
    if measured:
        entries["model-index"] = [{"name": title, "results": measured}]
    return [
        "---",
        # The escapes of `printable` are valid in quoted YAML strings.
        *(f"{key}: {printable(json.dumps(value, ensure_ascii=False))}" for key, value in entries.items()),
        "---",
        "",
    ]


def _text(text: object) -> str:
    """Converts a value, e.g. an input's name with arbitrary characters, to a string with escaped Markdown."""
    return _MARKDOWN.sub(r"\\\g<0>", printable(text))


def _code(name: str) -> str:
    """Returns a name as Markdown code, delimited by more backticks than it contains."""
    marks = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    return f"{marks}{name}{marks}" if marks == "`" else f"{marks} {name} {marks}"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    # A bar would start a new column.
    lines = [[_text(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def _of_model(state: TrainingState, model: str) -> list[str]:
    """Returns the lines of the section about the model: inputs, outputs, number of parameters, and how to run it."""
    manifest, outputs, store = state.run.manifest, state.run.predicted, state.run.store
    rows = [(spec.name, spec.dtype.name, _shape(spec.shape)) for spec in manifest.inputs]
    sizes = {name: math.prod(store.parameters[name].shape) for name in store.parameters}
    trained = sum(sizes[name] for name in store.trainable)
    # "..." stands for the reader's arrays.
    feeds = ", ".join(f"{spec.name!r}: ..." for spec in manifest.inputs)
    code = [
        "import onnxruntime",
        "",
        f"session = onnxruntime.InferenceSession({model!r})",
        f"outputs = session.run({outputs!r}, {{{feeds}}})",
    ]
    return [
        "## The model",
        "",
        f"An ONNX file with {sum(sizes.values()):,} parameters, of which {trained:,} were trained. Outputs: "
        f"{', '.join(_code(printable(name)) for name in outputs)}.",
        "",
        *_table(("input", "dtype", "shape"), rows),
        "```python",
        *code,
        "```",
        "",
    ]


def _shape(shape: Sequence[object] | None) -> str:
    return "unknown" if shape is None else f"[{', '.join(str(size or '?') for size in shape)}]"


def _of_training(state: TrainingState) -> list[str]:
    """Returns the lines of the section about training: size of the data, optimizer steps and options."""
    plan = state.position.plan
    rows: list[tuple[str, object]] = []
    if plan is not None:
        rows.append(("samples", "a stream" if plan.samples is None else f"{plan.samples:,}"))
        if isinstance(plan.validation, float):
            rows.append(("validation", f"{plan.validation:g} of the samples, split off"))
        elif plan.validation is not None:
            rows.append(("validation", f"{plan.validation:,} samples" if plan.validation else "a stream"))
    rows.append(("optimizer steps", f"{state.position.step:,}"))
    for name, value in state.run_settings.items():
        # Options that are off are left out.
        if name == "seed" or (name not in _TOLD and value not in (None, False, "", {}, [])):
            text = settings_text(value) if isinstance(value, Mapping) else value
            rows.append((name.replace("_", " "), text))
    told = f"Trained with onnxtrain in {len(state.position.history)} epochs."
    return ["## Training", "", told, "", *_table(("option", "value"), rows)]


def _of_results(state: TrainingState, results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns the lines of the section about results: on the evaluated datasets and in the last epoch."""
    lines = ["## Results", ""]
    for name, values in results.items():
        lines += [
            f"On {_text(name)}:",
            "",
            *_table(("metric", "value"), [(k, format_value(v)) for k, v in values.items()]),
        ]
    # The last epoch comes last: its values are averages while the parameters changed.
    last = {
        key: value
        for key, value in state.position.history.last.items()
        if key not in ("epoch", "learning_rate")
    }
    if last:
        lines += ["In the last epoch of training:", ""]
        lines += _table(("metric", "value"), [(key, format_value(value)) for key, value in last.items()])
    return lines


def _versions() -> list[str]:
    versions = {
        "onnxtrain": version("onnxtrain"),
        "onnxruntime": ort.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }
    return ["## Versions", "", *_table(("package", "version"), list(versions.items()))]
