"""Dropout where the network had it, by what exporters leave of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

import models
from onnxtrain import Trainer, restore_dropout
from onnxtrain.errors import InputError, ModelError
from onnxtrain.passes import load_model, to_proto


def restored(model: Any, *arguments: Any, **options: Any) -> ir.Model:
    """Call `restore_dropout`; assert that it returns the kind of model it was given, and load that."""
    result = restore_dropout(model, *arguments, **options)
    assert isinstance(result, ir.Model if isinstance(model, ir.Model) else onnx.ModelProto)
    return load_model(result)


RATIO = 0.25


class Net(nn.Module):
    """Dropout as a module, twice; one call of `clone` is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(6, 200), nn.Linear(200, 200), nn.Linear(200, 3)
        self.drop, self.other = nn.Dropout(RATIO), nn.Dropout(RATIO)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.first(x))).clone()
        return self.fc(self.other(torch.tanh(self.second(hidden))))


def export(path: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    net = Net().eval()
    torch.onnx.export(net, (torch.randn(2, 6),), str(path), input_names=["x"], output_names=["y"], verbose=False,
                      **options)  # fmt: skip
    return path


def dropouts(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Dropout"]


def outputs(model: ir.Model, names: list[str], x: np.ndarray, seed: int = 0) -> list[np.ndarray]:
    proto = to_proto(model)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names)
    ort.set_seed(seed)
    return ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_traces_of_the_dynamo_exporter(tmp_path: Path) -> None:
    """Two Dropouts where the modules were, and none for `clone`: zeros of that share, the rest scaled as in PyTorch."""
    path = export(tmp_path / "net.onnx", optimize=False)
    with pytest.raises(ModelError, match=r"the file does not contain its ratio. Pass it"):
        restored(path)
    model = restored(path, RATIO)
    first, second = dropouts(model)
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    for node in (first, second):
        before, after = outputs(model, [node.inputs[0].name, node.outputs[0].name], x)
        kept = after != 0
        share = 1 - kept[before != 0].mean()
        assert abs(share - RATIO) < 0.1
        np.testing.assert_allclose(after[kept], before[kept] / (1 - RATIO), rtol=1e-5)
    net = Net()
    assert [type(module).__name__ for module in (net.drop, net.other)] == ["Dropout"] * 2
    assert [node.inputs[0].producer().op_type for node in (first, second)] == ["Relu", "Tanh"]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("options", [{"dynamo": False}, {}], ids=["torchscript", "dynamo"])
def test_no_trace_is_said_and_layers_may_be_named(options: dict[str, Any], tmp_path: Path) -> None:
    path = export(tmp_path / "net.onnx", **options)
    with pytest.raises(ModelError, match=r"nor a trace of it\. .*optimize=False.*before="):
        restored(path, RATIO)
    (node,) = dropouts(restored(path, RATIO, before="fc"))
    assert node.inputs[0].producer().op_type == "Tanh"
    assert len(dropouts(restored(path, RATIO, before=["fc", "sec*"]))) == 2
    with pytest.raises(ModelError, match=r"matches 'head\*' of before; the layers are .*fc.weight"):
        restored(path, RATIO, before="head*")


def test_nodes_in_inference_mode_train(tmp_path: Path) -> None:
    """The ratio of the node, or another one; evaluation and the exported file are without."""
    model = models.mlp(hidden=400)
    model.graph.node[2].input[0] = "d"
    model.graph.node.insert(2, onnx.helper.make_node("Dropout", ["a", "r"], ["d"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "r"))
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    before = model.SerializeToString()
    for p, expected in ((None, 0.5), (0.1, 0.1)):
        new = restored(model, p)
        a, d = outputs(new, ["a", "d"], x)
        assert abs((d[a != 0] == 0).mean() - expected) < 0.05
        trainer = Trainer(new, "cross_entropy", "sgd", 0.1)
        plain = ort.InferenceSession(before).run(None, {"x": x})[0]
        np.testing.assert_allclose(trainer.predict(x), plain, rtol=1e-5, atol=1e-6)
        trainer.fit(x, np.arange(4) % 3, verbose=False)
        trainer.export(tmp_path / "out.onnx")
        nodes = onnx.load(tmp_path / "out.onnx").graph.node
        assert not [node for node in nodes if node.op_type == "Dropout" and len(node.input) > 2]
    assert model.SerializeToString() == before


def test_training_with_it_is_training_of_the_kept_units() -> None:
    """One step of gradient descent: the rows of `w2` whose units were dropped stay as they were."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((1, 4)).astype(np.float32), np.array([1])
    model = restored(models.mlp(hidden=50), 0.5, before="w2")
    trainer = Trainer(model, "cross_entropy", "sgd", 0.1)
    start = {name: np.array(p.data) for name, p in trainer.parameters}
    trainer.fit(x, y, verbose=False)
    moved = np.abs(trainer.parameters["w2"].data - start["w2"]).sum(axis=1) > 0
    assert 10 < moved.sum() < 40
    w1, b1, w2, b2 = (torch.tensor(start[name], requires_grad=True) for name in ("w1", "b1", "w2", "b2"))
    hidden = torch.tanh(torch.tensor(x) @ w1 + b1) * torch.tensor(moved) / 0.5
    nn.functional.cross_entropy(hidden @ w2 + b2, torch.tensor(y)).backward()
    for name, value in (("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)):
        expected = start[name] - 0.1 * value.grad.numpy()
        np.testing.assert_allclose(trainer.parameters[name].data, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("p", [-0.1, 1, "0.5", True])
def test_ratios_are_checked(p: Any) -> None:
    with pytest.raises(InputError, match=r"p must be a number in \[0, 1\)"):
        restored(models.mlp(), p)
