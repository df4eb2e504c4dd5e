"""The tables of losses and optimizers in docs/reference/losses-and-optimizers.md are written from the classes.

`ONNXTRAIN_WRITE_DOCS=1 pytest tests/test_losses_and_optimizers_page.py` writes them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain._names import LOSSES as LOSS_NAMES
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import LOSSES, JointLoss, Loss
from onnxtrain.optimizers import OPTIMIZERS, Optimizer
from onnxtrain.trainer import METRICS, SCHEDULES

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "losses-and-optimizers.md"


def _number(value: object) -> str:
    """Formats a default, e.g. 1e-8 instead of Python's 1e-08."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_number, value))})"
    text = '"' + value + '"' if isinstance(value, str) else repr(value)
    return text.replace("e-0", "e-") if isinstance(value, float) else text


def _setting(field: Field[Any]) -> str:
    assert field.default is not MISSING, (
        f"{field.name}: settings need a default, so that a name can stand for the class"
    )
    return field.name if field.default is None else f"{field.name}={_number(field.default)}"


def _call(kind: type, shared: type) -> str:
    """Returns a class with its own settings and their defaults, e.g. "HuberLoss(delta=1.0)"."""
    common = {field.name for field in fields(shared)}
    return f"{kind.__name__}({', '.join(_setting(f) for f in fields(kind) if f.name not in common)})"


def _summary(kind: type) -> str:
    """Returns the first line of a docstring, for a cell of a table."""
    first, _, _ = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    assert "\n" not in first, (
        f"{kind.__name__}: the first sentence of the docstring, with the formula, must fit on its first line"
    )
    return first.removesuffix(".").replace("|", r"\|")


def _metrics(kind: type[Loss]) -> str:
    """Returns the keys of the metrics that `Trainer` records for a loss by default."""

    def labels(shape: Sequence[int | str]) -> bool:
        scores = ir.Value(name="scores", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        loss = kind()
        if isinstance(loss, JointLoss):
            targets = loss.joint_targets([scores] * len(loss.takes))
        else:
            targets = loss.targets(scores)
        return bool(targets) and targets[0].class_labels is not None

    try:
        has_labels = labels(("batch", 10))
    except GraphBuildError:
        has_labels = labels(("batch", "sequence", 10))
    names = kind.label_metrics if has_labels else kind.default_metrics
    return ", ".join(f"`{METRICS[name].name}`" for name in names) or "none"


def losses() -> list[str]:
    return [
        "| name | class and settings | loss | targets | default metrics |",
        "|---|---|---|---|---|",
        *(
            f"| `{name}` | `{_call(kind, Loss)}` | {_summary(kind)} | {LOSS_NAMES[name][1]} | {_metrics(kind)} |"
            for name, kind in LOSSES.items()
        ),
    ]


def _rate(kind: type[Optimizer]) -> str:
    """Returns the default learning rate of PyTorch's optimizer of the same name."""
    twin = getattr(torch.optim, kind.__name__, None)
    return "" if twin is None else _number(inspect.signature(twin).parameters["lr"].default)


def optimizers() -> list[str]:
    return [
        "| name | class and settings | description | learning rate in PyTorch |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | `{_call(kind, Optimizer)}` | {_summary(kind)} | {_rate(kind)} |"
            for name, kind in OPTIMIZERS.items()
        ),
    ]


def _replaced(page: str, heading: str, table: list[str]) -> str:
    """Returns the page with another table as the first one below a heading."""
    lines = page.splitlines()
    begin = next(i for i in range(lines.index(heading), len(lines)) if lines[i].startswith("|"))
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
    return "\n".join([*lines[:begin], *table, *lines[end:]]) + "\n"


@pytest.mark.parametrize(("heading", "table"), [("## Losses", losses), ("## Optimizers", optimizers)])
def test_every_loss_and_optimizer_is_in_the_guide(heading: str, table: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    written = _replaced(page, heading, table())
    if os.environ.get("ONNXTRAIN_WRITE_DOCS"):
        PAGE.write_text(written, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == written, (
        "write the tables again: ONNXTRAIN_WRITE_DOCS=1 pytest -q tests/test_losses_and_optimizers_page.py"
    )


def test_every_schedule_and_metric_is_in_the_guide() -> None:
    page = PAGE.read_text(encoding="utf-8")
    whole = {
        name.split("_")[0] if name.startswith(("f1", "precision", "recall")) else name for name in METRICS
    }
    missing = [name for name in [*SCHEDULES, *whole] if f"`{name}`" not in page]
    assert not missing, (
        "add rows to the tables of metrics and schedules in docs/reference/losses-and-optimizers.md"
    )
    for name, kind in SCHEDULES.items():
        assert f"| `{kind.__name__}(" in page or f", `{kind.__name__}(" in page, name
