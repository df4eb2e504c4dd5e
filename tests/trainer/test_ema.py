"""Moving averages of the weights against PyTorch's, and what is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import EarlyStopping, ModelCheckpoint, Trainer
from onnxtrain.errors import CheckpointError, InputError
from trainer import problems
from trainer.problems import AtEachStep
from trainer.test_resume import FIT, InterruptAt, state

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def values(trainer: Trainer) -> dict[str, np.ndarray]:
    return {
        name: p.data.copy() for group in (trainer.parameters, trainer.state.statistics) for name, p in group
    }


def pytorch(steps: list[dict[str, np.ndarray]], decay: float) -> dict[str, np.ndarray]:
    """Average the same weights and statistics by PyTorch's `AveragedModel`."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    module = torch.nn.Module()
    names = {name: name.replace(".", "_") for name in steps[0]}
    for name in steps[0]:
        module.register_buffer(names[name], torch.zeros(steps[0][name].shape))
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    for step in steps:
        for name, value in step.items():
            getattr(module, names[name]).copy_(torch.from_numpy(value))
        averaged.update_parameters(module)
    return {name: getattr(averaged.module, names[name]).numpy() for name in steps[0]}


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.0])
@pytest.mark.parametrize("make", [problems.classes, problems.images], ids=["mlp", "batch-norm"])
def test_averages_are_those_of_pytorch(make: Any, decay: float) -> None:
    problem = make()
    weights = AtEachStep(lambda trainer, _: values(trainer))
    trainer = Trainer(problem.model, problem.loss, learning_rate=1e-2, ema_decay=decay)
    trainer.fit(problem.x, problem.y, epochs=3, batch_size=8, callbacks=[weights], verbose=False)
    expected = pytorch(weights.seen, decay)
    raw = values(trainer)
    with trainer.averaged():
        for name, value in values(trainer).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    for name, value in values(trainer).items():
        np.testing.assert_array_equal(value, raw[name])
        if decay:
            assert not np.allclose(value, expected[name], rtol=1e-4)


def test_training_is_what_it_was() -> None:
    problem = problems.images()
    trainers = [Trainer(problem.model, problem.loss, ema_decay=decay) for decay in (None, 0.9)]
    for trainer in trainers:
        trainer.fit(problem.x, problem.y, **FIT)
    assert state(trainers[0]) == state(trainers[1])
    assert trainers[0].history["loss"] == trainers[1].history["loss"]
    assert trainers[0].history["val_loss"] != trainers[1].history["val_loss"]


def test_everything_that_judges_sees_the_averages(tmp_path: Path) -> None:
    problem = problems.images()
    data = (problem.x, problem.y)
    trainer = Trainer(problem.model, problem.loss, learning_rate=1e-2, ema_decay=0.8)
    raw_loss = trainer.evaluate(*data)["loss"]
    plain = Trainer(problem.model, problem.loss)
    assert raw_loss == plain.evaluate(*data)["loss"]  # no step, no average
    history = trainer.fit(*data, epochs=2, batch_size=8, validation=data, verbose=False)
    with trainer.averaged():
        averages = values(trainer)
    for name, parameter in plain.parameters:
        parameter.data[...] = averages[name]
    for name, statistic in plain.state.statistics:
        statistic.data[...] = averages[name]
    expected = plain.evaluate(*data, batch_size=8)["loss"]
    assert trainer.evaluate(*data, batch_size=8)["loss"] == history["val_loss"][-1] == expected
    np.testing.assert_array_equal(trainer.predict(problem.x), plain.predict(problem.x))
    np.testing.assert_array_equal(trainer.confusion_matrix(*data), plain.confusion_matrix(*data))
    trainer.export(tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx")
    name = session.get_inputs()[0].name
    np.testing.assert_allclose(
        session.run(None, {name: problem.x})[0], plain.predict(problem.x), rtol=1e-5, atol=1e-6
    )
    initializers = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer
    }
    assert any(np.array_equal(initializers.get(name), value) for name, value in averages.items())
    trainer.save_parameters(tmp_path / "parameters")
    plain.load_parameters(tmp_path / "parameters")
    for key, value in values(plain).items():
        np.testing.assert_array_equal(value, averages[key])


@pytest.mark.parametrize("step", [1, 3, 6])
def test_interrupt_and_resume_is_bit_equal(step: int, tmp_path: Path) -> None:
    problem = problems.images()
    straight = Trainer(problem.model, problem.loss, ema_decay=0.9)
    straight.fit(problem.x, problem.y, **FIT)
    stopped = Trainer(problem.model, problem.loss, ema_decay=0.9, directory=tmp_path / "run")
    stopped.fit(problem.x, problem.y, callbacks=[InterruptAt(step)], **FIT)
    del stopped
    resumed = Trainer.resume(tmp_path / "run")
    resumed.save(tmp_path / "copy")
    resumed = Trainer.resume(tmp_path / "copy")
    history = resumed.fit(problem.x, problem.y, **FIT)
    assert history == straight.history
    assert state(resumed) == state(straight)
    with resumed.averaged(), straight.averaged():
        assert state(resumed) == state(straight)


