"""SAM beside a PyTorch loop in float64: the same gradients at the worst parameters nearby, step for step."""

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

import models
from onnxtrain import Trainer
from onnxtrain.errors import DivergenceError, InputError
from onnxtrain.trainer import SAM, Callback, StepGradients
from trainer.test_resume import dropout_model

# The optimizer model takes learning rate and momentum in float32, which holds these numbers exactly.
RHO, RATE, MOMENTUM, SIZE = 0.3, 0.0625, 0.75, 8


def doubled() -> onnx.ModelProto:
    """The small perceptron in float64."""
    model = models.mlp()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    return model


def samples(count: int = 24) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 4)), rng.integers(0, 3, count)


def torch_sam(
    model: onnx.ModelProto, x: Any, y: Any, *, epochs: int, adaptive: bool, accumulate: int = 1
) -> dict[str, torch.Tensor]:
    """The loop of the authors' PyTorch implementations, with torch.optim.SGD as base optimizer."""
    weights = {
        t.name: torch.tensor(numpy_helper.to_array(t), requires_grad=True) for t in model.graph.initializer
    }

    def backward(start: int) -> None:
        for weight in weights.values():
            weight.grad = None
        for first in range(start, start + accumulate * SIZE, SIZE):
            inputs, labels = torch.tensor(x[first : first + SIZE]), torch.tensor(y[first : first + SIZE])
            hidden = torch.tanh(inputs @ weights["w1"] + weights["b1"])
            loss = torch.nn.functional.cross_entropy(hidden @ weights["w2"] + weights["b2"], labels)
            (loss / accumulate).backward()

    optimizer = torch.optim.SGD(weights.values(), RATE, momentum=MOMENTUM)
    for _ in range(epochs):
        for start in range(0, len(x), accumulate * SIZE):
            backward(start)
            gradients = {name: weight.grad for name, weight in weights.items()}
            scaled = [(w.abs() if adaptive else 1.0) * w.grad for w in weights.values()]
            norm = torch.stack([term.norm(2) for term in scaled]).norm(2)
            old = {name: weight.detach().clone() for name, weight in weights.items()}
            with torch.no_grad():
                for name, weight in weights.items():
                    factor = weight**2 if adaptive else 1.0
                    weight.add_(factor * gradients[name] * (RHO / (norm + 1e-12)))
            backward(start)
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(old[name])
            optimizer.step()
    return weights


@pytest.mark.parametrize(("adaptive", "accumulate"), [(False, 1), (True, 1), (False, 3)])
def test_matches_pytorch(adaptive: bool, accumulate: int) -> None:
    from onnxtrain.optimizers import SGD

    x, y = samples()
    trainer = Trainer(doubled(), "cross_entropy", SGD(momentum=MOMENTUM), RATE)
    trainer.fit(
        x,
        y,
        epochs=3,
        batch_size=SIZE,
        accumulate=accumulate,
        shuffle=False,
        callbacks=[SAM(RHO, adaptive)],
        verbose=False,
    )
    expected = torch_sam(doubled(), x, y, epochs=3, adaptive=adaptive, accumulate=accumulate)
    plain = Trainer(doubled(), "cross_entropy", SGD(momentum=MOMENTUM), RATE)
    plain.fit(x, y, epochs=3, batch_size=SIZE, accumulate=accumulate, shuffle=False, verbose=False)
    for name, parameter in trainer.parameters:
        np.testing.assert_allclose(parameter.data, expected[name].detach().numpy(), rtol=1e-12, atol=1e-13)
        assert np.abs(parameter.data - plain.parameters[name].data).max() > 1e-6


def test_radius_zero_changes_nothing() -> None:
    """Neither random numbers of Dropout nor BatchNorm statistics are those of another step."""
    x = np.random.default_rng(1).standard_normal((24, 1, 4, 4)).astype(np.float32)
    y = np.arange(24) % 3
    results = []
    for callbacks in ([], [SAM(rho=0.0)]):
        trainer = Trainer(models.conv_bn(training=True), "cross_entropy", "sgd", 0.1)
        shape = trainer.manifest.inputs[0].shape
        assert shape is not None
        trainer.fit(
            np.resize(x, (24, *shape[1:])), y, epochs=2, batch_size=8, callbacks=callbacks, verbose=False
        )
        tensors = [*trainer.parameters, *trainer.state.statistics]
        results.append(({name: tensor.data.tobytes() for name, tensor in tensors}, trainer.history))
    assert results[0] == results[1]


def test_a_loss_that_is_not_finite_nearby_leaves_the_parameters(tmp_path: Path) -> None:
    class Far(Callback):
        def on_gradients(self, trainer: Trainer, gradients: StepGradients) -> None:
            gradients.recompute_at({"w2": np.full((8, 3), 1.7e308)})

    x, y = samples()
    trainer = Trainer(doubled(), "cross_entropy", "sgd", RATE, directory=tmp_path / "run")
    before = {name: parameter.data.tobytes() for name, parameter in trainer.parameters}
    with pytest.raises(DivergenceError, match=r"epoch 1, step 1"):
        trainer.fit(x, y, batch_size=SIZE, callbacks=[Far()], verbose=False)
    resumed = Trainer.resume(tmp_path / "run")
    for run in (trainer, resumed):
        assert {name: parameter.data.tobytes() for name, parameter in run.parameters} == before


@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf"), True, "wide"])
def test_radii_that_make_no_sense(rho: Any) -> None:
    with pytest.raises(InputError, match="SAM: rho must be a finite number >= 0"):
        SAM(rho)


def test_sparse_gradients_are_refused() -> None:
    """A step of theirs has rows for the reads of a batch, which are no direction in the table's space."""
    model = onnx.parser.parse_model("""
      <ir_version: 10, opset_import: ["": 21]>
      words (int64[n] x) => (float[n, 2] logits) <float[5, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}>
      { logits = Gather(table, x) }""")
    trainer = Trainer(model, "cross_entropy", "sgd", sparse_gradients="table")
    x = np.arange(10) % 5
    with pytest.raises(InputError, match=r"the gradients of table are sparse. Leave sparse_gradients out"):
        trainer.fit(x, x % 2, callbacks=[SAM()], verbose=False)
    before = trainer.parameters["table"].data.copy()
    trainer.fit(x, x % 2, verbose=False)
    assert (trainer.parameters["table"].data != before).any()


def test_an_interrupted_fit_resumes_bit_for_bit(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            if trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    x, y = samples()
    fit: dict[str, Any] = {"epochs": 3, "batch_size": SIZE, "verbose": False}
    straight = Trainer(dropout_model(), "cross_entropy", "adamw", RATE)
    straight.fit(np.float32(x), y, callbacks=[SAM(RHO)], **fit)
    trainer = Trainer(dropout_model(), "cross_entropy", "adamw", RATE, directory=tmp_path / "run")
    assert trainer.fit(np.float32(x), y, callbacks=[SAM(RHO), Stop()], **fit).stopped == "interrupted"
    resumed = Trainer.resume(tmp_path / "run")
    resumed.fit(np.float32(x), y, callbacks=[SAM(RHO)], **fit)
    assert resumed.history == straight.history
    for name, parameter in resumed.parameters:
        assert parameter.data.tobytes() == straight.parameters[name].data.tobytes()
