"""Threads that share a Trainer, or have one each."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtrain import Trainer
from onnxtrain.errors import TrainingStateError
from onnxtrain.trainer import Callback
from onnxtrain.trainer.data import _random
from trainer.problems import classes, line
from trainer.test_resume import dropout_model

Array = np.ndarray[Any, Any]
LINE = line()


def linear(**options: Any) -> Trainer:
    return Trainer(LINE.model, LINE.loss, learning_rate=0.05, metrics=[], **options)


def values(trainer: Trainer) -> dict[str, Array]:
    return {name: parameter.data.copy() for name, parameter in trainer.parameters}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4, "elsewhere") as pool:
        yield pool


class Each(Callback):
    """Calls a function after each step and each epoch."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.work()

    def on_epoch_end(self, trainer: Trainer, history: object) -> None:
        self.work()


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_predictions_during_a_fit_are_of_one_state_of_the_parameters(
    ema_decay: float | None, pool: ThreadPoolExecutor
) -> None:
    """Each is x w + b for some w and b between two steps, or for their averages; the fit continues as if alone."""
    alone = linear(ema_decay=ema_decay)
    alone.fit(LINE.x, LINE.y, epochs=12, batch_size=4, verbose=False)
    trainer = linear(ema_decay=ema_decay)
    seen: list[tuple[Array, Array]] = []
    predicted: list[Array] = []
    ended = threading.Event()

    def remember() -> None:
        with trainer.averaged():
            found = values(trainer)
        seen.append((found["w"], found["b"]))

    def predict() -> None:
        while not ended.is_set():
            predicted.append(trainer.predict(LINE.x, batch_size=8))
            trainer.evaluate(LINE.x, LINE.y)

    remember()
    running = [pool.submit(predict) for _ in range(4)]
    trainer.fit(LINE.x, LINE.y, epochs=12, batch_size=4, callbacks=[Each(remember)], verbose=False)
    ended.set()
    for future in running:
        future.result()
    assert predicted
    expected = np.stack([LINE.x.astype(np.float64) @ w + b for w, b in seen])
    for prediction in predicted:
        assert np.abs(expected - prediction).max(axis=(1, 2)).min() < 1e-5
    for name, value in values(alone).items():
        np.testing.assert_array_equal(values(trainer)[name], value)


