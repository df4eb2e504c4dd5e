"""A run from the shell that is interrupted and resumed, compared with one that never stopped, and beside Python's."""

from __future__ import annotations

import csv
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cli.files import arrays_in
from cli.processes import ROOT, environment
from onnxtrain import EarlyStopping, Trainer
from onnxtrain.runtime.checkpoint import read_checkpoint
from onnxtrain.schedules import Cosine
from trainer.test_resume import InterruptAt, dropout_model

OPTIONS: dict[str, Any] = {
    "--loss": "cross_entropy",
    "--optimizer": "adam",
    "--lr": 0.02,
    "--schedule": "cosine",
    "--warmup-ratio": 0.2,
    "--schedule-option": "end_factor=0.1",
    "--metric": "f1",
    "--ema-decay": 0.9,
    "--threads": 1,
    "--clip-norm": 1.0,
    "--epochs": 6,
    "--batch-size": 16,
    "--accumulate": 2,
    "--validation": 0.2,
    "--patience": 4,
    "--seed": 3,
}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(dropout_model(), path)
    return path


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the next command get Ctrl-C in a step."""
    from onnxtrain.cli import _train

    callbacks = _train.chosen_callbacks

    def at(step: int) -> None:
        monkeypatch.setattr(
            _train, "chosen_callbacks", lambda *given: [*callbacks(*given), InterruptAt(step)]
        )

    yield at
    monkeypatch.setattr(_train, "chosen_callbacks", callbacks)


def flat(options: dict[str, Any]) -> list[Any]:
    return [part for pair in options.items() for part in pair]


def tensors(directory: Path) -> dict[str, bytes]:
    """Everything that training changes, as it is saved."""
    store = read_checkpoint(directory / "checkpoint")
    groups = {"": store.parameters, **{f"{name}/": group for name, group in store.moments.items()}}
    saved = {
        prefix + name: b.read().tobytes() for prefix, group in groups.items() for name, b in group.items()
    }
    return saved | {"step": str(store.optimizer.step if store.optimizer else None).encode()}


@pytest.mark.parametrize("step", [1, 4, 5, 13])
def test_resumes_as_if_it_had_not_stopped(
    run: Any,
    interrupt: Any,
    net: Path,
    data: Path,
    tmp_path: Path,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    straight = run("train", net, "--data", data, *flat(OPTIONS), "-o", tmp_path / "straight", "--json")
    assert straight.code == 0, straight.err
    interrupt(step)
    stopped = run("train", net, "--data", data, *flat(OPTIONS), "-o", tmp_path / "run")
    assert stopped.code == 130
    assert f"onnxtrain train {tmp_path / 'run'} resumes it" in stopped.err
    interrupt(10**9)
    again = run("train", tmp_path / "run", "--json")
    assert again.code == 0, again.err
    assert again.json()["epochs"] == straight.json()["epochs"]
    assert tensors(tmp_path / "run") == tensors(tmp_path / "straight")
    models = [onnx.load(tmp_path / name / "trained.onnx") for name in ("run", "straight")]
    assert models[0].graph == models[1].graph

    arrays = arrays_in(data)
    trainer = Trainer(
        net,
        "cross_entropy",
        "adam",
        0.02,
        scheduler=Cosine(end_factor=0.1),
        warmup_ratio=0.2,
        clip_grad_norm=1.0,
        seed=3,
        metrics=["f1"],
        ema_decay=0.9,
        threads=1,
    )
    history = trainer.fit(
        arrays["x"],
        arrays["y"],
        epochs=6,
        batch_size=16,
        accumulate=2,
        validation=0.2,
        callbacks=[EarlyStopping("val_loss", 4, restore_best=True)],
        verbose=False,
    )
    assert history.epochs == straight.json()["epochs"]
    for name, parameter in trainer.parameters:
        assert parameter.data.tobytes() == tensors(tmp_path / "straight")[name]


@pytest.mark.parametrize("step", [3, 9])
def test_resumes_with_weights_splits_and_evaluations(
    run: Any, interrupt: Any, net: Path, data: Path, tmp_path: Path, step: int
) -> None:
    arrays = arrays_in(data)
    np.savez(tmp_path / "weighed.npz", **arrays, importance=np.linspace(1, 2, len(arrays["y"])))
    command = ("train", net, "--data", tmp_path / "weighed.npz", "--loss", "cross_entropy", "--epochs", 3)
    options = ("--validation", 0.2, "--stratify", "--class-weight", "balanced", "--evaluate-every", 2)
    options = (*options, "--sample-weight", "importance", "--batch-size", 40)
    straight = run(*command, *options, "-o", tmp_path / "straight", "--json").json()
    interrupt(step)
    assert run(*command, *options, "-o", tmp_path / "run").code == 130
    interrupt(10**9)
    changed = run("train", tmp_path / "run", "--data", tmp_path / "weighed.npz", "--class-weight", "1=2")
    assert changed.code == 1
    assert "--class-weight 1=2 (it was balanced)" in " ".join(changed.err.split())
    again = run("train", tmp_path / "run", "--data", tmp_path / "weighed.npz", "--json").json()
    for key in ("epochs", "evaluations", "exported"):
        assert again[key] == straight[key]
    assert len(again["evaluations"]) == 6
    assert tensors(tmp_path / "run") == tensors(tmp_path / "straight")


WAITING = """
import signal, sys, time
from onnxtrain.cli import main
from onnxtrain.trainer._fit.loop import FitLoop

