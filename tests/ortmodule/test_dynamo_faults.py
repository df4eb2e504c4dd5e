"""Each patch of PyTorch avoids a fault that the installed version has: here `torch.compile` runs without the patches.

If one of these tests fails, the installed PyTorch no longer has the fault. The patch may go when this holds for all
versions that onnxtrain supports.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import get_metrics_context
from torch.fx.passes.split_module import split_module

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.capture.dynamo.patches import DURING_CAPTURE, WITH_DATA_DEPENDENT_SIZES
from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import FAKES
from ortmodule.asserting import counted
from ortmodule.custom_functions import Scaling

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

X = torch.arange(6.0).reshape(3, 2)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="eager", **options)


def symbols() -> contextlib.AbstractContextManager[None]:
    """Data-dependent sizes and numbers become symbols, as in ORTModule."""
    return torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)


@pytest.fixture(autouse=True)
def after_a_capture() -> None:
    """ORTModule has captured before, and has undone its patches."""
    ORTModule(torch.nn.Linear(2, 2))(X)


def asserted_numbers() -> None:
    """The assertion is not checked."""
    with pytest.raises(AssertionError, match="too few"):
        counted(X - 10)
    with symbols():
        run = compiled(counted)
        torch.testing.assert_close(run(X), counted(X))
        run(X - 10)


def aliased_writes() -> None:
    """The gradient is that of `round`, zero, as Dynamo loses the function's own backward."""

    def written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x + 0
        y[0].mul_(weight)
        return StraightThrough.apply(y)

    slopes = []
    for function in (written, compiled(written)):
        weight = torch.ones(2, requires_grad=True)
        function(X, weight).sum().backward()
        slopes.append(weight.grad)
    torch.testing.assert_close(slopes, [X[0], torch.zeros(2)])


