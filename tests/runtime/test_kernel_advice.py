"""Who trains without native kernels is told once, with the factor of the net's kind."""

from __future__ import annotations

import json
import logging
import platform
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import fresh_process
import models
from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module
from onnxtrain.runtime import kernel_advice, kernels
from onnxtrain.runtime.kernel_advice import FACTORS, kind_of_training

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "steps.json"
# Layers and optimizers alone, and nets whose layers of a kind are frozen, are no nets of a kind.
CASES = {
    "convolutional": "cnn cnn-b1 cnn3d convnext efficientnet mobilenetv2 resnet18 resnet50 tcn unet vae",
    "recurrent": "bilstm gru gru200 lstm lstm-b1",
    "transformer": "bert encoder gpt2 llama vit",
    "dense": "dlrm graph mixer mlp mlp-b1 mlp-tiny nbeats text tsmixer",
}


@pytest.mark.parametrize("kind", FACTORS)
def test_factors_are_those_of_the_benchmark(kind: str) -> None:
    def ratio(case: str) -> float:
        engines = measured[case]["steps"]["engines"]
        return float(engines["device"]["step_ms"]["median"] / engines["device-kernels"]["step_ms"]["median"])

    measured = json.loads(RESULTS.read_text())
    assert f"{statistics.median(map(ratio, CASES[kind].split())):.1f}" == str(FACTORS[kind])


def test_the_page_on_installing_names_the_factors() -> None:
    page = " ".join((ROOT / "docs" / "install.md").read_text(encoding="utf-8").split())
    convolutional, recurrent, transformer, dense = FACTORS.values()
    assert (
        f"about {convolutional} times as long for convolutional networks, {recurrent} for recurrent networks, "
        f"{dense} for dense networks and {transformer} for transformers"
    ) in page


NETS = {
    "convolutional": """
        <ir_version: 10, opset_import: ["": 21]> net (float[n, 3, 8, 8] x) => (float[n, 5] y)
        { h = Conv<pads = [1, 1, 1, 1]>(x, w)  m = GlobalMaxPool(h)  f = Flatten(m)  y = MatMul(f, v) }""",
    "recurrent": """
        <ir_version: 10, opset_import: ["": 21]> net (float[t, n, 3] x) => (float[n, 5] y)
        { all, last = LSTM<hidden_size = 5>(x, w, v)  y = Squeeze(last, axis) }""",
    "transformer": """
        <ir_version: 10, opset_import: ["": 21]> net (float[n, t, 8] x) => (float[n, 5] y)
        {
            q = MatMul(x, w)  k = Transpose<perm = [0, 2, 1]>(q)  s = MatMul(q, k)  p = Softmax(s)  a = MatMul(p, q)
            m = ReduceMean<keepdims = 0>(a, axis)  y = MatMul(m, v)
        }""",
}
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int]]] = {
    "convolutional": ((4, 3, 3, 3), (4, 5), [0]),
    "recurrent": ((1, 20, 3), (1, 20, 5), [0]),
    "transformer": ((8, 8), (8, 5), [1]),
}


def net(kind: str) -> onnx.ModelProto:
    if kind == "dense":
        return models.mlp()
    model = onnx.parser.parse_model(NETS[kind])
    random = np.random.default_rng(0)
    w, v, axis = SHAPES[kind]
    arrays = {"w": random.standard_normal(w, np.float32), "v": random.standard_normal(v, np.float32)}
    for name, array in (arrays | {"axis": np.array(axis, np.int64)}).items():
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("kind", FACTORS)
def test_kind_is_that_of_the_net(tmp_path: Path, kind: str) -> None:
    generate_artifacts(net(kind), loss="cross_entropy", optimizer="adamw", artifact_directory=tmp_path)
    assert kind_of_training(kernels.function_names(str(tmp_path / "training_model.onnx")) or []) == kind
    for name in ("eval_model", "optimizer_model"):
        assert kind_of_training(kernels.function_names(str(tmp_path / f"{name}.onnx")) or []) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Artifacts of a dense net, in a process without kernels."""
    generate_artifacts(models.mlp(), loss="cross_entropy", artifact_directory=tmp_path)
    monkeypatch.setattr(kernel_advice, "_given", False)
    monkeypatch.setattr(kernel_advice, "PLATFORMS", {(sys.platform, platform.machine())})
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "onnxtrain_kernels", None)
    kernels._installed.cache_clear()
    yield tmp_path
    kernels._installed.cache_clear()


def train(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module(np.zeros((2, 4), np.float32), np.zeros(2, np.int64))


def test_advice_is_given_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(folder)
    train(folder)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("onnxtrain", logging.WARNING)
    assert record.getMessage() == (
        "Training runs without the native kernels: a step of a dense net takes about 1.6 times as long. "
        "To install them, run: pip install onnxtrain-kernels (in a checkout: make kernels). "
        "To silence this message, set ONNXTRAIN_KERNELS=off."
    )


def test_no_advice_to_those_who_chose_or_cannot_install(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(kernels.VARIABLE, "off")
        train(folder)
    # A phone, a browser.
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "emscripten")
        train(folder)
    # Kernels of another version, of which a RuntimeWarning tells.
    with monkeypatch.context() as patch:
        patch.setattr(
            kernels, "_installed", lambda: (None, "the installed onnxtrain-kernels implements version 1")
        )
        train(folder)
    assert caplog.records == []
    train(folder)
    assert len(caplog.records) == 1


def test_no_advice_on_import_and_for_inference(folder: Path) -> None:
    code = f"""
import sys
sys.modules["onnxtrain_kernels"] = None
import numpy as np, onnxtrain, onnxtrain.api
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.session import open_session
open_session({str(folder / "eval_model.onnx")!r}, "eval model", CPU, None)
print("no training yet", file=sys.stderr, flush=True)
state = onnxtrain.api.CheckpointState.load_checkpoint({str(folder / "checkpoint")!r})
onnxtrain.api.Module({str(folder / "training_model.onnx")!r}, state)
"""
    before, _, after = fresh_process.python("-c", code, ONNXTRAIN_KERNELS="auto").stderr.partition(
        "no training yet"
    )
    assert before == ""
    assert "1.6 times as long" in after


def test_a_logging_level_silences_the_advice(folder: Path) -> None:
    code = f"""
import logging, sys
logging.getLogger("onnxtrain").setLevel(logging.ERROR)
sys.modules["onnxtrain_kernels"] = None
import onnxtrain.api
state = onnxtrain.api.CheckpointState.load_checkpoint({str(folder / "checkpoint")!r})
onnxtrain.api.Module({str(folder / "training_model.onnx")!r}, state)
"""
    assert fresh_process.python("-c", code, ONNXTRAIN_KERNELS="auto").stderr == ""


def test_installed_kernels_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = pytest.importorskip("onnxtrain_kernels")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.describe_kernels().endswith(f" ({installed.level()})")
    monkeypatch.setenv(kernels.VARIABLE, "off")
    assert kernels.describe_kernels() == "none (ONNXTRAIN_KERNELS=off)"
    monkeypatch.setenv(kernels.VARIABLE, "maybe")
    assert kernels.describe_kernels().startswith("none (ONNXTRAIN_KERNELS='maybe': expected")


def test_missing_kernels_are_described(folder: Path) -> None:
    assert kernels.describe_kernels() == "none (pip install onnxtrain-kernels)"
