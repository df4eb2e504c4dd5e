"""Training against an independent numpy loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain import EarlyStopping, Trainer
from onnxtrain.errors import InputError
from trainer import problems
from trainer.problems import AtEachStep


def descend(
    problem: problems.Problem, batches: Sequence[np.ndarray], rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient descent on the mean squared error of a linear model, in float64."""
    values = {
        t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in problem.model.graph.initializer
    }
    w, b = values["w"], values["b"]
    for batch in batches:
        x, y = problem.x[batch].astype(np.float64), problem.y[batch]
        slope = 2 * (x @ w + b - y) / len(batch)
        w, b = w - rate * x.T @ slope, b - rate * slope.sum(axis=0)
    return w, b


def parameters(trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
    return trainer.parameters["w"].data, trainer.parameters["b"].data


def test_a_path_a_proto_and_a_model_of_onnx_ir_train_alike(tmp_path: Path) -> None:
    problem = problems.line()
    onnx.save(problem.model, tmp_path / "line.onnx")
    graph = ir.from_proto(problem.model)
    before = [model.SerializeToString() for model in (problem.model, ir.to_proto(graph))]
    models = [
        tmp_path / "line.onnx",
        str(tmp_path / "line.onnx"),
        problem.model,
        graph,
    ]
    trainers = [Trainer(model, "mse", learning_rate=0.05) for model in models]
    for trainer in trainers:
        trainer.fit(problem.x, problem.y, epochs=2, verbose=False)
        for values, expected in zip(parameters(trainer), parameters(trainers[0]), strict=True):
            np.testing.assert_array_equal(values, expected)
    # The models are not changed.
    assert [model.SerializeToString() for model in (problem.model, ir.to_proto(graph))] == before


@pytest.mark.parametrize(("size", "accumulate"), [(8, 1), (16, 1), (16, 2), (12, 3), (7, 4), (100, 1)])
def test_steps_match_numpy_with_smaller_last_batch_and_accumulation(size: int, accumulate: int) -> None:
    problem = problems.line(samples=40)
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=0.05)
    trainer.fit(
        problem.x, problem.y, epochs=3, batch_size=size, accumulate=accumulate, shuffle=False, verbose=False
    )
    together = size * accumulate
    steps = [np.arange(i, min(i + together, 40)) for i in range(0, 40, together)] * 3
    for value, expected in zip(parameters(trainer), descend(problem, steps, 0.05), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_summed_loss_accumulates_as_a_sum() -> None:
    from onnxtrain.losses import MSELoss

    problem = problems.line(samples=12)
    results = []
    for size, accumulate in ((12, 1), (5, 3)):
        trainer = Trainer(problem.model, MSELoss(reduction="sum"), "sgd", learning_rate=0.001)
        trainer.fit(
            problem.x, problem.y, batch_size=size, accumulate=accumulate, shuffle=False, verbose=False
        )
        results.append(trainer.parameters["w"].data.copy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


@pytest.mark.parametrize("moves", [0.0, -1.0], ids=["stands still", "goes back"])
def test_the_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch, moves: float) -> None:
    """freezegun stops time.perf_counter, too."""
    times = itertools.count(100.0, moves)
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    problem = problems.line()
    history = Trainer(problem.model, problem.loss).fit(problem.x, problem.y, epochs=2, verbose=True)
    assert len(history) == 2
    assert history.samples_per_second == [0.0, 0.0]


def test_learns_and_records() -> None:
    problem = problems.classes(samples=300)
    trainer = Trainer(problem.model, problem.loss, learning_rate=2e-2)
    history = trainer.fit(problem.x, problem.y, epochs=15, validation=0.2, verbose=False)
    assert history.keys() == ["epoch", "loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"]
    assert history["epoch"] == list(range(1, 16))
    assert history.last["val_accuracy"] > 0.9
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert len(history.seconds) == len(history.samples_per_second) == 15
    assert history.stopped is None


def test_loss_and_metrics_do_not_depend_on_batches() -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    logits = trainer.predict(problem.x)
    expected_loss = -np.log(np.exp(logits)[range(60), problem.y] / np.exp(logits).sum(axis=1)).mean()
    for size in (60, 7, 1):
        scores = trainer.evaluate(problem.x, problem.y, batch_size=size)
        assert scores["loss"] == pytest.approx(expected_loss, rel=1e-5)
        assert scores["accuracy"] == (logits.argmax(axis=1) == problem.y).mean()


def test_shuffling_follows_the_seed() -> None:
    problem = problems.classes()
    results = []
    for seed in (1, 1, 2):
        trainer = Trainer(problem.model, problem.loss, seed=seed)
        trainer.fit(problem.x, problem.y, epochs=2, batch_size=8, verbose=False)
        results.append(trainer.parameters["w1"].data.copy())
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_each_epoch_has_every_sample_once_in_a_new_order() -> None:
    seen: list[np.ndarray] = []

    def record(prediction: np.ndarray, target: np.ndarray) -> float:
        seen.append(target[:, 0])
        return 0.0

    problem = problems.line(samples=40)
    targets = np.arange(40, dtype=np.float32)[:, None]
    trainer = Trainer(problem.model, "mse", learning_rate=0.0, metrics=[record])
    trainer.fit(problem.x, targets, epochs=2, batch_size=16, verbose=False)
    first, second = seen
    np.testing.assert_array_equal(np.sort(first), np.arange(40))
    np.testing.assert_array_equal(np.sort(second), np.arange(40))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(40))


