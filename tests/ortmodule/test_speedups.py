"""Speedups of captures: graphs and results are the same without them, and what each of them leaves out."""

from __future__ import annotations

import copy
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from fresh_process import python
from onnxtrain import _building
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._torch import GuardBuilder, GuardManager, dynamo_config, dynamo_guards
from onnxtrain.ortmodule.capture.dynamo import speedups
from onnxtrain.ortmodule.capture.dynamo.speedups._known_breaks import KnownBreaks, _Break

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

TRACED: list[str] = []
"""Names of functions, one for each time that Dynamo has traced one."""


@torch._dynamo.assume_constant_result
def traced(name: str) -> float:
    """Notes that Dynamo traces a function, which calls this one for its value when it does."""
    TRACED.append(name)
    return 1.0


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.ends = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * traced("inner")
        if self.ends:
            torch._dynamo.graph_break()
        return self.last(x.tanh())


class _Outer(nn.Module):
    """Calls another module between two operations."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.layer = inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.layer(x)).sin()


def nested(depth: int) -> nn.Module:
    """Returns modules inside of one another, of which the innermost ends the graph."""
    torch.manual_seed(0)
    module: nn.Module = _Inner()
    for _ in range(depth):
        # Each with a class and a forward of its own.
        cls = type("Level", (_Outer,), {"forward": _copied(_Outer.forward)})
        module = cls(module)
    return module


def _copied(function: Any) -> Any:
    return type(function)(function.__code__.replace(), function.__globals__)


def described(model: ORTModule) -> list[tuple[Any, ...]]:
    return [(g.name, g.mode, g.forward_nodes, g.backward_nodes, g.break_reason) for g in model.report()]


def test_without_the_speedups_graphs_and_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for enabled in (True, False):
        monkeypatch.setattr(speedups, "ENABLED", enabled)
        torch._dynamo.reset()
        TRACED.clear()
        model = ORTModule(nested(2))
        result = model(torch.ones(3, 4))
        result.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        outcomes.append((described(model), result, gradients, len(TRACED)))
    (graphs, *ours, traced), (other_graphs, *theirs, traced_without) = outcomes
    assert graphs == other_graphs
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert traced < traced_without


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_beginning_of_a_deep_function_is_not_traced_for_each_of_its_callers(depth: int) -> None:
    plain = nested(depth)
    model = ORTModule(copy.deepcopy(plain))
    x = torch.randn(3, 4)
    TRACED.clear()
    ours = model(x)
    # By the outermost function, and twice by the function itself: before and after Dynamo knows where the graph ends.
    assert TRACED == ["inner"] * 3
    theirs = plain(x)
    torch.testing.assert_close(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    # One graph before the call of each level, one before the end, one behind it, and one behind each call.
    forward = [graph for graph in model.report() if graph.name.startswith("graph")]
    assert len(forward) == 2 * depth + 2
    assert all(graph.fallback_reason is None for graph in forward)
    reasons = [graph.break_reason for graph in forward if graph.break_reason]
    assert len(reasons) == depth + 1
    line = _Inner.forward.__code__.co_firstlineno + 3
    assert all(reason.startswith(f"test_speedups.py:{line}: ") for reason in reasons)


def test_another_call_forgets_where_graphs_ended() -> None:
    model = ORTModule(nested(2))
    x = torch.randn(3, 4)
    model(x)
    before = len(list(model.report()))
    for module in model.modules():
        if isinstance(module, _Inner):
            module.ends = False
    model(x)
    # All levels are one graph now.
    assert len(list(model.report())) == before + 1


@pytest.mark.parametrize("of_the_user", [True, False])
def test_the_first_captures_of_a_call_cache_what_pytorch_knows_of_operators(
    of_the_user: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ORTModule(nested(5))
    cached: list[bool] = []

    def with_room(*args: Any, **kwargs: Any) -> Any:
        cached.append(dynamo_config.fake_tensor_cache_enabled)
        return _building.with_room(*args, **kwargs)

    monkeypatch.setattr(speedups, "with_room", with_room)
    with dynamo_config.patch(fake_tensor_cache_enabled=of_the_user):
        for x in (torch.randn(2, 4), torch.randn(2, 4, dtype=torch.float64)):
            cached.clear()
            model.to(x.dtype)(x).sum().backward()
            assert len(cached) > 6
            expected = [of_the_user and index < 4 for index in range(len(cached))]
            assert cached == expected
        assert dynamo_config.fake_tensor_cache_enabled == of_the_user


def test_what_a_failed_attempt_noted_is_forgotten() -> None:
    known, code = KnownBreaks(), test_what_a_failed_attempt_noted_is_forgotten.__code__
    kept, dropped = (_Break(text, "", None) for text in ("kept", "dropped"))
    known.add(code, 2, code, kept)

    def attempt() -> None:
        with known.attempt():
            known.add(code, 2, code, dropped)
            known.add(code, 8, code, dropped)
            raise ValueError("attempt")

    with pytest.raises(ValueError, match="attempt"):
        attempt()
    assert known.find(code, 2, code) == kept
    assert known.find(code, 8, code) is None
    with known.attempt():
        known.add(code, 8, code, dropped)
    assert known.find(code, 8, code) == dropped


def test_functions_are_not_kept_alive() -> None:
    known, code = KnownBreaks(), nested.__code__.replace()
    known.add(code, 2, code, _Break("", "", None))
    reference = weakref.ref(code)
    del code
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_capture_leaves_the_collector_as_it_was(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(4, 4))
    monkeypatch.setattr(_building, "_user_freezes", False)
    gc.unfreeze()
    if frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    freeze = gc.freeze
    freezes: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: (freezes.append(1), freeze()))
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()
    assert bool(freezes) == (not frozen)
    # Frozen objects may die meanwhile, but none is added.
    assert gc.get_freeze_count() <= before
    assert bool(gc.get_freeze_count()) == frozen


def test_guards_are_measured_for_a_log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(dynamo_guards, "profile_guard_manager", lambda *args: calls.append(args) or 1.0)
    ours = dynamo_guards.profile_guard_manager
    ORTModule(nn.Linear(4, 4))(torch.ones(2, 4))
    assert not calls
    monkeypatch.setattr(dynamo_guards.guards_log, "isEnabledFor", lambda level: level == logging.DEBUG)
    torch._dynamo.reset()
    ORTModule(nn.Linear(4, 4))(torch.ones(2, 4))
    assert calls
    assert dynamo_guards.profile_guard_manager is ours


def test_dynamo_measures_guards_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a new PyTorch no longer does: `_guard_profiling.py` may go."""
    calls = []
    monkeypatch.setattr(dynamo_guards, "profile_guard_manager", lambda *args: calls.append(args) or 1.0)
    torch.compile(nn.Linear(4, 4), backend="eager")(torch.ones(2, 4))
    assert calls


