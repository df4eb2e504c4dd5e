"""Checkpoints, external data, optimizer models, and training with what blocks have built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from fresh_process import python
from onnxblock.nets import mlp, parameters_of, run, torch_forward, torch_mlp
from onnxtrain import onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import CheckpointError, GraphBuildError, ModelLoadError, NothingToTrain
from onnxtrain.onnxblock import optim
from tolerances import norm_relative_error


class Regression(onnxblock.TrainingBlock):
    def build(self, y: str) -> str:
        return onnxblock.loss.MSELoss()(y)


def built(model: onnx.ModelProto, path: Path | None = None, *, frozen: tuple[str, ...] = ()) -> Regression:
    block = Regression()
    for name in frozen:
        block.requires_grad(name, False)
    with onnxblock.base(model, path):
        block("y")
    return block


def test_checkpoint_holds_trainable_and_frozen_parameters(tmp_path: Path) -> None:
    model = mlp()
    onnxblock.save_checkpoint(built(model, frozen=("b0",)).parameters(), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    loaded = dict(state.parameters)
    assert {name: p.requires_grad for name, p in loaded.items()} == {
        "w0": True,
        "w1": True,
        "b1": True,
        "b0": False,
    }
    for name, array in parameters_of(model).items():
        np.testing.assert_array_equal(loaded[name].data, array)


def test_nominal_checkpoint_has_no_data(tmp_path: Path) -> None:
    onnxblock.save_checkpoint(built(mlp()).parameters(), tmp_path / "nominal", nominal_checkpoint=True)
    state = CheckpointState.load_checkpoint(tmp_path / "nominal")
    with pytest.raises(CheckpointError, match="no data yet"):
        _ = state.parameters["w0"].data
    with pytest.raises(CheckpointError, match="no data yet"):
        onnxblock.load_checkpoint_to_model(tmp_path / "nominal", mlp())


def test_loading_into_a_model_replaces_its_parameters(tmp_path: Path) -> None:
    trained, model = mlp(seed=1), mlp(seed=2)
    onnxblock.save_checkpoint(built(trained).parameters(), tmp_path / "checkpoint")
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)
    x = np.random.default_rng(0).normal(0, 1, (3, 6)).astype(np.float32)
    np.testing.assert_array_equal(run(model, {"x": x})["y"], run(trained, {"x": x})["y"])


@pytest.mark.parametrize("sizes", [(6, 9, 4), (6, 8)], ids=["another width", "fewer layers"])
def test_loading_into_another_model_is_reported(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    onnxblock.save_checkpoint(built(mlp((6, 8, 4))).parameters(), tmp_path / "checkpoint")
    if sizes == (6, 8):  # has the same first layer: what it lacks is left out
        model = mlp(sizes, seed=4)
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)
        np.testing.assert_array_equal(parameters_of(model)["w0"], parameters_of(mlp())["w0"])
        return
    with pytest.raises(CheckpointError, match=r"w0 is float32\[6, 8\] in the checkpoint"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", mlp(sizes))


def test_loading_into_a_model_without_any_of_the_names_is_reported(tmp_path: Path) -> None:
    onnxblock.save_checkpoint(built(mlp()).parameters(), tmp_path / "checkpoint")
    model = mlp()
    for tensor in model.graph.initializer:
        tensor.name = "other." + tensor.name
    with pytest.raises(CheckpointError, match="none of the checkpoint's 4 tensors"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)


@pytest.mark.parametrize("parameters", [None, [], 3], ids=repr)
def test_parameters_of_the_wrong_kind_are_reported(tmp_path: Path, parameters: Any) -> None:
    with pytest.raises(GraphBuildError, match="trainable, frozen"):
        onnxblock.save_checkpoint(parameters, tmp_path / "checkpoint")


def test_a_parameter_in_both_lists_is_reported(tmp_path: Path) -> None:
    trainable, _ = built(mlp()).parameters()
    with pytest.raises(GraphBuildError, match="w0 given more than once"):
        onnxblock.save_checkpoint((trainable, trainable[:1]), tmp_path / "checkpoint")


def _external(folder: Path) -> Path:
    folder.mkdir()
    model = mlp((6, 1024, 4))
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=True, size_threshold=1024, location="weights.bin"
    )
    return folder / "model.onnx"


def test_external_data_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _external(tmp_path / "model")
    block = built(onnx.load(path, load_external_data=False), path)
    trainable, _ = block.parameters()
    big = {t.name: t for t in trainable if t.data_location == TensorProto.EXTERNAL}
    assert "w0" in big
    assert not big["w0"].raw_data
    monkeypatch.chdir(tmp_path / "model")
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    for name, array in parameters_of(mlp((6, 1024, 4))).items():
        np.testing.assert_array_equal(state.parameters[name].data, array)


def test_missing_external_data_is_reported(tmp_path: Path) -> None:
    path = _external(tmp_path / "model")
    trainable, frozen = built(onnx.load(path, load_external_data=False), path).parameters()
    (path.parent / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match="cannot read the data of 'w0'"):
        onnxblock.save_checkpoint((trainable, frozen), tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


_STREAM = """
import resource, sys, numpy as np, onnx
from onnx import TensorProto, helper
from onnxtrain import onnxblock
folder, megabytes = sys.argv[1], int(sys.argv[2])
rows = megabytes * 1024 * 1024 // 4 // 64
np.memmap(f"{folder}/w.bin", np.float32, "w+", shape=(rows, 64)).flush()
tensor = TensorProto(name="w", dims=[rows, 64], data_type=1, data_location=TensorProto.EXTERNAL)
tensor.external_data.add(key="location", value="w.bin")
info = [helper.make_tensor_value_info("x", 7, ["n"]), helper.make_tensor_value_info("y", 1, ["n", 64])]
graph = helper.make_graph([helper.make_node("Gather", ["w", "x"], ["y"])], "g", info[:1], info[1:], [tensor])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
class Frozen(onnxblock.TrainingBlock):
    def build(self, y):
        return onnxblock.loss.MSELoss()(onnxblock.blocks.Linear(64, 2)(y))
