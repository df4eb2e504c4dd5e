"""`Trainer` trains adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from lora.models import products, run
from onnxtrain import Trainer
from onnxtrain.api import CheckpointState
from onnxtrain.lora import LoraConfig, load_adapter, save_adapter

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = np.tanh(X[:, :4])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.onnx"
    onnx.save(products({"fc1": (8, 16), "fc2": (16, 4)}), path)
    return path


def test_training_lowers_the_loss_and_leaves_the_base_as_it_is(base: Path, tmp_path: Path) -> None:
    trainer = Trainer(base, "mse", learning_rate=0.02, lora=LoraConfig(r=4), directory=tmp_path / "run")
    before = trainer.evaluate(X, Y)["loss"]
    history = trainer.fit(X, Y, epochs=20, batch_size=16, verbose=False)
    assert history["loss"][-1] < before / 2
    state = CheckpointState.load_checkpoint(tmp_path / "run" / "checkpoint")
    assert {name for name, _ in state.parameters} == {f"fc{n}.lora_{k}.weight" for n in "12" for k in "AB"}
    # The exported model computes what was trained, and so does the base with the saved adapter.
    trainer.export(tmp_path / "trained.onnx")
    expected = trainer.predict(X)
    assert np.allclose(run(onnx.load(tmp_path / "trained.onnx"), x=X), expected, atol=1e-5)
    save_adapter(tmp_path / "run" / "checkpoint", tmp_path / "a.onnx_adapter")
    model = load_adapter(tmp_path / "a.onnx_adapter", base)
    assert np.allclose(run(model, x=X), expected, atol=1e-5)
    assert float(((expected - Y) ** 2).mean()) == pytest.approx(trainer.evaluate(X, Y)["loss"], rel=1e-5)


def test_training_resumes_from_a_saved_adapter(base: Path, tmp_path: Path) -> None:
    first = Trainer(base, "mse", learning_rate=0.02, lora=LoraConfig(r=4), directory=tmp_path / "first")
    first.fit(X, Y, epochs=3, verbose=False)
    save_adapter(tmp_path / "first" / "checkpoint", tmp_path / "adapter", format="peft")
    second = Trainer(load_adapter(tmp_path / "adapter", base), "mse", directory=tmp_path / "second")
    assert second.evaluate(X, Y)["loss"] == pytest.approx(first.evaluate(X, Y)["loss"], rel=1e-5)
    assert all(".lora_" in entry.name for entry in second.manifest.parameters)
