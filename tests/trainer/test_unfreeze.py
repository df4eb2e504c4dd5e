"""`Unfreeze` beside PyTorch, in which the gradient of a frozen parameter is None, and in runs that are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.optimizers import SGD, AdamW, NAdam, Prodigy
from onnxtrain.trainer import SAM, Callback, Unfreeze
from test_layer_decay import SHAPES, loss_in_torch, residual, values
from trainer import problems
from trainer.test_resume import InterruptAt, state

X = np.random.default_rng(1).standard_normal((16, 4))
Y = np.random.default_rng(2).integers(0, 3, 16)
FIT: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": False}


def groups() -> list[Callback]:
    """The head and the last norm from the start, block 1 from the third epoch, the rest from the fifth."""
    return [Unfreeze(2, "blocks.1.*"), Unfreeze(4, ["stem.*", "blocks.*"])]


def first_epoch(name: str) -> int:
    return 2 if name.startswith("blocks.1") else 4 if name.startswith(("stem", "blocks")) else 0


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (AdamW(weight_decay=0.1), "AdamW", {"weight_decay": 0.1}),
        (NAdam(weight_decay=0.1), "NAdam", {"weight_decay": 0.1}),
        (SGD(momentum=0.9, weight_decay=0.1), "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ],
    ids=["adamw", "nadam", "sgd"],
)
def test_training_is_that_of_pytorch(ours: Any, theirs: str, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    rate = 2.0**-5
    trainer = Trainer(residual(), "cross_entropy", ours, rate, clip_grad_norm=0.3)
    trainer.fit(X, Y, epochs=6, callbacks=groups(), **FIT)
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in values().items()}
    optimizer = getattr(torch.optim, theirs)(list(tensors.values()), lr=rate, **settings)
    for epoch in range(6):
        for name, tensor in tensors.items():
            tensor.requires_grad_(epoch >= first_epoch(name))
        for half in (slice(0, 8), slice(8, 16)):
            optimizer.zero_grad()
            loss_in_torch(tensors, X[half], Y[half]).backward()
            torch.nn.utils.clip_grad_norm_(tensors.values(), 0.3)
            optimizer.step()
    for name, parameter in trainer.parameters:
        # LayerNormalization keeps its mean and deviation in float32.
        np.testing.assert_allclose(parameter.data, tensors[name].detach(), rtol=1e-6, atol=1e-6, err_msg=name)


class AfterEpochs(Callback):
    """Keeps the parameters and moments after each epoch."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_epoch_end(self, trainer: Trainer, history: Any) -> None:
        self.states.append(state(trainer))


def test_frozen_parameters_and_their_moments_stay() -> None:
    seen = AfterEpochs()
    trainer = Trainer(residual(), "cross_entropy", AdamW(weight_decay=0.5), 0.1)
    before = state(trainer)
    trainer.fit(X, Y, epochs=5, callbacks=[*groups(), seen], **FIT)
    keys = [key for key in before if "/" in key]
    assert len(keys) == 3 * len(SHAPES)
    for epoch, after in enumerate(seen.states):
        for key in keys:
            assert (after[key] == before[key]) == (epoch < first_epoch(key.split("/")[1])), (epoch, key)


def test_the_head_is_found() -> None:
    seen = AfterEpochs()
    trainer = Trainer(residual(TensorProto.FLOAT), "cross_entropy", learning_rate=0.1)
    before = state(trainer)
    trainer.fit(X, Y, epochs=2, callbacks=[Unfreeze(1), seen], **FIT)
    moved = [
        {name for name in SHAPES if after[f"parameter/{name}"] != before[f"parameter/{name}"]}
        for after in seen.states
    ]
    assert moved == [{"head.weight", "head.bias"}, set(SHAPES)]


