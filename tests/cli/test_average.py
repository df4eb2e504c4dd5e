"""`onnxtrain average`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import models
from onnxtrain import average_models


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for seed, path in enumerate(paths):
        onnx.save(models.mlp(seed=seed), path)
    return paths


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_the_command_writes_what_the_function_writes(run: Any, two: list[Path], tmp_path: Path) -> None:
    result = run("average", *two, "--weights", "3,1", "-o", tmp_path / "soup.onnx", "--json")
    assert result.json() == {
        "model": str(tmp_path / "soup.onnx"),
        "averaged": [str(path) for path in two],
        "weights": [3.0, 1.0],
    }
    average_models(two, [3, 1], output=tmp_path / "same.onnx")
    assert (tmp_path / "soup.onnx").read_bytes() == (tmp_path / "same.onnx").read_bytes()
    shown = run("average", *two, "--output", tmp_path / "soup.onnx")
    assert shown.code == 0
    assert "b.onnx" in shown.out


@pytest.mark.thorough
def test_runs_and_checkpoints_are_averaged(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        options = ("--seed", seed, "--epochs", 3, "--save-every", 5, "--keep", 2)
        trained = run(
            "train", mlp, "--data", data, "--loss", "cross_entropy", "-o", tmp_path / f"{seed}", *options
        )
        assert trained.code == 0, trained.err
    assert run("average", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "soup.onnx").code == 0
    each = [weights_of(tmp_path / f"{seed}" / "trained.onnx") for seed in (1, 2)]
    for name, values in weights_of(tmp_path / "soup.onnx").items():
        expected = np.mean([of[name].astype(np.float64) for of in each], axis=0)
        np.testing.assert_array_equal(values, expected.astype(np.float32))
    saves = run("average", tmp_path / "1" / "checkpoints", "-o", tmp_path / "soup.onnx", "--json").json()
    assert len(saves["averaged"]) == 2


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "more",
    [
        ("--metric", "accuracy", "--batch-size", 50),
        ("--loss", "cross_entropy"),
        ("--loss", "cross_entropy", "--loss-option", "label_smoothing=0.1"),
        (),  # the loss is that of the run
    ],
)
def test_a_greedy_soup_leaves_out_a_bad_model(
    run: Any, mlp: Path, data: Path, tmp_path: Path, more: tuple[object, ...]
) -> None:
    options = ("--loss", "cross_entropy", "--epochs", 5, "--learning-rate", 0.03)
    assert run("train", mlp, "--data", data, "-o", tmp_path / "run", *options).code == 0
    bad = tmp_path / "bad.onnx"
    onnx.save(models.mlp(seed=7), bad)
    compare = ("--greedy", "--data", data, "-o", tmp_path / "soup.onnx", "--json")
    good = tmp_path / "run" / "trained.onnx" if more else tmp_path / "run"
    assert run("average", bad, good, *compare, *more).json()["averaged"] == [str(good)]


@pytest.mark.thorough
def test_tables_of_different_encodings_are_refused(run: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, scale in (("a", 1), ("b", 50)):
        rows = [f"{x * scale:.3f},{'yes' if x > 0 else 'no'}" for x in rng.normal(size=60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", *rows]) + "\n")
        options = ("--network", "mlp", "--hidden", "4", "--target", "y", "--epochs", 2, "-o", tmp_path / name)
        assert run("train", "--data", tmp_path / f"{name}.csv", *options).code == 0
    assert run("average", tmp_path / "a", tmp_path / "a", "-o", tmp_path / "soup.onnx").code == 0
    inputs = [value.name for value in onnx.load(tmp_path / "soup.onnx").graph.input]
    assert inputs == ["x"]
    refused = run("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "soup.onnx")
    assert refused.code == 1
    assert "onnxtrain.table" in refused.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--greedy",), "--greedy compares the models on --data"),
        (("--metric", "f1"), "--metric is for --greedy"),
        (("--weights", "a,b"), "--weights is 'a,b'"),
        (("--weights", "1"), "must be 2 numbers"),
        (("--weights", "1,1", "--greedy", "--data", "data.npz"), "exclude each other"),
    ],
)
def test_wrong_options_are_refused(
    run: Any, two: list[Path], tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = run("average", *two, "-o", tmp_path / "soup.onnx", *options)
    assert result.code == 1
    assert message in " ".join(result.err.split())
