"""Optuna and MLflow themselves: pruned trials, and runs in a database."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.trainer import MLflowLogger, OptunaPruning
from trainer import problems
from trainer.problems import AtEachStep
from trainer.test_loggers import killed_and_resumed, make, straight
from trainer.test_resume import FIT, InterruptAt

pytestmark = [
    # Of MLflow's and Optuna's own dependencies.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(monitor: str, epochs: list[int]) -> Any:
    """Train with a rate that is far too low in all trials but the first three."""
    problem = problems.classes()

    def run(trial: Any) -> float:
        rate = 0.05 if trial.number < 3 else 1e-7
        trainer = Trainer(problem.model, problem.loss, learning_rate=rate, seed=trial.number)
        try:
            trainer.fit(
                problem.x,
                problem.y,
                epochs=6,
                batch_size=8,
                validation=(problem.x, problem.y),
                callbacks=[OptunaPruning(trial, monitor)],
                verbose=False,
            )
        finally:
            epochs.append(len(trainer.history))
        return trainer.history[monitor][-1]

    return run


@pytest.mark.parametrize(("monitor", "direction"), [("val_loss", "minimize"), ("val_accuracy", "maximize")])
def test_a_trial_that_is_worse_than_the_median_is_pruned(monitor: str, direction: str) -> None:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2)
    study = optuna.create_study(direction=direction, pruner=pruner)
    epochs: list[int] = []
    study.optimize(objective(monitor, epochs), n_trials=5)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE"] * 3 + ["PRUNED"] * 2
    # Steps are epochs: the pruner waits for two, and judges from the third on.
    assert epochs[:3] == [6, 6, 6]
    assert max(epochs[3:]) == 3
    assert study.best_trial.number < 3
    assert [len(trial.intermediate_values) for trial in study.trials] == epochs
    assert study.trials[0].intermediate_values[5] == study.trials[0].value


def test_a_study_of_the_other_direction_is_refused_and_a_fixed_trial_is_not() -> None:
    with pytest.raises(InputError, match=r"lower values of 'val_loss' are better.* is MAXIMIZE\. Pass"):
        optuna.create_study(direction="maximize").optimize(objective("val_loss", []), n_trials=1)
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    callback = OptunaPruning(optuna.trial.FixedTrial({}), "loss")
    trainer.fit(problem.x, problem.y, epochs=2, callbacks=[callback], verbose=False)
    assert len(trainer.history) == 2
    with pytest.raises(InputError, match="'val_loss' will not be recorded in this fit"):
        trainer.fit(
            problem.x, problem.y, callbacks=[OptunaPruning(optuna.trial.FixedTrial({}))], verbose=False
        )


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which MLflow makes by dozens of migrations: that takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(tmp_path: Path, empty_database: Path) -> str:
    return f"sqlite:///{shutil.copy(empty_database, tmp_path)}"


def runs(client: Any, experiment: str) -> list[Any]:
    found: list[Any] = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return found


@pytest.mark.parametrize("step", [0, 5], ids=["whole", "killed"])
def test_mlflow_gets_epochs_and_steps(step: int, uri: str, tmp_path: Path) -> None:
    expected, steps = straight()

    def logger() -> MLflowLogger:
        options: dict[str, Any] = {"parameters": {"data": "three features"}, "tags": {"kind": "test"}}
        return MLflowLogger("digits", "first", tracking_uri=uri, **options)

    if step:
        killed_and_resumed(logger, tmp_path / "run", step)
    else:
        problem = problems.classes()
        make().fit(problem.x, problem.y, callbacks=[logger()], **FIT)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = runs(client, "digits")
    assert (run.info.status, run.info.run_name, run.data.tags["kind"]) == ("FINISHED", "first", "test")

    def logged(key: str) -> list[tuple[int, float]]:
        return sorted(
            (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)
        )

    assert logged("step/loss") == [(number, loss) for number, loss, _ in steps.seen]
    assert logged("step/learning_rate") == [(number, rate) for number, _, rate in steps.seen]
    for key in expected.history.last:
        values = enumerate(expected.history[key], start=1)
        assert logged(f"epoch/{key}") == [(3 * epoch, value) for epoch, value in values]
    assert {
        "data": "three features",
        "learning_rate": "0.02",
        "scheduler": "cosine",
        "epochs": "5",
        "optimizer": "AdamW",
        "loss": "CrossEntropyLoss",
        "seed": "0",
    }.items() <= run.data.params.items()


def test_mlflow_status_tells_how_a_fit_ended(uri: str, tmp_path: Path) -> None:
    problem = problems.classes()
    client = mlflow.MlflowClient(tracking_uri=uri)
    trainer = Trainer(problem.model, problem.loss, directory=tmp_path / "run")
    logger = MLflowLogger("stopped", tracking_uri=uri, every_n_steps=None)
    trainer.fit(problem.x, problem.y, callbacks=[logger, InterruptAt(4)], **FIT)
    assert runs(client, "stopped")[0].info.status == "KILLED"
    Trainer.resume(tmp_path / "run").fit(problem.x, problem.y, callbacks=[logger], **FIT)
    (run,) = runs(client, "stopped")
    assert run.info.status == "FINISHED"
    assert "step/loss" not in run.data.metrics

    def fail(trainer: Trainer, _: float) -> None:
        raise ValueError("of a callback")

    callbacks = [MLflowLogger("failed", tracking_uri=uri), AtEachStep(fail)]
    with pytest.raises(ValueError, match="of a callback"):
        Trainer(problem.model, problem.loss).fit(problem.x, problem.y, callbacks=callbacks, verbose=False)
    assert runs(client, "failed")[0].info.status == "FAILED"


def test_mlflow_run_of_the_caller_stays_open_and_takes_evaluations(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problems.classes()
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("mine")
    try:
        with mlflow.start_run() as run:
            trainer = make()
            trainer.fit(problem.x, problem.y, evaluate_every=2, callbacks=[MLflowLogger()], **FIT)
            assert mlflow.active_run().info.run_id == run.info.run_id
            mlflow.log_metric("mine", 1.0)
        client = mlflow.MlflowClient()
        history = client.get_metric_history(run.info.run_id, "step/val_loss")
        assert [(m.step, m.value) for m in history] == [
            (entry["step"], entry["val_loss"]) for entry in trainer.history.evaluations
        ]
        # Without an active run the experiment that was chosen gets one.
        make().fit(problem.x, problem.y, callbacks=[MLflowLogger(every_n_steps=None)], **FIT)
        assert len(runs(client, "mine")) == 2
    finally:
        mlflow.set_tracking_uri("")
