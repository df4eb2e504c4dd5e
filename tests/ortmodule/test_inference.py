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


@pytest.mark.sample(every=4)
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


TRAINED_ON_INFERENCE_TENSORS = {
    "linear": lambda: nn.Linear(8, 8),
    "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
    "layer": layer,
    "encoder": MODULES["encoder"],
    "attention": MODULES["attention"],
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRAINED_ON_INFERENCE_TENSORS)
def test_inputs_made_in_inference_mode(name: str, training: bool) -> None:
    """Eager PyTorch takes them where an operator copies them first, and else says to clone them, as is done here."""
    torch.manual_seed(0)
    module = TRAINED_ON_INFERENCE_TENSORS[name]().train(training)
    count = 3 if name == "attention" else 1
    with torch.inference_mode():
        made = torch.randn(2, 3, 8)
    parameters = list(module.parameters())

    def gradients(call: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)  # of dropout
        result = call(*[x] * count)
        out = result if isinstance(result, torch.Tensor) else result[0]
        return torch.autograd.grad(out.square().sum(), parameters)

    model = ORTModule(module)
    got = gradients(model, made)
    assert model.report().runs_in_onnxruntime
    torch.testing.assert_close(got, gradients(module, made.clone()), rtol=1e-4, atol=1e-4)


def test_second_derivatives_of_inputs_made_in_inference_mode() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.inference_mode():
        made = torch.randn(2, 3)

    def penalty(call: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = list(module.parameters())
        first = torch.autograd.grad(call(x).square().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), weights)

    torch.testing.assert_close(penalty(ORTModule(module), made), penalty(module, made.clone()))
