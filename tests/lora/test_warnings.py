"""Warnings of ONNX Runtime, with its default settings, about the files of a training with adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from lora.models import in_bits, products
from onnxtrain import Trainer
from onnxtrain.lora import LoraConfig, adapter_model, merge, save_adapter

LAYERS = {"layers.0.fc1": (16, 32), "layers.1.fc1": (32, 32), "layers.1.fc2": (32, 16)}


@pytest.mark.parametrize("bits", [32, 4])
def test_only_the_inputs_of_a_model_for_adapters_are_warned_of(
    bits: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two per layer. ONNX Runtime needs them as inputs with defaults, which is what it warns of."""
    model = products(LAYERS) if bits == 32 else in_bits(products(LAYERS), bits)
    config = LoraConfig(r=4)
    trainer = Trainer(model, "mse", lora=config, directory=tmp_path / "run")
    x = np.ones((8, 16), np.float32)
    trainer.fit(x, x, verbose=False)
    trainer.export(tmp_path / "exported.onnx")
    trainer.save_parameters(tmp_path / "checkpoint")
    save_adapter(tmp_path / "checkpoint", tmp_path / "a.onnx_adapter")
    onnx.save(merge(model, tmp_path / "a.onnx_adapter"), tmp_path / "merged.onnx")
    onnx.save(adapter_model(model, config), tmp_path / "deployed.onnx")
    files = [*(tmp_path / "run").glob("*.onnx"), *tmp_path.glob("*.onnx")]
    assert len(files) == 4 + 3
    printed = {}
    for path in files:
        capfd.readouterr()
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        printed[path.name] = [line for line in capfd.readouterr().err.splitlines() if "[W:" in line]
    deployed = printed.pop("deployed.onnx")
    assert not any(printed.values()), printed
    assert len(deployed) == 2 * len(LAYERS)
    assert all(".lora_" in line and "appears in graph inputs" in line for line in deployed)
