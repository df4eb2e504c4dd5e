"""Code that Dynamo leaves to PyTorch without a word: ORTModule warns of it, and reports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException
from onnxtrain.ortmodule._torch import isolates_recompiles
from onnxtrain.ortmodule.module import _compiled_graph, _pytorch_work
from ortmodule.eager import strict


class LoopWithPrint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.linear(x)
            print("layer done")
            x = torch.sinh(x)
        return x


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sinh()


class ManualGenerator(nn.Linear):
    """Captured, although it looks as if it could not be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def terms() -> Iterator[torch.Tensor]:
            for power in range(1, 3):
                yield super(ManualGenerator, self).forward(x) ** power

        return sum(terms(), torch.zeros(()))


class Checked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            raise ValueError(f"a matrix is wanted, received {x.dim()} dimensions")
        return super().forward(x).sinh()


@pytest.mark.parametrize("cls", [LoopWithPrint, Disabled])
def test_a_function_that_dynamo_gives_up_on(cls: type[nn.Module]) -> None:
    plain = cls() if cls is LoopWithPrint else cls(3, 3)
    model = ORTModule(plain)
    x = torch.randn(2, 3)
    with pytest.warns(
        UserWarning, match=rf"runs in PyTorch: .*aten\.sinh.* in {cls.__name__}\.forward"
    ) as caught:
        result = model(x)
    assert len(caught) == 1
    model(x)  # does not warn again
    torch.testing.assert_close(result, plain(x))
    assert not model.report().runs_in_onnxruntime
    [record] = model.report().fallbacks
    assert record.engine == "PyTorch"
    assert record.name == "uncaptured 0"
    assert "aten.sinh" in str(record.fallback_reason)


def test_the_policy_forbids_it() -> None:
    model = strict(LoopWithPrint())
    for _ in range(2):
        with pytest.raises(ORTModuleTorchModelException, match=r"aten\.sinh in LoopWithPrint\.forward"):
            model(torch.randn(2, 3))


def test_a_captured_function_is_not_reported() -> None:
    model = ORTModule(ManualGenerator(3, 3))
    model(torch.randn(2, 3)).sum().backward()
    assert model.report().runs_in_onnxruntime


def test_functional_transforms_are_reported() -> None:
    model = ORTModule(nn.Linear(3, 3))
    x = torch.randn(4, 2, 3)
    with pytest.warns(UserWarning, match=r"Linear\.forward .*, under a transform of torch\.func"):
        result = torch.func.vmap(model)(x)
    torch.testing.assert_close(result, model.module(x))


def test_a_dispatch_mode_of_the_user_is_reported() -> None:
    model = ORTModule(nn.Linear(3, 3))
    with (
        FlopCounterMode(display=False) as counter,
        pytest.warns(UserWarning, match=r"aten\.addmm in Linear\.forward"),
    ):
        model(torch.randn(2, 3))
    assert counter.get_total_flops() == 2 * 2 * 3 * 3


def test_dynamo_switched_off_is_reported() -> None:
    model = ORTModule(nn.Linear(3, 3))
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.warns(UserWarning, match="while Dynamo is switched off"),
    ):
        model(torch.randn(2, 3))


def test_it_is_noticed_long_after_the_first_call() -> None:
    class Late(nn.Linear):
        def forward(self, x: torch.Tensor, loop: bool = False) -> torch.Tensor:
            x = super().forward(x)
            return LoopWithPrint.forward(self, x) if loop else x

        def linear(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = ORTModule(Late(3, 3))
    for _ in range(3):
        model(torch.randn(2, 3))
    assert model.report().runs_in_onnxruntime
    with pytest.warns(UserWarning, match=r"aten\.sinh"):
        model(torch.randn(2, 3), loop=True)


def test_one_that_raised_is_captured_again() -> None:
    """Dynamo cannot capture a call that raises, and then never captures the function again."""
    model = ORTModule(Checked(3, 3))
    x = torch.randn(2, 3)
    for bad in (False, True, False, True, False):
        if bad:
            with pytest.raises(ValueError, match="received 1 dimensions"):
                model(x[0])
        else:
            torch.testing.assert_close(model(x), model.module(x))
    assert model.report().runs_in_onnxruntime


def test_one_that_raised_first_is_captured() -> None:
    model = ORTModule(Checked(3, 3))
    with pytest.raises(ValueError, match="received 1 dimensions"):
        model(torch.randn(3))
    model(torch.randn(2, 3)).sum().backward()
    assert model.report().runs_in_onnxruntime


@pytest.mark.skipif(
    not isolates_recompiles, reason="Dynamo 2.12 captures nothing of such a loop: all runs in PyTorch"
)
def test_a_hook_inside_of_a_loop() -> None:
    """It breaks the graph there; the layers still run in ONNX Runtime, the operators between them do not."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = ORTModule(Stack())
    log: list[torch.Tensor] = []
    model.layers[1].register_full_backward_hook(lambda module, gi, go: log.append(go[0]))
    with pytest.warns(UserWarning, match=r"aten\.tanh in .*Stack\.forward"):
        model(torch.ones(1, 3)).sum().backward()
    assert len(log) == 1
    assert {graph.engine for graph in model.report()} == {"ONNX Runtime", "PyTorch"}


def test_a_forward_that_is_a_generator() -> None:
    """Its code runs when the caller asks for the items."""

    class Steps(nn.Linear):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
            for _ in range(2):
                x = super().forward(x)
                yield x

    model = ORTModule(Steps(3, 3))
    with pytest.warns(UserWarning, match=r"what the generator computes in .*Steps\.forward"):
        steps = list(model(torch.ones(1, 3)))
    assert len(steps) == 2
    assert not model.report().runs_in_onnxruntime


def test_a_string_that_often_differs_is_told_of() -> None:
    class Labelled(nn.Linear):
        label = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * len(self.label)

    layer = Labelled(3, 3)
    model = ORTModule(layer)
    # Each graph serves two calls: a function that each call captures is left to PyTorch long before.
    for layer.label in map(str, range(64)):
        model(torch.ones(1))
        model(torch.ones(1))
    layer.label = "another"
    with pytest.warns(UserWarning, match="captured 64 times"):
        model(torch.ones(1))
    assert model(torch.ones(1)) == 7


@pytest.mark.parametrize(
    ("net", "called"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), False),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout()), True),
        (nn.BatchNorm1d(3), True),
    ],
    ids=["no operator", "random numbers", "writes"],
)
def test_the_watch_is_left_only_for_graphs_that_call_operators(
    net: nn.Module, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ORTModule(net)
    x = torch.randn(4, 3)
    model(x).sum().backward()
    left: list[object] = []
    unwatched = _compiled_graph.unwatched
    monkeypatch.setattr(
        _compiled_graph,
        "unwatched",
        lambda function, *args: left.append(function) or unwatched(function, *args),
    )
    seen: list[object] = []
    watch = _pytorch_work._Watch.__torch_dispatch__
    monkeypatch.setattr(
        _pytorch_work._Watch, "__torch_dispatch__", lambda *args: seen.append(args[1]) or watch(*args)
    )
    model(x).sum().backward()
    assert bool(left) == called
    assert not seen


def test_pytorch_in_place_of_onnxruntime_is_unwatched() -> None:
    model = ORTModule(nn.Embedding(3, 2))
    index = torch.tensor([0, 2])
    model(index)
    for _ in range(2):
        with pytest.raises(IndexError):
            model(torch.tensor([0, 5]))
    assert model.report().runs_in_onnxruntime
