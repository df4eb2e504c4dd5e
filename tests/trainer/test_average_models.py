"""`average_models` beside numpy and `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import models
from onnxtrain import ModelCheckpoint, Trainer, average_models
from onnxtrain.errors import CheckpointError, InputError, ModelError

X = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
Y = X[:, :3].argmax(axis=1)


def weights_of(model: Any) -> dict[str, np.ndarray]:
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def outputs_of(path: Path, x: np.ndarray = X) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def files(tmp_path: Path, count: int = 3) -> list[Path]:
    paths = [tmp_path / f"{index}.onnx" for index in range(count)]
    for index, path in enumerate(paths):
        onnx.save(models.mlp(seed=index), path)
    return paths


@pytest.mark.parametrize("weights", [None, [3, 1, 0], [0.5, 0.25, 0.25]])
def test_parameters_are_means_of_numpy(tmp_path: Path, weights: list[float] | None) -> None:
    paths = files(tmp_path)
    assert average_models(paths, weights, output=tmp_path / "soup.onnx") == paths
    soup, each = weights_of(tmp_path / "soup.onnx"), [weights_of(path) for path in paths]
    assert soup.keys() == each[0].keys()
    for name, values in soup.items():
        expected = np.average([of[name].astype(np.float64) for of in each], axis=0, weights=weights)
        np.testing.assert_array_equal(values, expected.astype(np.float32), strict=True)


def test_outputs_are_those_of_torchs_averaged_model(tmp_path: Path) -> None:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(3)]
    averaged = torch.optim.swa_utils.AveragedModel(nets[0])
    paths = files(tmp_path)
    for path, net in zip(paths, nets, strict=True):
        averaged.update_parameters(net)
        model = onnx.load(path)
        del model.graph.initializer[:]
        for name, tensor in zip(("w1", "b1", "w2", "b2"), net.parameters(), strict=True):
            array = tensor.detach().numpy().T.astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        onnx.save(model, path)
    average_models(paths, output=tmp_path / "soup.onnx")
    expected = averaged(torch.tensor(X, dtype=torch.float64)).detach().numpy()
    np.testing.assert_allclose(outputs_of(tmp_path / "soup.onnx"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_precisions_are_averaged_in_float64(tmp_path: Path, dtype: Any) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    paths, arrays = [], [np.random.default_rng(i).normal(size=(5, 2)).astype(dtype) for i in range(3)]
    for index, array in enumerate(arrays):
        nodes = [
            helper.make_node("Cast", ["x"], ["c"], to=kind),
            helper.make_node("MatMul", ["c", "w"], ["m"]),
        ]
        nodes.append(helper.make_node("Cast", ["m"], ["y"], to=TensorProto.FLOAT))
        model = models.make_model(nodes, {"x": ["n", 5]}, {"y": ["n", 2]}, {})
        tensor = helper.make_tensor("w", kind, array.shape, array.tobytes(), raw=True)
        model.graph.initializer.append(tensor)
        paths.append(tmp_path / f"{index}.onnx")
        onnx.save(model, paths[-1])
    average_models(paths, output=tmp_path / "soup.onnx")
    mean = np.mean([array.astype(np.float64) for array in arrays], axis=0).astype(dtype)
    tensor = onnx.load(tmp_path / "soup.onnx").graph.initializer[0]
    assert ir.from_proto(tensor).numpy().tobytes() == mean.tobytes()


def test_equal_tensors_are_kept_even_if_infinite(tmp_path: Path) -> None:
    paths = []
    for index in range(3):
        nodes = models.parse_nodes("s = Add(x, mask)  m = Max(s, w)  y = Reshape(m, shape)")
        values = {
            "mask": np.float32([0, -np.inf]),
            "w": np.float32([index, 0.1]),
            "shape": np.int64([-1, 2]),
        }
        paths.append(tmp_path / f"{index}.onnx")
        onnx.save(models.make_model(nodes, {"x": ["n", 2]}, {"y": ["n", 2]}, values), paths[-1])
    average_models(paths, [1, 1, 5], output=tmp_path / "soup.onnx")
    soup = weights_of(tmp_path / "soup.onnx")
    # 0.1 is not a sum of its weighted parts in float32.
    np.testing.assert_array_equal(soup["mask"], np.float32([0, -np.inf]))
    np.testing.assert_array_equal(soup["w"], np.float32([11 / 7, 0.1]))


def changed(tmp_path: Path, change: Any) -> list[Path]:
    paths = files(tmp_path, 2)
    model = onnx.load(paths[1])
    change(model)
    onnx.save(model, paths[1])
    return paths


def _tanh_to_relu(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Relu"


def _alpha(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("alpha", 2.0))


def _other_sizes(model: onnx.ModelProto) -> None:
    model.CopyFrom(models.mlp(hidden=6))


def _other_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 20


def _more_nodes(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "last"
    model.graph.node.append(helper.make_node("Identity", ["logits"], ["last"]))


def _other_classes(model: onnx.ModelProto) -> None:
    helper.set_model_props(model, {"onnxtrain.images": '{"classes": ["b", "a"]}'})


def _not_a_number(model: onnx.ModelProto) -> None:
    array = numpy_helper.to_array(model.graph.initializer[0]).copy()
    array[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, "w1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_tanh_to_relu, "the node 'a' is Tanh in '.*0.onnx' and Relu in '.*1.onnx'"),
        (_alpha, r"the list of attributes of Gemm 'h' is \(\) in .* and \(name: \"alpha\" f: 2"),
        (_other_sizes, r"the parameter 'b1' is 'b1' float\[8\] in .* and 'b1' float\[6\]"),
        (_other_opset, "the opset of domain '' is 21 in .* and 20"),
        (_more_nodes, "output 0 is 'logits' .* and 'last'"),
        (_other_classes, "onnxtrain.images"),
        (_not_a_number, "the tensor 'w1' of '.*1.onnx' has NaN"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        average_models(changed(tmp_path, change), output=tmp_path / "soup.onnx")
    assert not (tmp_path / "soup.onnx").exists()


def test_different_integers_are_an_error(tmp_path: Path) -> None:
    paths = []
    for index in range(2):
        nodes = models.parse_nodes("y = Gather(w, x)")
        model = models.make_model(nodes, {}, {"y": ["n"]}, {"w": np.int8([index, 1])}, dtype=TensorProto.INT8)
        model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.INT64, ["n"]))
        paths.append(tmp_path / f"{index}.onnx")
        onnx.save(model, paths[-1])
    with pytest.raises(InputError, match=r"'w' \(int8\) has other values in '.*1.onnx'"):
        average_models(paths, output=tmp_path / "soup.onnx")


@pytest.mark.parametrize(
    ("weights", "count"), [([1, 2], 3), ([1, -1, 1], 3), ([0, 0], 2), ([float("nan"), 1], 2), ("ab", 2)]
)
def test_invalid_weights_are_refused(tmp_path: Path, weights: Any, count: int) -> None:
    with pytest.raises(InputError, match=f"must be {count} numbers"):
        average_models(files(tmp_path, count), weights, output=tmp_path / "soup.onnx")


def test_other_invalid_arguments_are_refused(tmp_path: Path) -> None:
    paths = files(tmp_path)
    with pytest.raises(InputError, match="no models"):
        average_models([], output=tmp_path / "soup.onnx")
    with pytest.raises(InputError, match="exclude each other"):
        average_models(paths, [1, 1, 1], score=lambda path: 0, output=tmp_path / "soup.onnx")
    with pytest.raises(ModelError, match="Writing the averaged model"):
        average_models(paths, output=tmp_path / "missing" / "soup.onnx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        average_models([tmp_path / "empty"], output=tmp_path / "soup.onnx")


def test_runs_and_their_checkpoints_are_exported_and_averaged(tmp_path: Path) -> None:
    trainer = Trainer(models.mlp(), "cross_entropy", learning_rate=0.05, directory=tmp_path / "run")
    saves = ModelCheckpoint(tmp_path / "saves", monitor=None, keep=2)
    trainer.fit(X, Y, epochs=4, callbacks=[saves], verbose=False)
    other = Trainer(models.mlp(), "cross_entropy", seed=1, directory=tmp_path / "other")
    other.fit(X, Y, verbose=False)
    other.export(tmp_path / "other.onnx")
    exported = []
    for index, path in enumerate([*saves.saved(), tmp_path / "run"]):
        exported.append(tmp_path / f"exported{index}.onnx")
        Trainer.resume(path).export(exported[-1])
    used = average_models(
        [tmp_path / "saves", tmp_path / "run", tmp_path / "other.onnx"], output=tmp_path / "soup.onnx"
    )
    assert used == [*saves.saved(), tmp_path / "run", tmp_path / "other.onnx"]
    each = [weights_of(path) for path in [*exported, tmp_path / "other.onnx"]]
    assert not np.array_equal(each[0]["w1"], each[1]["w1"])
    for name, values in weights_of(tmp_path / "soup.onnx").items():
        expected = np.mean([of[name].astype(np.float64) for of in each], axis=0)
        np.testing.assert_array_equal(values, expected.astype(np.float32))


def test_models_in_memory_are_not_modified(tmp_path: Path) -> None:
    protos = [models.mlp(seed=index) for index in range(2)]
    irs = [ir.from_proto(proto) for proto in protos]
    average_models([protos[0], irs[1]], output=tmp_path / "soup.onnx")
    for index in range(2):
        assert protos[index] == models.mlp(seed=index)
    np.testing.assert_array_equal(
        irs[1].graph.initializers["w1"].const_value.numpy(), weights_of(protos[1])["w1"]
    )


def test_the_soup_may_replace_one_of_its_models(tmp_path: Path) -> None:
    paths = files(tmp_path)
    expected = np.mean([weights_of(path)["w2"].astype(np.float64) for path in paths], axis=0)
    average_models(paths, output=paths[0])
    np.testing.assert_array_equal(weights_of(paths[0])["w2"], expected.astype(np.float32))


def test_a_greedy_soup_keeps_what_does_not_lower_the_score(tmp_path: Path) -> None:
    """Beside recipe 1 of Wortsman et al. written out over numbers: the score is minus the error of the only weight."""
    values, paths = [0.0, 3.0, 1.6, -4.0, 2.2], []
    for index, value in enumerate(values):
        nodes = models.parse_nodes("y = Mul(x, w)")
        model = models.make_model(nodes, {"x": ["n"]}, {"y": ["n"]}, {"w": np.float32([value])})
        paths.append(tmp_path / f"{index}.onnx")
        onnx.save(model, paths[-1])
    calls = []

    def score(path: str) -> float:
        calls.append(path)
        return -abs(float(weights_of(path)["w"][0]) - 1.9)

    kept = average_models(paths, score=score, output=tmp_path / "soup.onnx")
    # Sorted: 1.6 and 2.2 (errors .3), 3 (1.1), 0 (1.9), -4. The mean of 1.6 and 2.2 is exact, all others make it worse.
    assert kept == [paths[2], paths[4]]
    assert weights_of(tmp_path / "soup.onnx")["w"][0] == np.float32(
        (np.float64(np.float32(1.6)) + np.float32(2.2)) / 2
    )
    assert len(calls) == 5 + 4
    # A score of NaN is worse than any other.
    kept = average_models(
        paths,
        score=lambda path: 1.0 if weights_of(path)["w"][0] == 3 else np.nan,
        output=tmp_path / "soup.onnx",
    )
    assert kept == [paths[1]]


@pytest.mark.thorough
def test_a_soup_of_fine_tuned_models_is_good(tmp_path: Path) -> None:
    Trainer(models.mlp(), "cross_entropy").export(tmp_path / "base.onnx")
    base = Trainer(tmp_path / "base.onnx", "cross_entropy", learning_rate=0.05)
    base.fit(X, Y, epochs=20, verbose=False)
    base.export(tmp_path / "base.onnx")
    paths = []
    for seed in range(3):
        trainer = Trainer(tmp_path / "base.onnx", "cross_entropy", learning_rate=0.02, seed=seed)
        trainer.fit(X, Y, epochs=3, verbose=False)
        paths.append(tmp_path / f"{seed}.onnx")
        trainer.export(paths[-1])
    average_models(paths, output=tmp_path / "soup.onnx")
    assert (outputs_of(tmp_path / "soup.onnx").argmax(axis=1) == Y).mean() > 0.9
