"""A run that resumes from a checkpoint draws the random numbers that it would have drawn without interruption."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import CheckpointState, Module, Optimizer, Trainer, generate_artifacts
from trainer.test_resume import InterruptAt

FEATURES = 6
# What is drawn into `n`, as wide as x.
OPS = {
    "dropout": "n = Dropout(x, ratio, on)",
    "dropout-with-seed": "n = Dropout<seed = 7>(x, ratio, on)",
    "dropout-in-a-branch": """n = If<then_branch = yes () => (float[n, 6] a) { a = Dropout(x, ratio, on) },
        else_branch = no () => (float[n, 6] kept) { kept = Identity(x) }>(on)""",
    "normal-like": "r = RandomNormalLike<mean = 0.5, scale = 2.0>(x)  n = Add(x, r)",
    "normal-with-seed": "r = RandomNormal<shape = [6], seed = 3.0>()  n = Add(x, r)",
    "uniform": "r = RandomUniform<shape = [6], low = -1.0, high = 1.0>()  n = Mul(x, r)",
    "uniform-like": "r = RandomUniformLike(x)  n = Mul(x, r)",
    "bernoulli": "p = Sigmoid(x)  r = Bernoulli(p)  n = Mul(x, r)",
    "multinomial": "r = Multinomial<sample_size = 6>(x)  f = Cast<to = 1>(r)  n = Add(x, f)",
}


def file(op: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]> net (float[n, {FEATURES}] x) => (float[n, 1] y)
        <float ratio = {{0.5}}, bool on = {{1}}, float[1] b = {{0}}>
        {{ {OPS[op]}  h = MatMul(n, w)  y = Add(h, b) }}""")
    weight = np.random.default_rng(0).normal(size=(FEATURES, 1)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model


class Run:
    """A training on the device, from a checkpoint."""

    def __init__(self, folder: Path, checkpoint: str = "checkpoint", seed: int = 0) -> None:
        self.state = CheckpointState.load_checkpoint(folder / checkpoint)
        self.module = Module(
            folder / "training_model.onnx", self.state, folder / "eval_model.onnx", seed=seed
        )
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)

    def steps(self, first: int, last: int, batches: int = 1) -> list[float]:
        """Takes steps, each on the gradients of some batches; returns the losses."""
        losses = []
        for step in range(first, last):
            for batch in range(batches):
                x = np.random.default_rng([step, batch]).normal(size=(8, FEATURES)).astype(np.float32)
                losses.append(float(np.asarray(self.module(x, x.sum(1, keepdims=True)))))
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return losses

    def weights(self) -> list[bytes]:
        return [parameter.data.tobytes() for _, parameter in self.state.parameters]


@pytest.mark.parametrize("op", OPS)
def test_a_resumed_run_is_bit_equal(op: str, tmp_path: Path) -> None:
    """In sessions of its own, as in another process, also with several batches per step."""
    generate_artifacts(file(op), loss="mse", optimizer="adamw", artifact_directory=tmp_path)
    whole = Run(tmp_path)
    losses = whole.steps(0, 6, batches=2)
    # Another use of the process's generator.
    ort.set_seed(1)
    first = Run(tmp_path)
    assert first.steps(0, 3, batches=2) == losses[:6]
    CheckpointState.save_checkpoint(first.state, tmp_path / "saved", include_optimizer_state=True)
    del first
    resumed = Run(tmp_path, "saved")
    assert resumed.steps(3, 6, batches=2) == losses[6:]
    assert resumed.weights() == whole.weights()


@pytest.mark.parametrize("op", OPS)
def test_each_run_and_each_seed_draws_other_numbers(op: str, tmp_path: Path) -> None:
    generate_artifacts(file(op), loss="mse", optimizer="sgd", artifact_directory=tmp_path)
    x = np.random.default_rng(0).normal(size=(8, FEATURES)).astype(np.float32)

    def losses(run: Run) -> list[float]:
        # Without a step the parameters stand still.
        return [float(np.asarray(run.module(x, x[:, :1]))) for _ in range(4)]

    drawn = [losses(Run(tmp_path, seed=seed)) for seed in (0, 0, 1, -5)]
    assert drawn[0] == drawn[1]
    assert len({loss for run in (drawn[0], *drawn[2:]) for loss in run}) == 12
    # The next step draws other numbers than the last one.
    run = Run(tmp_path)
    run.optimizer.set_learning_rate(0.0)
    run.module(x, x[:, :1])
    run.optimizer.step()
    run.module.lazy_reset_grad()
    assert float(np.asarray(run.module(x, x[:, :1]))) != drawn[0][0]


def test_threads_draw_what_they_draw_alone(tmp_path: Path) -> None:
    """ONNX Runtime has one generator for all of them."""
    generate_artifacts(file("dropout"), loss="mse", optimizer="sgd", artifact_directory=tmp_path)
    alone = [Run(tmp_path, seed=seed).steps(0, 40) for seed in range(3)]
    runs, together = [Run(tmp_path, seed=seed) for seed in range(3)], [[]] * 3  # type: list[Run], Any

    def work(index: int) -> None:
        together[index] = runs[index].steps(0, 40)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_models_that_draw_nothing_leave_the_generator_alone(tmp_path: Path) -> None:
    model = file("dropout")
    del model.graph.node[0].input[2:]
    generate_artifacts(model, loss="mse", artifact_directory=tmp_path, dropout=0)
    noise = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]> net (float[n] x) => (float[n] y)
        <float ratio = {0.5}, bool on = {1}> { y = Dropout(x, ratio, on) }""")
    session, x = ort.InferenceSession(noise.SerializeToString()), np.ones(64, np.float32)

    def drawn(between: Any) -> list[np.ndarray]:
        ort.set_seed(5)
        first = session.run(None, {"x": x})[0]
        between()
        return [first, session.run(None, {"x": x})[0]]

    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    assert not module.manifest.draws
    batch = np.ones((2, FEATURES), np.float32)
    np.testing.assert_array_equal(drawn(lambda: module(batch, batch[:, :1])), drawn(lambda: None))


@pytest.mark.parametrize("op", ["dropout-in-a-branch", "normal-like", "multinomial"])
def test_an_interrupted_fit_is_bit_equal(op: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, FEATURES)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    fit: Any = {"epochs": 2, "batch_size": 8, "verbose": False}
    straight = Trainer(file(op), "mse")
    straight.fit(x, y, **fit)
    stopped = Trainer(file(op), "mse", directory=tmp_path / "run")
    stopped.fit(x, y, callbacks=[InterruptAt(3)], **fit)
    del stopped
    resumed = Trainer.resume(tmp_path / "run")
    resumed.fit(x, y, **fit)
    assert resumed.history == straight.history
    for name, parameter in straight.parameters:
        np.testing.assert_array_equal(resumed.parameters[name].data, parameter.data)
