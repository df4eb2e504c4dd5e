"""Runs whose process is killed before the trainer has saved: nothing of their settings is lost."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fresh_process import SOURCE, TESTS, python
from onnxtrain import CheckpointState, Trainer, generate_artifacts
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.lora import LoraConfig
from onnxtrain.schedules import OneCycle
from onnxtrain.trainer import Callback
from onnxtrain.trainer._run.directory_lock import LOCK
from trainer import problems
from trainer.test_resume import dropout_model, state

OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {
        "optimizer": "adam",
        "scheduler": "cosine",
        "warmup_steps": 3,
        "ema_decay": 0.9,
        "metrics": ["f1", "precision"],
        "positive": 1,
        "clip_grad_norm": 1.0,
    },
    "dropout": {"scheduler": OneCycle(pct_start=0.4), "total_steps": 40, "threads": 1},
    "batch norm": {"scheduler": "step", "warmup_ratio": 0.2, "ema_decay": 0.5, "metrics": []},
    "lora": {"lora": LoraConfig(r=2, seed=5), "scheduler": "linear", "ema_decay": 0.9},
}
FIT: dict[str, Any] = {"epochs": 3, "batch_size": 8, "accumulate": 2, "validation": 0.2, "verbose": False}


def problem(name: str) -> problems.Problem:
    if name == "batch norm":
        return problems.images()
    classes = problems.classes()
    model = dropout_model() if name == "dropout" else classes.model
    return problems.Problem(model, classes.loss, classes.x, classes.y)


def begin(name: str, directory: Path | None = None) -> Trainer:
    of = problem(name)
    return Trainer(of.model, of.loss, learning_rate=4e-2, seed=7, directory=directory, **OPTIONS[name])


def fit(trainer: Trainer, name: str, *callbacks: Callback) -> None:
    of = problem(name)
    trainer.fit(of.x, of.y, callbacks=callbacks, **FIT)


def end(way: str) -> None:
    if way == "exit":
        os._exit(9)
    os.kill(os.getpid(), signal.SIGKILL)


def killed(code: str, *arguments: object) -> None:
    """Runs code in a process that has to die in it."""
    head = "import sys\nfrom pathlib import Path\nfrom trainer.test_before_first_save import *\n"
    done = python("-c", head + code, *map(str, arguments), code=None, path=(SOURCE, TESTS))
    assert done.returncode in (9, -signal.SIGKILL), done.stderr


IN_THE_FIRST_STEP = """
name, way, directory = sys.argv[1:]
fit(begin(name, Path(directory)), name, problems.AtEachStep(lambda *_: end(way)))
"""
BEFORE_THE_FIRST_STEP = """
name, way, directory = sys.argv[1:]
begin(name, Path(directory))
end(way)
"""


def averages(trainer: Trainer) -> dict[str, bytes]:
    average = trainer._state.average
    return {} if average is None else {name: b.read().tobytes() for name, b in average.buffers.items()}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize(
    ("name", "way", "code"),
    [
        ("mlp", "exit", IN_THE_FIRST_STEP),
        *((name, "kill", IN_THE_FIRST_STEP) for name in OPTIONS),
        ("mlp", "kill", BEFORE_THE_FIRST_STEP),
    ],
    ids=["mlp-exit", *(f"{name}-kill" for name in OPTIONS), "mlp-before-the-fit"],
)
def test_killed_before_the_first_save_is_resumed_as_it_was_begun(
    tmp_path: Path, name: str, way: str, code: str
) -> None:
    killed(code, name, way, tmp_path / "run")
    straight, resumed = begin(name), Trainer.resume(tmp_path / "run")
    assert resumed._state.settings == straight._state.settings
    assert resumed._state.position == straight._state.position
    assert [metric.name for metric in resumed.metrics] == [metric.name for metric in straight.metrics]
    assert (resumed.learning_rate, resumed.current_learning_rate) == (4e-2, 4e-2)
    assert resumed.manifest == straight.manifest
    assert state(resumed) == state(straight)
    assert resumed.state.properties._store.properties == straight.state.properties._store.properties
    for trainer in (straight, resumed):
        fit(trainer, name)
    assert state(resumed) == state(straight)
    assert averages(resumed) == averages(straight)
    assert resumed.history == straight.history
    assert resumed._state.settings == Trainer.resume(tmp_path / "run")._state.settings


def test_functions_have_to_be_passed_again_from_the_start(tmp_path: Path) -> None:
    of = problems.classes()
    Trainer(of.model, of.loss, scheduler=lambda step, total: 0.5, directory=tmp_path)
    with pytest.raises(InputError, match="its scheduler included a function, which is not saved"):
        Trainer.resume(tmp_path)


def test_weights_are_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from onnxtrain.runtime import checkpoint

    written, write = [], checkpoint.write_tensors
    monkeypatch.setattr(
        checkpoint, "write_tensors", lambda file, *rest: written.append(file.name) or write(file, *rest)
    )
    begin("mlp", tmp_path)
    assert len(written) == 1


def without_settings(directory: Path) -> None:
    """Removes the settings from a run's checkpoint."""
    checkpoint = CheckpointState.load_checkpoint(directory / "checkpoint")
    del checkpoint._store.properties["onnxtrain.trainer"]
    CheckpointState.save_checkpoint(checkpoint, directory / "checkpoint")


