"""Batches without elements: shapes, values and gradients of eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as fn

from onnxtrain.nn import LayerNorm, RINorm, RMSNorm
from ortmodule.eager import Of, compare, compare_steps, strict

pytestmark = pytest.mark.torch

MODULES = {
    "RMSNorm": RMSNorm(3),
    "torch's RMSNorm": nn.RMSNorm(3),
    "LayerNorm": LayerNorm(3),
    "RINorm": nn.Sequential(nn.Unflatten(1, (1, 3)), RINorm(3)),
    "perceptron": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of the batch": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp of the batch": lambda x: x.logsumexp(0),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "sum of the batch": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "mean of the batch": lambda x: x.mean(0),
    "mean of all": lambda x: x.mean(),
    "var": lambda x: x.var(-1),
    "var of the batch": lambda x: x.var(0, correction=0),
    "std": lambda x: x.std(-1, keepdim=True),
    "norm": lambda x: x.norm(dim=-1),
    "amax": lambda x: x.amax(-1),
    "prod of the batch": lambda x: x.prod(0),
    "median": lambda x: x.median(),
    "layer_norm of the batch": lambda x: fn.layer_norm(x.t(), x.t().shape[-1:]),
    "layer_norm": lambda x: fn.layer_norm(x, (3,)),
    "mse_loss": lambda x: fn.mse_loss(x, x * 2),
    "l1_loss, sum": lambda x: fn.l1_loss(x, x * 2, reduction="sum"),
    "cdist": lambda x: torch.cdist(x, x.new_ones(5, 3)),
    "isin": lambda x: torch.isin(x, torch.tensor([1.0, 2.0])),
    "searchsorted": lambda x: torch.searchsorted(torch.arange(5.0), x),
    "erf in float64": lambda x: torch.erf(x.double()),
    "attention": lambda x: fn.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
}


CASES = {
    **MODULES,
    **{
        name: Of(
            lambda m, x, function=function: function(x * m.weight),
            weight=nn.Parameter(torch.linspace(0.5, 1.5, 3)),
        )
        for name, function in FUNCTIONS.items()
    },
}


def step(module: nn.Module) -> list[torch.Tensor | None]:
    x = torch.zeros(0, 3, requires_grad=True)
    y = module(x)
    if y.requires_grad:
        y.sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("module", CASES.values(), ids=CASES)
def test_an_empty_batch(module: nn.Module) -> None:
    plain = copy.deepcopy(module)
    compare(plain, step, wrap=strict, ignore="var|std", rtol=0, atol=0, equal_nan=True)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_mask_that_chooses_nothing() -> None:
    """In one graph, whose sizes only the data tells."""
    plain = Of(lambda m, x: m.norm(x[x[:, 0] > 0]), norm=RMSNorm(3))
    ones = torch.ones(4, 3)
    compare_steps(plain, ones, -ones, loss=lambda out: out[0].sum(), differentiate_inputs=False, wrap=strict)
