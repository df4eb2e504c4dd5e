"""Without native kernels, programs over short rows run with the last axis in front."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule


class Splines(nn.Module):
    """B-splines of each number by de Boor's recursion, and a weighted sum of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 12).expand(64, -1).contiguous())
        self.weight = nn.Parameter(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, grid = x.unsqueeze(-1), self.grid
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, 4):
            rising = (x - grid[:, : -k - 1]) / (grid[:, k:-1] - grid[:, : -k - 1])
            falling = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k])
            bases = rising * bases[..., :-1] + falling * bases[..., 1:]
        return (bases * self.weight).sum(-1)


def test_short_rows_without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "off")
    net = Splines()
    model = ORTModule(net)
    for batch in (16, 9):
        x = torch.randn(batch, 64, generator=torch.Generator().manual_seed(batch), requires_grad=True)
        y = model(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, net.weight])
        exact = x.detach().double().requires_grad_()
        double = Splines().double()
        double.load_state_dict(net.state_dict())
        expected = torch.autograd.grad(double(exact).square().sum(), [exact, double.weight])
        torch.testing.assert_close(y, double(exact).float(), rtol=1e-5, atol=1e-5)
        for got, want in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    files = {path.stem.rpartition("_")[2]: onnx.load(path) for path in model.export_training_graph(tmp_path)}
    for half in ("forward", "backward"):
        bodies = [function for function in files[half].functions if function.name.startswith("Elementwise")]
        assert any(node.op_type == "Transpose" for function in bodies for node in function.node), half
    # The backward half computes the splines again, instead of reading the results of each op.
    shapes = [[dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in files["backward"].graph.input]
    assert [shape for shape in shapes if len(shape) == 3 and shape[-1] > 1] == []
