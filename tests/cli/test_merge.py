"""`onnxtrain merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from lora.models import in_bits, products
from lora.models import run as outputs_of
from onnxtrain.lora import LoraConfig, add_lora, merge, save_adapter, target_names

LAYERS = {"fc1": (48, 32), "fc2": (32, 16)}
X = np.random.default_rng(1).normal(size=(70, 48)).astype(np.float32)
TARGET = np.random.default_rng(2).normal(size=(70, 16)).astype(np.float32)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    onnx.save(in_bits(products(LAYERS), 4), tmp_path / "base.onnx")
    return tmp_path / "base.onnx"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    trained = add_lora(base, LoraConfig(r=4, lora_alpha=2, init_lora_weights=False))
    onnx.save(trained, tmp_path / "trained.onnx")
    save_adapter(trained, tmp_path / "mine.onnx_adapter")
    return tmp_path / "mine.onnx_adapter"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=X, y=TARGET)
    return tmp_path / "data.npz"


def loss_of(model: onnx.ModelProto) -> float:
    return float(((outputs_of(model, x=X).astype(np.float64) - TARGET) ** 2).mean())


@pytest.mark.parametrize("requantize", [False, True])
def test_losses_are_those_of_the_files(
    run: Any, base: Path, adapter: Path, data: Path, tmp_path: Path, requantize: bool
) -> None:
    output = tmp_path / "merged.onnx"
    options = ("--data", data, "--loss", "mse", "--json", *(("--requantize",) if requantize else ()))
    document = run("merge", base, adapter, "-o", output, *options).json()
    merged = onnx.load(output)
    assert outputs_of(merged, x=X).tobytes() == outputs_of(merge(base, adapter, requantize), x=X).tobytes()
    assert document["loss"]["before"] == pytest.approx(
        loss_of(onnx.load(tmp_path / "trained.onnx")), rel=1e-5
    )
    assert document["loss"]["after"] == pytest.approx(loss_of(merged), rel=1e-5)
    # Rounding moves the loss; without it the two differ by errors of float32 alone.
    apart = abs(document["loss"]["after"] / document["loss"]["before"] - 1)
    assert apart > 1e-5 if requantize else apart < 1e-6
    assert document["merged"] == str(output)


def test_without_data_the_model_alone_is_written(run: Any, base: Path, adapter: Path, tmp_path: Path) -> None:
    shown = run("merge", base, adapter, "--output", tmp_path / "merged.onnx")
    assert shown.code == 0, shown.err
    assert "loss" not in shown.out
    assert target_names(tmp_path / "merged.onnx") == list(LAYERS)


def test_a_table_of_the_losses(run: Any, base: Path, adapter: Path, data: Path, tmp_path: Path) -> None:
    shown = run("merge", base, adapter, "-o", tmp_path / "merged.onnx", "--data", data, "--loss", "mse")
    assert "loss before" in shown.out
    assert "loss after" in shown.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--loss", "mse"), "computes losses from --data and --loss; pass both"),
        (("--data", "data.npz"), "computes losses from --data and --loss; pass both"),
        (("--loss", "mse", "--data", "nothing.npz"), "there is no such file"),
        (("--loss", "nonsense", "--data", "{data}"), "received 'nonsense'"),
        (("-o", "{folder}/nowhere/merged.onnx"), "Writing the merged model to"),
    ],
)
def test_wrong_options_are_one_message(
    run: Any, base: Path, adapter: Path, data: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    given = [text.format(data=data, folder=tmp_path) for text in options]
    shown = run("merge", base, adapter, "-o", tmp_path / "merged.onnx", *given)
    assert shown.code == 1
    assert message in shown.err
    assert not (tmp_path / "merged.onnx").exists()


def test_an_adapter_of_another_model_is_refused(run: Any, adapter: Path, tmp_path: Path) -> None:
    onnx.save(products({"fc": (3, 2)}), tmp_path / "other.onnx")
    shown = run("merge", tmp_path / "other.onnx", adapter, "-o", tmp_path / "merged.onnx")
    assert shown.code == 1
    assert "trained on other base weights" in shown.err
