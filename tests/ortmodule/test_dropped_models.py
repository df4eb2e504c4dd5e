"""A model that is dropped takes its sessions along: nothing that Dynamo keeps of it holds them."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Broken(Plain):
    """Two graphs: the second is that of a function which Dynamo makes, called by code which Dynamo makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(hidden)


class PartlyPyTorch(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.polygamma(1, self.first(x).abs() + 1))


class Raises(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("one sample")
        return super().forward(x)


def _step(model: Any) -> None:
    model(torch.randn(3, 4)).sum().backward()


def _forward(model: Any) -> None:
    model.register_forward_hook(lambda *_: None)  # so that `model.forward` is compiled by itself
    _step(model)
    model.forward(torch.randn(3, 4)).sum().backward()


def _second_derivative(model: Any) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()


def _modes(model: Any) -> None:
    _step(model)
    model(torch.randn(2, 4)).sum().backward()
    with torch.no_grad():
        model.eval()(torch.randn(3, 4))


def _raises(model: Any) -> None:
    with pytest.raises(ValueError, match="one sample"):
        model(torch.randn(1, 4))
    _step(model)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[ort.InferenceSession]:
    """The sessions that are made in the test and still there."""
    made: weakref.WeakSet[ort.InferenceSession] = weakref.WeakSet()
    create = ort.InferenceSession.__init__

    def create_noted(self: ort.InferenceSession, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        made.add(self)

    monkeypatch.setattr(ort.InferenceSession, "__init__", create_noted)
    return made


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), _step),
        (Plain, _step),
        (Plain, _forward),
        (Plain, _second_derivative),
        (Plain, _modes),
        (Broken, _step),
        (Broken, _modes),
        (Raises, _raises),
        pytest.param(
            PartlyPyTorch,
            _step,
            marks=pytest.mark.filterwarnings("ignore:ORTModule. graph 0 runs in PyTorch"),
        ),
    ],
    ids=["sequential", "plain", "forward", "second", "modes", "broken", "broken-modes", "raises", "partly"],
)
def test_sessions_go_with_their_model(
    make: Callable[[], nn.Module],
    use: Callable[[Any], None],
    sessions: weakref.WeakSet[ort.InferenceSession],
) -> None:
    module = make()  # it lives on
    model = ORTModule(module)
    use(model)
    assert len(sessions) > 0
    del model
    gc.collect()
    assert len(sessions) == 0
    _step(ORTModule(module))  # captured again


def test_other_models_of_the_class_keep_their_graphs(
    sessions: weakref.WeakSet[ort.InferenceSession],
) -> None:
    first, second = ORTModule(Broken()), ORTModule(Broken())
    _step(first)
    alone = len(sessions)
    _step(second)
    del first
    gc.collect()
    assert len(sessions) == alone
    captured = len(second.report())
    _step(second)
    assert len(second.report()) == captured
    assert len(sessions) == alone


def test_backward_after_the_model_is_dropped() -> None:
    module = Broken()
    x = torch.randn(3, 4)
    loss = ORTModule(module)(x).square().sum()
    gc.collect()
    loss.backward()
    got = [parameter.grad for parameter in module.parameters()]
    want = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(got, list(want))


def test_classes_that_are_defined_in_functions_go_too() -> None:
    class Local(Plain):
        def scale(self) -> float:
            return 1.0

    _step(ORTModule(Local()))
    reference = weakref.ref(Local)
    del Local
    gc.collect()
    assert reference() is None


MODELS, ALLOWED = 8, 12 * 2**20

PROGRAM = f"""
import gc
import torch
from onnxtrain.ortmodule import ORTModule

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(hidden)

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))

for count in range(3 + {MODELS}):
    if count == 3:
        before = resident()
    ORTModule(Model())(torch.randn(4, 8)).sum().backward()
    gc.collect()
print(resident() - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_dropped_models() -> None:
    """Eight models take some 2 MB, what Dynamo notes of each capture; with their sessions they took 60."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) < ALLOWED
