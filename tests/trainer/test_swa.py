"""SWA beside torch.optim.swa_utils: the average of the last epochs, and BatchNorm statistics computed anew."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch.optim.swa_utils import AveragedModel, update_bn

import models
from onnxtrain import Callback, EarlyStopping, History, Trainer
from onnxtrain.errors import InputError
from onnxtrain.trainer import SWA
from trainer import problems
from trainer.test_ema import values
from trainer.test_resume import dropout_model


class Keep(Callback):
    """Keeps the parameters after each epoch, as PyTorch's loop has them at hand."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        self.epochs.append(values(trainer))


class Net(torch.nn.Module):
    """The net of `models.conv_bn`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = (
            torch.nn.Conv2d(2, 4, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(4, momentum=0.2),
        )
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))
        return result

    def load(self, tensors: dict[str, Any]) -> None:
        names = {"bn.scale": "bn.weight", "bn.mean": "bn.running_mean", "bn.var": "bn.running_var"}
        state = {names.get(name, name): torch.tensor(value) for name, value in tensors.items()}
        state["fc.weight"] = state["fc.weight"].T
        self.load_state_dict(state, strict=False)


@pytest.mark.parametrize("start", [4, 0.6, 1])
def test_average_and_statistics_are_those_of_pytorch(start: Any) -> None:
    problem = problems.images(samples=30)
    keep = Keep()
    options: dict[str, Any] = {"epochs": 6, "batch_size": 8, "shuffle": False, "verbose": False}
    trainer = Trainer(problem.model, "cross_entropy", learning_rate=0.05, batch_norm="training")
    trainer.fit(problem.x, problem.y, callbacks=[keep, SWA(start)], **options)
    net = Net()
    averaged = AveragedModel(net)
    first = 4 if start == 0.6 else start
    for epoch in keep.epochs[first - 1 :]:
        net.load(epoch)
        averaged.update_parameters(net)
    loader = [torch.tensor(problem.x[i : i + 8]) for i in range(0, 30, 8)]
    with torch.no_grad():
        update_bn(loader, averaged)
    expected = Net()
    expected.load(values(trainer))
    for name, tensor in averaged.module.state_dict().items():
        if "num_batches" not in name:
            np.testing.assert_allclose(
                expected.state_dict()[name], tensor, rtol=2e-5, atol=1e-6, err_msg=name
            )
    averaged.eval()
    with torch.no_grad():
        scores = averaged(torch.tensor(problem.x))
    np.testing.assert_allclose(trainer.predict(problem.x), scores, rtol=1e-4, atol=1e-4)
    # They are neither those of the last epoch nor the averages of the statistics.
    assert not np.allclose(values(trainer)["bn.var"], keep.epochs[-1]["bn.var"], rtol=1e-3)
    assert not np.allclose(
        values(trainer)["bn.var"], np.mean([e["bn.var"] for e in keep.epochs[first - 1 :]], 0), rtol=1e-3
    )


def test_statistics_that_are_not_trained_stay() -> None:
    problem = problems.images()
    model = models.conv_bn(training=True)
    before = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    trainer = Trainer(model, "cross_entropy", batch_norm="inference")
    trainer.fit(problem.x, problem.y, epochs=2, callbacks=[SWA(1)], verbose=False)
    trained = values(trainer)
    for name in ("bn.mean", "bn.var"):
        np.testing.assert_array_equal(trained.get(name, before[name]), before[name])


def test_learning_rate_of_the_averaged_epochs() -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss, "sgd", learning_rate=0.1)
    trainer.fit(problem.x, problem.y, epochs=4, callbacks=[SWA(3, learning_rate=0.5)], verbose=False)
    assert trainer.history["learning_rate"] == pytest.approx([0.1, 0.1, 0.5, 0.5])


@pytest.mark.parametrize("model", [dropout_model, models.conv_bn], ids=["dropout", "batch-norm"])
@pytest.mark.parametrize("step", [4, 8, 11])
def test_an_interrupted_fit_resumes_with_its_averages(model: Any, step: int, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            if trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGINT)

    problem = problems.images(24) if model is models.conv_bn else problems.classes(24)
    fit: dict[str, Any] = {"epochs": 4, "batch_size": 8, "verbose": False}
    straight = Trainer(model(), "cross_entropy", learning_rate=0.05)
    straight.fit(problem.x, problem.y, callbacks=[SWA(2)], **fit)
    trainer = Trainer(model(), "cross_entropy", learning_rate=0.05, directory=tmp_path / "run")
    history = trainer.fit(problem.x, problem.y, callbacks=[SWA(2), Stop()], **fit)
    assert history.stopped == "interrupted"
    # Also from a copy.
    trainer.save(tmp_path / "copy")
    for path in ("run", "copy"):
        resumed = Trainer.resume(tmp_path / path)
        resumed.fit(problem.x, problem.y, callbacks=[SWA(2)], **fit)
        for name, value in values(resumed).items():
            np.testing.assert_array_equal(value, values(straight)[name])
        again = Trainer.resume(tmp_path / path)
        np.testing.assert_array_equal(again.predict(problem.x), straight.predict(problem.x))


def test_the_epochs_to_average_cannot_change(tmp_path: Path) -> None:
    """Interrupted in the last of four epochs: the third one is in the average, or is lost to it."""

    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            if trainer.global_step == 11:
                os.kill(os.getpid(), signal.SIGINT)

    problem = problems.classes(24)
    fit: dict[str, Any] = {"batch_size": 8, "verbose": False}
    for name, callbacks in (("with", [SWA(0.5), Stop()]), ("without", [Stop()])):
        trainer = Trainer(problem.model, "cross_entropy", directory=tmp_path / name)
        trainer.fit(problem.x, problem.y, epochs=4, callbacks=callbacks, **fit)
        resumed = Trainer.resume(tmp_path / name)
        what = "began with epoch 3" if name == "with" else "has not begun"
        for epochs in (8, 10) if name == "with" else (4, 5):
            with pytest.raises(InputError, match=f"the average {what}"):
                resumed.fit(problem.x, problem.y, epochs=epochs, callbacks=[SWA(0.5)], **fit)
        # Later epochs are all in the average, and from an epoch by its number on, nothing changes.
        callback = SWA(0.5) if name == "with" else SWA(4)
        history = resumed.fit(problem.x, problem.y, epochs=5, callbacks=[callback], **fit)
        assert len(history) == 5


def test_settings_that_do_not_go_together() -> None:
    problem = problems.images()
    data = (problem.x, problem.y)
    for start in (0, 1.0, -0.5, True, "3"):
        with pytest.raises(InputError, match="SWA: start"):
            SWA(start)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="SWA and ema_decay both replace the parameters"):
        Trainer(problem.model, problem.loss, ema_decay=0.9).fit(*data, callbacks=[SWA()])
    trainer = Trainer(problem.model, problem.loss)
    with pytest.raises(InputError, match=r"SWA and EarlyStopping\(restore_best=True\) both set"):
        trainer.fit(*data, validation=data, callbacks=[SWA(), EarlyStopping(restore_best=True)])
    with pytest.raises(InputError, match="SWA reads the data once more to recompute the statistics"):
        trainer.fit([data], callbacks=[SWA()], verbose=False)
    # Without statistics a stream will do.
    classes = problems.classes()
    Trainer(classes.model, "cross_entropy").fit([(classes.x, classes.y)], callbacks=[SWA(1)], verbose=False)
    assert onnx.checker.check_model(problem.model) is None
