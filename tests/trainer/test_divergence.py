"""A loss that is no number: reported once, and the last good state stays."""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain import ModelCheckpoint, Trainer
from onnxtrain.errors import DivergenceError, InputError
from onnxtrain.trainer._fit.snapshot import Snapshot
from onnxtrain.trainer._fit.state import TrainingState
from trainer import problems
from trainer.problems import AtEachStep


def assert_same(trainer: Trainer, expected: dict[str, np.ndarray]) -> None:
    for name, parameter in trainer.parameters:
        np.testing.assert_array_equal(parameter.data, expected[name])


def test_infinite_loss_leaves_the_parameters_before_the_step(tmp_path: Path) -> None:
    """Each step multiplies the error, so that the loss overflows while the parameters are still finite."""
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1e4, directory=tmp_path)
    remember = AtEachStep(lambda trainer, _: {name: p.data.copy() for name, p in trainer.parameters})
    with pytest.raises(DivergenceError) as caught:
        trainer.fit(problem.x, problem.y, epochs=50, batch_size=40, callbacks=[remember], verbose=False)
    message = str(caught.value)
    epoch = int(re.match(r"Training stopped in epoch (\d+), step 1: the loss is inf", message).group(1))
    assert epoch == len(remember.seen) + 1
    assert "learning rate 10000" in message
    assert "clip_grad_norm=1.0" in message
    assert str(tmp_path) in message
    assert_same(trainer, remember.seen[-1])
    resumed = Trainer.resume(tmp_path)
    assert_same(resumed, remember.seen[-1])
    assert len(resumed.history) == epoch - 1


def test_infinite_gradient_of_a_finite_loss() -> None:
    """The derivative of a square root at zero."""
    model = problems.scalar_gain("Sqrt")
    trainer = Trainer(model, "l1", "sgd", learning_rate=0.1)
    x = np.ones((4, 1), np.float32)
    with pytest.raises(
        DivergenceError, match="epoch 1, step 1: the loss is 1, but its gradients contain NaN or inf"
    ):
        trainer.fit(x, x, verbose=False)
    assert trainer.parameters["gain"].data == 0


def test_parameters_that_overflow_in_the_update_go_back_to_the_snapshot() -> None:
    """Finite loss and gradients, but a learning rate beyond float32: the next step finds the damage."""
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1e38)
    before = {name: p.data.copy() for name, p in trainer.parameters}
    with pytest.raises(DivergenceError, match=r"step 2: the loss is (nan|inf).*of epoch 1, before step 1"):
        trainer.fit(100 * problem.x, problem.y, batch_size=20, verbose=False)
    assert_same(trainer, before)
    assert trainer.state._store.optimizer.step == 0


def one_weight(dtype: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 1] x) => (float[n, 1] y)
        { v = Cast<to = 1>(w)  y = MatMul(x, v) }"""
    )
    kind = onnx.TensorProto.DataType.Value(dtype.upper())
    model.graph.initializer.append(onnx.helper.make_tensor("w", kind, [1, 1], [1.0]))
    return model


TWOS, ZEROS = np.full((8, 1), 2, np.float32), np.zeros((8, 1), np.float32)
"""With w = 1 the mean squared error has the gradient 8."""


@pytest.mark.parametrize(("dtype", "rate"), [("float", 1e38), ("float16", 2e4), ("bfloat16", 1e38)])
def test_the_last_update_of_a_fit_is_noticed(tmp_path: Path, dtype: str, rate: float) -> None:
    """No later step sees the parameters, which would be evaluated, saved and exported as infinity."""
    trainer = Trainer(one_weight(dtype), "mse", "sgd", rate, directory=tmp_path / "run", metrics=[])
    before = trainer.parameters["w"].data.copy()
    with pytest.raises(
        DivergenceError, match=r"epoch 1, step 1: the update made the parameters NaN or inf.*before step 1"
    ):
        trainer.fit(TWOS, ZEROS, validation=(TWOS, ZEROS), batch_size=8, epochs=1, verbose=False)
    assert np.array_equal(trainer.parameters["w"].data, before)
    assert np.array_equal(Trainer.resume(tmp_path / "run").parameters["w"].data, before)
    assert len(trainer.history) == 0


def test_moments_that_overflow_are_noticed() -> None:
    """Adam's running mean of the squared gradient stays infinite: the weight would never move again."""
    trainer = Trainer(one_weight("float"), "mse", "adamw", 1e-3, metrics=[])
    huge = np.full((8, 1), 1e12, np.float32)
    with pytest.raises(
        DivergenceError, match="step 1: the update made the running means of the optimizer NaN"
    ):
        trainer.fit(huge, ZEROS, batch_size=8, verbose=False)
    assert trainer.parameters["w"].data == 1
    assert not any(
        moment.read().any() for group in trainer.state._store.moments.values() for moment in group.values()
    )


