"""Checkpoints of onnxruntime-training, made by that package itself (`data/make_legacy.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import CheckpointError
from runtime import handmade

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def expected():
    with np.load(DATA / "legacy.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", ["legacy_plain", "legacy_full"])
def test_parameters_and_properties_are_read_bit_exactly(name, expected):
    state = CheckpointState.load_checkpoint(DATA / name)
    assert len(state.parameters) == 4
    for parameter, view in state.parameters:
        np.testing.assert_array_equal(view.data, expected[f"before/{parameter}"])
        assert view.data.dtype == np.float32
        assert view.requires_grad == (parameter != "fc1.bias")
    assert dict(state.properties) == {"epoch": 7, "best": 0.25, "name": "größe"}


def train(module, optimizer, expected):
    """Three steps on the batch that the old package trained on."""
    for _ in range(3):
        module(expected["x"], expected["labels"])
        optimizer.step()
        module.lazy_reset_grad()


def test_training_resumes_where_the_old_package_stopped(expected):
    run = handmade.mlp()
    state = CheckpointState.load_checkpoint(DATA / "legacy_full")
    module = Module(run.training.SerializeToString(), state)
    model = handmade.optimizer_model(run.manifest, run.parameters, weight_decay=0.0)
    optimizer = Optimizer(model.SerializeToString(), module)
    assert optimizer.step_count == 3
    assert optimizer.get_learning_rate() == pytest.approx(1e-3)
    train(module, optimizer, expected)
    for name, parameter in state.parameters:
        np.testing.assert_allclose(parameter.data, expected[f"after/{name}"], rtol=0, atol=1e-7)
        if parameter.requires_grad:
            assert np.abs(parameter.data - expected[f"before/{name}"]).max() > 1e-4


def test_sgd_resumes_without_the_moments_that_the_old_package_kept_for_it(expected):
    run = handmade.mlp(optimizer=handmade.SGD)
    state = CheckpointState.load_checkpoint(DATA / "legacy_sgd")
    module = Module(run.training.SerializeToString(), state)
    optimizer = Optimizer(run.optimizer.SerializeToString(), module)
    assert optimizer.step_count == 3
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, expected[f"sgd_before/{name}"])
    train(module, optimizer, expected)
    for name, parameter in state.parameters:
        np.testing.assert_allclose(parameter.data, expected[f"sgd_after/{name}"], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "other"), [("legacy_full", handmade.SGD), ("legacy_sgd", handmade.ADAMW)], ids=["SGD", "AdamW"]
)
def test_state_of_another_optimizer_is_an_error(name, other):
    run = handmade.mlp(optimizer=other)
    module = Module(run.training.SerializeToString(), CheckpointState.load_checkpoint(DATA / name))
    with pytest.raises(CheckpointError, match="optimizer state does not fit"):
        Optimizer(run.optimizer.SerializeToString(), module)


def test_nominal_checkpoint_is_completed_by_a_buffer(expected):
    state = CheckpointState.load_checkpoint(DATA / "legacy_nominal")
    run = handmade.mlp()
    with pytest.raises(CheckpointError, match="has no shapes"):
        state.parameters["fc2.bias"] = np.zeros(3, np.float32)
    module = Module(run.training.SerializeToString(), state)
    with pytest.raises(CheckpointError, match="has no data yet"):
        _ = state.parameters["fc1.weight"].data
    order = [p["name"] for p in run.manifest["parameters"]]
    flat = np.concatenate([expected[f"before/{name}"].reshape(-1) for name in order])
    module.copy_buffer_to_parameters(flat, trainable_only=False)
    for name in order:
        np.testing.assert_array_equal(state.parameters[name].data, expected[f"before/{name}"])


def test_a_read_checkpoint_is_saved_in_the_new_format(tmp_path, expected):
    state = CheckpointState.load_checkpoint(DATA / "legacy_full")
    CheckpointState.save_checkpoint(state, tmp_path / "new", include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(tmp_path / "new")
    assert dict(again.properties) == dict(state.properties)
    for name, parameter in again.parameters:
        np.testing.assert_array_equal(parameter.data, expected[f"before/{name}"])
    run = handmade.mlp()
    model = run.optimizer.SerializeToString()
    assert Optimizer(model, Module(run.training.SerializeToString(), again)).step_count == 3


def test_legacy_statistics_are_frozen_parameters_there_and_statistics_here(tmp_path):
    run = handmade.batchnorm()
    everything = {**run.parameters, **run.statistics}  # as the old package holds them
    state = CheckpointState.from_arrays(everything, trainable=["a"])
    Module(run.training.SerializeToString(), state)
    assert [name for name, _ in state.parameters] == list(run.parameters)
    assert [name for name, _ in state.statistics] == list(run.statistics)


@pytest.mark.parametrize("name", ["legacy_plain", "legacy_full", "legacy_nominal"])
def test_damaged_files_are_checkpoint_errors(name, tmp_path):
    content = (DATA / name).read_bytes()
    rng = np.random.default_rng(0)

    def damaged(trial):
        if trial % 2:
            return content[: rng.integers(8, len(content))]
        changed = bytearray(content)
        for position in rng.integers(8, len(content), rng.integers(1, 4)):
            changed[position] = rng.integers(256)
        return changed

    # A flipped bit in the data itself goes unnoticed; missing bytes are seen.
    handmade.check_damaged_checkpoints(tmp_path / "damaged", map(damaged, range(400)), least=150)
