"""`torch.autocast("cpu")` around an ORTModule: as near to PyTorch as that is to float32, with products in bfloat16."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from kernels.against_body import needs_kernels
from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

STEPS = 10


class Encoder(nn.Module):
    """Embedding, two pre-norm transformer layers, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 32)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.qkv = nn.ModuleList([nn.Linear(32, 96) for _ in range(2)])
        self.out = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(32, 128) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(128, 32, bias=False) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        batch, length, width = x.shape
        for layer in range(2):
            parts = self.qkv[layer](self.norms[2 * layer](x)).view(batch, length, 3, 2, 16)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[layer](mixed.transpose(1, 2).reshape(batch, length, width))
            x = x + self.down[layer](nn.functional.gelu(self.up[layer](self.norms[2 * layer + 1](x))))
        return nn.functional.linear(x, self.embedding.weight)


def curve(net: nn.Module, *, autocast: bool, ours: bool) -> tuple[list[float], torch.dtype]:
    """The losses of some steps of AdamW, and the dtype of the outputs."""
    net, losses = copy.deepcopy(net), []
    module = strict(net) if ours else net
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    torch.manual_seed(1)
    tokens = torch.randint(0, 60, (8, 17))
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(tokens[:, :-1])
            loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, out.dtype


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_losses_are_as_near_to_float32_as_those_of_pytorch(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    torch.manual_seed(0)
    net = Encoder()
    exact, _ = curve(net, autocast=False, ours=False)
    theirs, dtype = curve(net, autocast=True, ours=False)
    ours, own_dtype = curve(net, autocast=True, ours=True)
    assert own_dtype == dtype == torch.bfloat16
    assert ours[-1] < 0.8 * ours[0]
    own = np.abs(np.subtract(theirs, exact)).mean()
    assert 0 < np.abs(np.subtract(ours, exact)).mean() <= 1.5 * own  # both round, and so are off at random
    assert np.abs(np.subtract(ours, theirs)).mean() <= 2 * own


class Gated(nn.Module):
    """Products with a bias and without, of matrices and of batches, of a transposed factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(24, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.gelu(self.first(x)) * self.second(x)
        return torch.bmm(gate, gate.transpose(1, 2)) @ x


class Convolved(nn.Module):
    """Convolutions of several shapes, of which two have the same gradient, with a normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(9, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(nn.Conv1d(8, 8, 3, padding=1) for _ in range(2)), nn.BatchNorm1d(8))
        self.last = nn.Conv1d(8, 4, 2, stride=2, groups=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.blocks(self.first(x))))


def step(module: nn.Module, net: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        out = module(x)
    out.float().square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters())]


def error(values: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((v.double() - e).norm() / e.norm()) for v, e in zip(values, exact, strict=True)]


@pytest.mark.parametrize("make", [Gated, Convolved])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_as_near_to_float64_as_those_of_pytorch(
    dtype: torch.dtype, make: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    net, x = make(), torch.randn(3, 9, 24)
    wide = copy.deepcopy(net).double()
    leaf = x.double().requires_grad_()
    out = wide(leaf)
    out.square().mean().backward()
    exact = [out.detach(), leaf.grad, *(p.grad for p in wide.parameters())]
    theirs = step(net, net, x, dtype)
    own = copy.deepcopy(net)
    own.zero_grad()
    ours = step(strict(own), own, x, dtype)
    assert [value.dtype for value in ours] == [value.dtype for value in theirs]
    for mine, other in zip(error(ours, exact), error(theirs, exact), strict=True):
        assert mine <= 1.25 * other + 1e-4


def executed(net: nn.Module, folder: Path) -> Counter[str]:
    """The ops of the graphs that run forward and backward under autocast."""
    ours = ORTModule(net)
    with torch.autocast("cpu", torch.bfloat16):
        ours(torch.randn(3, 9, 24)).float().sum().backward()
        ours.export_training_graph(folder)
    return Counter(node.op_type for path in folder.glob("*.onnx") for node in onnx.load(path).graph.node)


@needs_kernels
def test_products_and_composites_are_those_that_have_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "auto")
    ops = executed(Gated(), tmp_path)
    assert not {"MatMul", "Gemm"} & ops.keys()
    assert sum(count for op, count in ops.items() if "Bfloat16" in op and "Round" not in op) == 9
    assert ops["GeluGradient_float"] == 1
    assert ops["RoundToBfloat16_float"] > 0


@needs_kernels
def test_gradients_of_convolutions_are_one_op_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "auto")
    ops = executed(Convolved(), tmp_path)
    assert ops["ConvolutionBfloat16_float"] == 4
    gradients = {op: count for op, count in ops.items() if op.startswith("Convolution") and "Grad" in op}
    assert sum(gradients.values()) == 4
    assert len(gradients) == 3  # those of the two blocks are one function
    assert all(op.startswith("ConvolutionBfloat16") and op.endswith("_float") for op in gradients)
    assert "Conv" not in ops
