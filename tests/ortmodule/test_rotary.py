"""Attention with rotary position embeddings, as in Llama, GPT-NeoX and ModernBERT, beside PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from onnxtrain.functions import rotary
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.sessions import _session
from tolerances import norm_relative_error


class RotaryAttention(nn.Module):
    """Grouped-query attention; the first `turned` numbers of each head are rotated."""

    HEADS, GROUPS, SIZE = 4, 2, 8

    def __init__(self, turned: int, learned: bool, sliced: bool) -> None:
        super().__init__()
        self.turned, self.sliced = turned, sliced
        self.q = nn.Linear(12, self.HEADS * self.SIZE)
        self.k, self.v = (nn.Linear(12, self.GROUPS * self.SIZE) for _ in range(2))
        self.rates = nn.Parameter(10.0 ** -torch.linspace(0, 2, turned // 2), requires_grad=learned)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x, rest = x[..., : self.turned], x[..., self.turned :]
        half = self.turned // 2
        low, high = (x[..., :half], x[..., half:]) if self.sliced else x.chunk(2, -1)
        return torch.cat([x * cos + torch.cat([-high, low], -1) * sin, rest], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), self.rates)
        angles = torch.cat([angles, angles], -1)[None, None]
        q, k, v = (f(x).view(*x.shape[:2], -1, self.SIZE).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (self._turn(t, angles.cos(), angles.sin()) for t in (q, k))
        k, v = (t.repeat_interleave(self.HEADS // self.GROUPS, 1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("sliced", [True, False], ids=["slices", "chunks"])
@pytest.mark.parametrize(("turned", "learned"), [(8, False), (4, False), (8, True)])
def test_rotary_attention(
    turned: int, learned: bool, sliced: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lengths of which the later ones were not there at the first call."""
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    called = []
    suited = _session.suited

    def watched(model, *rest):
        called.extend(node.op_type for node in model.graph)
        return suited(model, *rest)

    monkeypatch.setattr(_session, "suited", watched)
    torch.manual_seed(0)
    net = RotaryAttention(turned, learned, sliced)
    exact = RotaryAttention(turned, learned, sliced).double()
    exact.load_state_dict(net.state_dict())
    ours = ORTModule(net)
    for shape in ((3, 7, 12), (2, 11, 12), (1, 1, 12)):
        x, ct = torch.randn(shape), torch.randn(*shape[:2], 32)
        for each, dtype in ((ours, torch.float32), (exact, torch.float64)):
            each.zero_grad()
            y = each(x.to(dtype))
            y.backward(ct.to(dtype))
            if each is ours:
                found = y.detach()
        assert norm_relative_error(found.numpy(), y.detach().numpy()) <= 2e-6
        for own, reference in zip(ours.parameters(), exact.parameters(), strict=True):
            assert (own.grad is None) == (reference.grad is None)
            if own.grad is not None:
                assert norm_relative_error(own.grad.numpy(), reference.grad.numpy()) <= 2e-6
    assert ours.report().runs_in_onnxruntime
    assert called.count(rotary.function_names[0]) >= 2