@pytest.mark.parametrize("copied", [False, True], ids=["own", "copy"])
@pytest.mark.parametrize("name", ["manifest.json", "no manifest.json"])
def test_run_without_settings_is_refused(tmp_path: Path, copied: bool, name: str) -> None:
    trainer = begin("mlp", tmp_path / "run")
    if copied:
        trainer.save(tmp_path / "copy")
        shutil.rmtree(tmp_path / "run")
    directory = tmp_path / ("copy" if copied else "run")
    without_settings(directory)
    # Each model has a copy of the manifest.
    (directory / "manifest.json").rename(directory / name)
    with pytest.raises(
        CheckpointError,
        match=r"lacks the property 'onnxtrain\.trainer'.* or start a new run with overwrite=True\.$",
    ):
        Trainer.resume(directory)


def test_run_with_sample_weights_without_settings_is_refused(tmp_path: Path) -> None:
    of = problems.classes()
    trainer = begin("mlp", tmp_path)
    trainer.fit(of.x, of.y, sample_weight=np.ones(len(of.x), np.float32), verbose=False)
    assert trainer.manifest.sample_weight is not None
    without_settings(tmp_path)
    with pytest.raises(CheckpointError, match="lacks the property"):
        Trainer.resume(tmp_path)


def artifacts(directory: Path) -> None:
    of = problems.classes()
    generate_artifacts(
        of.model,
        loss=of.loss,
        optimizer="adamw",
        artifact_directory=directory,
        additional_output_names=["logits"],
    )


def test_run_killed_in_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """Such a run has the files of `generate_artifacts`, and the lock file of the killed process."""
    artifacts(tmp_path)
    (tmp_path / LOCK).write_text("4711")
    with pytest.raises(
        CheckpointError, match=rf"or remove '{LOCK}' if generate_artifacts wrote the directory\.$"
    ):
        Trainer.resume(tmp_path)
    (tmp_path / LOCK).unlink()
    assert Trainer.resume(tmp_path).learning_rate == 1e-3


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_killed_training_of_plain_artifacts_can_be_repeated(tmp_path: Path) -> None:
    artifacts(tmp_path)
    code = 'fit(Trainer.resume(sys.argv[1]), "mlp", problems.AtEachStep(lambda *_: end("kill")))'
    killed(code, tmp_path)
    assert (tmp_path / LOCK).exists()
    again = Trainer.resume(tmp_path)
    fit(again, "mlp")
    assert len(again.history) == 3
