"""`torch.compile(module, backend="onnxtrain")` beside eager PyTorch."""

from __future__ import annotations

import copy
import importlib
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from onnxtrain.ortmodule import (
    DebugOptions,
    FallbackPolicy,
    ORTModuleONNXModelException,
    Report,
    compile_backend,
)


@pytest.fixture(autouse=True)
def registered() -> None:
    """PyTorch finds the backend by its entry point, once this version of the package is installed."""
    if "onnxtrain" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(compile_backend, name="onnxtrain")
    torch._dynamo.reset()


def test_entry_point_leads_to_the_backend() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    module, name = points["onnxtrain"].split(":")
    assert getattr(importlib.import_module(module), name) is compile_backend


class _Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.layer(x) * factor


X = torch.linspace(-2, 3, 24).reshape(6, 4)
CASES = {
    "sizes": (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)), [(X,), (X[:2],), (X[1:],)], {}),
    "fullgraph": (nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), [(X,)], {"fullgraph": True}),
    "dynamic": (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), [(X,), (X[2:],)], {"dynamic": True}),
    "numbers": (_Numbers(), [(X, 0.5), (X, 0.25), (X, 2.0)], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_eager_pytorch(case: str) -> None:
    net, calls, options = CASES[case]
    net = copy.deepcopy(net)
    plain, report = copy.deepcopy(net), Report()
    compiled = torch.compile(net, backend="onnxtrain", options={"report": report}, **options)
    for model in (compiled, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for arguments in calls:
            optimizer.zero_grad()
            model(*arguments).square().mean().backward()
            optimizer.step()
    for got, want in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want)
    assert report.runs_in_onnxruntime
    assert {record.mode for record in report} == {"training"}


def test_functions_and_inference() -> None:
    report = Report()

    @torch.compile(backend="onnxtrain", options={"report": report})
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) @ x.T

    torch.testing.assert_close(function(X), torch.sin(X) @ X.T)
    assert [record.mode for record in report] == ["inference"]


def test_options_are_those_of_debug_options(tmp_path: Path) -> None:
    options = {"save_onnx": True, "onnx_prefix": "net", "save_path": tmp_path}
    torch.compile(nn.Linear(4, 1), backend="onnxtrain", options=options)(X).sum().backward()
    assert {path.name for path in tmp_path.iterdir()} == {
        "net_graph_0_training.onnx",
        "net_graph_0_gradient_training.onnx",
    }
    assert DebugOptions(**options).save_path == tmp_path


def test_policy_without_fallback_raises() -> None:
    options = {"fallback_policy": FallbackPolicy.DISABLE}
    compiled = torch.compile(torch.linalg.svdvals, backend="onnxtrain", options=options)
    with pytest.raises(BackendCompilerFailed, match="_linalg_svd") as caught:
        compiled(X)
    assert isinstance(caught.value.inner_exception, ORTModuleONNXModelException)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"report": "mine"}, "report must be a Report, received str"),
        ({"speed": 3}, "unexpected keyword argument 'speed'"),
    ],
)
def test_options_that_there_are_not(options: dict[str, object], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(nn.Linear(4, 1), backend="onnxtrain", options=options)(X)
