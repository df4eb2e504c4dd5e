"""FusedAdam beside PyTorch's Adam and AdamW, and beside the AdamW of transformers 4 written in NumPy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from onnxtrain.errors import CompatError
from onnxtrain.optim import AdamWMode, FP16_Optimizer, FusedAdam

pytestmark = pytest.mark.torch

SETTINGS = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2}


def trained(make: Any, steps: int = 6) -> list[torch.Tensor]:
    """Parameters after some steps; the second gets its first gradient late, the last never."""
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 4), (5,), (2,))
    ]
    optimizer = make(parameters)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(steps):
        optimizer.zero_grad()
        loss = parameters[0].pow(3).sum() + (parameters[1].sin().sum() if step > 2 else 0)
        loss.backward()
        optimizer.step()
        schedule.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(
    ("mode", "reference"),
    [(AdamWMode.ADAM_L2_REGULARIZATION, torch.optim.Adam), (AdamWMode.ADAMW_TORCH, torch.optim.AdamW)],
)
def test_steps_are_those_of_pytorch(mode: AdamWMode, reference: Any) -> None:
    got = trained(lambda parameters: FusedAdam(parameters, adam_w_mode=int(mode), **SETTINGS))
    wanted = trained(lambda parameters: reference(parameters, **SETTINGS))
    torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_steps_are_those_of_transformers(bias_correction: bool) -> None:
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(3, 4)), rng.normal(size=(5, 3, 4))
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = FusedAdam([parameter], bias_correction=bias_correction, **SETTINGS)  # type: ignore[arg-type]
    w, m, v = start.copy(), np.zeros((3, 4)), np.zeros((3, 4))
    for step, gradient in enumerate(gradients, 1):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient**2
        size = 0.03 * (np.sqrt(1 - 0.95**step) / (1 - 0.8**step) if bias_correction else 1)
        w = w - size * m / (np.sqrt(v) + 1e-4)
        w = w - 0.03 * 0.2 * w
        np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=1e-13)


def test_resumes_from_its_state_and_from_that_of_the_old_package() -> None:
    def stepped(steps: int, state: Any = None, start: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = torch.nn.Parameter(torch.ones(3) if start is None else start.clone())
        optimizer = FusedAdam([parameter], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        for _ in range(steps):
            parameter.grad = parameter.detach() * 2
            optimizer.step()
        return parameter.detach(), optimizer.state_dict()

    whole, _ = stepped(5)
    half, state = stepped(2)
    torch.testing.assert_close(stepped(3, state, half)[0], whole)
    state["param_groups"][0]["step"] = state["state"][0].pop("step")  # which counted per group
    torch.testing.assert_close(stepped(3, state, half)[0], whole)


def test_closure_and_zero_grad() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([parameter], set_grad_none=False)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    optimizer.zero_grad(set_to_none=False)
    torch.testing.assert_close(parameter.grad, torch.zeros(2))
    FusedAdam([parameter]).zero_grad(set_to_none=False)
    assert parameter.grad is None


@pytest.mark.parametrize(
    "wrong", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"adam_w_mode": 3}, {"eps": float("nan")}]
)
def test_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"FusedAdam: |not a valid AdamWMode"):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **wrong)


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdam(table.parameters()).step()


def test_what_takes_the_place_of_fp16_optimizer() -> None:
    with pytest.raises(CompatError, match=r"FP16_Optimizer\(SGD\).*torch\.amp\.GradScaler"):
        FP16_Optimizer(torch.optim.SGD([torch.ones(1)]))
