"""Callbacks."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from onnxtrain import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, Trainer
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.trainer import TimeLimit
from trainer import problems


def overfitting() -> tuple[Trainer, dict]:
    """A net and few samples with random labels: the validation loss soon rises."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 4)).astype(np.float32), rng.integers(0, 3, 24)
    trainer = Trainer(problems.classes().model, "cross_entropy", learning_rate=0.05)
    data = {"inputs": x[:16], "targets": y[:16], "validation": (x[16:], y[16:]), "verbose": False}
    return trainer, data


def test_early_stopping_waits_and_restores_the_best() -> None:
    trainer, data = overfitting()
    history = trainer.fit(**data, epochs=100, callbacks=[EarlyStopping(patience=4, restore_best=True)])
    losses = history["val_loss"]
    best = int(np.argmin(losses))
    assert history.stopped == "early"
    assert len(losses) == best + 5
    assert trainer.evaluate(*data["validation"])["loss"] == pytest.approx(losses[best], rel=1e-6)
    assert losses[-1] > losses[best]


def test_early_stopping_without_improvement_by_min_delta() -> None:
    trainer, data = overfitting()
    trainer.learning_rate = 0.0
    history = trainer.fit(**data, epochs=100, callbacks=[EarlyStopping("loss", patience=3)])
    assert len(history) == 4


def test_accuracy_counts_upwards() -> None:
    problem = problems.classes(samples=200)
    trainer = Trainer(problem.model, problem.loss, learning_rate=1e-2)
    history = trainer.fit(
        problem.x, problem.y, epochs=6, callbacks=[EarlyStopping("accuracy", patience=2)], verbose=False
    )
    assert history.stopped is None
    assert history["accuracy"][-1] > history["accuracy"][0]


def test_reduce_on_plateau() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1e-12)
    callback = ReduceLROnPlateau("loss", factor=0.5, patience=2, min_lr=3e-13)
    history = trainer.fit(
        problem.x, problem.y, epochs=8, batch_size=40, shuffle=False, callbacks=[callback], verbose=False
    )
    expected = [1e-12] * 3 + [5e-13] * 2 + [3e-13] * 3
    np.testing.assert_allclose(history["learning_rate"], expected)


def test_model_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    trainer, data = overfitting()
    history = trainer.fit(**data, epochs=30, callbacks=[ModelCheckpoint(tmp_path / "best")])
    best = int(np.argmin(history["val_loss"]))
    saved = Trainer.resume(tmp_path / "best")
    assert len(saved.history) == best + 1
    assert saved.evaluate(*data["validation"])["loss"] == pytest.approx(history["val_loss"][best], rel=1e-6)


