"""Public names, their arguments and their defaults stay: each must accept what `tests/public_names.json` records.

Names and keyword arguments may be added. `python tests/test_public_names.py` records them.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("public_names.json")
MODULES = [
    "onnxtrain",
    "onnxtrain.api",
    "onnxtrain.artifacts",
    "onnxtrain.autodiff",
    "onnxtrain.compat",
    "onnxtrain.demo",
    "onnxtrain.distributed",
    "onnxtrain.errors",
    "onnxtrain.estimators",
    "onnxtrain.functional",
    "onnxtrain.images",
    "onnxtrain.lora",
    "onnxtrain.losses",
    "onnxtrain.nn",
    "onnxtrain.onnxblock",
    "onnxtrain.onnxblock.blocks",
    "onnxtrain.onnxblock.loss",
    "onnxtrain.onnxblock.optim",
    "onnxtrain.optim",
    "onnxtrain.optimizers",
    "onnxtrain.ortmodule",
    "onnxtrain.planning",
    "onnxtrain.qat",
    "onnxtrain.recipe",
    "onnxtrain.schedules",
    "onnxtrain.surgery",
    "onnxtrain.tables",
    "onnxtrain.texts",
    "onnxtrain.trainer",
    "onnxtrain.trainer.data",
    "onnxtrain.utils.data",
]


def signature(value: Any) -> list[list[str]] | None:
    """Returns name, kind and default of each parameter, or None if Python does not know them."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        [p.name, p.kind.name, "" if p.default is p.empty else _stable(p.default)]
        for p in parameters
        if p.name != "self"
    ]


def _stable(default: object) -> str:
    """Returns the text of a default, without addresses."""
    return f"<{type(default).__name__}>" if " at 0x" in repr(default) else repr(default)


def public() -> Iterator[tuple[str, list[list[str]] | None]]:
    """Yields each public name, and each public member of its classes, with its signature."""
    for module in MODULES:
        home = importlib.import_module(module)
        for name in sorted(home.__all__):
            value = getattr(home, name)
            yield f"{module}.{name}", signature(value) if callable(value) else None
            if not inspect.isclass(value):
                continue
            for member in sorted(dir(value)):
                of_ours = any(
                    member in vars(c) for c in value.__mro__ if c.__module__.startswith("onnxtrain")
                )
                if not member.startswith("_") and of_ours:
                    attribute = inspect.getattr_static(value, member)
                    called = getattr(value, member) if callable(getattr(value, member, None)) else None
                    yield (
                        f"{module}.{name}.{member}",
                        None if isinstance(attribute, property) or called is None else signature(called),
                    )


def missing(was: list[list[str]] | None, now: list[list[str]] | None) -> list[str]:
    """Returns what calls that the recorded signature allows can no longer do."""
    if was is None or now is None:
        return [] if was == now else [f"{was} became {now}"]
    positional = [p for p in was if p[1].startswith("POSITIONAL")]
    order = [p for p in now if p[1].startswith("POSITIONAL")][: len(positional)]
    # A required argument may become optional.
    wrong = [
        f"positional {a} became {b}"
        for a, b in zip(positional, order, strict=False)
        if a != b and (a[:2] != b[:2] or a[2])
    ]
    wrong += [f"{p} is missing" for p in positional[len(order) :]]
    by_name = {p[0]: p for p in now}
    wrong += [
        f"{p} became {by_name.get(p[0])}" for p in was if p not in positional and by_name.get(p[0]) != p
    ]
    added = [p for p in now if p[0] not in {q[0] for q in was}]
    return wrong + [f"{p} is new and required" for p in added if not p[2] and not p[1].startswith("VAR")]


RECORDED: dict[str, list[list[str]] | None] = json.loads(RECORD.read_text()) if RECORD.exists() else {}


@pytest.fixture(scope="module")
def today() -> dict[str, list[list[str]] | None]:
    return dict(public())


def test_recorded_names_and_arguments_stay(today: dict[str, list[list[str]] | None]) -> None:
    assert len(RECORDED) > 500
    wrong = {
        name: missing(was, today[name]) if name in today else ["is missing"] for name, was in RECORDED.items()
    }
    assert {name: what for name, what in wrong.items() if what} == {}


def test_every_public_name_is_recorded(today: dict[str, list[list[str]] | None]) -> None:
    assert today.keys() - RECORDED.keys() == set(), "record the new names: python tests/test_public_names.py"


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ([["a", "POSITIONAL_OR_KEYWORD", ""], ["b", "KEYWORD_ONLY", "1"]], []),
        (
            [
                ["a", "POSITIONAL_OR_KEYWORD", ""],
                ["b", "KEYWORD_ONLY", "1"],
                ["c", "KEYWORD_ONLY", "None"],
            ],
            [],
        ),
        ([["a", "POSITIONAL_OR_KEYWORD", "None"], ["b", "KEYWORD_ONLY", "1"]], []),
        ([["a", "POSITIONAL_OR_KEYWORD", ""]], ["['b', 'KEYWORD_ONLY', '1'] became None"]),
        (
            [["a", "POSITIONAL_OR_KEYWORD", ""], ["b", "KEYWORD_ONLY", "2"]],
            ["['b', 'KEYWORD_ONLY', '1'] became ['b', 'KEYWORD_ONLY', '2']"],
        ),
        (
            [["a", "POSITIONAL_OR_KEYWORD", ""], ["b", "KEYWORD_ONLY", "1"], ["c", "KEYWORD_ONLY", ""]],
            ["['c', 'KEYWORD_ONLY', ''] is new and required"],
        ),
        (None, [None]),
    ],
)
def test_what_breaks_callers_is_found(now: list[list[str]] | None, what: list[str | None]) -> None:
    was = [["a", "POSITIONAL_OR_KEYWORD", ""], ["b", "KEYWORD_ONLY", "1"]]
    found = missing(was, now)
    assert found == what if what != [None] else len(found) == 1


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(dict(public()).items())]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
