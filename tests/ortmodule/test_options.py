"""DebugOptions, the environment variables, the fallback policy and the report."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from onnxtrain.ortmodule import (
    DebugOptions,
    FallbackPolicy,
    GraphRecord,
    LogLevel,
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
    Report,
    _variables,
)


def test_by_default_nothing_is_saved_and_pytorch_may_help() -> None:
    options = DebugOptions()
    assert options.log_level is LogLevel.WARNING
    assert (options.save_onnx, options.onnx_prefix, options.save_path) == (False, "", Path())
    assert options.fallback_policy is FallbackPolicy.ENABLE


def test_positional_order_is_the_old_package_s(tmp_path: Path) -> None:
    options = DebugOptions(LogLevel.INFO, True, "net", str(tmp_path), None)
    assert (options.log_level, options.save_onnx, options.onnx_prefix) == (LogLevel.INFO, True, "net")
    assert options.save_path == tmp_path
    for clone in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert repr(clone) == repr(options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_level": 3},
        {"log_level": "INFO"},
        {"save_onnx": 1},
        {"save_onnx": True, "onnx_prefix": None},
        {"save_onnx": True, "onnx_prefix": "a", "save_path": 4},
        {"config": {}},
        {"fallback_policy": "DISABLE"},
    ],
    ids=str,
)
def test_options_of_wrong_types_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="DebugOptions: "):
        DebugOptions(**wrong)


def test_saving_needs_a_prefix_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="non-empty onnx_prefix"):
        DebugOptions(save_onnx=True)
    with pytest.raises(ValueError, match="is not a folder"):
        DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path / "nope")


def test_environment_variables_override_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "verbose")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "DISABLE")
    options = DebugOptions(LogLevel.ERROR, True, "net", "elsewhere")
    assert options.log_level is LogLevel.VERBOSE
    assert options.save_path == tmp_path
    assert options.fallback_policy is FallbackPolicy.DISABLE


@pytest.mark.parametrize("variable", ["ORTMODULE_LOG_LEVEL", "ORTMODULE_FALLBACK_POLICY"])
def test_environment_without_meaning(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "LOUD")
    with pytest.raises(ValueError, match=r"'LOUD'.*unknown; use .*, "):
        DebugOptions()


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_variables, "_warned_of", set())


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("name", [*_variables.VARIABLES, "ORTMODULE_SOMETHING"])
def test_variables_of_the_old_package_are_named_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "9999")
    _, advice = _variables.VARIABLES.get(name, ((), "it is not one"))
    with pytest.warns(
        UserWarning, match=f"{name}=9999 was a setting of onnxruntime-training.*{re.escape(advice)}"
    ):
        DebugOptions()
    DebugOptions()


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (values, _) in _variables.VARIABLES.items() for value in values],
)
def test_values_that_ask_for_what_happens_anyway(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    DebugOptions()


def test_every_variable_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pytorch" / "migrate.md").read_text(encoding="utf-8")
    honoured = {
        _variables.LOG_LEVEL, _variables.SAVE_ONNX_PATH, _variables.FALLBACK_POLICY, _variables.CAPTURE_ALL,
    }  # fmt: skip
    assert {name for name in (*_variables.VARIABLES, *honoured) if f"`{name}`" not in text} == set()


def test_log_levels_have_the_numbers_of_the_old_package() -> None:
    assert [(level.name, level.value) for level in LogLevel] == [
        ("VERBOSE", 0),
        ("DEVINFO", 1),
        ("INFO", 2),
        ("WARNING", 3),
        ("ERROR", 4),
        ("FATAL", 5),
    ]
    assert LogLevel.WARNING.logging_level == logging.WARNING
    # ONNX Runtime's severities: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal.
    assert [level.onnxruntime_severity for level in LogLevel] == [0, 1, 2, 3, 3, 4]


CAUSES = {
    "UNSUPPORTED_DEVICE": ORTModuleDeviceException,
    "UNSUPPORTED_DATA": ORTModuleIOError,
    "UNSUPPORTED_TORCH_MODEL": ORTModuleTorchModelException,
    "UNSUPPORTED_ONNX_MODEL": ORTModuleONNXModelException,
    "BAD_INITIALIZATION": ORTModuleInitException,
}


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("spelling", ["{}", "FALLBACK_{}", "fallback_{} | DISABLE"])
def test_a_policy_allows_the_cause_that_it_names(name: str, spelling: str) -> None:
    policy = FallbackPolicy.parse(spelling.format(name))
    assert [cause for cause, kind in CAUSES.items() if policy.allows(kind("why"))] == [name]
    assert not policy.allows(ORTModuleFallbackException("why"))


@pytest.mark.parametrize("kind", [ORTModuleFallbackException, *CAUSES.values()])
def test_enable_and_disable(kind: type[ORTModuleFallbackException]) -> None:
    assert FallbackPolicy.parse("ENABLE").allows(kind("why"))
    assert not FallbackPolicy.parse("FALLBACK_DISABLE").allows(kind("why"))


def test_a_report_of_no_graph_says_so() -> None:
    report = Report()
    assert str(report) == "no graph yet: the model has not been called"
    assert not report.runs_in_onnxruntime
    first = GraphRecord("graph 0", "training", "cpu", 12, 21)
    report.record(first)
    assert report.runs_in_onnxruntime
    report.record(GraphRecord("graph 1", "inference", "cpu", 3, fallback_reason="no lowering of aten.foo"))
    assert not report.runs_in_onnxruntime
    assert [graph.name for graph in report.fallbacks] == ["graph 1"]
    assert [graph.engine for graph in report] == ["ONNX Runtime", "PyTorch"]
    assert repr(report) == "<Report: 2 graphs, 1 of them in PyTorch>"
    lines = str(report).splitlines()
    assert len(lines) == 5
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[-1] == "graph 1 runs in PyTorch: no lowering of aten.foo"


def test_a_graph_recorded_again_takes_its_old_place() -> None:
    report = Report()
    for seconds in (0.0, 0.5):
        report.record(GraphRecord("graph 0", "training", "cpu", 12, 21, seconds))
    report.record(GraphRecord("graph 0", "inference", "cpu", 9))
    assert [(graph.mode, graph.first_call_seconds) for graph in report] == [
        ("training", 0.5),
        ("inference", 0.0),
    ]
