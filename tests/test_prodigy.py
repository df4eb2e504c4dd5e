"""Prodigy against the paper's algorithm 4, written with PyTorch in float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from onnxtrain import Trainer
from onnxtrain.errors import GraphBuildError
from onnxtrain.optimizers import (
    ClipGradNorm,
    ParameterGroup,
    ParameterSpec,
    Prodigy,
    build_optimizer_model,
)
from test_optimizers import check_reads_come_first
from trainer import problems

SHAPES = {"matrix": (4, 3), "vector": (5,), "pointwise": (3, 2, 1, 1), "scalar": ()}
STEPS = 60
TARGETS = {name: np.random.default_rng(1).normal(size=shape) for name, shape in SHAPES.items()}
"""The loss is the squared distance from these: far from them d grows, near them the gradient turns."""


def paper(
    start: dict[str, torch.Tensor],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    d0: float = 1e-6,
    d_coef: float = 1.0,
    max_norm: float = math.inf,
) -> tuple[dict[str, torch.Tensor], float]:
    """All steps of algorithm 4 on one long vector, as the paper has it; the parameters, and d."""
    x = torch.cat([value.flatten() for value in start.values()])
    target = torch.cat([torch.from_numpy(np.asarray(TARGETS[name])).flatten() for name in start])
    x0, d, r = x.clone(), d0, 0.0
    s, m, v = (torch.zeros_like(x) for _ in range(3))
    root = math.sqrt(betas[1])
    for t in range(1, STEPS + 1):
        gamma = rate(t)
        g = 2 * (x - target)
        g = g * min(1.0, max_norm / float(g.norm()))
        m = betas[0] * m + (1 - betas[0]) * d * g
        v = betas[1] * v + (1 - betas[1]) * d**2 * g**2
        r = root * r + (1 - root) * gamma * d**2 * float(g @ (x0 - x))
        s = root * s + (1 - root) * gamma * d**2 * g
        x = (1 - gamma * d * weight_decay) * x - gamma * d * m / (v.sqrt() + d * eps)
        used, d = d, max(d, d_coef * r / float(s.abs().sum()))
    parts = x.split([value.numel() for value in start.values()])
    return {
        name: part.reshape(value.shape) for (name, value), part in zip(start.items(), parts, strict=True)
    }, used


def rate(step: int) -> float:
    """A warm-up in numbers that float32 has."""
    return min(1.0, step / 4)


def run(optimizer: Prodigy, dtype: type, zeros: int = 0) -> dict[str, np.ndarray]:
    """All steps of the optimizer model: the parameters and the moments, by input name.

    `zeros` steps with gradients of zero come before them.
    """
    specs = [
        ParameterSpec(name, ir.DataType.from_numpy(np.dtype(dtype)), shape) for name, shape in SHAPES.items()
    ]
    proto = ir.to_proto(build_optimizer_model(optimizer, specs))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    state = {name: np.asarray(np.zeros(shape) + 0.5, dtype) for name, shape in SHAPES.items()}
    for name, shape in SHAPES.items():
        for moment in optimizer.state_spec(shape):
            state[f"{name}_{moment.name}"] = np.full(moment.shape, moment.initial_value, dtype)
    names = [value.name for value in session.get_outputs()]
    for t in range(1 - zeros, STEPS + 1):
        feeds = {"learning_rate": np.array(rate(max(1, t)), np.float32), "step": np.array(zeros + t)}
        feeds |= {
            f"{name}_grad": np.asarray((t > 0) * 2 * (state[name] - TARGETS[name]), dtype) for name in SHAPES
        }
        outputs = session.run(None, state | feeds)
        state = {
            name.removesuffix("_updated"): np.asarray(value, dtype)
            for name, value in zip(names, outputs, strict=True)
        }
    return state


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_first_gradients_of_zero_change_nothing(dtype: type) -> None:
    """The estimate is 0 / 0 then; moments and parameters stay, as x0 does."""
    expected, got = run(Prodigy(), dtype), run(Prodigy(), dtype, zeros=3)
    assert got["matrix_momentum5"] > 1e-3
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


ALL_SETTINGS = {"betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.2, "d0": 1e-3, "d_coef": 0.5}


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ({}, np.float64, 1e-9),
        (ALL_SETTINGS, np.float64, 1e-9),
        ({"clip_grad": ClipGradNorm(1.5)}, np.float64, 1e-9),
        # From d0 = 1e-6 on, w - x0 is a few last bits of a float32, and so are the first estimates.
        (ALL_SETTINGS, np.float32, 2e-4),
        ({"clip_grad": ClipGradNorm(1.5), "d0": 1e-2}, np.float32, 2e-3),
    ],
    ids=["defaults", "all settings", "clipped", "all settings float32", "clipped float32"],
)
def test_60_steps_match_the_paper(options: dict[str, Any], dtype: type, tolerance: float) -> None:
    start = {name: torch.full(shape, 0.5, dtype=torch.float64) for name, shape in SHAPES.items()}
    settings = dict(options)
    clipping = settings.pop("clip_grad", None)
    expected, d = paper(start, **settings, max_norm=clipping.max_norm if clipping else math.inf)
    assert d > 2 * settings.get("d0", 1e-6)  # otherwise nothing was estimated
    got = run(Prodigy(**options), dtype)
    for name, want in expected.items():
        np.testing.assert_allclose(got[name], want.numpy(), rtol=tolerance, atol=tolerance)
        assert got[f"{name}_momentum5"] == pytest.approx(d, rel=10 * tolerance)


def test_group_with_another_decay_has_its_own_estimate() -> None:
    optimizer = Prodigy(weight_decay=0.1, groups=[ParameterGroup("vector", weight_decay=0.0)])
    got = run(optimizer, np.float64)
    for names, decay in ((["matrix", "pointwise", "scalar"], 0.1), (["vector"], 0.0)):
        start = {name: torch.full(SHAPES[name], 0.5, dtype=torch.float64) for name in names}
        expected, d = paper(start, weight_decay=decay)
        for name, want in expected.items():
            np.testing.assert_allclose(got[name], want.numpy(), rtol=1e-9, atol=1e-9)
            assert got[f"{name}_momentum5"] == pytest.approx(d, rel=1e-8)


def test_trainer_saves_and_resumes(tmp_path: Path) -> None:
    problem = problems.line()
    trainers = [Trainer(problem.model, "mse", "prodigy", learning_rate=1.0) for _ in range(2)]
    for trainer, epochs in zip(trainers, (100, 50), strict=True):
        trainer.fit(problem.x, problem.y, epochs=epochs, shuffle=False, verbose=False)
    trainers[1].save(tmp_path)
    again = Trainer.resume(tmp_path)
    again.fit(problem.x, problem.y, epochs=50, shuffle=False, verbose=False)
    assert trainers[0].evaluate(problem.x, problem.y)["loss"] < 0.02  # of which 0.01 is noise
    for name, parameter in trainers[0].parameters:
        np.testing.assert_array_equal(again.parameters[name].data, parameter.data)


def test_no_old_value_is_read_after_its_new_value_is_there() -> None:
    specs = [ParameterSpec(name, "float32", shape) for name, shape in SHAPES.items()]
    check_reads_come_first(
        build_optimizer_model(Prodigy(weight_decay=0.1, clip_grad=ClipGradNorm(1.0)), specs)
    )


@pytest.mark.parametrize("field", ["d0", "d_coef"])
def test_settings_must_be_positive(field: str) -> None:
    with pytest.raises(GraphBuildError, match=f"{field} is 0.0; it must be a positive number"):
        dataclasses.replace(Prodigy(), **{field: 0.0})
