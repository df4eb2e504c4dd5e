"""ORTModule on a GPU beside eager PyTorch on the same GPU: what tests of the CPU do not have."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import assert_same, gradients, strict


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5)
    )


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], **context: Any
) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=bool(context), **context):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(count)]


def test_a_module_moves_to_the_gpu_and_back() -> None:
    plain = _net().cpu()
    model = strict(copy.deepcopy(plain))
    x = torch.randn(4, 3, 8, 8, device="cpu")
    for device in ("cpu", "cuda", "cpu", "cuda"):
        model, plain = model.to(device), plain.to(device)
        got, want = model(x.to(device)), plain(x.to(device))
        assert got.device.type == device
        assert_same(got, want, rtol=2e-3, atol=2e-3)
        got.sum().backward(), want.sum().backward()
        assert_same(gradients(model), gradients(plain), rtol=1e-2, atol=1e-2)
        model.zero_grad(), plain.zero_grad()


# PyTorch's own, of gradients that eager PyTorch adds up on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_tensors_computed_on_another_stream() -> None:
    """ONNX Runtime reads what a stream of PyTorch has just computed, and PyTorch reads what ONNX Runtime has."""
    plain = nn.Linear(256, 256)
    model = strict(copy.deepcopy(plain))
    big = torch.randn(4096, 4096) / 64
    for _ in range(5):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = big
            for _ in range(20):
                y = y @ big
            x = y[:64, :256].contiguous()
            got = model(x)
            got.square().sum().backward()
            twice = got * 2
        torch.cuda.current_stream().wait_stream(stream)
        want = plain(x)
        want.square().sum().backward()
        assert_same(twice, want * 2)
        assert_same(gradients(model), gradients(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    plain = _net()
    model = strict(copy.deepcopy(plain))
    batches = _batches()
    runs = [
        _steps(net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True), batches, dtype=dtype)
        for net in (model, plain)
    ]
    assert runs[0] == pytest.approx(runs[1], rel=3e-2)


def test_gradient_scaler() -> None:
    plain = _net()
    model = strict(copy.deepcopy(plain))
    batches, runs = _batches(), []
    for net in (model, plain):
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        runs.append((losses, scaler.get_scale()))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=3e-2)
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_module_of_another_dtype(dtype: torch.dtype) -> None:
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(dtype)
    model = strict(copy.deepcopy(plain))
    x = torch.randn(8, 16, dtype=dtype)
    got, want = model(x), plain(x)
    got.float().square().sum().backward(), want.float().square().sum().backward()
    tolerance = {torch.float64: 1e-9, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert got.dtype == dtype
    assert_same(got, want, rtol=tolerance, atol=tolerance)
    assert_same(gradients(model), gradients(plain), rtol=2 * tolerance, atol=2 * tolerance)


def test_dropout_draws_what_pytorch_draws() -> None:
    plain = nn.Sequential(nn.Linear(16, 4096), nn.Dropout(0.3))
    model = strict(copy.deepcopy(plain))
    x = torch.randn(8, 16)
    torch.manual_seed(5)
    got = model(x)
    after = torch.rand(3)
    torch.manual_seed(5)
    want = plain(x)
    assert torch.equal(after, torch.rand(3))
    assert (got == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert_same(got, want)


def test_queries_without_any_key() -> None:
    """ONNX Runtime's ReduceMax of -inf alone is the lowest finite number on CUDA."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return functional.scaled_dot_product_attention(x, x, x, mask)

    plain = Attention()
    model = strict(copy.deepcopy(plain))
    x, mask = torch.randn(2, 3, 5, 8), torch.rand(5, 5) > 0.4
    mask[2] = False
    got, want = model(x, mask), plain(x, mask)
    assert (want[:, :, 2] == 0).all()
    assert_same(got, want)
    for result in (got, want):
        result.square().sum().backward()
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("width", [3, 40, 300, 2000])
def test_infinities_are_sorted(width: int) -> None:
    """ONNX Runtime's TopK returns indices beyond the end for infinities on CUDA."""

    class Sort(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            up, down = x.sort(), x.sort(descending=True)
            # Indices of equal numbers are in no order on CUDA, where PyTorch's own sort is not stable, either.
            read = x.gather(1, up[1]), x.gather(1, down[1])
            return up[0], down[0], *read, x.topk(2)[0], x.amax(1), x.amin(1)

    x = torch.randn(4, width)
    x[0, 1], x[1, 0], x[1, 2], x[2], x[3] = torch.inf, -torch.inf, torch.inf, -torch.inf, torch.inf
    for got, want in zip(strict(Sort())(x), Sort()(x), strict=True):
        assert torch.equal(got, want)


def test_memory_does_not_grow() -> None:
    model = strict(_net())
    optimizer = torch.optim.AdamW(model.parameters())
    _steps(model, optimizer, _batches(10))
    free, _ = torch.cuda.mem_get_info()
    _steps(model, optimizer, _batches(60))
    assert free - torch.cuda.mem_get_info()[0] <= 64 << 20


def test_tensors_on_two_devices() -> None:
    with pytest.raises(Exception, match=r"cpu.*cuda|cuda.*cpu"):
        ORTModule(nn.Linear(3, 2))(torch.randn(4, 3, device="cpu"))


def test_threads_of_data_parallel_loops() -> None:
    plain = _net()
    nets = [strict(copy.deepcopy(plain)) for _ in range(4)]
    batches = _batches()

    def train(net: nn.Module) -> list[float]:
        torch.set_default_device("cuda")
        return _steps(net, torch.optim.SGD(net.parameters(), lr=1e-2), batches)

    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(train, nets))
    want = train(plain)
    for found in losses:
        assert found == pytest.approx(want, rel=5e-3)