def test_best_epoch_is_the_best_average(tmp_path: Path) -> None:
    problem = problems.classes(samples=40)
    data = (problem.x, problem.y)
    trainer = Trainer(problem.model, problem.loss, learning_rate=0.3, ema_decay=0.5)
    callbacks = [EarlyStopping(patience=50, restore_best=True), ModelCheckpoint(tmp_path / "best")]
    rng = np.random.default_rng(0)
    validation = (problem.x, rng.integers(0, 3, len(problem.x)))
    history = trainer.fit(
        *data, epochs=8, batch_size=10, validation=validation, callbacks=callbacks, verbose=False
    )
    best = min(history["val_loss"])
    assert best < history["val_loss"][-1]
    assert trainer.evaluate(*validation, batch_size=10)["loss"] == best
    assert Trainer.resume(tmp_path / "best").evaluate(*validation, batch_size=10)["loss"] == best


def test_half_precision_is_averaged_in_float32() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float16[n, 1] x) => (float16[n, 1] y) <float16[1, 1] w = {15360}> { y = MatMul(x, w) }""")
    x = np.ones((4, 1), np.float16)
    weights = AtEachStep(lambda trainer, _: values(trainer))
    trainer = Trainer(model, "mse", "sgd", learning_rate=1e-3, ema_decay=0.999)
    trainer.fit(x, 3 * x, epochs=60, callbacks=[weights], verbose=False)
    expected = weights.seen[0]["w"].astype(np.float64)
    for step in weights.seen[1:]:
        expected = 0.999 * expected + 0.001 * step["w"].astype(np.float64)
    with trainer.averaged():
        average = trainer.parameters["w"].data.astype(np.float64)
    np.testing.assert_allclose(average, expected, rtol=2**-11)
    assert expected > weights.seen[0]["w"]  # a float16 average would not have moved


def test_bfloat16_is_widened_and_rounded_as_pytorch_does() -> None:
    from onnxtrain.runtime.dtypes import BY_NAME, narrow, widen

    values = torch.from_numpy(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    bits = values.bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(narrow(values.numpy(), BY_NAME["bfloat16"]), bits)
    np.testing.assert_array_equal(widen(bits, BY_NAME["bfloat16"]), values.bfloat16().float().numpy())


def test_divergence_takes_the_averages_back(tmp_path: Path) -> None:
    """The parameters are damaged unseen, and found out 2 steps later."""
    from onnxtrain.errors import DivergenceError

    def damage(trainer: Trainer, _: float) -> None:
        if trainer.state._store.optimizer.step == 5:  # type: ignore[union-attr]
            trainer.parameters["w"].data[...] = np.nan

    problem = problems.line()
    trainer = Trainer(problem.model, "mse", ema_decay=0.9, directory=tmp_path)
    trainer.fit(problem.x, problem.y, batch_size=10, verbose=False)
    before = trainer.evaluate(problem.x, problem.y)["loss"]
    with pytest.raises(DivergenceError):
        trainer.fit(problem.x, problem.y, batch_size=10, callbacks=[AtEachStep(damage)], verbose=False)
    for one in (trainer, Trainer.resume(tmp_path)):
        assert one.evaluate(problem.x, problem.y)["loss"] == before


def test_bad_decays_and_files(tmp_path: Path) -> None:
    problem = problems.line()
    for decay in (1.0, -0.1, "0.9", True):
        with pytest.raises(InputError, match=r"ema_decay must be a number such as 0\.999"):
            Trainer(problem.model, "mse", ema_decay=decay)  # type: ignore[arg-type]
    trainer = Trainer(problem.model, "mse", ema_decay=0.9, directory=tmp_path / "run")
    trainer.fit(problem.x, problem.y, verbose=False)
    (tmp_path / "run" / "average").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"average': .* corrupt"):
        Trainer.resume(tmp_path / "run")
    (tmp_path / "run" / "average").unlink()
    with pytest.raises(CheckpointError, match=r"No such file: '.*average'"):
        Trainer.resume(tmp_path / "run")
    other = Trainer(problems.classes().model, "cross_entropy", ema_decay=0.9, directory=tmp_path / "other")
    other.fit(problems.classes().x, problems.classes().y, verbose=False)
    (tmp_path / "run" / "average").write_bytes((tmp_path / "other" / "average").read_bytes())
    with pytest.raises(CheckpointError, match="they belong to another model"):
        Trainer.resume(tmp_path / "run")