@pytest.mark.parametrize("enabled", [True, False])
def test_hooks_are_guarded_once(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no guard is left out, a new PyTorch guards hooks once: `_hook_guards.py` may go."""
    monkeypatch.setattr(speedups, "ENABLED", enabled)
    guarded: list[str] = []
    length = GuardBuilder.SEQUENCE_LENGTH

    def noted(self: Any, guard: Any) -> None:
        guarded.append(getattr(guard.originating_source, "member", ""))
        length(self, guard)

    monkeypatch.setattr(GuardBuilder, "SEQUENCE_LENGTH", noted)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    model = ORTModule(net)
    expected = model(x)
    assert "_forward_hooks" in guarded
    assert any(name.endswith("_with_kwargs") for name in guarded) == (not enabled)
    net[0].register_forward_hook(lambda module, args, kwargs, result: result * 2, with_kwargs=True)
    torch.testing.assert_close(model(x), (net[0](x)).relu())
    assert not torch.equal(model(x), expected)


UNUSED = """
import sys, torch
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.capture.dynamo import speedups
speedups.ENABLED = {enabled}
ORTModule(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
print([name in sys.modules for name in ("torch._inductor.codecache", "torch._functorch.aot_autograd", "networkx")])
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_compilers_of_pytorch_are_not_imported(enabled: bool) -> None:
    """If they are not without the speedups either, a new PyTorch does not: `_unused_imports.py` may go."""
    assert python("-c", UNUSED.format(enabled=enabled)).stdout.strip() == str([not enabled] * 3)


@pytest.mark.skipif(not hasattr(GuardManager, "add_dimension_marking_guard"), reason="PyTorch before 2.13")
@pytest.mark.parametrize("enabled", [True, False])
def test_marks_on_parameters_are_not_guarded(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no guard is left out, a new PyTorch doesn't guard marks on parameters: `_marking_guards.py` may go."""
    monkeypatch.setattr(speedups, "ENABLED", enabled)
    names: list[str] = []
    add = GuardManager.add_dimension_marking_guard
    monkeypatch.setattr(
        GuardManager, "add_dimension_marking_guard", lambda *args: names.append(args[4][0]) or add(*args)
    )
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = ORTModule(net)
    x = torch.randn(4, 3)
    model(x)
    assert any("L['input']" in name for name in names)
    assert any("_parameters" in name for name in names) == (not enabled)
    assert any("_buffers" in name for name in names) == (not enabled)
    # The graph stays valid for a marked parameter.
    torch._dynamo.mark_static(net[1].weight, 0)
    other = copy.deepcopy(net)
    torch.testing.assert_close(model(x), other(x))
    # Another shape of a parameter still needs another graph.
    net[1] = nn.Linear(3, 5)
    other[1] = copy.deepcopy(net[1])
    torch.testing.assert_close(model(x), other(x))


@pytest.mark.parametrize("enabled", [True, False])
def test_saved_tensor_hooks_are_not_guarded(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that are FX graphs are called, although no guard asks for them."""
    monkeypatch.setattr(speedups, "ENABLED", enabled)
    calls: list[Any] = []
    hooks = torch._functorch._aot_autograd.utils.top_saved_tensors_hooks
    net = nn.Linear(3, 2)
    model = ORTModule(net)
    x = torch.randn(4, 3)
    monkeypatch.setattr(
        torch._functorch._aot_autograd.utils, "top_saved_tensors_hooks", lambda: calls.append(None) or hooks()
    )
    model(x)
    calls.clear()
    model(x)
    assert bool(calls) == (not enabled)
    packed: list[torch.Tensor] = []
    pack = torch.fx.symbolic_trace(lambda tensor: tensor.clone())
    pack.register_forward_pre_hook(lambda module, args: packed.append(args[0]))
    unpack = torch.fx.symbolic_trace(lambda tensor: tensor * 2)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = model(x)
    result.sum().backward()
    assert packed
    torch.testing.assert_close(net.weight.grad, 2 * x.sum(0).expand(2, 3))


def test_a_call_runs_few_python_functions() -> None:
    """In a small model's call, Python functions and comprehensions take longer than ONNX Runtime."""
    model = ORTModule(nn.Linear(3, 2))
    x, cotangent = torch.ones(4, 3), torch.ones(4, 2)
    # The first call is captured. Later on the addresses of the tensors are known.
    for _ in range(3):
        model(x).backward(cotangent)
    own: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and f"onnxtrain{os.sep}ortmodule" in frame.f_code.co_filename:
            own.append(frame.f_code.co_qualname)

    def functions(run: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
        own.clear()
        sys.setprofile(note)
        try:
            result = run(*args)
        finally:
            sys.setprofile(None)
        return result, list(own)

    halves = []
    for _ in range(4):
        y, forward = functions(model, x)
        _, backward = functions(y.backward, cotangent)
        halves.append((forward, backward))
    forward, backward = (min(lists, key=len) for lists in zip(*halves, strict=True))
    assert len(forward) <= 20, forward
    assert len(backward) <= 8, backward