def test_what_another_thread_saves_during_a_fit_resumes_as_the_fit_does(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    arguments: dict[str, Any] = {
        "epochs": 4,
        "batch_size": 8,
        "validation": (LINE.x, LINE.y),
        "verbose": False,
    }
    trainer = linear(ema_decay=0.9)
    saves: list[Future[None]] = []

    def save() -> None:
        saves.append(pool.submit(trainer.save, tmp_path / str(len(saves))))

    trainer.fit(LINE.x, LINE.y, callbacks=[Each(save)], **arguments)
    for future in saves:
        future.result()
    unfinished = 0
    for path in sorted(tmp_path.iterdir())[::8]:
        resumed = Trainer.resume(path)
        if not resumed.resumes_fit:  # saved behind the last epoch
            continue
        unfinished += 1
        resumed.fit(LINE.x, LINE.y, **arguments)
        assert resumed.history.epochs == trainer.history.epochs
        for name, value in values(trainer).items():
            np.testing.assert_array_equal(values(resumed)[name], value)
    assert unfinished


def test_a_second_fit_is_an_error(pool: ThreadPoolExecutor) -> None:
    alone, trainer = linear(), linear()
    alone.fit(LINE.x, LINE.y, verbose=False)
    refused: list[str] = []

    def fit_again() -> None:
        for call in (trainer.fit, lambda *data, **named: pool.submit(trainer.fit, *data, **named).result()):
            with pytest.raises(TrainingStateError) as caught:
                call(LINE.x, LINE.y, verbose=False)
            refused.append(str(caught.value))
        with pytest.raises(TrainingStateError, match=r"abandon_fit\(\): a call to fit"):
            pool.submit(trainer.abandon_fit).result()

    trainer.fit(LINE.x, LINE.y, callbacks=[Each(fit_again)], verbose=False)
    assert "in this thread: perhaps a callback" in refused[0]
    assert "in thread 'MainThread'" in refused[1]
    for name, value in values(alone).items():
        np.testing.assert_array_equal(values(trainer)[name], value)
    pool.submit(trainer.fit, LINE.x, LINE.y, verbose=False).result()  # nothing is left behind
    assert len(trainer.history.epochs) == 2


def test_callbacks_may_use_the_trainer_here_and_wait_for_threads_that_do(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    trainer = linear(ema_decay=0.5)

    def use() -> None:
        here = trainer.predict(LINE.x)
        np.testing.assert_array_equal(pool.submit(trainer.predict, LINE.x).result(), here)
        pool.submit(trainer.export, tmp_path / "net.onnx").result()

    def metric(prediction: Array, target: Array) -> float:
        return float(trainer.predict(LINE.x).mean())  # while evaluate holds the lock

    trainer.fit(LINE.x, LINE.y, callbacks=[Each(use)], validation=(LINE.x, LINE.y), verbose=False)
    measured = Trainer(LINE.model, LINE.loss, metrics=[metric])
    trainer, expected = measured, measured.predict(LINE.x).mean()
    assert measured.evaluate(LINE.x, LINE.y)["metric"] == pytest.approx(expected)


def test_an_error_in_a_fit_leaves_the_trainer_to_other_threads(pool: ThreadPoolExecutor) -> None:
    trainer = linear()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.fit(LINE.x, LINE.y, callbacks=[Each(fail)], verbose=False)
    pool.submit(trainer.abandon_fit).result()
    pool.submit(trainer.fit, LINE.x, LINE.y, verbose=False).result()


def test_another_thread_may_end_a_fit(pool: ThreadPoolExecutor) -> None:
    trainer = linear()
    stop = Each(lambda: pool.submit(trainer.stop_training).result())
    assert len(trainer.fit(LINE.x, LINE.y, epochs=5, callbacks=[stop], verbose=False).epochs) == 1


def test_averages_are_not_trained() -> None:
    trainer = linear(ema_decay=0.5)
    trainer.fit(LINE.x, LINE.y, verbose=False)
    before = values(trainer)
    with trainer.averaged(), pytest.raises(TrainingStateError, match="would train the averages"):
        trainer.fit(LINE.x, LINE.y, verbose=False)
    for name, value in before.items():
        np.testing.assert_array_equal(values(trainer)[name], value)


def test_weights_do_not_come_into_a_fit_that_has_none() -> None:
    trainer = linear()
    weights = np.ones(len(LINE.x), np.float32)

    def evaluate() -> None:
        with pytest.raises(TrainingStateError, match="sample weights for the first time: a call to fit"):
            trainer.evaluate(LINE.x, LINE.y, sample_weight=weights)

    trainer.fit(LINE.x, LINE.y, callbacks=[Each(evaluate)], verbose=False)
    assert trainer.evaluate(LINE.x, LINE.y, sample_weight=weights) == pytest.approx(
        trainer.evaluate(LINE.x, LINE.y)
    )


def test_a_range_test_during_a_fit_changes_nothing(pool: ThreadPoolExecutor) -> None:
    alone, trainer = linear(), linear()
    alone.fit(LINE.x, LINE.y, epochs=2, verbose=False)
    search = Each(lambda: pool.submit(trainer.find_learning_rate, LINE.x, LINE.y, steps=5).result())
    trainer.fit(LINE.x, LINE.y, epochs=2, callbacks=[search], verbose=False)
    for name, value in values(alone).items():
        np.testing.assert_array_equal(values(trainer)[name], value)


def test_trainers_in_threads_draw_as_they_do_alone(pool: ThreadPoolExecutor) -> None:
    """ONNX Runtime has one generator for all sessions of a process."""
    problem = classes()
    barrier = threading.Barrier(4)

    def fit(seed: int, together: bool) -> dict[str, Array]:
        trainer = Trainer(dropout_model(), "cross_entropy", seed=seed, metrics=[])
        if together:
            barrier.wait()
        trainer.fit(problem.x, problem.y, epochs=6, batch_size=4, verbose=False)
        return values(trainer)

    alone = [fit(seed, False) for seed in range(4)]
    assert any(not np.array_equal(value, alone[1][name]) for name, value in alone[0].items())
    together = [pool.submit(fit, seed, True) for seed in range(4)]
    for expected, future in zip(alone, together, strict=True):
        for name, value in future.result().items():
            np.testing.assert_array_equal(value, expected[name])


def test_a_step_is_one_thing_and_callbacks_come_after_it() -> None:
    """The schedule is asked at the beginning of a step; data is read, and callbacks are called, without the lock."""
    depths: dict[str, set[int]] = {"schedule": set(), "callback": set(), "transform": set()}

    def schedule(step: int, total: int) -> float:
        depths["schedule"].add(trainer.lock.depth)
        return 1.0

    def transform(x: Array, y: Array) -> tuple[Array, Array]:
        depths["transform"].add(trainer.lock.depth)
        return x, y

    trainer = Trainer(LINE.model, LINE.loss, scheduler=schedule, metrics=[])
    callback = Each(lambda: depths["callback"].add(trainer.lock.depth))
    trainer.fit(LINE.x, LINE.y, transform=transform, callbacks=[callback], verbose=False)
    assert depths == {"schedule": {1}, "callback": {0}, "transform": {0}}


def _noisy(inputs: Array, targets: Array) -> tuple[Array, Array]:
    """Draws twice, from both generators of the process: another thread could draw in between."""
    noise = [np.random.normal(size=inputs.shape), np.full(inputs.shape, random.gauss(0, 1))]
    return (inputs + noise[0] + noise[1] + np.random.normal(size=inputs.shape)).astype(np.float32), targets


def _noisy_batches() -> Iterator[tuple[Array, Array]]:
    for first in range(0, len(LINE.x), 4):
        yield _noisy(LINE.x[first : first + 4], LINE.y[first : first + 4])


@pytest.mark.parametrize("source", ["transform", "stream"])
def test_trainers_in_several_threads_draw_the_random_numbers_that_each_draws_alone(
    source: str, pool: ThreadPoolExecutor
) -> None:
    def train(seed: int) -> dict[str, Array]:
        trainer = linear(seed=seed, threads=1)
        if source == "stream":
            trainer.fit(_noisy_batches, epochs=3, verbose=False)
        else:
            trainer.fit(LINE.x, LINE.y, epochs=3, batch_size=4, transform=_noisy, verbose=False)
        return values(trainer)

    alone = [train(seed) for seed in range(3)]
    np.random.seed(5)
    random.seed(5)
    together = list(pool.map(train, range(3)))
    for one, other in zip(alone, together, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
    # The program's own numbers continue as if nothing had been trained.
    assert np.random.random() == np.random.RandomState(5).random()
    assert random.random() == random.Random(5).random()


def test_a_stream_that_waits_for_another_trainers_thread_gets_its_batches(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The consumer's stream waits inside of its turn for what the producer draws: neither can wait for the other."""
    monkeypatch.setattr(_random, "_PATIENCE", 0.05)
    monkeypatch.setattr(_random, "_take_turns", True)
    batches: queue.SimpleQueue[tuple[Array, Array]] = queue.SimpleQueue()
    waiting = threading.Event()

    def consumed() -> Iterator[tuple[Array, Array]]:
        waiting.set()
        for _ in range(3):
            yield batches.get(timeout=30)

    def produce(inputs: Array, targets: Array) -> tuple[Array, Array]:
        batches.put((inputs, targets))
        return inputs, targets

    consumer = pool.submit(linear().fit, consumed, verbose=False)
    assert waiting.wait(30)
    linear().fit(LINE.x[:12], LINE.y[:12], batch_size=4, transform=produce, verbose=False)
    assert len(consumer.result(30)) == 1
    assert caplog.text.count("neither waits") == 1