def test_an_update_that_overflows_is_not_saved_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    trainer = Trainer(one_weight("float"), "mse", "sgd", 1e38, metrics=[])
    saves = ModelCheckpoint(tmp_path / "saves", every_n_steps=1)
    with pytest.raises(DivergenceError, match="step 1: the update made the parameters NaN or infinite"):
        trainer.fit(TWOS, ZEROS, batch_size=4, callbacks=[saves], verbose=False)
    assert not (tmp_path / "saves").exists()
    trainer = Trainer(one_weight("float"), "mse", "sgd", 1e38, metrics=[])
    with pytest.raises(DivergenceError, match="step 1: the update made the parameters NaN or infinite"):
        trainer.fit(TWOS, ZEROS, batch_size=4, validation=(TWOS, ZEROS), evaluate_every=1, verbose=False)
    assert trainer.history.evaluations == []


def test_a_rate_beyond_float32_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be a number from 0 to 3.403e\+38, received 1e\+39"):
        Trainer(one_weight("float"), "mse", "sgd", 1e39)


def test_statistics_of_the_offending_batch_are_undone() -> None:
    problem = problems.images()
    x = problem.x.copy()
    x[20:] = 1e30  # the variance of such a batch is infinite
    trainer = Trainer(problem.model, problem.loss)
    steps = AtEachStep(lambda trainer, _: {name: p.data.copy() for name, p in trainer.state.statistics})
    # Gradients too, with the BatchNormalization of onnxruntime 1.20.
    with pytest.raises(
        DivergenceError, match=r"epoch 1, step 3.*(statistics|gradients) contain NaN or infinity"
    ):
        trainer.fit(x, problem.y, batch_size=10, shuffle=False, callbacks=[steps], verbose=False)
    assert len(steps.seen) == 2
    for name, statistic in trainer.state.statistics:
        np.testing.assert_array_equal(statistic.data, steps.seen[-1][name])


def test_nan_of_a_batch_without_labels_is_named_where_the_loss_is_no_mean_over_labels() -> None:
    """A mean over the labels that count and a mean over all samples."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x, int64[n] kind) => (float loss)
        <float[4, 3] w = {1., 0., 0., 0., 1., 0., 0., 0., 1., 1., 1., 1.}>
        { y = MatMul(x, w)  of_labels = SoftmaxCrossEntropyLoss<ignore_index = -100>(y, kind)
          size = ReduceL2<keepdims = 0>(y)  loss = Add(of_labels, size) }"""
    )
    problem = problems.classes(samples=20)
    labels = np.where(np.arange(20) < 10, problem.y, -100)
    trainer = Trainer(model, None)
    with pytest.raises(
        DivergenceError, match=r"step 2: all labels 'kind' of a batch are -100.*larger batches"
    ):
        trainer.fit({"x": problem.x, "kind": labels}, batch_size=10, shuffle=False, verbose=False)


def test_training_resumes_with_a_lower_rate() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1e38)
    with pytest.raises(DivergenceError):
        trainer.fit(100 * problem.x, problem.y, epochs=50, verbose=False)
    trainer.learning_rate = 1e-5
    history = trainer.fit(100 * problem.x, problem.y, epochs=50, verbose=False)
    assert history.last["loss"] < 1


def test_one_snapshot_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would take the memory of parameters and optimizer state twice."""
    alive: list[weakref.ref[Snapshot]] = []
    take = TrainingState.snapshot

    def snapshot(state: TrainingState) -> Snapshot:
        assert all(earlier() is None for earlier in alive)
        taken = take(state)
        alive.append(weakref.ref(taken))
        return taken

    monkeypatch.setattr(TrainingState, "snapshot", snapshot)
    problem = problems.line()
    Trainer(problem.model, loss=problem.loss).fit(
        problem.x, problem.y, epochs=25, batch_size=4, verbose=False
    )
    # Before the first step, and after 100 and 200 of 250 steps.
    assert len(alive) == 3