def test_frozen_parameters_stay_and_only_the_named_ones_move() -> None:
    problem = problems.classes()
    before = {t.name: onnx.numpy_helper.to_array(t) for t in problem.model.graph.initializer}
    for options, moving in (
        ({"frozen_params": ["w1", "b1"]}, {"w2", "b2"}),
        ({"requires_grad": ["w2"]}, {"w2"}),
    ):
        trainer = Trainer(problem.model, problem.loss, **options)
        trainer.fit(problem.x, problem.y, verbose=False)
        trained = {name for name, p in trainer.parameters if not np.array_equal(p.data, before[name])}
        assert trained == moving


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"scheduler": "linear"}, [0.6, 0.2]),
        ({"scheduler": "linear", "warmup_steps": 2}, [1.0, 1 / 3]),
        ({"scheduler": "cosine"}, [0.5 * (1 + np.cos(np.pi * 2 / 5)), 0.5 * (1 + np.cos(np.pi * 4 / 5))]),
        ({"scheduler": lambda step, total: step / total}, [0.4, 0.8]),
        ({"warmup_steps": 5}, [0.6, 1.0]),
    ],
    ids=["linear", "linear-warmup", "cosine", "function", "warmup"],
)
def test_a_schedule_sets_the_rate_of_each_step(options: dict, rates: list[float]) -> None:
    """Five steps in all; epochs record the rate of their last one, here steps 2 and 4 counted from 0."""
    problem = problems.line(samples=24)

    steps = AtEachStep(lambda trainer, _: trainer.current_learning_rate)
    trainer = Trainer(problem.model, "mse", learning_rate=0.1, **options)
    trainer.fit(problem.x, problem.y, epochs=1, batch_size=5, callbacks=[steps], verbose=False)
    np.testing.assert_allclose([steps.seen[2], steps.seen[4]], 0.1 * np.array(rates), rtol=1e-6)


def test_clipping_bounds_the_step() -> None:
    problem = problems.line()
    before = {t.name: onnx.numpy_helper.to_array(t) for t in problem.model.graph.initializer}
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1.0, clip_grad_norm=0.5)
    trainer.fit(problem.x, problem.y, batch_size=40, verbose=False)
    change = np.concatenate([(p.data - before[name]).ravel() for name, p in trainer.parameters])
    assert np.linalg.norm(change) == pytest.approx(0.5, rel=1e-5)

    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1.0, clip_grad_value=0.25)
    trainer.fit(problem.x, problem.y, batch_size=40, verbose=False)
    change = np.concatenate([(p.data - before[name]).ravel() for name, p in trainer.parameters])
    assert np.abs(change).max() == pytest.approx(0.25, rel=1e-5)


def test_second_fit_continues() -> None:
    problem = problems.classes()
    once = Trainer(problem.model, problem.loss)
    once.fit(problem.x, problem.y, epochs=4, verbose=False)
    twice = Trainer(problem.model, problem.loss)
    twice.fit(problem.x, problem.y, epochs=1, verbose=False)
    history = twice.fit(problem.x, problem.y, epochs=3, verbose=False)
    assert history == once.history
    np.testing.assert_array_equal(twice.parameters["w1"].data, once.parameters["w1"].data)


