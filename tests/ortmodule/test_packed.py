"""Packed sequences: the recurrent layer runs in PyTorch, which is said; the rest in ONNX Runtime."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ortmodule.eager import compare_steps, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

LENGTHS = torch.tensor([6, 2, 4, 1, 5])


class Tagger(nn.Module):
    def __init__(self, layer: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layer = layer(4, 5, batch_first=True, bidirectional=True, **options)
        self.last = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.last(torch.tanh(y))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_are_pytorchs_and_said_so(layer: type[nn.RNNBase]) -> None:
    batches = [[torch.randn(batch, 6, 3), LENGTHS[:batch]] for batch in (3, 4, 5)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = compare_steps(Tagger(layer, num_layers=2), *batches, differentiate_inputs=False)
    said = [str(w.message) for w in caught if "ORTModule" in str(w.message)]
    assert said
    assert len(said) == len(set(said))
    assert any("_pack_padded_sequence" in message for message in said)
    assert any("aten.addmm" in message or "aten.tanh" in message for message in said)  # the layer itself
    assert any("pack_padded_sequence" in str(graph.break_reason) for graph in ours.report())
    engines = {graph.engine for graph in ours.report() if graph.mode == "training"}
    assert engines == {"ONNX Runtime"}


def test_packed_sequences_can_be_forbidden() -> None:
    with pytest.raises(Exception, match="_pack_padded_sequence"):
        strict(Tagger(nn.GRU))(torch.randn(3, 6, 3), LENGTHS[:3])