def test_model_checkpoint_after_every_epoch(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(problem.x, problem.y, epochs=3, callbacks=[ModelCheckpoint(tmp_path, None)], verbose=False)
    saved = Trainer.resume(tmp_path)
    assert len(saved.history) == 3
    assert not saved.resumes_fit


def test_order_of_calls() -> None:
    calls: list[str] = []

    class Log(Callback):
        def on_fit_begin(self, trainer: Trainer) -> None:
            calls.append("begin")

        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            calls.append("step")

        def on_epoch_end(self, trainer: Trainer, history: object) -> None:
            calls.append("epoch")
            if calls.count("epoch") == 2:
                trainer.stop_training()

        def on_fit_end(self, trainer: Trainer, history: object) -> None:
            calls.append("end")

    problem = problems.line(samples=10)
    trainer = Trainer(problem.model, "mse")
    history = trainer.fit(problem.x, problem.y, epochs=9, batch_size=5, callbacks=[Log()], verbose=False)
    assert calls == ["begin", "step", "step", "epoch", "step", "step", "epoch", "end"]
    assert history.stopped == "early"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(patience=0), "patience must be an integer >= 1"),
        (lambda: EarlyStopping(mode="down"), "mode must be 'auto', 'min' or 'max'"),
        (lambda: ReduceLROnPlateau(factor=2.0), "expected 0 < factor < 1"),
        (lambda: TimeLimit(0), "seconds must be a positive number, received 0"),
        (lambda: TimeLimit(float("nan")), "seconds must be a positive number, received nan"),
        (lambda: TimeLimit("1h"), "seconds must be a positive number, received '1h'"),
    ],
)
def test_settings_of_callbacks_are_checked(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_monitor_that_is_not_recorded() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse")
    with pytest.raises(
        InputError, match="'val_loss' will not be recorded in this fit, which records loss, mae, rmse"
    ):
        trainer.fit(problem.x, problem.y, callbacks=[EarlyStopping()], verbose=False)


def f1(prediction: np.ndarray, target: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(target == 1, prediction.argmax(axis=1) == 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda **mode: EarlyStopping("val_f1", patience=50, restore_best=True, **mode),
        lambda **mode: ReduceLROnPlateau("val_f1", **mode),
    ],
)
def test_functions_need_a_mode(make: object) -> None:
    problem = problems.classes(samples=100)
    trainer = Trainer(problem.model, problem.loss, learning_rate=0.05, metrics=[f1])
    data = (problem.x, problem.y)
    with pytest.raises(InputError, match=r"'val_f1' is a function, .* better. Pass mode='max'"):
        trainer.fit(*data, validation=data, callbacks=[make()], verbose=False)  # type: ignore[operator]
    assert len(trainer.history) == 0
    trainer.fit(*data, validation=data, epochs=2, callbacks=[make(mode="max")], verbose=False)  # type: ignore[operator]
    assert len(trainer.history) == 2


def test_restore_best_of_a_function_keeps_the_best_epoch() -> None:
    problem = problems.classes(samples=60)
    trainer = Trainer(problem.model, problem.loss, learning_rate=0.3, metrics=[f1])
    data = (problem.x, problem.y)
    stop = EarlyStopping("val_f1", patience=50, restore_best=True, mode="max")
    history = trainer.fit(*data, epochs=12, batch_size=20, validation=data, callbacks=[stop], verbose=False)
    assert trainer.evaluate(*data)["f1"] == pytest.approx(max(history["val_f1"]))
    assert f1(trainer.predict(problem.x), problem.y) == pytest.approx(max(history["val_f1"]))
    assert min(history["val_f1"]) < max(history["val_f1"])


@pytest.mark.parametrize("epochs", [100, 6], ids=["stopped", "ended"])
def test_saved_best_is_the_best_in_memory(tmp_path: Path, epochs: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 4)).astype(np.float32), rng.integers(0, 3, 24)
    trainer = Trainer(
        problems.classes().model, "cross_entropy", learning_rate=0.2, directory=tmp_path / "run"
    )
    both = [EarlyStopping(patience=4, restore_best=True), ModelCheckpoint(tmp_path / "best")]
    validation = (x[16:], y[16:])
    history = trainer.fit(x[:16], y[:16], epochs=epochs, validation=validation, callbacks=both, verbose=False)
    assert len(history) > 1 + int(np.argmin(history["val_loss"]))
    for saved in (Trainer.resume(tmp_path / "run"), Trainer.resume(tmp_path / "best")):
        for name, parameter in trainer.parameters:
            np.testing.assert_array_equal(saved.parameters[name].data, parameter.data)
    resumed = Trainer.resume(tmp_path / "run")
    assert not resumed.resumes_fit
    scores = [t.evaluate(*validation)["loss"] for t in (trainer, resumed)]
    assert scores[0] == scores[1] == pytest.approx(min(history["val_loss"]), rel=1e-6)


