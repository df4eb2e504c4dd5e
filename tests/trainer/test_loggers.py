"""Files of loggers are read by others; a resumed run logs each step once."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxtrain import CSVLogger, TensorBoardLogger, Trainer, WandbLogger
from onnxtrain.errors import DivergenceError, InputError, MissingPackageError
from onnxtrain.trainer import MLflowLogger, OptunaPruning
from trainer import problems
from trainer.problems import AtEachStep
from trainer.test_resume import FIT

STEPS = 15  # 48 samples in batches of 8, two per step, 5 epochs


def killed(step: int) -> AtEachStep:
    """Ends the process, as it were, in a given step: nothing is saved."""

    def work(trainer: Trainer, _: float) -> None:
        if trainer.global_step == step:
            raise KeyboardInterrupt

    return AtEachStep(work)


def straight() -> tuple[Trainer, AtEachStep]:
    """Train without a logger; the steps hold what loggers should write."""
    problem = problems.classes()
    steps = AtEachStep(lambda trainer, loss: (trainer.global_step, loss, trainer.current_learning_rate))
    trainer = make()
    trainer.fit(problem.x, problem.y, callbacks=[steps], **FIT)
    assert trainer.global_step == len(steps.seen) == STEPS
    return trainer, steps


def make(directory: Path | None = None) -> Trainer:
    problem = problems.classes()
    return Trainer(problem.model, problem.loss, scheduler="cosine", learning_rate=0.02, directory=directory)


def killed_and_resumed(logger: Any, directory: Path, step: int) -> Trainer:
    """Ends in a step after the last save, and resumes from there with a new logger."""
    problem = problems.classes()
    with pytest.raises(KeyboardInterrupt):
        make(directory).fit(problem.x, problem.y, callbacks=[logger(), killed(step)], **FIT)
    trainer = Trainer.resume(directory)
    assert trainer.global_step == step - step % 3  # three steps an epoch
    trainer.fit(problem.x, problem.y, callbacks=[logger()], **FIT)
    return trainer


def read(path: Path) -> list[dict[str, float]]:
    with open(path, encoding="utf-8", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.mark.parametrize("step", [0, 5, 8, 15], ids=["whole", "5", "8", "end"])
def test_csv_files_hold_epochs_and_steps(step: int, tmp_path: Path) -> None:
    expected, steps = straight()
    path = tmp_path / "logs" / "log.csv"
    if step:
        killed_and_resumed(lambda: CSVLogger(path), tmp_path / "run", step if step % 3 else step - 1)
    else:
        problem = problems.classes()
        path.parent.mkdir()
        path.write_text("of an earlier run")
        path.with_name("log.steps.csv").write_text("epoch,step,loss,learning_rate\r\n1,1,9.0,9.0\r\n")
        make().fit(problem.x, problem.y, callbacks=[CSVLogger(path)], **FIT)
    assert read(path) == expected.history.epochs
    rows = read(path.with_name("log.steps.csv"))
    assert [(row["step"], row["loss"], row["learning_rate"]) for row in rows] == steps.seen
    assert [row["epoch"] for row in rows] == [1 + index // 3 for index in range(STEPS)]
    import pandas as pd

    assert list(pd.read_csv(path)["val_loss"]) == pytest.approx(expected.history["val_loss"], rel=1e-12)


def test_csv_of_a_row_that_was_cut_off_and_of_another_file(tmp_path: Path) -> None:
    problem = problems.classes()
    path = tmp_path / "log.csv"
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "run").fit(problem.x, problem.y, callbacks=[CSVLogger(path), killed(5)], **FIT)
    steps = path.with_name("log.steps.csv")
    steps.write_bytes(steps.read_bytes() + b"2,6,0.")
    Trainer.resume(tmp_path / "run").fit(problem.x, problem.y, callbacks=[CSVLogger(path, 2)], **FIT)
    assert [row["step"] for row in read(steps)] == [1, 2, 3, 4, 6, 8, 10, 12, 14]
    steps.write_text("a,b\r\n1,2\r\n")
    trainer = Trainer.resume(tmp_path / "run")
    with pytest.raises(InputError, match=r"has the columns a, b instead of epoch, step, loss, learning_rate"):
        trainer.fit(problem.x, problem.y, callbacks=[CSVLogger(path)], **FIT)


def test_csv_of_several_fits_and_keys(tmp_path: Path) -> None:
    """Validation begins with the second fit: the first rows have nothing there."""
    problem = problems.classes()
    trainer = make()
    logger = CSVLogger(tmp_path / "log.csv", every_n_steps=None)
    for validation in (None, 0.2):
        trainer.fit(problem.x, problem.y, validation=validation, callbacks=[logger], verbose=False)
    assert read(tmp_path / "log.csv") == trainer.history.epochs
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("writer", ["tensorboardX", "torch"])
@pytest.mark.parametrize("step", [0, 5], ids=["whole", "killed"])
def test_tensorboard_gets_epochs_and_steps(
    step: int, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if writer == "torch":
        pytest.importorskip("torch")
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
    expected, steps = straight()
    logs = tmp_path / "logs"
    if step:
        killed_and_resumed(lambda: TensorBoardLogger(logs), tmp_path / "run", step)
    else:
        problem = problems.classes()
        make().fit(problem.x, problem.y, callbacks=[TensorBoardLogger(logs)], **FIT)
    events = EventAccumulator(str(logs))
    events.Reload()
    shown = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    keys = ["loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"]
    assert shown.keys() == {"step/loss", "step/learning_rate", *(f"epoch/{key}" for key in keys)}
    assert shown["step/loss"] == [(number, np.float32(loss)) for number, loss, _ in steps.seen]
    assert shown["step/learning_rate"] == [(number, np.float32(rate)) for number, _, rate in steps.seen]
    for key in keys:
        values = expected.history[key]
        assert shown[f"epoch/{key}"] == [(3 * (i + 1), np.float32(value)) for i, value in enumerate(values)]


class FakeWandb(SimpleNamespace):
    """Takes what is logged as Weights & Biases does: steps only rise, and a resumed run begins after the last one."""

    def __init__(self) -> None:
        super().__init__(run=None, calls=[], runs={})

    def init(self, **options: Any) -> SimpleNamespace:
        self.calls.append(options)
        name = options.get("id") or f"run-{len(self.runs)}"
        rows = self.runs.setdefault(name, {})
        assert not rows or options["resume"] == "allow"
        self.run = SimpleNamespace(id=name, starting_step=max(rows, default=-1) + 1)

        def log(values: dict[str, float], step: int) -> None:
            assert step >= max(rows, default=-1), "wandb warns of such a step and drops it"
            rows.setdefault(step, {}).update(values)

        def finish() -> None:
            self.run = None

        self.run.log, self.run.finish = log, finish
        return self.run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.mark.parametrize("step", [0, 5], ids=["whole", "killed"])
def test_wandb_gets_epochs_and_steps(step: int, wandb: FakeWandb, tmp_path: Path) -> None:
    expected, steps = straight()

    def logger() -> WandbLogger:
        return WandbLogger("digits", "first", config={"data": "three features"}, mode="offline")

    if step:
        killed_and_resumed(logger, tmp_path / "run", step)
    else:
        problem = problems.classes()
        make().fit(problem.x, problem.y, callbacks=[logger()], **FIT)
    assert wandb.run is None
    assert list(wandb.runs) == ["run-0"]
    rows = wandb.runs["run-0"]
    assert list(rows) == [number for number, _, _ in steps.seen]
    for number, loss, rate in steps.seen:
        assert (rows[number]["step/loss"], rows[number]["step/learning_rate"]) == (loss, rate)
    for index, epoch in enumerate(expected.history, start=1):
        logged = {
            k.removeprefix("epoch/"): v for k, v in rows[3 * index].items() if not k.startswith("step/")
        }
        assert logged == epoch
    first, *others = wandb.calls
    assert {"project": "digits", "name": "first", "mode": "offline"}.items() <= first.items()
    assert {
        "data": "three features",
        "learning_rate": 0.02,
        "scheduler": "cosine",
        "epochs": 5,
        "batch_size": 8,
        "optimizer": "AdamW",
        "loss": "CrossEntropyLoss",
        "seed": 0,
    }.items() <= first["config"].items()
    assert "id" not in first
    assert [(call["id"], call["resume"]) for call in others] == [("run-0", "allow")] * bool(step)


def test_evaluations_between_epochs_are_logged(wandb: FakeWandb, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    problem = problems.classes()
    loggers = [CSVLogger(tmp_path / "log.csv"), TensorBoardLogger(tmp_path / "logs"), WandbLogger()]
    trainer = make()
    trainer.fit(problem.x, problem.y, callbacks=loggers, evaluate_every=2, **FIT)
    evaluations = trainer.history.evaluations
    assert [entry["step"] for entry in evaluations] == list(range(2, 16, 2))
    assert read(tmp_path / "log.evaluations.csv") == evaluations
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    for key in ("val_loss", "val_accuracy"):
        logged = [(event.step, event.value) for event in events.Scalars(f"step/{key}")]
        assert logged == [(entry["step"], np.float32(entry[key])) for entry in evaluations]
        rows = wandb.runs["run-0"]
        assert [rows[int(entry["step"])][f"step/{key}"] for entry in evaluations] == [
            entry[key] for entry in evaluations
        ]


def test_wandb_run_of_the_caller_stays_open(wandb: FakeWandb) -> None:
    problem = problems.classes()
    run = wandb.init(project="mine")
    make().fit(problem.x, problem.y, callbacks=[WandbLogger(every_n_steps=None)], **FIT)
    assert wandb.run is run
    assert len(wandb.calls) == 1
    assert list(wandb.runs["run-0"]) == [3, 6, 9, 12, 15]


def test_a_fit_that_fails_closes_its_loggers(wandb: FakeWandb, tmp_path: Path) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1e30)
    with pytest.raises(DivergenceError):
        trainer.fit(
            problem.x,
            problem.y,
            epochs=9,
            callbacks=[WandbLogger(), CSVLogger(tmp_path / "log.csv")],
            verbose=False,
        )
    assert wandb.run is None
    assert len(read(tmp_path / "log.steps.csv")) == trainer.global_step > 0


@pytest.mark.parametrize(
    ("modules", "make_logger", "message"),
    [
        (
            ["wandb"],
            lambda: WandbLogger(),
            "WandbLogger needs wandb, which is not installed: pip install wandb",
        ),
        (
            ["tensorboardX", "tensorboard"],
            lambda: TensorBoardLogger("there"),
            r"TensorBoardLogger needs tensorboardX, which is not installed: pip install 'onnxtrain\[tensorboard\]'",
        ),
        (
            ["mlflow"],
            MLflowLogger,
            r"MLflowLogger needs mlflow, which is not installed: pip install 'onnxtrain\[mlflow\]'",
        ),
        (
            ["optuna"],
            lambda: OptunaPruning(None),
            r"OptunaPruning needs optuna, which is not installed: pip install 'onnxtrain\[optuna\]'",
        ),
    ],
    ids=["wandb", "tensorboard", "mlflow", "optuna"],
)
def test_missing_packages_are_named(
    modules: list[str], make_logger: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MissingPackageError, match=message):
        make_logger()


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(InputError, match="CSVLogger: every_n_steps must be an integer >= 1, received 0"):
        CSVLogger("log.csv", every_n_steps=0)
