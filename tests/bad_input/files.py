"""Missing, damaged and mistaken files of a run."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import safetensors.numpy

import models
from bad_input.bench import Bench, X, Y, case, cases, corrupt, truncate
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import ModelLoadError

MODELS = {
    "training model": "training_model.onnx",
    "eval model": "eval_model.onnx",
    "optimizer model": "optimizer_model.onnx",
}


def load(bench: Bench, role: str, path: Path) -> object:
    """Loads `path` as the model of a role, with the rest as it should be."""
    state = CheckpointState.load_checkpoint(bench.run / "checkpoint")
    if role == "training model":
        return Module(path, state)
    if role == "eval model":
        return Module(bench.run / "training_model.onnx", state, path)
    return Optimizer(path, Module(bench.run / "training_model.onnx", state))


def add_model_cases(role: str, file: str) -> None:
    @case(f"{role} is missing")
    def _(bench: Bench) -> None:
        (bench.run / file).unlink()
        load(bench, role, bench.run / file)

    @case(f"{role} is truncated")
    def _(bench: Bench) -> None:
        truncate(bench.run / file, lambda: load(bench, role, bench.run / file))

    @case(f"{role} is corrupt")
    def _(bench: Bench) -> None:
        corrupt(bench.run / file, lambda: load(bench, role, bench.run / file))

    @case(f"{role} is an ordinary model")
    def _(bench: Bench) -> None:
        load(bench, role, bench.model_file())

    @case(f"{role} is a different model of the run")
    def _(bench: Bench) -> None:
        wrong = "optimizer_model.onnx" if role == "training model" else "training_model.onnx"
        load(bench, role, bench.run / wrong)


for _role, _file in MODELS.items():
    add_model_cases(_role, _file)


cases(
    {
        "eval model of a different run": lambda b: load(b, "eval model", b.other / "eval_model.onnx"),
        "optimizer model of a different run": lambda b: load(
            b, "optimizer model", b.other / "optimizer_model.onnx"
        ),
        "external data of the training model is missing": lambda b: external_data_of_the_training_model(
            b, Path.unlink
        ),
        "external data of the training model is truncated": lambda b: external_data_of_the_training_model(
            b, lambda path: path.write_bytes(b"0" * 100)
        ),
        "checkpoint is missing": lambda b: CheckpointState.load_checkpoint(b.directory / "checkpoint"),
        "checkpoint is a directory": lambda b: CheckpointState.load_checkpoint(b.run),
        "checkpoint of a different model": lambda b: Module(
            b.run / "training_model.onnx", CheckpointState.load_checkpoint(b.other / "checkpoint")
        ),
        "delta without its base checkpoint": lambda b: CheckpointState.load_checkpoint(
            save_delta(b, b.state)
        ),
        "delta is a full checkpoint": lambda b: CheckpointState.load_checkpoint(
            b.run / "checkpoint", delta=b.run / "checkpoint"
        ),
        "checkpoint cannot be written": lambda b: CheckpointState.save_checkpoint(
            b.state, b.directory / "nowhere" / "checkpoint"
        ),
        "path instead of a state": lambda b: Module(b.run / "training_model.onnx", str(b.run / "checkpoint")),
        "device is unknown": lambda b: b.module(device="gpu"),
    }
)


@case("optimizer state has a symbolic size")
def _(bench: Bench) -> None:
    path = bench.run / "optimizer_model.onnx"
    model = onnx.load(path)
    for value in model.graph.input:
        if value.name == "b1_momentum0":
            value.type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(model, path)
    load(bench, "optimizer model", path)


@case("artifacts of a newer version")
def _(bench: Bench) -> None:
    path = bench.run / "training_model.onnx"
    model = onnx.load(path)
    for entry in model.metadata_props:
        if entry.key == "onnxtrain.manifest":
            entry.value = json.dumps(json.loads(entry.value) | {"version": 3})
    onnx.save(model, path)
    load(bench, "training model", path)


def external_data_of_the_training_model(bench: Bench, damage: Callable[[Path], None]) -> None:
    """A constant of the training model is moved to a file beside it, which is then damaged."""
    path = bench.run / "training_model.onnx"
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(5000, np.float32), "constant"))
    model.graph.node.append(onnx.helper.make_node("Identity", ["constant"], ["copy"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("copy", 1, [5000]))
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    damage(bench.run / "weights.bin")
    load(bench, "training model", path)


@case("external data of the training model lies outside its directory")
def _(bench: Bench) -> None:
    def link(path: Path) -> None:
        path.rename(bench.directory / "elsewhere.bin")
        path.symlink_to(bench.directory / "elsewhere.bin")

    external_data_of_the_training_model(bench, link)


@case("training model given as bytes has external data")
def _(bench: Bench) -> None:
    with contextlib.suppress(ModelLoadError):
        external_data_of_the_training_model(bench, Path.unlink)
    Module((bench.run / "training_model.onnx").read_bytes(), bench.state)


@case("journal of an interrupted save is corrupt")
def _(bench: Bench) -> None:
    (bench.run / ".onnxtrain-commit").write_text('{"moves": [["a", "../b"]], "remove": []}')
    CheckpointState.load_checkpoint(bench.run / "checkpoint")


@case("checkpoint is truncated")
def _(bench: Bench) -> None:
    path = bench.run / "checkpoint"
    truncate(path, lambda: CheckpointState.load_checkpoint(path))


@case("checkpoint is corrupt")
def _(bench: Bench) -> None:
    path = bench.run / "checkpoint"
    corrupt(path, lambda: CheckpointState.load_checkpoint(path))


@case("checkpoint of onnxruntime-training is truncated")
def _(bench: Bench) -> None:
    path = bench.directory / "checkpoint"
    shutil.copy(Path(__file__).parents[1] / "runtime" / "data" / "legacy_full", path)
    truncate(path, lambda: CheckpointState.load_checkpoint(path))


@case("checkpoint is an ordinary safetensors file")
def _(bench: Bench) -> None:
    path = bench.directory / "model.safetensors"
    safetensors.numpy.save_file({"w": X}, path)
    CheckpointState.load_checkpoint(path)


@case("checkpoint has the state of a different optimizer")
def _(bench: Bench) -> None:
    module = bench.module()
    optimizer = bench.optimizer(module)
    module(X, Y)
    optimizer.step()
    CheckpointState.save_checkpoint(bench.state, bench.run / "checkpoint", include_optimizer_state=True)
    load(bench, "optimizer model", bench.sgd / "optimizer_model.onnx")


def save_delta(bench: Bench, state: CheckpointState) -> Path:
    path = bench.directory / "delta"
    CheckpointState.save_checkpoint(state, path, trainable_only=True)
    return path


@case("delta is truncated")
def _(bench: Bench) -> None:
    path = save_delta(bench, bench.state)
    truncate(path, lambda: CheckpointState.load_checkpoint(bench.run / "checkpoint", delta=path))


@case("delta of a different model")
def _(bench: Bench) -> None:
    path = save_delta(bench, CheckpointState.load_checkpoint(bench.other / "checkpoint"))
    CheckpointState.load_checkpoint(bench.run / "checkpoint", delta=path)


@case("delta of a different base checkpoint")
def _(bench: Bench) -> None:
    arrays = {name: parameter.data + 1 for name, parameter in bench.state.parameters}
    path = save_delta(bench, CheckpointState.from_arrays(arrays, trainable=["w2", "b2"]))
    CheckpointState.load_checkpoint(bench.run / "checkpoint", delta=path)


@case("ONNX Runtime has no kernel for the dtype")
def _(bench: Bench) -> None:
    kernel = np.ones((1, 1, 3, 3), np.float64)
    shape = ["n", 1, 8, 8]
    node = onnx.helper.make_node("Conv", ["x", "kernel"], ["y"], pads=[1, 1, 1, 1])
    model = models.make_model(
        [node], {"x": shape}, {"y": shape}, {"kernel": kernel}, dtype=onnx.TensorProto.DOUBLE
    )
    bench.generate(model)
    state = CheckpointState.load_checkpoint(bench.directory / "generated" / "checkpoint")
    Module(bench.directory / "generated" / "training_model.onnx", state)


@case("checkpoint of a run is missing")
def _(bench: Bench) -> None:
    from onnxtrain import Trainer

    (bench.run / "checkpoint").unlink()
    Trainer.resume(bench.run)


@case("checkpoint of a run lacks the trainer's settings")
def _(bench: Bench) -> None:
    from onnxtrain import Trainer

    directory = bench.directory / "trainer"
    trainer = Trainer(models.mlp(), "cross_entropy", directory=directory)
    values = {name: parameter.data for name, parameter in trainer.parameters}
    CheckpointState.save_checkpoint(
        CheckpointState.from_arrays(values, list(values)), directory / "checkpoint"
    )
    Trainer.resume(directory)