block = Frozen()
block.requires_grad("w", False)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, ((used + megabytes * 512) * 1024, resource.RLIM_INFINITY))
try:
    np.fromfile(f"{folder}/w.bin", np.float32)
except MemoryError:
    print("the limit holds")
with onnxblock.base(model, f"{folder}/model.onnx"):
    block("y")
onnxblock.save_checkpoint(block.parameters(), f"{folder}/checkpoint", nominal_checkpoint=True)
onnxblock.save_checkpoint(block.parameters(), f"{folder}/checkpoint")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_external_weights_are_neither_read_when_building_nor_copied_when_saving(tmp_path: Path) -> None:
    """In a process that may allocate half the size of the weights."""
    script = tmp_path / "stream.py"
    script.write_text(_STREAM)
    size = 256
    done = python(script, tmp_path, str(size), path=filter(None, sys.path))
    assert done.stdout.strip() == "the limit holds"
    assert (tmp_path / "checkpoint").stat().st_size > size * 1024 * 1024


def _numpy_adamw(
    w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, step: int, lr: float
) -> list[np.ndarray]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    u = w - lr * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * m / (np.sqrt(v) + 1e-6)
    return [u - lr * 0.01 * u, m, v]


def test_adamw_block_is_the_formula_of_the_old_package() -> None:
    block = optim.AdamW(weight_decay=0.01)
    parameters = built(mlp()).parameters()
    with onnxblock.empty_base():
        outputs = block(parameters)
    model = block.to_model_proto()
    assert outputs[:3] == ("w0_updated", "w0_momentum0_updated", "w0_momentum1_updated")
    generator = np.random.default_rng(3)
    feeds: dict[str, np.ndarray] = {"learning_rate": np.array(1e-2, np.float32), "step": np.array(3)}
    expected = {}
    for tensor in parameters[0]:
        w, g, m, v = (generator.uniform(0.1, 1, tuple(tensor.dims)) for _ in range(4))
        feeds |= dict(zip((tensor.name, f"{tensor.name}_grad"), (w.astype("f"), g.astype("f")), strict=True))
        feeds |= {f"{tensor.name}_momentum0": m.astype("f"), f"{tensor.name}_momentum1": v.astype("f")}
        expected[tensor.name] = _numpy_adamw(w, g, m, v, 3, 1e-2)
    result = run(model, feeds)
    for name, values in expected.items():
        for suffix, value in zip(("", "_momentum0", "_momentum1"), values, strict=True):
            assert norm_relative_error(result[f"{name}{suffix}_updated"], value) < 1e-6


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_sgd_with_clipping(max_norm: float) -> None:
    block = optim.SGD(clip_grad=optim.ClipGradNorm(max_norm))
    parameters = built(mlp()).parameters()
    with onnxblock.empty_base():
        block(parameters)
    gradients = {
        t.name: np.random.default_rng(1).normal(0, 1, tuple(t.dims)).astype("f") for t in parameters[0]
    }
    values = {t.name: numpy_helper.to_array(t) for t in parameters[0]}
    feeds = values | {f"{name}_grad": g for name, g in gradients.items()}
    feeds |= {"learning_rate": np.array(0.1, np.float32)}
    model = block.to_model_proto()
    if "step" in {value.name for value in model.graph.input}:
        feeds["step"] = np.array(1)
    result = run(model, feeds)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
    scale = min(1.0, max_norm / norm)
    for name, value in values.items():
        assert norm_relative_error(result[f"{name}_updated"], value - 0.1 * scale * gradients[name]) < 1e-6


