"""`model.export_training_graph(folder)`: the files, run by a stock session, beside PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule, ORTModuleONNXModelException

Arrays = dict[str, np.ndarray]


def run(file: Path, known: Arrays) -> Arrays:
    """Runs a file on what it names; returns its outputs by name."""
    onnx.checker.check_model(str(file), full_check=True)
    session = ort.InferenceSession(file)
    names = [value.name for value in session.get_outputs()]
    feeds = {value.name: known[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, feeds), strict=True))


def arrays(module: nn.Module) -> Arrays:
    return {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}


NETS = {
    "float64": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 3)),
        (6, 4),
    ),
    "convolutional": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)
        ),
        (2, 1, 6, 6),
    ),
}


@pytest.mark.parametrize("kind", NETS)
def test_forward_and_backward_files_train(kind: str, tmp_path: Path) -> None:
    """In float64, with what the sessions run in the place of Erf; in float32, with the functions of fused layers."""
    torch.manual_seed(0)
    make, shape = NETS[kind]
    dtype, rtol = (torch.float64, 1e-9) if kind == "float64" else (torch.float32, 1e-4)
    net, x = make().to(dtype), torch.randn(*shape, dtype=dtype)
    plain, before = copy.deepcopy(net), arrays(net)
    model = ORTModule(net)
    model(x).sum().backward()
    forward, backward = model.export_training_graph(tmp_path / "graphs")
    assert forward == tmp_path / "graphs" / "graph_0_forward.onnx"
    assert backward == tmp_path / "graphs" / "graph_0_backward.onnx"

    y = plain(x)
    ct = torch.randn_like(y)
    y.backward(ct)
    known = before | {"input": x.numpy()}
    results = run(forward, known)
    first, *_ = results
    np.testing.assert_allclose(results[first], y.detach().numpy(), rtol=rtol)
    gradients = run(backward, known | results | {f"{first}_ct": ct.numpy()})
    assert set(gradients) == {f"{name}_grad" for name, _ in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        # Nothing comes to the bias before BatchNormalization but rounding.
        np.testing.assert_allclose(
            gradients[f"{name}_grad"], parameter.grad.numpy(), rtol=rtol, atol=rtol * 1e-2
        )
    updated = [array for array in results.values() if array.shape == (5,)]
    for name in ("1.running_mean", "1.running_var"):
        assert any(np.allclose(array, plain.state_dict()[name].numpy(), rtol=rtol) for array in updated)


def test_graphs_of_training_and_inference_and_their_random_numbers(tmp_path: Path) -> None:
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    with torch.no_grad():
        expected = model.eval()(x)
    forward, backward, inference = model.export_training_graph(str(tmp_path))
    assert [file.name for file in (forward, backward, inference)] == [
        "graph_0_forward.onnx",
        "graph_0_backward.onnx",
        "graph_1_inference.onnx",
    ]
    inputs = [value.name for value in onnx.load(forward).graph.input]
    assert inputs == ["0.weight", "0.bias", "input", "random"]
    (result,) = run(inference, arrays(model) | {"input": x.numpy()}).values()
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-6)


class _Decomposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(torch.linalg.svd(self.layer(x).exp())[1] * more["factor"])


def test_parts_around_what_runs_in_pytorch(tmp_path: Path) -> None:
    model = ORTModule(_Decomposed())
    x, factor = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([2.0, 3.0])
    with pytest.warns(UserWarning, match="runs in PyTorch in part"):
        model(x, {"factor": factor}).sum().backward()
    files = model.export_training_graph(tmp_path)
    assert all(file.name.startswith("graph_0_part_") for file in files)
    first = next(file for file in files if file.name.endswith("_forward.onnx"))
    result, *_ = run(first, arrays(model) | {"x": x.numpy()}).values()
    np.testing.assert_allclose(result, model.layer(x).exp().detach().numpy(), rtol=1e-6)


def test_before_the_first_call_there_is_nothing(tmp_path: Path) -> None:
    model = ORTModule(nn.Linear(2, 1))
    with pytest.raises(ORTModuleONNXModelException, match="call the model first, in training mode"):
        model.export_training_graph(tmp_path / "none")
    assert not (tmp_path / "none").exists()