finish = FitLoop._finish_epoch

def finish_and_wait(self, *arguments):
    finish(self, *arguments)
    guard = signal.getsignal(signal.SIGINT).__self__
    while not guard.requested:
        time.sleep(0.001)

FitLoop._finish_epoch = finish_and_wait
sys.argv[0] = "onnxtrain"
main()
"""
"""The command, which does not continue after its first epoch before the signal has come."""


def test_a_signal_from_outside(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    """A real Ctrl-C to a real process; then as the documentation says."""
    options = [
        "--data",
        data,
        "--loss",
        "cross_entropy",
        "--epochs",
        "4",
        "--batch-size",
        "16",
        "--schedule",
        "linear",
    ]
    command = [sys.executable, "-u", "-c", WAITING, "train", mlp, *options, "-o", tmp_path / "run"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    assert process.stderr.readline().startswith("epoch 1/4")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert f"The state is saved in '{tmp_path / 'run'}'" in err
    shown = run("inspect", tmp_path / "run", "--json").json()
    assert shown["unfinished"]
    assert shown["epochs"] == 1
    again = run("train", tmp_path / "run", "--data", data, "--json")
    straight = run("train", mlp, *options, "-o", tmp_path / "straight", "--json")
    assert again.json()["epochs"] == straight.json()["epochs"]
    assert tensors(tmp_path / "run") == tensors(tmp_path / "straight")


KILLED = """
import os, sys
from onnxtrain.api import Optimizer
from onnxtrain.cli import _train, main

if sys.argv.pop(1) == "first step":
    Optimizer.step = lambda self: os._exit(9)
else:
    _train.remember = lambda *_: os._exit(9)
