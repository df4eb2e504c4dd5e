"""Trial runs: `limit_batches` of `fit`, and `verify_export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxtrain import Trainer
from onnxtrain.errors import InputError, ModelError
from trainer import problems
from trainer.problems import AtEachStep
from trainer.test_resume import InterruptAt, dropout_model, state


@pytest.mark.parametrize(
    ("limit", "batches", "validation"),
    [(2, 2, 2), (0.25, 2, 1), (0.3, 3, 1), (1.0, 8, 3), (100, 8, 3), (8, 8, 3)],
)
def test_an_epoch_has_the_first_batches(limit: int | float, batches: int, validation: int) -> None:
    """8 batches to train on and 3 to validate on, each in the order of the data."""
    problem = problems.classes(60)
    x, y = problem.x, problem.y
    trainer = Trainer(problem.model, problem.loss)
    held_out = problems.classes(20, seed=1)
    seen = AtEachStep(lambda trainer, loss: loss)
    fit: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": False}
    history = trainer.fit(
        x, y, epochs=2, validation=(held_out.x, held_out.y), limit_batches=limit, callbacks=[seen], **fit
    )
    assert len(seen.seen) == 2 * batches
    expected = Trainer(problem.model, problem.loss)
    count = 8 * batches
    few = expected.fit(
        x[:count],
        y[:count],
        epochs=2,
        validation=(held_out.x[: 8 * validation], held_out.y[: 8 * validation]),
        **fit,
    )
    assert history.epochs == few.epochs
    assert state(trainer) == state(expected)


def test_a_schedule_and_accumulation_follow_the_shorter_epochs() -> None:
    problem = problems.classes(60)
    rates: list[list[float]] = []
    for fit in ({"limit_batches": 5}, {"steps_per_epoch": 3}):
        seen = AtEachStep(lambda trainer, loss: trainer.current_learning_rate)
        trainer = Trainer(problem.model, problem.loss, scheduler="linear")
        # 5 batches are 3 steps of at most 2.
        trainer.fit(
            problem.x, problem.y, epochs=2, batch_size=8, accumulate=2, callbacks=[seen], verbose=False, **fit
        )
        rates.append(seen.seen)
    assert len(rates[0]) == 6
    assert rates[0] == rates[1]


def test_a_stream_begins_anew_in_each_epoch() -> None:
    problem = problems.classes(60)
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for start in range(0, 60, 10):
            drawn.append(start)
            yield problem.x[start : start + 10], problem.y[start : start + 10]

    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(batches, epochs=3, limit_batches=2, verbose=False)
    assert trainer.global_step == 6
    assert drawn[-2:] == [0, 10]
    expected = Trainer(problem.model, problem.loss)
    expected.fit(problem.x[:20], problem.y[:20], epochs=3, batch_size=10, shuffle=False, verbose=False)
    assert state(trainer) == state(expected)
    # The stream may also be shorter.
    trainer.fit(batches, limit_batches=50, verbose=False)
    assert trainer.global_step == 12
    with pytest.raises(InputError, match="the length of the data is unknown; pass a number of batches"):
        trainer.fit(batches, limit_batches=0.5, verbose=False)


@pytest.mark.parametrize("step", [1, 3, 4])
def test_an_interrupted_trial_is_bit_equal(step: int, tmp_path: Path) -> None:
    problem = problems.classes(60)
    fit: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 8,
        "validation": 0.2,
        "limit_batches": 2,
        "verbose": False,
    }
    straight = Trainer(dropout_model(), problem.loss)
    straight.fit(problem.x, problem.y, class_weight="balanced", **fit)
    trainer = Trainer(dropout_model(), problem.loss, directory=tmp_path)
    trainer.fit(problem.x, problem.y, class_weight="balanced", callbacks=[InterruptAt(step)], **fit)
    del trainer
    resumed = Trainer.resume(tmp_path)
    with pytest.raises(InputError, match="limit_batches 2, now 3"):
        resumed.fit(problem.x, problem.y, class_weight="balanced", **fit | {"limit_batches": 3})
    resumed.fit(problem.x, problem.y, class_weight="balanced", **fit)
    assert state(resumed) == state(straight)
    assert resumed.history.epochs == straight.history.epochs


@pytest.mark.parametrize("limit", [0, -1, 0.0, 1.5, float("nan"), True, "2"])
def test_a_wrong_limit_is_refused(limit: Any) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    with pytest.raises(InputError, match="limit_batches must be a number of batches"):
        trainer.fit(problem.x, problem.y, limit_batches=limit)
    with pytest.raises(InputError, match="both set the length of an epoch"):
        trainer.fit(problem.x, problem.y, limit_batches=2, steps_per_epoch=2)


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Trainer, Path, problems.Problem]:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss, ema_decay=0.5)
    trainer.fit(problem.x, problem.y, verbose=False)
    trainer.export(tmp_path / "model.onnx")
    return trainer, tmp_path / "model.onnx", problem


def changed(path: Path, name: str, amount: float) -> Path:
    """Add a number to a parameter of a model."""
    model = onnx.load(path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    value = numpy_helper.to_array(tensor) + np.float32(amount)
    tensor.CopyFrom(numpy_helper.from_array(value, name))
    onnx.save(model, path.with_name("changed.onnx"))
    return path.with_name("changed.onnx")


def test_an_export_is_compared_with_the_trainer(exported: tuple[Trainer, Path, problems.Problem]) -> None:
    trainer, path, problem = exported
    (difference,) = trainer.verify_export(path, problem.x).values()
    assert difference < 1e-6
    # A bias that is off by 1/4096 moves all logits by as much; more is no rounding.
    found = trainer.verify_export(changed(path, "b2", 2.0**-12), problem.x, batch_size=5)
    assert found == {"logits": pytest.approx(2.0**-12, rel=1e-2)}
    with pytest.raises(ModelError, match=r"output 'logits' differs from the trainer's by up to 0\.25"):
        trainer.verify_export(changed(path, "b2", 0.25), problem.x)
    with pytest.raises(ModelError, match="differs from the trainer's by up to inf"):
        trainer.verify_export(changed(path, "b2", np.nan), problem.x)


def test_other_files_are_refused(exported: tuple[Trainer, Path, problems.Problem], tmp_path: Path) -> None:
    trainer, path, problem = exported
    trainer.export(tmp_path / "hidden.onnx", ["logits"])
    model = onnx.load(path)
    model.graph.input[0].name = model.graph.node[0].input[0] = "other"
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(InputError, match="takes the inputs other, which the data lacks"):
        trainer.verify_export(tmp_path / "other.onnx", problem.x)
    model = onnx.load(path)
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    onnx.save(model, tmp_path / "scores.onnx")
    with pytest.raises(InputError, match="has none of the outputs logits"):
        trainer.verify_export(tmp_path / "scores.onnx", problem.x)


def test_a_fixed_batch_size_is_filled(tmp_path: Path) -> None:
    problem = problems.line(batch=7)
    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(problem.x, problem.y, verbose=False)
    trainer.export(tmp_path / "model.onnx")
    (difference,) = trainer.verify_export(tmp_path / "model.onnx", problem.x[:3]).values()
    assert difference < 1e-6
