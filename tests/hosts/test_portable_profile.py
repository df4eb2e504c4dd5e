"""Artifacts of `profile="portable"`: what their manifest says, what is refused, and how Python feeds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from models import make_model, parse_nodes
from onnxtrain import Trainer, api
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.cli._app import app
from onnxtrain.errors import GraphBuildError, InputError, ModelLoadError
from onnxtrain.passes.io import save

from .nets import mlp, transformer


def artifacts(model: onnx.ModelProto, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Write artifacts, and read their manifest."""
    defaults = {"loss": "cross_entropy", "optimizer": "sgd", "profile": "portable"}
    generate_artifacts(model, artifact_directory=folder, **defaults | arguments)
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def ops_of(folder: Path, name: str) -> set[str]:
    model = onnx.load(folder / f"{name}.onnx")
    bodies = [model.graph, *model.functions]
    return {node.op_type for body in bodies for node in body.node if not node.domain}


def test_manifest_describes_the_input_that_the_host_feeds(tmp_path: Path) -> None:
    manifest = artifacts(transformer(), tmp_path)
    assert manifest["profile"] == "portable"
    entry = {"name": "onnxtrain.random", "dtype": "int64", "shape": [3], "holds": ["seed", "step", "run"]}
    assert manifest["host_inputs"] == [entry]
    assert "onnxtrain.random" not in {x["name"] for x in manifest["inputs"] + manifest["targets"]}
    last = onnx.load(tmp_path / "training_model.onnx").graph.input[-1]
    assert (last.name, last.type.tensor_type.elem_type) == ("onnxtrain.random", TensorProto.INT64)
    for name in ("eval_model", "inference_model", "optimizer_model"):
        assert "onnxtrain.random" not in {x.name for x in onnx.load(tmp_path / f"{name}.onnx").graph.input}
    for name in ("training_model", "eval_model", "inference_model"):
        assert "Dropout" not in ops_of(tmp_path, name)
        # Calls of functions have native kernels in Python, which compute in another order.
        assert not onnx.load(tmp_path / f"{name}.onnx").functions


def test_the_default_profile_leaves_dropout_to_onnxruntime(tmp_path: Path) -> None:
    manifest = artifacts(transformer(), tmp_path, profile="default")
    assert (manifest["profile"], manifest["host_inputs"]) == ("default", [])
    assert "Dropout" in ops_of(tmp_path, "training_model")


def test_manifest_lists_the_states_of_the_optimizer(tmp_path: Path) -> None:
    manifest = artifacts(mlp(), tmp_path, optimizer="adamw", frozen_params=["w1"])
    inputs = {x.name: x for x in onnx.load(tmp_path / "optimizer_model.onnx").graph.input}
    states = manifest["optimizer"]["states"]
    assert {x["parameter"] for x in states} == {"b1", "w2", "b2"}
    for state in states:
        shape = inputs[f"{state['parameter']}_{state['moment']}"].type.tensor_type.shape
        assert [dim.dim_value for dim in shape.dim] == state["shape"]
    described = {f"{x['parameter']}_{x['moment']}" for x in states}
    assert described == {name for name in inputs if "_momentum" in name}


def test_manifest_names_files_of_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert artifacts(mlp(), tmp_path / "small")["external_data"] == {}
    monkeypatch.setattr(save.write_models, "__defaults__", (1000,))
    values = {"w": np.ones((6, 5), np.float32)}
    # A constant of more than a kilobyte, which all models but that of the optimizer hold.
    big = numpy_helper.from_array(np.random.default_rng(0).normal(0, 1, (80, 6)).astype(np.float32))
    nodes = [
        helper.make_node("Constant", [], ["big"], value=big),
        *parse_nodes("h = MatMul(x, big)  logits = MatMul(h, w)"),
    ]
    model = make_model(nodes, {"x": ["batch", 80]}, {"logits": ["batch", 5]}, values)
    data = artifacts(model, tmp_path / "large")["external_data"]
    names = {name for files in data.values() for name in files}
    assert names == {path.name for path in (tmp_path / "large").glob("*.data")}
    assert {"training_model", "eval_model", "inference_model"} == data.keys()


@pytest.mark.parametrize(
    ("text", "dtype", "message"),
    [
        (
            "r = RandomNormalLike(x)  h = Add(x, r)  logits = MatMul(h, w)",
            "float32",
            "RandomNormalLike.*different numbers",
        ),
        (
            "h = Cast<to=16>(x)  g = Cast<to=1>(h)  logits = MatMul(g, w)",
            "float32",
            "does not support bfloat16 tensors",
        ),
        ("logits = MatMul(x, w)", "float64", "no float64 kernels"),
    ],
)
def test_ops_and_dtypes_that_hosts_lack_are_refused(
    text: str, dtype: str, message: str, tmp_path: Path
) -> None:
    values = {"w": np.ones((6, 5), dtype)}
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = make_model(
        parse_nodes(text), {"x": ["batch", 6]}, {"logits": ["batch", 5]}, values, dtype=element
    )
    with pytest.raises(GraphBuildError, match=message):
        artifacts(model, tmp_path / "portable")
    assert not (tmp_path / "portable").exists()
    assert artifacts(model, tmp_path / "default", profile="default")["profile"] == "default"


def test_unknown_profiles_and_bfloat16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="profile='web' is unknown"):
        artifacts(mlp(), tmp_path, profile="web")
    with pytest.raises(GraphBuildError, match="precision='bf16' cannot be combined"):
        artifacts(mlp(), tmp_path, precision="bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transformer")
    artifacts(transformer(), path)
    return path


