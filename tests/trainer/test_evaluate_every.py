"""Evaluation in the middle of epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from onnxtrain import Callback, Trainer
from onnxtrain.errors import InputError
from trainer import problems
from trainer.problems import AtEachStep


class Seen(Callback):
    """Keeps what the hook was given, and in which order the hooks of a step are called."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.order: list[str] = []

    def on_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        assert trainer.history.evaluations[-1] == values
        self.values.append(dict(values))
        self.order.append("evaluation")

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.order.append("step")


@pytest.mark.parametrize("make", [problems.classes, problems.images], ids=["mlp", "batch-norm"])
def test_values_are_those_of_evaluate_at_these_steps(make: Any) -> None:
    problem = make()
    data = (problem.x, problem.y)
    fit: dict[str, Any] = {"epochs": 3, "batch_size": 8, "verbose": False}
    each = AtEachStep(lambda trainer, _: (trainer.global_step, trainer.evaluate(*data)))
    plain = Trainer(problem.model, problem.loss)
    plain.fit(*data, callbacks=[each], **fit)
    seen = Seen()
    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(*data, validation=data, evaluate_every=3, callbacks=[seen], **fit)
    expected = [(step, values) for step, values in each.seen if step % 3 == 0]
    per_epoch = -(-len(problem.x) // 8)
    assert len(seen.values) == len(each.seen) // 3 > 2
    for entry, (step, values) in zip(trainer.history.evaluations, expected, strict=True):
        assert entry["step"] == step
        assert entry["epoch"] == (step - 1) // per_epoch + 1
        assert {name: entry[f"val_{name}"] for name in values} == pytest.approx(values, rel=1e-6)
    assert seen.values == trainer.history.evaluations
    assert seen.order[:5] == ["step", "step", "evaluation", "step", "step"]
    # Training is what it is without.
    assert trainer.history["loss"] == plain.history["loss"]


def test_it_needs_data_and_a_number() -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    with pytest.raises(InputError, match=r"evaluate_every=5 needs data to evaluate on: pass validation"):
        trainer.fit(problem.x, problem.y, evaluate_every=5)
    with pytest.raises(InputError, match="evaluate_every must be an integer >= 1"):
        trainer.fit(problem.x, problem.y, validation=0.5, evaluate_every=0)