@pytest.mark.parametrize("callbacks", [[], [SAM(0.5)]], ids=["plain", "sam"])
def test_frozen_epochs_are_those_of_a_model_with_fewer_parameters(callbacks: list[Callback]) -> None:
    """Also for what looks at all gradients: clipping by their norm, and SAM."""
    settings: dict[str, Any] = {"learning_rate": 0.1, "clip_grad_norm": 0.2}
    ours = Trainer(residual(), "cross_entropy", **settings)
    ours.fit(X, Y, epochs=3, callbacks=[Unfreeze(3), *callbacks], **FIT)
    fewer = Trainer(residual(), "cross_entropy", requires_grad="head.*", **settings)
    fewer.fit(X, Y, epochs=3, callbacks=callbacks, **FIT)
    for name, parameter in fewer.parameters:
        np.testing.assert_allclose(ours.parameters[name].data, parameter.data, rtol=1e-12, err_msg=name)


def test_running_statistics_of_frozen_layers_stay() -> None:
    problem = problems.images()
    seen = AfterEpochs()
    trainer = Trainer(problem.model, problem.loss)
    before = state(trainer)
    trainer.fit(problem.x, problem.y, epochs=2, callbacks=[Unfreeze(1), seen], verbose=False)
    statistics = [key for key in before if key.startswith("statistic/")]
    assert len(statistics) == 2
    for key in statistics:
        assert [after[key] == before[key] for after in seen.states] == [True, False]


@pytest.mark.parametrize("step", [1, 4, 5, 9])
def test_an_interrupted_run_is_bit_equal(step: int, tmp_path: Path) -> None:
    straight = Trainer(residual(), "cross_entropy", clip_grad_norm=0.3)
    straight.fit(X, Y, epochs=6, callbacks=groups(), **FIT)
    trainer = Trainer(residual(), "cross_entropy", clip_grad_norm=0.3, directory=tmp_path)
    trainer.fit(X, Y, epochs=6, callbacks=[*groups(), InterruptAt(step)], **FIT)
    assert trainer.resumes_fit
    del trainer
    resumed = Trainer.resume(tmp_path)
    resumed.fit(X, Y, epochs=6, callbacks=groups(), **FIT)
    assert state(resumed) == state(straight)


def test_later_fits_count_the_steps_of_each_parameter(tmp_path: Path) -> None:
    """The bias correction of a parameter that was frozen depends on its own steps, also without the callback."""
    straight = Trainer(residual(), "cross_entropy")
    straight.fit(X, Y, epochs=5, callbacks=groups(), **FIT)
    trainer = Trainer(residual(), "cross_entropy", directory=tmp_path)
    trainer.fit(X, Y, epochs=4, callbacks=groups(), **FIT)
    del trainer
    resumed = Trainer.resume(tmp_path)
    resumed.fit(X, Y, epochs=1, **FIT)
    assert state(resumed) == state(straight)


def test_an_optimizer_that_shares_state_is_refused() -> None:
    trainer = Trainer(residual(), "cross_entropy", Prodigy(), 1.0)
    before = state(trainer)
    with pytest.raises(InputError, match="Prodigy computes the step of a parameter from the state of others"):
        trainer.fit(X, Y, callbacks=[Unfreeze(1)], **FIT)
    assert state(trainer) == before
    trainer.fit(X, Y, **FIT)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: Unfreeze(0), "epoch must be an integer from 1"),
        (lambda: Unfreeze(True), "epoch must be an integer from 1"),
        (lambda: Unfreeze(1, []), "patterns must be names or patterns"),
        (lambda: Unfreeze(1, ["a", 3]), "patterns must be names or patterns"),  # type: ignore[list-item]
        (lambda: Unfreeze(1, "tail.*"), r"no trained parameter matches 'tail\.\*'"),
        (lambda: Unfreeze(2, "*"), "all parameters are frozen until epoch 3"),
    ],
)
def test_what_is_refused(callback: Any, message: str) -> None:
    trainer = Trainer(residual(), "cross_entropy")
    with pytest.raises(InputError, match=message):
        trainer.fit(X, Y, callbacks=[callback()], **FIT)
    assert trainer.global_step == 0
