"""Training by the on-device API on a GPU beside the same training on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import models
from onnxtrain import Trainer
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import InputError, ModelLoadError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.store import Buffer
from tolerances import norm_relative_error
from trainer import problems

STEPS = 20
RNG = np.random.default_rng(0)

MODELS: dict[str, tuple[onnx.ModelProto, tuple[int, ...]]] = {
    "mlp": (models.mlp(), (8, 4)),
    "conv_bn": (models.conv_bn(), (8, 2, 6, 6)),
}
"""Model, and shape of its input; three classes."""


def _open(
    folder: Path, device: str, checkpoint: str = "checkpoint"
) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", device=device)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def _parameters(state: CheckpointState) -> dict[str, Any]:
    return {name: np.array(parameter.data) for name, parameter in state.parameters}


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_on_the_cpu(name: str, optimizer: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, shape = MODELS[name]
    generate_artifacts(
        model,
        profile="portable" if name == "conv_bn" else "default",
        requires_grad=[i.name for i in model.graph.initializer if not i.name.endswith((".mean", ".var"))],
        loss="cross_entropy",
        optimizer=optimizer,
        artifact_directory=tmp_path,
        **options,
    )
    x, y = RNG.normal(size=shape).astype(np.float32), RNG.integers(0, 3, shape[0])
    found = {}
    for device in ("cpu", "cuda"):
        state, module, step = _open(tmp_path, device)
        losses = []
        for number in range(STEPS):
            losses.append(float(module(x, y)))
            # Every third step adds up two gradients.
            if number % 3 == 0:
                module(x[::-1], y[::-1])
            step.step()
            module.lazy_reset_grad()
        module.eval()
        found[device] = np.array([*losses, float(module(x, y))]), _parameters(state)
    np.testing.assert_allclose(found["cuda"][0], found["cpu"][0], rtol=2e-4)
    for key, value in found["cpu"][1].items():
        assert norm_relative_error(found["cuda"][1][key], value) <= 2e-4, key


def test_batch_norm_in_training_mode_names_the_profile_that_can(tmp_path: Path) -> None:
    generate_artifacts(models.conv_bn(), loss="cross_entropy", optimizer="sgd", artifact_directory=tmp_path)
    with pytest.raises(ModelLoadError, match=r"training-mode BatchNormalization.*profile='portable'"):
        _open(tmp_path, "cuda")


def test_resumes_from_the_checkpoint_of_another_device(tmp_path: Path) -> None:
    generate_artifacts(
        models.mlp(),
        requires_grad=["w1", "b1", "w2", "b2"],
        loss="cross_entropy",
        optimizer="adamw",
        artifact_directory=tmp_path,
    )
    x, y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.integers(0, 3, 8)
    state, module, step = _open(tmp_path, "cuda")
    for _ in range(3):
        module(x, y)
        step.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    after: dict[str, dict[str, Any]] = {}
    for device in ("cpu", "cuda"):
        again, module, step = _open(tmp_path, device, "saved")
        for name, value in _parameters(state).items():
            np.testing.assert_array_equal(_parameters(again)[name], value)
        for _ in range(3):
            module(x, y)
            step.step()
            module.lazy_reset_grad()
        after[device] = _parameters(again)
    for name, value in after["cpu"].items():
        assert norm_relative_error(after["cuda"][name], value) <= 2e-4, name


def test_values_on_the_gpu_are_taken_and_returned(tmp_path: Path) -> None:
    generate_artifacts(
        models.mlp(),
        requires_grad=["w1", "b1"],
        loss="cross_entropy",
        optimizer="sgd",
        artifact_directory=tmp_path,
    )
    x, y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.integers(0, 3, 8)
    _, module, _ = _open(tmp_path, "cuda")
    values = [ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for array in (x, y)]
    loss = module(*values)
    assert isinstance(loss, ort.OrtValue)
    assert loss.device_name() == "cuda"
    module.lazy_reset_grad()
    np.testing.assert_array_equal(loss.numpy(), module(x, y))


def test_trainer_learns_as_on_the_cpu(tmp_path: Path) -> None:
    problem = problems.classes()
    histories = {}
    for device in ("cpu", "cuda"):
        trainer = Trainer(
            problem.model,
            loss=problem.loss,
            metrics=["accuracy"],
            device=device,
            directory=tmp_path / device,
            seed=3,
        )
        trainer.fit(problem.x, problem.y, epochs=3, batch_size=7)
        histories[device] = trainer.evaluate(problem.x, problem.y)
        predictions = trainer.predict(problem.x)
        exported = trainer.export(tmp_path / f"{device}.onnx")
        session = ort.InferenceSession(
            str(exported or tmp_path / f"{device}.onnx"), providers=["CPUExecutionProvider"]
        )
        (plain,) = session.run(None, {"x": problem.x})
        np.testing.assert_allclose(predictions, plain, rtol=1e-3, atol=1e-4)
    for name, value in histories["cpu"].items():
        np.testing.assert_allclose(histories["cuda"][name], value, rtol=1e-3, err_msg=name)


def test_a_bfloat16_parameter_is_refused_on_the_gpu() -> None:
    with pytest.raises(InputError, match="Moving a bfloat16 tensor"):
        Buffer.zeros(dtypes.BY_NAME["bfloat16"], (2,), parse_device("cuda"))
