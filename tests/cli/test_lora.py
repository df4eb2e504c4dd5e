"""`--lora-rank` and the options beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.files import arrays_in
from onnxtrain import Trainer
from onnxtrain.api import CheckpointState
from onnxtrain.lora import LoraConfig

OPTIONS = ("--lora-rank", 2, "--lora-alpha", 6)


def test_train_is_the_trainer_with_the_same_configuration(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    settings = ("--loss", "cross_entropy", "--epochs", 2, "--seed", 3)
    result = run("train", mlp, "--data", data, *settings, *OPTIONS, "-o", tmp_path / "run", "--json")
    assert result.code == 0, result.err
    arrays = arrays_in(data)
    trainer = Trainer(
        mlp, "cross_entropy", lora=LoraConfig(r=2, lora_alpha=6), seed=3, directory=tmp_path / "python"
    )
    trainer.fit(arrays["x"], arrays["y"], epochs=2, verbose=False)
    states = [CheckpointState.load_checkpoint(tmp_path / name / "checkpoint") for name in ("run", "python")]
    ours, theirs = ({name: p.data.tolist() for name, p in state.parameters} for state in states)
    assert ours == theirs
    assert all(".lora_" in name for name in ours)


def test_targets_and_dropout_reach_the_artifacts(run: Any, mlp: Path, tmp_path: Path) -> None:
    all_layers = run("artifacts", mlp, "--loss", "cross_entropy", *OPTIONS, "-o", tmp_path / "all")
    assert all_layers.code == 0, all_layers.err
    paths = described(tmp_path / "all")["modules"]
    target = paths[0]["path"]
    options = ("--lora-targets", target, "--lora-dropout", 0.25)
    one = run("artifacts", mlp, "--loss", "cross_entropy", *OPTIONS, *options, "-o", tmp_path / "one")
    assert one.code == 0, one.err
    written = described(tmp_path / "one")
    assert [module["path"] for module in written["modules"]] == [target]
    assert written["config"]["lora_dropout"] == 0.25
    assert len(paths) > 1


def described(directory: Path) -> dict[str, Any]:
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    found: dict[str, Any] = json.loads(str(state.properties["onnxtrain.lora"]))
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lora-alpha", 8), "need --lora-rank, e.g. --lora-rank 8"),
        (("--lora-rank", 2, "--lora-targets", "q_proj"), "no layer is named 'q_proj'"),
        (("--lora-rank", 2, "--lora-dropout", 1), "--lora-dropout is 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    run: Any, mlp: Path, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    result = run("artifacts", mlp, "--loss", "cross_entropy", *options, "-o", tmp_path / "run")
    assert result.code != 0
    assert message in result.err
    assert not (tmp_path / "run").exists()
