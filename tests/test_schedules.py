"""Each schedule against the values of PyTorch's and transformers', step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from onnxtrain import schedules
from onnxtrain.errors import InputError
from onnxtrain.schedules import SCHEDULES, Schedule
from onnxtrain.trainer._fit.schedule import describe_schedule, make_schedule, named_schedule

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EPOCHS, PER_EPOCH = 6, 5
TOTAL = EPOCHS * PER_EPOCH


def reference(make: Callable[[Any], Any], *, per_epoch: bool = False) -> list[float]:
    """The rate of each step, of a scheduler that is told of each step or of each epoch."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for step in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step + 1 < TOTAL and (not per_epoch or (step + 1) % PER_EPOCH == 0):
            scheduler.step()
    return rates


def ours(schedule: Any, warmup_steps: int = 0, warmup_ratio: float = 0.0) -> list[float]:
    curve = make_schedule(schedule, warmup_steps, warmup_ratio)
    return [curve(step, TOTAL, step // PER_EPOCH) for step in range(TOTAL)]


lr = torch.optim.lr_scheduler

PYTORCH = {
    "constant": (schedules.Constant(), lambda o: lr.ConstantLR(o, factor=1.0), False),
    "linear": (schedules.Linear(), lambda o: lr.LinearLR(o, 1.0, 0.0, TOTAL), False),
    "linear-to": (schedules.Linear(end_factor=0.2), lambda o: lr.LinearLR(o, 1.0, 0.2, TOTAL), False),
    "cosine": (schedules.Cosine(), lambda o: lr.CosineAnnealingLR(o, TOTAL), False),
    "cosine-to": (schedules.Cosine(0.1), lambda o: lr.CosineAnnealingLR(o, TOTAL, eta_min=0.1), False),
    "restarts": (
        schedules.CosineWithRestarts(cycles=3), lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=TOTAL // 3),
        False,
    ),
    "polynomial": (schedules.Polynomial(), lambda o: lr.PolynomialLR(o, TOTAL, power=1.0), False),
    "polynomial-2": (schedules.Polynomial(power=2.5), lambda o: lr.PolynomialLR(o, TOTAL, power=2.5), False),
    "step": (schedules.Step(step_size=2, gamma=0.3), lambda o: lr.StepLR(o, 2, gamma=0.3), True),
    "step-by-step": (schedules.Step(7, 0.3, unit="step"), lambda o: lr.StepLR(o, 7, gamma=0.3), False),
    "multistep": (schedules.MultiStep([1, 4], 0.2), lambda o: lr.MultiStepLR(o, [1, 4], gamma=0.2), True),
    "multistep-by-step": (
        schedules.MultiStep([3, 3, 11], 0.2, unit="step"), lambda o: lr.MultiStepLR(o, [3, 3, 11], gamma=0.2),
        False,
    ),
    "exponential": (schedules.Exponential(0.8), lambda o: lr.ExponentialLR(o, 0.8), True),
    "exponential-by-step": (
        schedules.Exponential(0.98, unit="step"), lambda o: lr.ExponentialLR(o, 0.98), False,
    ),
    "one-cycle": (schedules.OneCycle(), lambda o: lr.OneCycleLR(o, 1.0, total_steps=TOTAL), False),
    "one-cycle-linear": (
        schedules.OneCycle(0.17, 10.0, 100.0, "linear"),
        lambda o: lr.OneCycleLR(o, 1.0, TOTAL, None, None, 0.17, "linear", div_factor=10, final_div_factor=100),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PYTORCH)
def test_schedules_are_those_of_pytorch(name: str) -> None:
    schedule, make, per_epoch = PYTORCH[name]
    np.testing.assert_allclose(ours(schedule), reference(make, per_epoch=per_epoch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 6}, {"warmup_ratio": 0.19}], ids=["steps", "ratio"])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_behind_a_warm_up_they_are_those_of_transformers(name: str, warmup: dict[str, Any]) -> None:
    """Both rise over 6 steps; ours begins at 1/6, where transformers spends a step on a rate of 0."""
    from transformers import optimization

    theirs = {
        "constant": lambda o: optimization.get_constant_schedule_with_warmup(o, 6),
        "linear": lambda o: optimization.get_linear_schedule_with_warmup(o, 6, TOTAL),
        "cosine": lambda o: optimization.get_cosine_schedule_with_warmup(o, 6, TOTAL),
        "cosine_with_restarts": lambda o: optimization.get_cosine_with_hard_restarts_schedule_with_warmup(
            o, 6, TOTAL, num_cycles=2
        ),
        "polynomial": lambda o: optimization.get_polynomial_decay_schedule_with_warmup(
            o, 6, TOTAL, lr_end=0.0
        ),
    }
    expected = reference(theirs[name])
    rates = ours(name, **warmup)
    np.testing.assert_allclose(rates[6:], expected[6:], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rates[:6], [*expected[1:6], 1.0], rtol=1e-9)


def test_epochs_are_counted_from_the_first_step_whatever_the_warm_up() -> None:
    rates = ours(schedules.Step(2, 0.5), warmup_steps=4)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:10] == [1.0] * 6
    assert rates[10:20] == [0.5] * 10
    early = ours(schedules.Step(1, 0.5), warmup_steps=8)
    assert early[7:] == ours(schedules.Step(1, 0.5))[7:]
    assert early[5] == 0.5 * 6 / 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_saved_by_name_and_parameters(name: str) -> None:
    given = {"milestones": [2, 5]} if name == "multistep" else {}
    schedule = named_schedule(name, given)
    described = describe_schedule(schedule)
    assert described == (name, asdict(schedule))
    assert named_schedule(name, json.loads(json.dumps(described[1]))) == schedule


def test_a_class_of_ones_own() -> None:
    class Half(Schedule):
        after_warmup = False

        def __call__(self, step: int, total: int, epoch: int = 0) -> float:
            return 0.5**epoch

    assert describe_schedule(Half()) is None
    assert make_schedule(Half())(7, 30, 2) == 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_schedule("sine"),
            "'sine' is unknown; pass scheduler='cosine', or choose from constant, linear, cosine",
        ),
        (
            lambda: make_schedule(schedules.Step),
            "expected a name, a schedule such as onnxtrain.schedules.Cosine()",
        ),
        (lambda: make_schedule("multistep"), "expected milestones that rise"),
        (lambda: make_schedule("cosine", 3, 0.1), "pass warmup_steps or warmup_ratio, not both"),
        (lambda: make_schedule("cosine", warmup_ratio=1.5), "warmup_ratio must be a number from 0 to 1"),
        (
            lambda: named_schedule("step", {"size": 3}),
            "'step' has no parameter size; it has step_size, gamma, unit",
        ),
        (lambda: named_schedule("linear", {"end_factor": "x"}), "'linear' with {'end_factor': 'x'}"),
        (lambda: schedules.Step(0), "expected an integer step_size >= 1"),
        (lambda: schedules.MultiStep([5, 2]), "expected milestones that rise"),
        (lambda: schedules.Exponential(gamma=0), "expected gamma > 0"),
        (lambda: schedules.OneCycle(pct_start=2), "expected 0 <= pct_start <= 1"),
        (lambda: schedules.CosineWithRestarts(0), "expected cycles >= 1"),
        (lambda: schedules.Polynomial(-1), "expected power > 0"),
        (lambda: make_schedule("cosine")(0, None), "unknown for data without a length"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make()


def test_steps_and_epochs_need_no_total() -> None:
    assert make_schedule("step", 4)(1, None) == 0.5
    assert make_schedule(schedules.Exponential(0.5))(100, None, 2) == 0.25


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "multistep"])
def test_no_steps_at_all_are_the_end_of_a_schedule(name: str) -> None:
    schedule = SCHEDULES[name]()
    assert schedule(0, 0) == schedule(5, 0)
    if schedule.needs_total:
        assert schedule(0, 0) == schedule(7, 7)


