"""Layers that eager PyTorch runs by special kernels in inference."""

from __future__ import annotations

from collections.abc import Callable

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
    """Eager PyTorch takes them where an operator copies them first, and else says to clone them."""
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
    if name == "linear":
        for call in (module, model):
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                gradients(call, made)
        return
    got = gradients(model, made)
    assert model.report().runs_in_onnxruntime
    torch.testing.assert_close(got, gradients(module, made.clone()), rtol=1e-4, atol=1e-4)


USES = {
    "product": (lambda x, w: x @ w, True),
    "factor": (lambda x, w: x * w, True),
    "view": (lambda x, w: x.view(9) @ w.view(9), True),
    "sum": (lambda x, w: x + w, False),
    "result": (lambda x, w: x.relu() * w, False),
    "clone": (lambda x, w: x.clone() * w, False),
    "condition": (lambda x, w: torch.where(x > 0, w, w * 2), False),
}
"""Functions of an inference tensor and a weight, and whether eager PyTorch saves the tensor."""


class Weighted(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((3, 3), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize("name", USES)
def test_saved_inference_tensors_are_refused(name: str) -> None:
    function, is_saved = USES[name]
    plain = Weighted(function)
    model = ORTModule(plain)
    with torch.inference_mode():
        made = torch.randn(3, 3)
    # Also if another tensor has been compiled before.
    model(torch.randn(3, 3)).sum().backward()
    found = []
    for call in (plain, model):
        if is_saved:
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                call(made)
        else:
            found.append(torch.autograd.grad(call(made).sum(), plain.weight)[0])
    if not is_saved:
        torch.testing.assert_close(*found)
    assert not torch.is_inference_mode_enabled()


def test_second_derivatives_of_inputs_made_in_inference_mode() -> None:
    module = nn.Sequential(nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.inference_mode():
        made = torch.randn(2, 3)

    def penalty(call: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = list(module.parameters())
        first = torch.autograd.grad(call(x).square().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), weights)

    torch.testing.assert_close(penalty(ORTModule(module), made), penalty(module, made.clone()))


class WithoutInference(nn.Module):
    """Leaves the inference mode, which enables gradients."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x * self.weight
        with torch.inference_mode(self.mode):
            inside = before * self.weight
        return before, inside, before * self.weight


@pytest.mark.filterwarnings("ignore:.*the graph enables gradients that its caller")
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_inference_mode_false_enables_gradients(enabled: bool, mode: bool) -> None:
    plain = WithoutInference(mode)
    flags = []
    for module in (ORTModule(plain), plain):
        torch._dynamo.reset()
        with torch.set_grad_enabled(enabled):
            flags.append([y.requires_grad for y in module(torch.ones(2))])
            assert torch.is_grad_enabled() == enabled
    assert flags[0] == flags[1]
    assert any(flags[0]) == (enabled or not mode)