def test_clipping_called_with_names_of_gradients() -> None:
    names = ["a", "b"]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in names]

    class Clipped(onnxblock.ForwardBlock):
        def build(self) -> tuple[str, ...]:
            self.base.graph.input.extend(info)
            return tuple(optim.ClipGradNorm(1.0)(*names))

    block = Clipped()
    with onnxblock.empty_base():
        outputs = block()
    feeds = {name: np.array([3.0, 0.0, 4.0], np.float32) for name in names}
    result = run(block.to_model_proto(), feeds)
    for name in outputs:
        np.testing.assert_allclose(result[name], feeds["a"] / np.sqrt(50), rtol=1e-6)


def test_optimizer_beside_another_model_is_reported() -> None:
    parameters = built(mlp()).parameters()
    with onnxblock.base(mlp()), pytest.raises(GraphBuildError, match="empty_base"):
        optim.AdamW()(parameters)


def test_optimizer_without_parameters_is_reported() -> None:
    with onnxblock.empty_base(), pytest.raises(NothingToTrain):
        optim.AdamW()(([], []))


@pytest.mark.parametrize("frozen", [(), ("b0",)], ids=["all trained", "one frozen"])
def test_module_and_optimizer_train_what_blocks_have_built(tmp_path: Path, frozen: tuple[str, ...]) -> None:
    """Twenty steps of gradient descent on the device API against PyTorch in float64."""
    model = mlp()
    block, optimizer_block = built(model, frozen=frozen), optim.SGD()
    with onnxblock.empty_base():
        optimizer_block(block.parameters())
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    training, evaluation = (proto.SerializeToString() for proto in block.to_model_proto())
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(training, state, evaluation)
    optimizer = Optimizer(optimizer_block.to_model_proto().SerializeToString(), module)
    optimizer.set_learning_rate(0.1)
    leaves = torch_mlp(parameters_of(model))
    trained = [name for name in leaves if name not in frozen]
    generator = np.random.default_rng(0)
    for _ in range(20):
        x, target = (generator.normal(0, 1, (8, size)).astype(np.float32) for size in (6, 4))
        loss = module(x, target)
        optimizer.step()
        module.lazy_reset_grad()
        expected = F.mse_loss(torch_forward(leaves, x), torch.tensor(target).double())
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in zip(
            trained, torch.autograd.grad(expected, [leaves[n] for n in trained]), strict=True
        ):
            leaves[name].data -= 0.1 * gradient
    for name, leaf in leaves.items():
        assert norm_relative_error(state.parameters[name].data, leaf.detach().numpy()) < 1e-5


def test_optimizer_of_another_model_is_reported(tmp_path: Path) -> None:
    block, other = built(mlp()), built(mlp((6, 9, 4)))
    optimizer_block = optim.AdamW()
    with onnxblock.empty_base():
        optimizer_block(other.parameters())
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(block.to_model_proto()[0].SerializeToString(), state)
    with pytest.raises(ModelLoadError, match="does not belong"):
        Optimizer(optimizer_block.to_model_proto().SerializeToString(), module)
