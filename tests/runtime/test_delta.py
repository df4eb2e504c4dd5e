"""Deltas: checkpoints that hold the trained parameters only."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
from safetensors import safe_open

from onnxtrain.api import CheckpointState
from onnxtrain.errors import CheckpointError
from runtime import handmade
from runtime.handmade import open_run, train

FROZEN = ("fc1.weight", "fc1.bias")


@pytest.fixture
def run_dir(tmp_path):
    """Artifacts of the MLP whose first layer is frozen."""
    return handmade.mlp(frozen=FROZEN).save(tmp_path)


def trained(directory, **options) -> CheckpointState:
    """A state after five steps, of which `directory / "delta"` is saved."""
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    module, optimizer = open_run(directory, state)
    optimizer.set_learning_rate(0.05)
    train(module, optimizer, 5, seed=1)
    state.properties["user"] = "Ada"
    CheckpointState.save_checkpoint(state, directory / "delta", trainable_only=True, **options)
    return state


def test_the_file_is_what_the_architecture_document_says(run_dir):
    state = trained(run_dir, include_optimizer_state=True)
    with safe_open(run_dir / "delta", framework="numpy") as file:
        metadata, keys = file.metadata(), set(file.keys())
        np.testing.assert_array_equal(
            file.get_tensor("parameter/fc2.weight"), state.parameters["fc2.weight"].data
        )
    names = ["fc2.weight", "fc2.bias"]
    assert keys == {f"{kind}/{n}" for kind in ("parameter", "momentum0", "momentum1") for n in names}
    digest = hashlib.sha256()
    for name, shape in (("fc1.bias", "[8]"), ("fc1.weight", "[8,4]")):
        digest.update(f'["{name}","float32",{shape}]'.encode())
        digest.update(state.parameters[name].data.tobytes())
    assert metadata["frozen"] == digest.hexdigest()
    assert metadata["format"] == "onnxtrain-checkpoint-delta"
    assert metadata["version"] == "1"
    assert json.loads(metadata["trainable"]) == names
    assert json.loads(metadata["properties"]) == {"user": "Ada"}
    assert json.loads(metadata["optimizer"])["step"] == 5
    assert metadata["fingerprint"] == handmade.mlp(frozen=FROZEN).manifest["fingerprint"]


def test_base_and_delta_are_the_trained_state(run_dir, batch):
    state = trained(run_dir)
    again = CheckpointState.load_checkpoint(run_dir / "checkpoint", delta=run_dir / "delta")
    assert [n for n, _ in again.parameters] == [n for n, _ in state.parameters]
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(again.parameters[name].data, parameter.data)
        assert again.parameters[name].requires_grad == (name not in FROZEN)
    assert dict(again.properties) == {"user": "Ada"}
    module, optimizer = open_run(run_dir, again)
    expected, _ = open_run(run_dir, state)
    np.testing.assert_array_equal(module.eval()(*batch)[1], expected.eval()(*batch)[1])
    assert (optimizer.step_count, optimizer.get_learning_rate()) == (0, 1e-3)
    full = CheckpointState.load_checkpoint(run_dir / "checkpoint")
    assert not np.array_equal(full.parameters["fc2.weight"].data, again.parameters["fc2.weight"].data)


def test_resuming_from_a_delta_is_bit_equal_to_not_having_stopped(run_dir):
    state = trained(run_dir, include_optimizer_state=True)
    resumed = CheckpointState.load_checkpoint(run_dir / "checkpoint", delta=run_dir / "delta")
    module, optimizer = open_run(run_dir, resumed)
    assert (optimizer.step_count, optimizer.get_learning_rate()) == (5, 0.05)
    train(module, optimizer, 5, seed=2)
    train(*open_run(run_dir, state), 5, seed=2)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(resumed.parameters[name].data, parameter.data)


def test_the_base_may_have_been_trained_whole(tmp_path):
    """The backbone was trained first: in its checkpoint all parameters are trainable and have moments."""
    for name, frozen in (("whole", ()), ("personal", FROZEN)):
        (tmp_path / name).mkdir()
        handmade.mlp(frozen=frozen).save(tmp_path / name)
    state = CheckpointState.load_checkpoint(tmp_path / "whole" / "checkpoint")
    train(*open_run(tmp_path / "whole", state), 3, seed=0)
    base, delta = tmp_path / "base", tmp_path / "delta"
    CheckpointState.save_checkpoint(state, base)
    train(*open_run(tmp_path / "personal", state_of_base := CheckpointState.load_checkpoint(base)), 3, seed=1)
    CheckpointState.save_checkpoint(state_of_base, delta, trainable_only=True)
    CheckpointState.save_checkpoint(state, base, include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(base, delta=delta)
    module, optimizer = open_run(tmp_path / "personal", again)  # the moments of the base are not the delta's
    for name, parameter in state_of_base.parameters:
        np.testing.assert_array_equal(again.parameters[name].data, parameter.data)
    train(module, optimizer, 1, seed=2)
    with pytest.raises(CheckpointError, match="other values of the parameters that it does not contain"):
        CheckpointState.load_checkpoint(tmp_path / "whole" / "checkpoint", delta=delta)


def test_statistics_are_part_of_a_delta(tmp_path):
    directory = handmade.batchnorm().save(tmp_path)
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    module, _ = open_run(directory, state)
    x = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
    module(x, x)
    CheckpointState.save_checkpoint(state, directory / "delta", trainable_only=True)
    again = CheckpointState.load_checkpoint(directory / "checkpoint", delta=directory / "delta")
    assert not np.array_equal(again.statistics["bn.mean"].data, handmade.batchnorm().statistics["bn.mean"])
    for name, statistic in state.statistics:
        np.testing.assert_array_equal(again.statistics[name].data, statistic.data)


def test_frozen_parameters_of_all_kinds(tmp_path):
    arrays = {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.arange(3, dtype=np.float16),
        "double": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "naïve/name": np.array([[True], [False]]),
    }
    state = CheckpointState.from_arrays(arrays, trainable=["half"])
    CheckpointState.save_checkpoint(state, tmp_path / "base")
    state.parameters["half"].data[...] = 7
    CheckpointState.save_checkpoint(state, tmp_path / "delta", trainable_only=True)
    again = CheckpointState.load_checkpoint(tmp_path / "base", delta=tmp_path / "delta")
    np.testing.assert_array_equal(again.parameters["half"].data, np.full(3, 7, np.float16))
    for name in arrays.keys() - {"half", "empty"}:
        other = CheckpointState.load_checkpoint(tmp_path / "base")
        other.parameters[name].data[(0,) * arrays[name].ndim] += 1
        CheckpointState.save_checkpoint(other, tmp_path / "other")
        if np.array_equal(other.parameters[name].data, arrays[name]):
            continue  # True + 1 is True
        with pytest.raises(CheckpointError, match="other values"):
            CheckpointState.load_checkpoint(tmp_path / "other", delta=tmp_path / "delta")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": np.ones(3, np.float32)}, r"parameter 'v' is not in the checkpoint"),
        (
            {"w": np.ones(3, np.float32), "v": np.ones((2, 1), np.float32)},
            r"'v' is float32\[2\] in the delta and float32\[2, 1\] in the checkpoint",
        ),
        (
            {"w": np.ones(3, np.float32), "v": np.ones(2, np.float16)},
            r"'v' is float32\[2\] in the delta and float16\[2\]",
        ),
        ({"w": np.ones(4, np.float32), "v": np.ones(2, np.float32)}, r"parameters that it does not contain differ"),
        ({"x": np.ones(3, np.float32), "v": np.ones(2, np.float32)}, r"parameters that it does not contain differ"),
        *(
            ({"w": np.full(3, k, np.float32), "v": np.ones(2, np.float32)}, r"is the same, but .* other values")
            for k in (0, 1, 2, 3, 4, 6)
        ),
    ],
)  # fmt: skip
def test_another_base_is_an_error(tmp_path, other, message):
    state = CheckpointState.from_arrays({"w": np.full(3, 5, np.float32), "v": np.ones(2, np.float32)}, ["v"])
    CheckpointState.save_checkpoint(state, tmp_path / "delta", trainable_only=True)
    CheckpointState.save_checkpoint(
        CheckpointState.from_arrays(other, ["v"] if "v" in other else []), tmp_path / "b"
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointState.load_checkpoint(tmp_path / "b", delta=tmp_path / "delta")
    assert str(caught.value).startswith("Loading the delta '")
    assert "Load the checkpoint it was trained from." in str(caught.value)


def test_files_taken_for_another(run_dir):
    trained(run_dir)
    with pytest.raises(CheckpointError, match=r"it is a delta.*load_checkpoint\(full, delta="):
        CheckpointState.load_checkpoint(run_dir / "delta")
    with pytest.raises(CheckpointError, match=r"it is a full checkpoint. Save deltas with"):
        CheckpointState.load_checkpoint(run_dir / "checkpoint", delta=run_dir / "checkpoint")
    with pytest.raises(CheckpointError, match=r"No such file: '.*nothing'"):
        CheckpointState.load_checkpoint(run_dir / "checkpoint", delta=run_dir / "nothing")


def test_nominal_checkpoints_have_no_delta(run_dir):
    state = trained(run_dir)
    CheckpointState.save_checkpoint(state, run_dir / "nominal", nominal=True)
    with pytest.raises(CheckpointError, match=r"Loading the delta .* have no data yet"):
        CheckpointState.load_checkpoint(run_dir / "nominal", delta=run_dir / "delta")
    nominal = CheckpointState.load_checkpoint(run_dir / "nominal")
    with pytest.raises(CheckpointError, match=r"Saving the delta .* have no data yet"):
        CheckpointState.save_checkpoint(nominal, run_dir / "delta", trainable_only=True)
    with pytest.raises(ValueError, match="pass one of the two"):
        CheckpointState.save_checkpoint(state, run_dir / "delta", nominal=True, trainable_only=True)


def test_damaged_deltas_are_checkpoint_errors(run_dir):
    state = trained(run_dir, include_optimizer_state=True)
    content = (run_dir / "delta").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(400):
        damaged = bytearray(content)
        if trial % 2:
            damaged = damaged[: rng.integers(0, len(content))]
        else:
            damaged[rng.integers(header)] = rng.integers(256)
        (run_dir / "damaged").write_bytes(damaged)
        try:
            loaded = CheckpointState.load_checkpoint(run_dir / "checkpoint", delta=run_dir / "damaged")
        except CheckpointError:
            refused += 1
        else:  # a changed byte may leave an equivalent header, or change a property
            for name, parameter in state.parameters:
                np.testing.assert_array_equal(loaded.parameters[name].data, parameter.data)
    assert refused > 300


def test_a_failing_save_leaves_the_old_delta_and_nothing_else(tmp_path, monkeypatch):
    state = CheckpointState.from_arrays({"w": np.ones(2, np.float32)}, ["w"])
    CheckpointState.save_checkpoint(state, tmp_path / "delta", trainable_only=True)
    before = (tmp_path / "delta").read_bytes()
    state.parameters["w"].data[...] = 2

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(CheckpointError, match=r"Saving the delta .*No space left"):
            CheckpointState.save_checkpoint(state, tmp_path / "delta", trainable_only=True)
    assert (tmp_path / "delta").read_bytes() == before
    assert os.listdir(tmp_path) == ["delta"]
    with pytest.raises(CheckpointError, match=r"Saving the delta .*check that the directory exists"):
        CheckpointState.save_checkpoint(
            CheckpointState.from_arrays({}, []), tmp_path / "no" / "where", trainable_only=True
        )