def test_one_cycle_has_the_rates_of_pytorch_at_its_boundaries() -> None:
    """Fractions whose peak is at the first or the last step, or just beside a step."""
    tried = 0
    for total in range(2, 12):
        fractions = [k / total for k in range(1, total + 1)]
        for part in [*fractions, *(float(np.nextafter(f, g)) for f in fractions for g in (0, 1))]:
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            try:
                scheduler = lr.OneCycleLR(
                    optimizer, 1.0, total_steps=total, pct_start=part, cycle_momentum=False
                )
            except ZeroDivisionError:  # PyTorch's, where the rise or the fall has no step
                continue
            for step in range(total):
                rate = schedules.OneCycle(pct_start=part)(step, total)
                np.testing.assert_allclose(rate, optimizer.param_groups[0]["lr"], rtol=1e-9, atol=1e-12)
                tried += 1
                optimizer.step()
                if step + 1 < total:
                    scheduler.step()
    assert tried > 1000
    for total in range(3):
        for part in (0.0, 0.5, 1.0):
            assert all(0 <= schedules.OneCycle(pct_start=part)(step, total) <= 1 for step in range(4))


def test_factors_beyond_floats_are_refused_and_not_divided_by() -> None:
    tiny = schedules.OneCycle(div_factor=1e-200, final_div_factor=1e-200)
    for schedule in (tiny, schedules.Exponential(10.0, unit="step"), schedules.Step(1, 10.0, unit="step")):
        with pytest.raises(InputError, match=r"The schedule returned (inf|nan)"):
            make_schedule(schedule)(999, 1000)