def test_killed_before_the_best_is_put_back(tmp_path: Path) -> None:
    """A process that ends between the last epoch and the callbacks' end: the same call puts the best back."""

    class Killed(Callback):
        def on_fit_end(self, trainer: Trainer, history: object) -> None:
            raise KeyboardInterrupt

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 4)).astype(np.float32), rng.integers(0, 3, 24)
    data = {
        "inputs": x[:16],
        "targets": y[:16],
        "validation": (x[16:], y[16:]),
        "epochs": 100,
        "verbose": False,
    }
    model = problems.classes().model
    straight = Trainer(model, "cross_entropy", learning_rate=0.2)
    straight.fit(**data, callbacks=[EarlyStopping(patience=4, restore_best=True)])
    killed = Trainer(model, "cross_entropy", learning_rate=0.2, directory=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        killed.fit(**data, callbacks=[Killed(), EarlyStopping(patience=4, restore_best=True)])
    resumed = Trainer.resume(tmp_path)
    assert resumed.resumes_fit
    resumed.fit(**data, callbacks=[EarlyStopping(patience=4, restore_best=True)])
    assert resumed.history == straight.history
    for name, parameter in straight.parameters:
        np.testing.assert_array_equal(resumed.parameters[name].data, parameter.data)


def test_only_one_callback_restores() -> None:
    problem = problems.line()
    both = [EarlyStopping("loss", restore_best=True), EarlyStopping("mae", restore_best=True)]
    with pytest.raises(InputError, match=r"\(restore_best=True\) both set the final parameters"):
        Trainer(problem.model, "mse").fit(problem.x, problem.y, callbacks=both, verbose=False)


def test_metric_objects_say_what_is_better() -> None:
    from onnxtrain.trainer import Metric

    def measure(prediction: np.ndarray, target: np.ndarray, spec: object) -> tuple[float, float]:
        return float((prediction - target).sum()), float(len(target))

    problem = problems.line()
    for known, message in ((None, "it is unknown whether higher or lower"), (True, None)):
        trainer = Trainer(problem.model, "mse", metrics=[Metric("bias", measure, higher_is_better=known)])
        stop = EarlyStopping("bias", patience=1)
        if message is None:
            trainer.fit(problem.x, problem.y, callbacks=[stop], verbose=False)
            continue
        with pytest.raises(InputError, match=message):
            trainer.fit(problem.x, problem.y, callbacks=[stop], verbose=False)
    with pytest.raises(InputError, match="pass either measure or function"):
        Metric("nothing")


def numbers(directory: Path, kind: str) -> list[int]:
    return sorted(int(path.name.removeprefix(f"{kind}-")) for path in directory.iterdir())


def test_model_checkpoint_keeps_the_newest_steps(tmp_path: Path) -> None:
    """60 samples in batches of 8, two per step: 4 steps an epoch; resuming from any save changes nothing."""
    problem = problems.classes()
    options = {
        "epochs": 3,
        "batch_size": 8,
        "accumulate": 2,
        "validation": (problem.x, problem.y),
        "verbose": False,
    }
    trainer = Trainer(problem.model, problem.loss, scheduler="cosine", learning_rate=0.01)
    keeping = ModelCheckpoint(tmp_path, every_n_steps=3, keep=2)
    trainer.fit(problem.x, problem.y, callbacks=[keeping], **options)
    assert trainer.global_step == 12
    assert numbers(tmp_path, "step") == [9, 12]
    assert [path.name for path in keeping.saved()] == ["step-00000009", "step-00000012"]
    with pytest.raises(CheckpointError, match=r"generate_artifacts, such as '.*step-00000012'"):
        Trainer.resume(tmp_path)
    resumed = Trainer.resume(keeping.saved()[0])
    assert resumed.resumes_fit
    assert resumed.global_step == 9
    resumed.fit(problem.x, problem.y, **options)
    assert resumed.history == trainer.history
    for name, parameter in trainer.parameters:
        np.testing.assert_array_equal(resumed.parameters[name].data, parameter.data)


def test_model_checkpoint_of_steps_in_one_place(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(
        problem.x,
        problem.y,
        batch_size=10,
        callbacks=[ModelCheckpoint(tmp_path / "one", every_n_steps=4)],
        verbose=False,
    )
    assert Trainer.resume(tmp_path / "one").global_step == 4


@pytest.mark.parametrize("keep", [1, 3])
def test_model_checkpoint_keeps_the_best_epochs(tmp_path: Path, keep: int) -> None:
    trainer, data = overfitting()
    history = trainer.fit(**data, epochs=12, callbacks=[ModelCheckpoint(tmp_path, keep=keep)])
    more = trainer.fit(**data, epochs=4, callbacks=[ModelCheckpoint(tmp_path, keep=keep)])
    losses = more["val_loss"]
    assert len(losses) == 16
    best = np.argsort(losses, kind="stable")[:keep]
    assert best.max() < 15  # not simply the newest
    assert numbers(tmp_path, "epoch") == sorted(int(i) + 1 for i in best)
    for index in best:
        saved = Trainer.resume(tmp_path / f"epoch-{index + 1:08d}")
        assert saved.evaluate(*data["validation"])["loss"] == pytest.approx(losses[index], rel=1e-6)
    assert history is more


def test_model_checkpoint_keeps_the_newest_epochs(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss, directory=tmp_path / "run")
    keeping = ModelCheckpoint(tmp_path / "kept", monitor=None, keep=2)
    trainer.fit(problem.x, problem.y, epochs=3, callbacks=[keeping], verbose=False)
    assert numbers(tmp_path / "kept", "epoch") == [2, 3]
    earlier = Trainer.resume(tmp_path / "kept" / "epoch-00000002")
    (tmp_path / "kept" / ".onnxtrain-unfinished-epoch-00000009").mkdir()  # of a process that was killed
    (tmp_path / "kept" / "notes.txt").write_text("the user's own")
    earlier.fit(problem.x, problem.y, epochs=3, callbacks=[keeping], verbose=False)
    names = {"epoch-00000002", "epoch-00000003", "notes.txt"}  # the first is where the trainer works
    assert {path.name for path in (tmp_path / "kept").iterdir()} == names
    earlier.fit(problem.x, problem.y, epochs=2, callbacks=[keeping], verbose=False)
    assert {path.name[-1] for path in (tmp_path / "kept").glob("epoch-*")} == {"2", "4", "5"}
    for number in (4, 5):
        assert len(Trainer.resume(tmp_path / "kept" / f"epoch-{number:08d}").history) == number
    assert len(Trainer.resume(earlier.directory).history) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer >= 1, received 0"),
        ({"keep": True}, "keep must be an integer >= 1, received True"),
        (
            {"monitor": "loss", "every_n_steps": 5},
            "'loss' is recorded after each epoch, but every_n_steps=5 saves within",
        ),
    ],
)
def test_bad_settings_of_model_checkpoint(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelCheckpoint("there", **arguments)


class Slow(Callback):
    """Makes each step take 0.05 s longer; raises an error after step `fails_after`."""

    def __init__(self, fails_after: int = 0) -> None:
        self.fails_after = fails_after

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        time.sleep(0.05)
        if trainer.global_step == self.fails_after:
            raise RuntimeError("killed")


def fits_into(seconds: list[float], limit: float) -> int:
    """Number of epochs of these durations until another one could exceed the limit."""
    count = 1
    while sum(seconds[:count]) + max(seconds[:count]) <= limit:
        count += 1
    return count


def test_time_limit_ends_the_fit_before_the_epoch_that_would_exceed_it() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse")
    before = 0
    # A later fit has the whole limit to itself. Epochs of 0.05 s or more: all 40 never fit into the limit.
    for _ in range(2):
        history = trainer.fit(
            problem.x,
            problem.y,
            epochs=40,
            batch_size=40,
            callbacks=[Slow(), TimeLimit(1.5)],
            verbose=False,
        )
        seconds = history.seconds[before:]
        assert history.stopped == "early"
        assert len(seconds) == fits_into(seconds, 1.5)
        before += len(seconds)


def test_time_limit_trains_at_least_one_epoch() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse")
    trainer.fit(problem.x, problem.y, epochs=3, callbacks=[TimeLimit(1e-9)], verbose=False)
    assert len(trainer.history) == 1


def test_time_limit_of_a_resumed_fit_counts_the_epochs_before(tmp_path: Path) -> None:
    problem = problems.line()
    data = {"inputs": problem.x, "targets": problem.y, "epochs": 40, "batch_size": 40, "verbose": False}
    killed = Trainer(problem.model, "mse", directory=tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        killed.fit(**data, callbacks=[Slow(fails_after=3), TimeLimit(1.5)])
    resumed = Trainer.resume(tmp_path)
    assert len(resumed.history) == 2
    seconds = resumed.fit(**data, callbacks=[Slow(), TimeLimit(1.5)]).seconds
    assert len(seconds) == max(fits_into(seconds, 1.5), 3)