def test_plain_lines_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(problem.x, problem.y, epochs=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("epoch 2/2  loss ")
    assert "accuracy 0." in lines[1]
    assert lines[1].endswith("samples/s")
    trainer.fit(problem.x, problem.y, verbose=False)
    assert capsys.readouterr() == ("", "")


def test_progress_bar_on_a_terminal() -> None:
    import io

    from rich.console import Console

    from onnxtrain.trainer._show.terminal import BarReport

    screen = io.StringIO()
    with BarReport(Console(file=screen, force_terminal=True, width=120)) as report:
        report.begin_epoch(1, 2, 10, 3)
        report.step(2, {"loss": 0.5, "accuracy": 0.75}, 1234.0)
        report.end_epoch(1, 2, {"epoch": 1, "loss": 0.5}, 1234.0)
    shown = screen.getvalue()
    assert "epoch 1/2" in shown
    assert "5/10" in shown
    assert "loss 0.5000  accuracy 0.7500" in shown
    assert "1,234 samples/s" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs must be an integer >= 1, received 0"),
        ({"accumulate": 1.5}, "accumulate must be an integer >= 1, received 1.5"),
        ({"batch_size": -1}, "batch_size must be an integer >= 1, received -1"),
        ({"validation": 1.5}, "leaves nothing to train on"),
        ({"validation": 0.001}, "leaves nothing to validate with"),
        ({"validation": "x"}, "validation must be"),
        ({"callbacks": EarlyStopping()}, "callbacks must be a list of callbacks, received EarlyStopping"),
        ({"callbacks": [print]}, "callbacks must be a list of callbacks, received builtin_function"),
    ],
)
def test_impossible_arguments_are_errors(arguments: dict, message: str) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse")
    with pytest.raises(InputError, match=message):
        trainer.fit(problem.x, problem.y, verbose=False, **arguments)


@pytest.mark.parametrize("factor", ["0.5", None, -1.0, float("nan")])
def test_schedule_that_gives_no_factor(factor: object) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", scheduler=lambda step, total: factor)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"The schedule returned {factor!r} for"):
        trainer.fit(problem.x, problem.y, verbose=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be"),
        ({"learning_rate": float("nan")}, "learning rate must be"),
        (
            {"scheduler": "sine"},
            "'sine' is unknown; pass scheduler='cosine', or choose from constant, linear, cosine",
        ),
        ({"scheduler": 0.5}, "expected a name, a schedule .*, or a function .*, received 0.5"),
        ({"metrics": ["f3"]}, "'f3' is unknown; choose from accuracy"),
        ({"metrics": ["mae", "mae"]}, "mae is already used"),
        ({"warmup_steps": -1}, "warmup_steps must be"),
    ],
)
def test_impossible_settings_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Trainer(problems.line().model, "mse", **arguments)


@pytest.mark.parametrize(("size", "accumulate"), [(8, 1), (7, 1), (7, 3)])
def test_recorded_numbers_are_those_of_a_numpy_loop(size: int, accumulate: int) -> None:
    """Loss, errors and learning rate of each epoch: each sample as it was before its step."""
    problem = problems.line(samples=40)
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=0.05, scheduler="linear")
    history = trainer.fit(
        problem.x, problem.y, epochs=3, batch_size=size, accumulate=accumulate, shuffle=False, verbose=False
    )
    together = size * accumulate
    steps = [np.arange(i, min(i + together, 40)) for i in range(0, 40, together)]
    values = {t.name: onnx.numpy_helper.to_array(t).astype(float) for t in problem.model.graph.initializer}
    w, b = values["w"], values["b"]
    for epoch in range(3):
        errors = []
        for index, step in enumerate(steps):
            rate = 0.05 * (1 - (epoch * len(steps) + index) / (3 * len(steps)))
            x, error = problem.x[step].astype(float), problem.x[step] @ w + b - problem.y[step]
            errors.append(error)
            w, b = w - rate * x.T @ (2 * error / len(step)), b - rate * (2 * error / len(step)).sum(axis=0)
        all_errors = np.concatenate(errors)
        assert history.epochs[epoch] == pytest.approx(
            {
                "epoch": epoch + 1,
                "loss": (all_errors**2).mean(),
                "mae": np.abs(all_errors).mean(),
                "rmse": np.sqrt((all_errors**2).mean()),
                "learning_rate": rate,
            },
            rel=1e-5,
        )
