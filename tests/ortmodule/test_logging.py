"""Records that an ORTModule logs, and messages that ONNX Runtime prints, at each level."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

pytestmark = pytest.mark.torch


def train(level: LogLevel, module: nn.Module | None = None) -> None:
    model = ORTModule(module or nn.Linear(3, 2), DebugOptions(level))
    model(torch.zeros(4, 3)).sum().backward()


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "onnxtrain.ortmodule"]


def test_info_tells_what_was_compiled(caplog):
    train(LogLevel.INFO)
    (level, compiled), (_, called) = said(caplog)
    assert level == logging.INFO
    assert compiled.startswith("graph 0: compiled for training on cpu in ")
    assert compiled.endswith(" nodes forward, 2 backward")
    assert called.startswith("graph 0: first call after ")


def test_devinfo_adds_the_operators_and_verbose_the_graph(caplog):
    train(LogLevel.DEVINFO)
    (operators,) = [text for level, text in said(caplog) if level == logging.DEBUG]
    assert "MatMul 1" in operators or "Gemm 1" in operators
    caplog.clear()
    train(LogLevel.VERBOSE)
    (graph,) = [text for level, text in said(caplog) if level < logging.DEBUG]
    assert "linear" in graph


@pytest.mark.parametrize("level", [LogLevel.WARNING, LogLevel.ERROR, LogLevel.FATAL])
def test_the_others_log_nothing(level, caplog, capfd):
    train(level)
    assert not said(caplog)
    assert capfd.readouterr().err == ""


def test_a_level_is_that_of_one_module(caplog):
    train(LogLevel.VERBOSE)
    caplog.clear()
    train(LogLevel.WARNING)
    assert not said(caplog)


@pytest.mark.parametrize(
    ("level", "printed"),
    [(LogLevel.INFO, False), (LogLevel.DEVINFO, True)],
)
def test_onnxruntime_prints_from_one_level_below(level, printed, capfd):
    train(level)
    assert ("[I:onnxruntime" in capfd.readouterr().err) == printed


@pytest.mark.parametrize("level", list(LogLevel))
def test_a_fallback_warns_at_every_level(level, caplog):
    class Unknown(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(x[:3] * self.weight).real

    with pytest.warns(UserWarning, match="graph 0 runs in PyTorch"):
        train(level, Unknown(3, 3))
    logged = any("runs in PyTorch" in text for _, text in said(caplog))
    assert logged == (level <= LogLevel.INFO)


@pytest.mark.thorough
def test_the_variable_alone_makes_it_speak_on_stderr():
    code = (
        "import os; os.environ['ORTMODULE_LOG_LEVEL'] = 'INFO'\n"
        "import torch; from onnxtrain.ortmodule import ORTModule\n"
        "ORTModule(torch.nn.Linear(3, 2))(torch.zeros(4, 3))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "onnxtrain.ortmodule: graph 0: compiled for" in result.stderr
