"""Checkpoint files: content, exact resume, atomicity."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors import safe_open

from onnxtrain.api import CheckpointState
from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.manifest import fingerprint
from runtime import handmade
from runtime.handmade import open_run, train


def test_the_file_is_what_the_architecture_document_says(mlp_dir):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    module, optimizer = open_run(mlp_dir, state)
    optimizer.set_learning_rate(0.25)
    train(module, optimizer, 2, seed=0)
    state.properties["epoch"] = 4
    CheckpointState.save_checkpoint(state, mlp_dir / "saved", include_optimizer_state=True)
    # The tensors begin at a multiple of eight bytes, so that a mapped file can be read in place.
    assert int.from_bytes((mlp_dir / "saved").read_bytes()[:8], "little") % 8 == 0
    with safe_open(mlp_dir / "saved", framework="numpy") as file:
        metadata = file.metadata()
        keys = set(file.keys())
        np.testing.assert_array_equal(
            file.get_tensor("parameter/fc1.weight"), state.parameters["fc1.weight"].data
        )
    trained = ["fc1.weight", "fc2.weight", "fc2.bias"]
    assert keys == {
        *(f"parameter/{n}" for n in [*trained, "fc1.bias"]),
        *(f"momentum{i}/{n}" for n in trained for i in (0, 1)),
    }
    assert metadata["format"] == "onnxtrain-checkpoint"
    assert metadata["version"] == "1"
    assert json.loads(metadata["trainable"]) == trained
    assert json.loads(metadata["order"]) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert json.loads(metadata["properties"]) == {"epoch": 4}
    assert json.loads(metadata["optimizer"]) == {
        "step": 2,
        "learning_rate": 0.25,
        "initial_learning_rate": 1e-3,
    }
    assert json.loads(metadata["nominal"]) is False
    assert metadata["fingerprint"] == module.manifest.fingerprint


def test_resuming_is_bit_equal_to_not_having_stopped(mlp_dir):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    module, optimizer = open_run(mlp_dir, state)
    optimizer.set_learning_rate(0.01)
    train(module, optimizer, 5, seed=1)
    CheckpointState.save_checkpoint(state, mlp_dir / "middle", include_optimizer_state=True)
    train(module, optimizer, 5, seed=2)

    resumed = CheckpointState.load_checkpoint(mlp_dir / "middle")
    module, optimizer = open_run(mlp_dir, resumed)
    assert (optimizer.step_count, optimizer.get_learning_rate()) == (5, 0.01)
    train(module, optimizer, 5, seed=2)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(resumed.parameters[name].data, parameter.data)


def test_optimizer_state_survives_without_an_optimizer_and_can_be_left_out(mlp_dir):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    train(*open_run(mlp_dir, state), 3, seed=1)
    CheckpointState.save_checkpoint(state, mlp_dir / "a", include_optimizer_state=True)
    CheckpointState.save_checkpoint(
        CheckpointState.load_checkpoint(mlp_dir / "a"), mlp_dir / "b", include_optimizer_state=True
    )
    assert (mlp_dir / "a").read_bytes() == (mlp_dir / "b").read_bytes()
    CheckpointState.save_checkpoint(state, mlp_dir / "c")
    _, optimizer = open_run(mlp_dir, CheckpointState.load_checkpoint(mlp_dir / "c"))
    assert (optimizer.step_count, optimizer.get_learning_rate()) == (0, 1e-3)


def test_statistics_are_part_of_a_checkpoint(tmp_path):
    directory = handmade.batchnorm().save(tmp_path)
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    module, _ = open_run(directory, state)
    x = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
    module(x, x)
    CheckpointState.save_checkpoint(state, directory / "saved")
    again = CheckpointState.load_checkpoint(directory / "saved")
    assert not np.array_equal(again.statistics["bn.mean"].data, handmade.batchnorm().statistics["bn.mean"])
    for name, statistic in state.statistics:
        np.testing.assert_array_equal(again.statistics[name].data, statistic.data)


def test_properties_keep_their_types(tmp_path):
    state = CheckpointState.from_arrays({"w": np.zeros(2, np.float32)}, ["w"])
    values = {"int": 2**60, "float": 0.1, "whole": 1.0, "str": '日本 "x"', "bool": True, "inf": float("inf")}
    for name, value in values.items():
        state.properties[name] = value
    state.properties["numpy"] = np.int64(3)
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    properties = CheckpointState.load_checkpoint(tmp_path / "c").properties
    assert dict(properties) == {**values, "bool": 1, "numpy": 3}
    assert {n: type(v) for n, v in properties} == {
        "int": int, "float": float, "whole": float, "str": str, "bool": int, "inf": float, "numpy": int,
    }  # fmt: skip
    assert len(properties) == 7
    assert "int" in properties
    assert repr(properties).startswith("Properties({'int': 1152921504606846976")
    with pytest.raises(TypeError, match=r"expected int, float or str, received list"):
        state.properties["bad"] = [1]  # type: ignore[assignment]


def test_shapes_and_dtypes_of_all_kinds(tmp_path):
    arrays = {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.arange(3, dtype=np.float16),
        "double": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "naïve/name": np.array([[True], [False]]),
        "big endian": np.arange(4, dtype=">i4"),
    }
    state = CheckpointState.from_arrays(arrays, trainable=["half"])
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    again = CheckpointState.load_checkpoint(tmp_path / "c")
    assert [n for n, _ in again.parameters] == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(again.parameters[name].data, array)
        assert again.parameters[name].data.shape == array.shape
    assert again.parameters["double"].data.dtype == np.float64


def test_a_nominal_checkpoint_has_shapes_and_no_data(mlp_dir, batch):
    full = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    CheckpointState.save_checkpoint(full, mlp_dir / "nominal", nominal=True)
    with safe_open(mlp_dir / "nominal", framework="numpy") as file:
        assert list(file.keys()) == []
        assert json.loads(file.metadata()["shapes"])["fc1.weight"] == ["float32", [8, 4]]
    state = CheckpointState.load_checkpoint(mlp_dir / "nominal")
    CheckpointState.save_checkpoint(state, mlp_dir / "again")
    assert (mlp_dir / "again").read_bytes() == (mlp_dir / "nominal").read_bytes()
    module, optimizer = open_run(mlp_dir, state)
    for act in (
        lambda: state.parameters["fc1.weight"].data,
        lambda: module(*batch),
        lambda: module.eval()(*batch),
        lambda: module.get_contiguous_parameters(),
        lambda: module.export_model_for_inferencing(mlp_dir / "out.onnx", ["logits"]),
    ):
        with pytest.raises(CheckpointError, match=r"no data yet.*copy_buffer_to_parameters"):
            act()
    source, _ = open_run(mlp_dir, full)
    module.copy_buffer_to_parameters(source.get_contiguous_parameters(True), trainable_only=True)
    assert state.parameters["fc1.weight"].data.shape == (8, 4)
    with pytest.raises(CheckpointError, match=r"1 of 4 parameters.*'fc1\.bias'"):
        CheckpointState.save_checkpoint(state, mlp_dir / "partial")
    module.copy_buffer_to_parameters(source.get_contiguous_parameters(), trainable_only=False)
    np.testing.assert_array_equal(module.train()(*batch)[1], source(*batch)[1])
    optimizer.step()
    CheckpointState.save_checkpoint(state, mlp_dir / "complete")
    assert CheckpointState.load_checkpoint(mlp_dir / "complete").parameters["fc1.bias"].data.shape == (8,)


def test_nominal_checkpoint_keeps_statistics(tmp_path):
    run = handmade.batchnorm()
    CheckpointState.save_checkpoint(run.state(), tmp_path / "nominal", nominal=True)
    state = CheckpointState.load_checkpoint(tmp_path / "nominal")
    np.testing.assert_array_equal(state.statistics["bn.var"].data, run.statistics["bn.var"])


def test_fingerprint_ignores_order_and_sees_everything_else():
    a, b = ("a", "float32", (2, 3)), ("b", "float32", (4,))
    base = fingerprint([a, b])
    assert base == fingerprint([b, a])
    others = [
        fingerprint([a]),
        fingerprint([a], [b]),
        fingerprint([a, ("b", "float16", (4,))]),
        fingerprint([a, ("b", "float32", (2, 2))]),
        fingerprint([a, ("c", "float32", (4,))]),
    ]
    assert len({base, *others}) == 6


def test_damaged_files_are_checkpoint_errors(mlp_dir):
    content = (mlp_dir / "checkpoint").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)

    def damaged(trial):
        if trial % 2:
            return content[: rng.integers(0, len(content))]
        changed = bytearray(content)
        changed[rng.integers(header)] = rng.integers(256)
        return changed

    # A changed byte may leave an equivalent header; truncation never does.
    handmade.check_damaged_checkpoints(mlp_dir / "damaged", map(damaged, range(400)), least=300)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 100, b"ODTC" * 4, b"\x10\0\0\0ODTC", os.urandom(500)])
def test_anything_else_is_no_checkpoint(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"Checkpoint verification failed\."):
        CheckpointState.load_checkpoint(tmp_path / "file")


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"Checkpoint verification failed\. No such file:"):
        CheckpointState.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"Checkpoint verification failed\."):
        CheckpointState.load_checkpoint(tmp_path)


def test_a_failing_save_leaves_the_old_file_and_nothing_else(tmp_path):
    state = CheckpointState.from_arrays({"w": np.ones(2, np.float32)}, ["w"])
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    state.properties["bad"] = 1
    state._store.properties["bad"] = object()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        CheckpointState.save_checkpoint(state, tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == before
    assert os.listdir(tmp_path) == ["c"]
    with pytest.raises(CheckpointError, match=r"check that the directory exists"):
        CheckpointState.save_checkpoint(CheckpointState.from_arrays({}, []), tmp_path / "no" / "where")


def test_a_link_stays_a_link(tmp_path):
    state = CheckpointState.from_arrays({"w": np.ones(2, np.float32)}, ["w"])
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "c")
    CheckpointState.save_checkpoint(state, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert CheckpointState.load_checkpoint(tmp_path / "real" / "c").parameters["w"].data[0] == 1


def test_saves_of_one_file_from_many_threads_do_not_disturb_each_other(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    def save(value: int) -> None:
        array = np.full((100, 100), value, np.float32)
        state = CheckpointState.from_arrays({"w": array}, ["w"])
        for _ in range(10):
            CheckpointState.save_checkpoint(state, tmp_path / "c")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    data = CheckpointState.load_checkpoint(tmp_path / "c").parameters["w"].data
    assert (data == data[0, 0]).all()
    assert os.listdir(tmp_path) == ["c"]
