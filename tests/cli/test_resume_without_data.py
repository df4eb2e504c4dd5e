"""`onnxtrain train DIR` finds the data that the run was trained on, and takes another number of epochs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import models
from cli.conftest import Runner
from cli.files import arrays_in
from cli.test_resuming import tensors
from onnxtrain.cli import _train
from onnxtrain.cli._train_options import TrainOptions, WorkerOptions
from trainer.test_resume import InterruptAt

# 200 samples in 8 batches of 25; Ctrl-C in step 13 is in the middle of the second epoch.
OPTIONS = ["--loss", "cross_entropy", "--lr", 0.02, "--batch-size", 25, "--threads", 1, "--seed", 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Data, a model, a run of six epochs that is interrupted in the second one, and runs that are not, by length."""
    folder = tmp_path_factory.mktemp("without-data")
    onnx.save(models.mlp(), folder / "net.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 4)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=x[:, :3].argmax(axis=1))
    with pytest.MonkeyPatch.context() as patch:
        run = Runner(patch)
        command = ["train", folder / "net.onnx", "--data", folder / "data.npz", *OPTIONS]
        for epochs in (2, 7):
            whole = run(*command, "--epochs", epochs, "-o", folder / f"straight-{epochs}", "--json")
            assert whole.code == 0, whole.err
        callbacks = _train.chosen_callbacks
        patch.setattr(_train, "chosen_callbacks", lambda *given: [*callbacks(*given), InterruptAt(13)])
        stopped = run(*command, "--epochs", 6, "-o", folder / "run")
        assert stopped.code == 130
        assert f"onnxtrain train {folder / 'run'} resumes it" in stopped.err
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Callable[[], Path]:
    def make() -> Path:
        shutil.copytree(folder / "run", tmp_path / "run")
        return tmp_path / "run"

    return make


@pytest.mark.parametrize("epochs", [2, 7])
def test_an_interrupted_run_may_have_fewer_or_more_epochs(
    run: Any, folder: Path, copy: Callable[[], Path], epochs: int
) -> None:
    """They count from the start of the interrupted command: as if it had been given this number."""
    directory = copy()
    assert run("train", directory, "--epochs", epochs, "--json").code == 0
    assert tensors(directory) == tensors(folder / f"straight-{epochs}")


def test_fewer_epochs_than_have_begun_are_refused(run: Any, copy: Callable[[], Path]) -> None:
    directory = copy()
    before = tensors(directory)
    refused = run("train", directory, "--epochs", 1)
    assert refused.code == 1
    assert (
        "--epochs 1 is the length of the whole fit, of whose 6 epochs 1 are done and the next one has begun. "
        "Pass at least --epochs 2." in " ".join(refused.err.split())
    )
    assert tensors(directory) == before


def test_data_is_found_where_folder_or_run_were_moved(run: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    # The original data must not be what is found.
    arrays = arrays_in(folder / "data.npz")
    hidden = folder / "hidden.npz"
    (folder / "data.npz").rename(hidden)
    try:
        assert run("train", tmp_path / "moved" / "run", "--epochs", 2).code == 0
        assert tensors(tmp_path / "moved" / "run") == tensors(folder / "straight-2")
        shutil.copytree(folder / "run", tmp_path / "alone")
        missing = run("train", tmp_path / "alone")
        assert missing.code == 1
        said = " ".join(missing.err.split())
        assert (
            f"was trained on '{folder / 'data.npz'}', which is not there any more. Pass the file with --data"
            in said
        )
        np.savez(tmp_path / "same.npz", **arrays)
        assert run("train", tmp_path / "alone", "--data", tmp_path / "same.npz", "--epochs", 2).code == 0
        assert tensors(tmp_path / "alone") == tensors(folder / "straight-2")
    finally:
        hidden.rename(folder / "data.npz")
    shutil.copytree(folder / "run", tmp_path / "only-run")
    assert run("train", tmp_path / "only-run", "--epochs", 2).code == 0


@pytest.mark.parametrize("name", ["run", "straight-2"])
def test_changed_data_is_refused_unless_it_is_passed(
    run: Any, folder: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    directory, data = tmp_path / "moved" / name, tmp_path / "moved" / "data.npz"
    arrays = arrays_in(data)
    np.savez(data, x=arrays["x"] * 2, y=arrays["y"])
    before = tensors(directory)
    refused = run("train", directory)
    assert refused.code == 1
    assert "has changed since the run in" in refused.err
    assert ("Pass --data to train on it" in refused.err) == (name != "run")
    assert tensors(directory) == before
    # Only a finished run may go on with other data.
    assert run("train", directory, "--data", data).code == (1 if name == "run" else 0)


def test_a_received_run_cannot_have_another_file_read(
    run: Any, folder: Path, copy: Callable[[], Path], tmp_path: Path
) -> None:
    """A file that the run names is trained on only if its content is known to who wrote the run."""
    from onnxtrain.cli._remember import PROPERTY
    from onnxtrain.runtime.state import CheckpointState

    arrays = arrays_in(folder / "data.npz")
    np.savez(tmp_path / "secret.npz", x=arrays["x"] + 7.25, y=arrays["y"])
    directory = copy()
    os.mkfifo(tmp_path / "pipe.npz")
    for name, message in (
        ("../secret.npz", "has changed since the run"),
        (str(tmp_path / "secret.npz"), "has changed since the run"),
        ("../pipe.npz", "is not there any more"),
        ("/dev/zero", "is not there any more"),
        ("a\0b", "is not there any more"),
        (3, "is not there any more"),
    ):
        state = CheckpointState.load_checkpoint(directory / "checkpoint")
        record = json.loads(str(state.properties[PROPERTY])) | {"files": [name]}
        state.properties[PROPERTY] = json.dumps(record)
        CheckpointState.save_checkpoint(state, directory / "checkpoint", include_optimizer_state=True)
        before = tensors(directory)
        refused = run("train", directory)
        assert refused.code == 1, name
        assert message in " ".join(refused.err.split())
        assert "7.25" not in refused.err
        assert tensors(directory) == before


def test_a_new_run_needs_data(run: Any, mlp: Path) -> None:
    result = run("train", mlp, "--loss", "cross_entropy")
    assert result.code == 2
    assert "Invalid value for '--data': a new run needs data." in " ".join(
        result.err.replace("│", " ").split()
    )
    assert not mlp.with_name("mlp-trained").exists()


def test_the_command_that_resumes_has_what_the_run_does_not_keep(tmp_path: Path) -> None:
    options = TrainOptions(source=tmp_path / "net.onnx", data=tmp_path / "data.npz")
    assert _train.resume_options(options) == ""
    workers = WorkerOptions(workers=2, shard_optimizer=True, compress="bf16", save_steps=50)
    assert (
        _train.resume_options(replace(options, workers=workers, device="cuda:1"))
        == " --workers 2 --save-steps 50 --shard-optimizer --compress bf16 --device cuda:1"
    )
