"""Layers that eager PyTorch runs by special kernels in inference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


MODULES = {
    "layer": layer,
    "encoder": lambda: nn.TransformerEncoder(layer(), 2),
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("padded", [False, True])
def test_transformer_in_inference(name: str, padded: bool) -> None:
    torch.manual_seed(0)
    plain = MODULES[name]().eval()
    model = ORTModule(plain)
    inputs = {"layer": 1, "encoder": 1, "attention": 3, "transformer": 2}[name]
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = padded
    option = "key_padding_mask" if name == "attention" else "src_key_padding_mask"
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        result = model(*[x] * inputs, **{option: padding})
        torch.backends.mha.set_fastpath_enabled(False)  # it also fills padded positions with zeros
        try:
            expected = plain(*[x] * inputs, **{option: padding})
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        model(*[x] * inputs)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert model.report().runs_in_onnxruntime
    assert torch.backends.mha.get_fastpath_enabled()