sys.argv[0] = "onnxtrain"
main()
"""
"""The command, which is killed in its first step, or before it has stored its options."""


def test_killed_before_the_first_save(run: Any, net: Path, data: Path, tmp_path: Path) -> None:
    options = ["--data", data, *flat(OPTIONS)]
    assert run("train", net, *options, "-o", tmp_path / "straight").code == 0

    def kill(moment: str, directory: Path) -> None:
        command = [sys.executable, "-c", KILLED, moment, "train", net, *options, "-o", directory]
        done = subprocess.run(list(map(str, command)), env=environment(), check=False, capture_output=True)
        assert done.returncode == 9, done.stderr

    kill("first step", tmp_path / "run")
    again = run("train", tmp_path / "run", "--data", data)
    assert again.code == 0, again.err
    assert tensors(tmp_path / "run") == tensors(tmp_path / "straight")

    kill("options", tmp_path / "other")
    refused = run("train", tmp_path / "other", "--data", data)
    assert refused.code == 1
    assert "was killed before it began to train" in " ".join(refused.err.split())
    assert "Repeat that command with --overwrite." in " ".join(refused.err.split())
    assert run("inspect", tmp_path / "other").code == 0
    # Python knows the settings, and the run is then one that was trained in Python.
    shutil.copytree(tmp_path / "other", tmp_path / "python")
    trainer = Trainer.resume(tmp_path / "python")
    assert (trainer.learning_rate, trainer._state.settings.ema_decay) == (0.02, 0.9)
    arrays = arrays_in(data)
    trainer.fit(arrays["x"], arrays["y"], verbose=False)
    assert run("train", tmp_path / "python", "--data", data, "--epochs", 1).code == 0
    again = run("train", net, *options, "-o", tmp_path / "other", "--overwrite")
    assert again.code == 0, again.err
    assert tensors(tmp_path / "other") == tensors(tmp_path / "straight")


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--lr", 0.1], "--learning-rate 0.1 (it was 0.02)"),
        (["--schedule", "linear"], "--schedule linear (it was cosine)"),
        (
            ["--loss", "mse", "--optimizer", "sgd"],
            "--loss mse (it was cross_entropy), --optimizer sgd (it was adam)",
        ),
        (["--schedule-option", "end_factor=0.2"], "--schedule-option end_factor=0.2 (it was end_factor=0.1)"),
        (["--warmup-ratio", 0.3], "--warmup-ratio 0.3 (it was 0.2)"),
        (["--metric", "auroc"], "--metric auroc (it was f1)"),
        (["--ema-decay", 0.99], "--ema-decay 0.99 (it was 0.9)"),
        (["--schedule-epochs", 9], "--schedule-epochs 9 (it was not given)"),
        (["--freeze", "w1"], "--freeze w1 (it was not given)"),
        (["--validation", 0.3], "--validation 0.3 (it was 0.2)"),
        (["--patience", 1], "--patience 1 (it was 4)"),
        (["--batch-size", 8], "--batch-size 8 (it was 16)"),
        (["--clip-norm", 2.0], "--clip-norm 2.0 (it was 1.0)"),
        (["--seed", 4], "--seed 4 (it was 3)"),
        (["--output", "elsewhere"], "--output is 'elsewhere', but a run is resumed in its own directory"),
    ],
)
def test_contradictions_are_refused(
    run: Any, interrupted: Path, data: Path, tmp_path: Path, change: list[Any], message: str
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(interrupted, directory)
    before = tensors(directory)
    result = run("train", directory, "--data", data, *change)
    assert result.code == 1
    assert message in " ".join(result.err.split())
    assert tensors(directory) == before


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has got Ctrl-C in the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    onnx.save(dropout_model(), folder / "net.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 4)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=x[:, :3].argmax(axis=1))
    script = (
        "import sys; from onnxtrain.cli import _train, main; from cli.test_resuming import InterruptAt\n"
        "_train.chosen_callbacks = lambda *given: [InterruptAt(7)]\n"
        "main()"
    )
    arguments = [
        "train",
        folder / "net.onnx",
        "--data",
        folder / "data.npz",
        *flat(OPTIONS),
        "-o",
        folder / "run",
    ]
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment(ROOT / "tests"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 130, process.stderr
    return folder / "run"


def test_the_same_options_may_be_given_again_and_other_data_not(
    run: Any, interrupted: Path, data: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(interrupted, directory)
    arrays = arrays_in(data)
    np.savez(tmp_path / "other.npz", x=arrays["x"] + 1, y=arrays["y"])
    other = run("train", directory, "--data", tmp_path / "other.npz")
    assert other.code == 1
    assert "was interrupted while training on data other than" in other.err
    assert run("train", directory, "--data", data, *flat(OPTIONS)).code == 0


def test_a_finished_run_keeps_its_learning_rate_and_takes_more_epochs(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    first = run(
        "train", mlp, "--data", data, "--loss", "cross_entropy", "--lr", 0.01, "--epochs", 2, "-o", directory
    )
    assert first.code == 0, first.err
    more = run("train", directory, "--data", data, "--epochs", 1, "--json").json()
    assert [epoch["learning_rate"] for epoch in more["epochs"]] == pytest.approx([0.01] * 3)
    once = run(
        "train", mlp, "--data", data, "--loss", "cross_entropy", "--lr", 0.01, "--epochs", 3, "--json"
    ).json()
    assert more["epochs"] == once["epochs"]
    slower = run(
        "train", directory, "--data", data, "--lr", 0.001, "--json"
    ).json()  # one epoch, as the last fit
    assert [epoch["learning_rate"] for epoch in slower["epochs"]] == pytest.approx([0.01] * 3 + [0.001])
    for change, message in (
        (
            ["--optimizer", "sgd", "--loss", "mse"],
            "--loss mse (it was cross_entropy), --optimizer sgd (it was adamw)",
        ),
        (["--schedule", "linear"], "--schedule linear (it was not given)"),
        (["--clip-norm", 1], "--clip-norm 1.0 (it was not given)"),
        (["-o", tmp_path / "elsewhere"], "a run is resumed in its own directory"),
    ):
        result = run("train", directory, "--data", data, *change)
        assert result.code == 1
        assert message in " ".join(result.err.split())
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_that_python_began(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    arrays = arrays_in(data)
    fit: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 50,
        "shuffle": False,
        "validation": 0.1,
        "verbose": False,
    }
    straight = Trainer(mlp, "cross_entropy", learning_rate=0.01)
    straight.fit(arrays["x"], arrays["y"], **fit)
    trainer = Trainer(mlp, "cross_entropy", learning_rate=0.01, directory=tmp_path / "run")
    trainer.fit(arrays["x"], arrays["y"], callbacks=[InterruptAt(6)], **fit)
    for change, message in (
        (["--loss", "cross_entropy"], "was not started from the command line, so --loss cannot be compared"),
        (["--batch-size", 40], "--batch-size 40 (it was 50)"),
    ):
        result = run("train", tmp_path / "run", "--data", data, *change)
        assert result.code == 1
        assert message in " ".join(result.err.split())
    again = run("train", tmp_path / "run", "--data", data, "--json")
    assert again.code == 0, again.err
    assert again.json()["epochs"] == straight.history.epochs
    for name, parameter in straight.parameters:
        assert parameter.data.tobytes() == tensors(tmp_path / "run")[name]


def test_one_schedule_over_several_commands(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    options = [mlp, "--data", data, "--loss", "cross_entropy", "--schedule", "multistep"]
    options += ["--schedule-option", "milestones=2", "--schedule-option", "gamma=0.5", "--lr", 0.01]
    once = run("train", *options, "--epochs", 4, "-o", tmp_path / "once", "--json")
    assert once.code == 0, once.err
    first = run("train", *options, "--epochs", 2, "--schedule-epochs", 4, "-o", tmp_path / "twice")
    assert first.code == 0, first.err
    second = run("train", tmp_path / "twice", "--data", data, "--json")
    assert second.json()["epochs"] == once.json()["epochs"]
    rates = [epoch["learning_rate"] for epoch in once.json()["epochs"]]
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.005])
    assert tensors(tmp_path / "twice") == tensors(tmp_path / "once")
    third = run("train", tmp_path / "twice", "--data", data)
    assert third.code == 1
    assert "--schedule-epochs 4 is the total number of epochs of all calls to fit" in " ".join(
        third.err.split()
    )


def test_a_run_in_the_directory_is_replaced_when_asked_for(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    options = [mlp, "--data", data, "--loss", "cross_entropy", "-o", tmp_path / "run", "--epochs"]
    assert run("train", *options, 2).code == 0
    refused = run("train", *options, 1)
    assert refused.code == 1
    assert "or replace the run with --overwrite" in " ".join(refused.err.split())
    replaced = run("train", *options, 1, "--overwrite", "--json")
    assert replaced.code == 0, replaced.err
    assert len(replaced.json()["epochs"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule-option", "gamma=0.5"], "--schedule-option is given without --schedule"),
        (
            ["--schedule", "step", "--schedule-option", "gamma"],
            "--schedule-option 'gamma' should be NAME=VALUE",
        ),
        (
            ["--schedule", "step", "--schedule-option", "size=2"],
            "'step' has no parameter size; it has step_size",
        ),
        (["--schedule", "sine"], "'sine' is unknown; pass --schedule cosine, or choose from constant"),
        (["--metric", "f2"], "'f2' is unknown; choose from accuracy"),
        (["--warmup", 2, "--warmup-ratio", 0.1], "pass --warmup or --warmup-ratio, not both"),
        (["--keep", 2], "--keep is given without --save-every"),
        (["--ema-decay", 1.0], "--ema-decay must be a number such as 0.999"),
    ],
)
def test_options_that_do_not_fit_leave_nothing(
    run: Any, mlp: Path, data: Path, tmp_path: Path, options: list[Any], message: str
) -> None:
    result = run("train", mlp, "--data", data, "--loss", "cross_entropy", *options, "-o", tmp_path / "run")
    assert result.code == 1
    assert message in " ".join(result.err.split())
    assert not (tmp_path / "run").exists()


def test_log_and_saves_of_a_resumed_run(
    run: Any, interrupt: Any, net: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 samples of which 160 are trained on, in 10 batches, two per step: 5 steps an epoch, 30 in all."""
    monkeypatch.chdir(tmp_path)
    options = ["--log", "log.csv", "--save-every", 4, "--keep", 2]
    interrupt(13)
    stopped = run("train", net, "--data", data, *flat(OPTIONS), *options, "-o", tmp_path / "run")
    assert stopped.code == 130
    assert f"onnxtrain train {tmp_path / 'run'} --log log.csv resumes it" in stopped.err
    interrupt(10**9)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    refused = run("train", tmp_path / "run", "--data", data)
    assert refused.code == 1
    assert f"started with --log '{tmp_path / 'log.csv'}', outside its directory" in " ".join(
        refused.err.split()
    )
    log = ["--log", tmp_path / "log.csv"]
    again = run("train", tmp_path / "run", "--data", data, *log, "--json")
    assert again.code == 0, again.err
    epochs = again.json()["epochs"]
    with open(tmp_path / "log.csv", newline="") as file:
        assert [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)] == epochs
    with open(tmp_path / "log.steps.csv", newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 1 + 5 * len(epochs)))
    saves = tmp_path / "run" / "checkpoints"
    last = 5 * len(epochs) // 4 * 4
    assert sorted(path.name for path in saves.iterdir()) == [
        f"step-{number:08d}" for number in (last - 4, last)
    ]
    from_save = run("train", saves / f"step-{last - 4:08d}", "--data", data, *log, "--json")
    assert from_save.json()["epochs"] == epochs


def test_a_file_to_validate_on_is_remembered_beside_the_data_only(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(data, tmp_path / "beside.npz")
    shutil.copy(data, tmp_path / "elsewhere" / "far.npz")
    for name in ("beside.npz", "elsewhere/far.npz"):
        directory = tmp_path / f"run-{Path(name).stem}"
        options = ("--validation", tmp_path / name)
        first = run(
            "train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 1, *options, "-o", directory
        )
        assert first.code == 0, first.err
        more = run("train", directory, "--data", data, "--json")
        if name == "beside.npz":
            assert "val_loss" in more.json()["epochs"][1]
        else:
            assert more.code == 1
            assert "pass --validation" in " ".join(more.err.split())
            again = run("train", directory, "--data", data, *options, "--json").json()["epochs"]
            assert [("val_loss" in epoch) for epoch in again] == [True, True]
