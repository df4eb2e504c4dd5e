"""Results lie in memory as in eager PyTorch: what can be viewed, and where random numbers go, depends on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import Of, compare

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Sequences(nn.Module):
    """Results that eager PyTorch lays out otherwise than by their axes; one complex, one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 4, 2)
        self.recurrent = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.convolution(x).transpose(1, 2)
        return {
            "transposed": h,
            "batch_first": self.recurrent(h)[0],
            "complex": torch.fft.fft(h.contiguous()).transpose(0, 2),
            "every_second": (h * 2)[:, ::2],
            "expanded": h[:, :1].sum((0, 1), keepdim=True).expand(2, 3, 4),
        }


def _step(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None]]:
    torch.manual_seed(1)
    model.zero_grad()
    results = model(x)
    sum(t.abs().square().sum() for t in results.values()).backward()
    return results, [p.grad for p in model.parameters()]


def test_results_have_the_strides_of_eager_pytorch() -> None:
    torch.manual_seed(0)
    plain = Sequences()
    ours = ORTModule(copy.deepcopy(plain))
    for batch in (2, 3, 4):
        x = torch.randn(batch, 3, 6)
        (expected, want), (results, got) = _step(plain, x), _step(ours, x)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(got, want)
        for name in ("transposed", "batch_first", "complex"):
            assert results[name].stride() == expected[name].stride()
            assert not results[name].is_contiguous()
        view = results["batch_first"].transpose(0, 1).view(-1)  # of which PyTorch makes no view otherwise
        torch.testing.assert_close(view, expected["batch_first"].transpose(0, 1).reshape(-1))
        results["transposed"].mul_(2)  # no view, of which autograd would refuse this
    assert ours.report().runs_in_onnxruntime
    with torch.no_grad():
        assert ours(x)["transposed"].stride() == plain(x)["transposed"].stride()


def broken(partly: bool) -> Of:
    def function(module: Of, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = module.convolution(x)
        if partly:  # has no lowering: PyTorch runs it, in the middle of the graph
            h = torch.nextafter(h.detach(), h.detach() + 1) + h.sin() * h.cos() * h.exp()
        h = (h * h).tanh().transpose(1, 2)
        torch._dynamo.graph_break()
        return {"h": nn.functional.dropout(h, 0.5, module.training)}

    return Of(function, convolution=nn.Conv1d(3, 8, 2))


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("partly", [False, True])
def test_dropout_after_a_graph_break_drops_what_eager_pytorch_drops(partly: bool) -> None:
    plain, batches = broken(partly), [torch.randn(batch, 3, 9) for batch in (2, 3, 4)]
    compare(plain, lambda module: [_step(module, x)[0] for x in batches])
    compare(plain, lambda module: [_step(module, x)[1] for x in batches], atol=1e-4)


def test_channels_last_stays() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(memory_format=torch.channels_last)
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(2, 3, 5, 6).to(memory_format=torch.channels_last)
    expected, result = plain(x), ours(x)
    torch.testing.assert_close(result, expected)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert result.stride() == expected.stride()