X = np.random.default_rng(0).normal(0, 1, (4, 6, 8)).astype(np.float32)
LABELS = np.arange(4)


@pytest.fixture
def open_module(folder: Path) -> Callable[..., tuple[api.Module, api.Optimizer]]:
    def open_(**arguments: Any) -> tuple[api.Module, api.Optimizer]:
        state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
        module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **arguments)
        return module, api.Optimizer(folder / "optimizer_model.onnx", module)

    return open_


def test_masks_change_with_seed_step_and_run(open_module: Callable[..., Any]) -> None:
    module, optimizer = open_module()
    optimizer.set_learning_rate(0.0)
    first, second = float(module(X, LABELS)), float(module(X, LABELS))
    optimizer.step()
    third = float(module(X, LABELS))
    # The parameters are the same in all of them, as the learning rate is 0.
    assert len({first, second, third}) == 3
    assert float(open_module()[0](X, LABELS)) == first
    assert float(open_module(seed=1)[0](X, LABELS)) != first
    module, _ = open_module(seed=1)
    module.seed = 0
    assert float(module(X, LABELS)) == first
    module.eval()
    assert float(module(X, LABELS)) == float(module(X, LABELS))


@pytest.mark.parametrize("seed", [True, 1.5, "1", 2**63])
def test_seeds_that_are_no_integers_of_64_bits(open_module: Callable[..., Any], seed: object) -> None:
    with pytest.raises(InputError, match="64-bit integer"):
        open_module(seed=seed)


def test_gradients_are_those_of_the_mask(open_module: Callable[..., Any]) -> None:
    module, _ = open_module(seed=5)
    state = api.CheckpointState(module._store)
    weight = state.parameters["fc_w"].data
    direction = np.random.default_rng(0).normal(0, 1, weight.shape).astype(np.float32)
    before = weight.copy()

    def loss(step: float) -> float:
        weight[...] = before + step * direction
        # Each difference is taken at the masks of the first run.
        module._store.runs = 0
        module.lazy_reset_grad()
        return float(module(X, LABELS))

    loss(0.0)
    slope = float((state.parameters["fc_w"].grad * direction).sum())
    np.testing.assert_allclose((loss(1e-2) - loss(-1e-2)) / 2e-2, slope, rtol=1e-2, atol=1e-3)


def test_a_manifest_with_an_unknown_number_is_refused(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "training_model.onnx")
    for entry in model.metadata_props:
        entry.value = entry.value.replace('"run"', '"clock"')
    onnx.save(model, tmp_path / "model.onnx")
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(ModelLoadError, match="it must be an int64 vector of seed, step, run"):
        api.Module(tmp_path / "model.onnx", state)


def test_a_trainer_resumes_with_the_same_masks(tmp_path: Path) -> None:
    x, labels = np.concatenate([X] * 4), np.concatenate([LABELS] * 4)

    def fit(trainer: Trainer, epochs: int) -> Trainer:
        trainer.fit(x, labels, epochs=epochs, batch_size=4, verbose=False)
        return trainer

    def weights(trainer: Trainer) -> np.ndarray:
        return np.array(trainer._state.run.store.parameters["q_w"].read())

    def begin(name: str, **arguments: Any) -> Trainer:
        defaults = {"loss": "cross_entropy", "profile": "portable", "directory": tmp_path / name, "seed": 7}
        return Trainer(transformer(), **defaults | arguments)

    whole = fit(fit(begin("whole"), 1), 1)
    fit(begin("begun"), 1).save(tmp_path / "saved")
    resumed = fit(Trainer.resume(tmp_path / "saved"), 1)
    np.testing.assert_array_equal(weights(resumed), weights(whole))
    other = fit(fit(begin("other", seed=8), 1), 1)
    assert (weights(other) != weights(whole)).any()


def test_command_line(tmp_path: Path) -> None:
    onnx.save(transformer(), tmp_path / "net.onnx")
    arguments = ["artifacts", "net.onnx", "--loss", "cross_entropy", "--profile", "portable", "-o", "out"]
    arguments[1], arguments[-1] = str(tmp_path / "net.onnx"), str(tmp_path / "out")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["profile"] == "portable"
    fits = CliRunner().invoke(app, ["ops", str(tmp_path / "net.onnx"), "--profile", "portable"])
    assert fits.exit_code == 0
    assert "Fits profile portable." in fits.output
    values = {"w": np.ones((6, 5), np.float32)}
    nodes = parse_nodes("r = RandomNormalLike(x)  h = Add(x, r)  logits = MatMul(h, w)")
    nodes[0].name = "noise"
    onnx.save(make_model(nodes, {"x": ["n", 6]}, {"logits": ["n", 5]}, values), tmp_path / "noisy.onnx")
    shown = CliRunner().invoke(app, ["ops", str(tmp_path / "noisy.onnx"), "--profile", "portable", "--json"])
    assert shown.exit_code == 1
    document = json.loads(shown.output)
    assert (document["trainable"], document["fits"]) == (True, False)
    assert [(x["op"], x["node"]) for x in document["obstacles"]] == [("RandomNormalLike", "noise")]
    # Without the profile nothing stops it.
    assert CliRunner().invoke(app, ["ops", str(tmp_path / "noisy.onnx")]).exit_code == 0
