"""Recurrent layers under autocast return what eager PyTorch returns: the same dtypes, and the numbers of float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

LAYERS = {
    "lstm": lambda: nn.LSTM(4, 5),
    "projected": lambda: nn.LSTM(4, 5, proj_size=3),
    "bidirectional": lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(4, 5),
    "rnn": lambda: nn.RNN(4, 5, 2, nonlinearity="relu"),
}


def _states(layer: nn.RNNBase, dtype: torch.dtype, batch: int) -> Any:
    """Returns the states to start from, or None for float64, which stands for no states."""
    if dtype == torch.float64:
        return None
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = torch.randn(rows, batch, layer.proj_size or layer.hidden_size).to(dtype)
    if layer.mode != "LSTM":
        return hidden
    return hidden, torch.randn(rows, batch, layer.hidden_size).to(dtype)


def _run(call: Any, layer: nn.Module, x: torch.Tensor, states: Any, autocast: bool) -> list[torch.Tensor]:
    """Returns all results, then the gradients of the sum of their squares."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = pytree.tree_leaves(call(x, states))
    score = sum(result.double().square().sum() for result in results)
    wrt = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad]
    return [*results, *torch.autograd.grad(score, wrt)]


@pytest.mark.sample(every=4)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
# float64 states stand for none
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "trained_input"),
    [
        (torch.float32, torch.float64, True),
        (torch.float32, torch.float64, False),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
    ],
    ids=["float32", "constant", "bfloat16", "bfloat16-states"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_under_autocast(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype, trained_input: bool
) -> None:
    layer = LAYERS[name]()
    x = torch.randn(2, 3, 4).to(dtype).requires_grad_(trained_input)
    states = _states(layer, state_dtype, 2 if layer.batch_first else 3)
    model = ORTModule(layer)
    got = _run(model, layer, x, states, autocast=True)
    eager = _run(layer, layer, x, states, autocast=True)
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in eager]
    assert model.report().runs_in_onnxruntime

    exact = copy.deepcopy(layer).double()
    exact_x = x.detach().double().requires_grad_(trained_input)
    exact_states = pytree.tree_map_only(torch.Tensor, torch.Tensor.double, states)
    want = _run(exact, exact, exact_x, exact_states, autocast=False)
    for ours, true in zip(got, want, strict=True):
        # bfloat16 has 8 bits: eager's own results are off by 2 % of the largest here
        assert (ours.double() - true).abs().max() < 0.05 * true.abs().max()
