"""Frozen weights that all models of a run have are stored once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain import Trainer
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.passes.io import save

SIZE = 256
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, SIZE)).astype(np.float32)
LABELS = RNG.integers(0, 4, 8)


def backbone() -> onnx.ModelProto:
    """Two frozen layers of 256 KiB each, and a head."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[n, {SIZE}] x) => (float[n, 4] y)
        {{ a = MatMul(x, w1)  b = Tanh(a)  c = MatMul(b, w2)  d = Tanh(c)  y = MatMul(d, head) }}"""
    )
    for name, shape in {"w1": (SIZE, SIZE), "w2": (SIZE, SIZE), "head": (SIZE, 4)}.items():
        array = RNG.normal(size=shape).astype(np.float32) / 16
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


MODEL = backbone()
WEIGHTS = 2 * SIZE * SIZE * 4


def trained(directory: Path) -> tuple[list[float], bytes]:
    generate_artifacts(
        MODEL, requires_grad=["head"], loss="cross_entropy", optimizer="sgd", artifact_directory=directory
    )
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    module = Module(directory / "training_model.onnx", state, directory / "eval_model.onnx")
    optimizer = Optimizer(directory / "optimizer_model.onnx", module)
    losses = []
    for _ in range(3):
        losses.append(float(module(X, LABELS)))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    losses.append(float(module(X, LABELS)))
    module.export_model_for_inferencing(directory / "trained.onnx", ["y"])
    return losses, onnx.load(directory / "trained.onnx").SerializeToString()


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.name != "trained.onnx")


@pytest.fixture
def low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save.write_models, "__defaults__", (WEIGHTS - 1,))


def test_weights_are_stored_once_and_steps_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apart").mkdir()
    apart = trained(tmp_path / "apart")
    assert size(tmp_path / "apart") > 3 * WEIGHTS
    monkeypatch.setattr(save.write_models, "__defaults__", (WEIGHTS - 1,))
    assert trained(tmp_path / "once") == apart
    assert WEIGHTS < size(tmp_path / "once") < 1.2 * WEIGHTS
    assert len(list((tmp_path / "once").glob("*.data"))) == 1


@pytest.mark.usefixtures("low_threshold")
def test_writing_again_leaves_one_file_of_weights(tmp_path: Path) -> None:
    first = trained(tmp_path)
    names = set(tmp_path.glob("*.data"))
    assert trained(tmp_path) == first
    assert len(list(tmp_path.glob("*.data"))) == 1
    assert set(tmp_path.glob("*.data")) != names


@pytest.mark.usefixtures("low_threshold")
def test_a_run_is_resumed_from_shared_weights(tmp_path: Path) -> None:
    trainer = Trainer(MODEL, "cross_entropy", requires_grad="head", directory=tmp_path / "run")
    trainer.fit(X, LABELS, epochs=2, verbose=False)
    assert len(list((tmp_path / "run").glob("*.data"))) == 1
    expected = trainer.predict(X)
    assert np.array_equal(Trainer.resume(tmp_path / "run").predict(X), expected)


def test_small_models_stay_single_files(tmp_path: Path) -> None:
    trained(tmp_path)
    assert not list(tmp_path.glob("*.data"))
