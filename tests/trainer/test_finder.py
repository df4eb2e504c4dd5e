"""The learning rate range test beside the same steps in PyTorch, and that it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from trainer import problems
from trainer.test_resume import FIT, InterruptAt, dropout_model, state

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_losses_are_those_of_pytorch() -> None:
    """A linear model on all samples at once, so that their order does not matter."""
    problem = problems.line()
    found = Trainer(problem.model, "mse", "sgd").find_learning_rate(
        problem.x, problem.y, start=1e-4, stop=50.0, steps=40, batch_size=len(problem.x)
    )
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        initial = {name: p.data for name, p in Trainer(problem.model, "mse").parameters}
        model.weight.copy_(torch.from_numpy(initial["w"].T.copy()))
        model.bias.copy_(torch.from_numpy(initial["b"].copy()))
    model = model.double()
    x, y = torch.from_numpy(problem.x).double(), torch.from_numpy(problem.y).double()
    rates = np.exp(np.linspace(np.log(1e-4), np.log(50.0), 40))
    average, expected = 0.0, []
    for step, rate in enumerate(rates, start=1):
        loss = torch.nn.functional.mse_loss(model(x), y)
        average = 0.98 * average + 0.02 * loss.item()
        smoothed = average / (1 - 0.98**step)
        if step > 2 and smoothed > 4 * min(expected):
            break
        expected.append(smoothed)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    assert 25 < len(expected) < 40
    np.testing.assert_allclose(found.losses, expected, rtol=1e-4)
    np.testing.assert_allclose(found.rates, rates[: len(expected)], rtol=1e-9)
    slopes = np.gradient(expected[10:-1])
    assert found.suggestion == found.rates[10 + int(slopes.argmin())]
    assert found.losses[found.rates.index(found.suggestion)] < found.losses[0]


@pytest.mark.parametrize("make", [problems.classes, problems.images], ids=["mlp", "batch-norm"])
def test_leaves_the_trainer_as_it_was(make: Any, tmp_path: Path) -> None:
    """Before, between and in the middle of fits, with moving averages."""
    problem = make()
    options: dict[str, Any] = {"learning_rate": 0.02, "scheduler": "cosine", "ema_decay": 0.9}
    straight = Trainer(problem.model, problem.loss, **options)
    tested = Trainer(problem.model, problem.loss, **options, directory=tmp_path / "run")

    def look() -> None:
        before, text = state(tested), tested._state.position.to_json(tested._state.settings)
        gradients = tested._state.run.store.gradients_valid
        found = tested.find_learning_rate(problem.x, problem.y, batch_size=8, steps=30)
        assert len(found.losses) == len(found.rates) > 15
        assert state(tested) == before
        assert tested._state.position.to_json(tested._state.settings) == text
        assert not tested._state.run.store.gradients_valid or gradients
        with tested.averaged():
            return

    look()
    for trainer in (straight, tested):
        trainer.fit(problem.x, problem.y, **FIT)
    look()
    straight.fit(problem.x, problem.y, **FIT)
    tested.fit(problem.x, problem.y, callbacks=[InterruptAt(4)], **FIT)
    look()
    tested.fit(problem.x, problem.y, **FIT)
    assert state(tested) == state(straight)
    assert tested.history == straight.history
    with tested.averaged(), straight.averaged():
        assert state(tested) == state(straight)


def test_dropout_and_ignored_labels() -> None:
    problem = problems.classes()
    y = np.where(np.arange(len(problem.y)) < 50, -100, problem.y)
    trainer = Trainer(dropout_model(), "cross_entropy")
    before = state(trainer)
    found = trainer.find_learning_rate(problem.x, y, batch_size=4, steps=20)
    assert np.isfinite(found.losses).all()
    assert state(trainer) == before
    with pytest.raises(InputError, match="all labels of the data are ignored"):
        trainer.find_learning_rate(problem.x, np.full_like(y, -100))
    assert state(trainer) == before


def test_the_curve_of_losses_is_plotted() -> None:
    problem = problems.classes()
    found = Trainer(problem.model, problem.loss).find_learning_rate(problem.x, problem.y)
    assert found.suggestion is not None
    (axes,) = found.plot().axes
    curve, line = axes.get_lines()
    np.testing.assert_array_equal(curve.get_xydata(), np.column_stack([found.rates, found.losses]))
    assert line.get_xdata()[0] == found.suggestion
    assert axes.get_xscale() == "log"


@pytest.mark.parametrize(
    "arguments", [{"start": 0.0}, {"start": 1.0, "stop": 0.1}, {"steps": 1}, {"steps": True}]
)
def test_impossible_ranges_are_errors(arguments: dict[str, Any]) -> None:
    problem = problems.line()
    with pytest.raises(InputError, match="expected 0 < start < stop and steps >= 2"):
        Trainer(problem.model, "mse").find_learning_rate(problem.x, problem.y, **arguments)


def test_too_few_steps_for_a_suggestion() -> None:
    problem = problems.line()
    found = Trainer(problem.model, "mse").find_learning_rate(problem.x, problem.y, steps=5)
    assert found.suggestion is None
    assert len(found.plot().axes[0].get_lines()) == 1