def caught_errors() -> None:
    """The error bypasses the function's `except`."""

    def f(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        try:
            return x[index]
        except IndexError:
            return x * 2

    run, index = compiled(f), torch.tensor([1])
    torch.testing.assert_close(run(X, index), f(X, index))
    torch.testing.assert_close(f(X, index + 5), X * 2)
    with pytest.raises(IndexError):
        run(X, index + 5)


def appended(x: torch.Tensor, deque: collections.deque[int]) -> torch.Tensor:
    deque.append(2)
    return x * len(deque)


def deque_maxlen() -> None:
    """The deque grows beyond its maxlen."""

    results = [f(X, collections.deque([1], maxlen=1)) for f in (appended, compiled(appended))]
    torch.testing.assert_close(results[0], X)
    torch.testing.assert_close(results[1], X * 2)


def id_guards() -> None:
    """The graph of an object is used for another object that has got the same id."""

    def f(x: torch.Tensor, match: re.Match[str]) -> torch.Tensor:
        return x * int(match.group(1))

    run = compiled(f)
    numbers = [run(X[0] * 0 + 1, re.match("(.*)", str(n)))[0].item() for n in range(1, 5)]
    assert numbers != [1, 2, 3, 4]


def inactive_dropout() -> None:
    """The result is a copy."""
    assert torch.dropout(X, 0.5, False) is X
    with enable_python_dispatcher():
        assert torch.ops.aten.dropout.default(X, 0.5, False) is not X


def list_contains() -> None:
    """A size is not found in a shape."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if 3 in x.shape else x

    torch.testing.assert_close(f(X), X * 2)
    torch.testing.assert_close(compiled(f, dynamic=True)(X), X)


def metric_tracebacks() -> None:
    """Tracebacks stay after the capture, with code objects on the stack."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    get_metrics_context()._edits.clear()
    compiled(f)(X)
    assert get_metrics_context()._edits


def missing_fakes() -> None:
    """The operators cannot be captured."""
    mask, classes = X[:, 0] > 1, torch.tensor([0, 1, 1])
    scores = torch.randn(5, 1, 4).log_softmax(-1)
    calls: dict[str, Callable[[], Any]] = {
        "_ctc_loss": lambda: torch.nn.functional.ctc_loss(
            scores, classes[None, 1:], torch.tensor([5]), torch.tensor([2])
        ),
        "cummax": lambda: X[mask].cummax(0)[0],
        "cummin": lambda: X[mask].cummin(0)[0],
    }
    names = {op.name().removeprefix("aten::").partition(".")[0] for op in FAKES}
    # That of `bincount` is wrong in PyTorch 2.12 only.
    assert names == calls.keys() | {"bincount"}
    for call in calls.values():
        with symbols(), pytest.raises((torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
            compiled(call, fullgraph=True)()


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.step


def module_integers() -> None:
    """Each step of a counter is captured."""
    counter, model = CompileCounter(), Counting()
    run = torch.compile(model, backend=counter)
    for _ in range(5):
        run(X)
    assert counter.frame_count == 5


def random_objects() -> None:
    """Each call draws the same number."""

    def f(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
        return x * rng.random()

    run, rng = compiled(f), random.Random(0)
    torch.testing.assert_close(run(X, rng), run(X, rng), rtol=0, atol=0)


class StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def transformed_functions() -> None:
    """The gradient is that of `round`, zero."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda u: StraightThrough.apply(u).sum())(x)

    torch.testing.assert_close(slope(X), torch.ones_like(X))
    torch.testing.assert_close(compiled(slope)(X), torch.zeros_like(X))


FAULTS = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        aliased_writes,
        asserted_numbers,
        caught_errors,
        deque_maxlen,
        id_guards,
        inactive_dropout,
        list_contains,
        metric_tracebacks,
        missing_fakes,
        module_integers,
        random_objects,
        transformed_functions,
    )
}


def test_each_patch_has_its_fault_here() -> None:
    assert not DURING_CAPTURE.keys() & WITH_DATA_DEPENDENT_SIZES.keys()
    assert FAULTS.keys() == DURING_CAPTURE.keys() | WITH_DATA_DEPENDENT_SIZES.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_pytorch_has_the_fault(name: str) -> None:
    gc.collect()
    FAULTS[name]()


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_patches_hold_after_other_users_of_dynamo() -> None:
    """Dynamo fills tables of its functions at its first capture, which was one without patches."""

    class Appending(torch.nn.Module):
        def forward(self, x: torch.Tensor, deque: collections.deque[int]) -> torch.Tensor:
            return appended(x, deque)

    deque_maxlen()
    torch.testing.assert_close(ORTModule(Appending())(X, collections.deque([1], maxlen=1)), X)


@pytest.mark.filterwarnings("ignore")
def test_a_captured_backward_has_no_derivative() -> None:
    """If this fails, `_record_backwards` of capture/graph/_split.py may go."""

    def second(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.sum(), x)[0]

    torch.testing.assert_close(second(Scaling.apply), -X.sin())
    with pytest.raises(RuntimeError, match="does not require grad"):
        second(compiled(lambda x: Scaling.apply(x)))


def test_a_gradient_by_an_output_of_a_graph_raises() -> None:
    """If this fails, `differentiated_outputs` of capture/graph/_split.py may go."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        q = x * 2
        return torch.autograd.grad(q.sin().sum(), q)[0]

    x = X.clone().requires_grad_()
    torch.testing.assert_close(slope(x), (2 * X).cos())
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.compile(slope, backend="aot_eager")(x)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_with_an_unbound_size_cannot_be_split() -> None:
    """If this fails, `_hide_unbound_sizes` of capture/graph/_split.py may go."""
    raised = []

    def split(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        # Without the assertions on the size, which ORTModule checks itself, no node holds it.
        for node in reversed(graph_module.graph.nodes):
            if node.op.startswith("call") and not node.users:
                graph_module.graph.erase_node(node)
        last = [node for node in graph_module.graph.nodes if node.op.startswith("call")][-1]
        try:
            split_module(graph_module, graph_module, lambda node: int(node is last), keep_original_order=True)
        except KeyError as error:
            raised.append(str(error))
        return graph_module.forward

    def selected(x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.tensor([True, False] * x.shape[1])[: x.shape[1]]].sin().cos()

    with symbols():
        torch.compile(selected, backend=split)(X)
    assert raised == ["u0"]
