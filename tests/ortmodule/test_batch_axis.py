"""One capture serves all sizes of the batch, and never computes anything else than eager PyTorch."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.capture._break_even import BreakEven
from onnxtrain.ortmodule.capture.graph._batch import Batch
from onnxtrain.ortmodule.module._sizes import BySize
from ortmodule.eager import Of, assert_same_step, compare, pair, step

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def _captures() -> int:
    """Returns how many graphs Dynamo has captured since the last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def test_other_sizes_are_not_captured_again() -> None:
    ours, plain = pair(_mlp())
    torch._dynamo.utils.counters.clear()
    for rows in (5, 3, 7, 5, 3, 11):
        assert_same_step(ours, plain, torch.randn(rows, 4))
    assert _captures() == 1
    assert [graph.name for graph in ours.report()] == ["graph 0", "graph 1", "graph 2"]
    assert ours.report().runs_in_onnxruntime


def test_arguments_keep_no_marks() -> None:
    x = torch.randn(5, 4)
    ORTModule(_mlp())(x)
    assert not vars(x)


def test_marks_of_the_user_count() -> None:
    """One graph for all sizes, from the first call on."""
    ours, plain = pair(_mlp())
    for rows in (5, 3, 7):
        x = torch.randn(rows, 4)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(ours(x), plain(x))
    assert len(ours.report()) == 1


def test_an_axis_that_the_user_marks_as_static_is_captured_as_a_number() -> None:
    torch._dynamo.utils.counters.clear()
    ours, plain = pair(_mlp())
    x = torch.randn(5, 4)
    torch._dynamo.mark_static(x, 0)
    torch.testing.assert_close(ours(x), plain(x))
    y = torch.randn(3, 4)
    torch.testing.assert_close(ours(y), plain(y))
    assert _captures() == 2


def test_a_size_is_compiled_under_the_settings_of_the_caller() -> None:
    """Modes, hooks and transforms of the call are no part of the graph."""
    plain = Of(lambda m, x: m.layer(x) + torch.arange(x.shape[0])[:, None], layer=nn.Linear(4, 4))
    ours, plain = pair(plain)
    assert_same_step(ours, plain, torch.randn(5, 4))
    unpacked = []
    with (
        torch.device("cpu"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t),
    ):
        assert_same_step(ours, plain, torch.randn(3, 4))
    with torch.device("cpu"):
        assert_same_step(ours, plain, torch.randn(7, 4))
    assert len(ours.report()) == 3
    assert ours.report().runs_in_onnxruntime


_RANDOM = torch.Generator().manual_seed(0)
"""For the batches of this table, which are made when the tests are collected."""


def _randn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=_RANDOM)


def _rows(*sizes: int) -> list[tuple[torch.Tensor, ...]]:
    return [(_randn(size, 4),) for size in sizes]


class _Times(torch.autograd.Function):
    """Multiplies by the size of the batch; its gradient tells that its own backward has run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = x.shape[0]
        return x * ctx.rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7 * ctx.rows


def _counted(m: Of, x: torch.Tensor) -> torch.Tensor:
    m.seen += x.shape[0]
    return m.layer(x) * m.seen


def _cached(m: Of, x: torch.Tensor) -> torch.Tensor:
    if m.mask is None or m.mask.shape[0] != x.shape[0]:
        m.mask = torch.arange(x.shape[0]).float()[:, None]
    return m.layer(x) * m.mask


def _two_graphs(m: Of, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    if h.sum() > 0:
        h = h * 2
    return h[: x.shape[0] // 2].tanh()


def _written(m: Of, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(m.layer(x).detach().sum(0))
    return m.layer(x) + total


def _steps_of_rnn(m: Of, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(itertools.accumulate(x.unbind(0), lambda h, t: torch.tanh(m.layer(t) + h))))


def _graph_net(m: Of, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).index_add(0, edges[0], m.layer(x)[edges[1]])


PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "the size is a factor": (lambda m, x: m.layer(x) * x.shape[0], _rows(5, 3, 7, 1, 0)),
    "a loop over the batch": (
        lambda m, x: torch.stack([m.layer(row) * i for i, row in enumerate(x)]),
        _rows(5, 3, 7),
    ),
    "a range over the batch": (
        lambda m, x: sum((m.layer(x[i]) * i for i in range(len(x))), x.new_zeros(4)),
        _rows(5, 3, 7, 0),
    ),
    "a view of one size": (
        lambda m, x: m.layer(x).view(5, -1) if len(x) == 5 else m.layer(x) * 2,
        _rows(5, 3, 7, 5),
    ),
    "a view of all rows": (lambda m, x: m.layer(x).view(4, -1).cumsum(0), _rows(5, 3, 7, 1)),
    "a branch on the size": (lambda m, x: m.layer(x) if len(x) > 4 else m.layer(x).tanh(), _rows(5, 3, 7, 4)),
    "a branch on even sizes": (
        lambda m, x: m.layer(x).view(2, -1).sum(0) if len(x) % 2 == 0 else m.layer(x).tanh(),
        _rows(6, 3, 8, 5, 2),
    ),
    "a branch on elements": (
        lambda m, x: m.layer(x) if x.numel() < 24 else m.layer(x).tanh(),
        _rows(5, 7, 3, 6),
    ),
    "a table by size": (lambda m, x: m.layer(x) * {5: 1.0, 3: 2.0}.get(len(x), 9.0), _rows(5, 3, 7, 9)),
    "a seed of the size": (lambda m, x: m.layer(x) * random.Random(len(x)).random(), _rows(5, 3, 7)),
    "a text of the size": (lambda m, x: m.layer(x) * len(f"{x.shape[0]}"), _rows(5, 13, 7, 10)),
    "equal shapes": (
        lambda m, x, y: m.layer(x) + y if x.shape == y.shape else m.layer(x) * y.sum(),
        [(_randn(a, 4), _randn(b, 4)) for a, b in ((5, 5), (3, 3), (7, 2), (4, 4))],
    ),
    "as many edges as two": (
        _graph_net,
        [
            (_randn(n, 4), torch.randint(n, (2, e), generator=_RANDOM))
            for n, e in ((2, 7), (2, 9), (5, 7), (9, 2), (2, 2))
        ],
    ),
    "a square matrix": (
        lambda m, x, a: (a + a.T) @ m.layer(x),
        [(_randn(n, 4), _randn(n, n)) for n in (5, 3, 7, 4)],
    ),
    "as many classes as rows": (
        lambda m, x, weight, target: F.cross_entropy(m.layer(x), target, weight),
        [
            (_randn(n, 4), torch.rand(4, generator=_RANDOM) + 0.1, torch.randint(4, (n,), generator=_RANDOM))
            for n in (4, 3, 7, 4)
        ],
    ),
    "both axes vary": (
        lambda m, x: m.layer(x).sum(1),
        [(_randn(*shape, 4),) for shape in ((5, 3), (5, 4), (3, 6), (7, 3), (5, 3))],
    ),
    "both axes are alike": (
        lambda m, x: m.layer(x).sum(1),
        [(_randn(*shape, 4),) for shape in ((5, 5), (3, 5), (5, 3), (7, 7), (5, 5))],
    ),
    "time first": (_steps_of_rnn, [(_randn(steps, 2, 4),) for steps in (5, 3, 7)]),
    "random numbers": (lambda m, x: F.dropout(m.layer(x)) + torch.rand(len(x), 1), _rows(5, 3, 7, 5)),
    "a padded batch": (
        lambda m, x: F.pad(m.layer(x), (0, 0, 0, (4 - len(x) % 4) % 4)).view(-1, 4, 4).mean(1),
        _rows(5, 3, 7, 8),
    ),
    "chunks": (lambda m, x: [part.tanh() for part in m.layer(x).split(3)], _rows(6, 4, 8, 5, 3)),
    "sizes and views": (lambda m, x: (m.layer(x), x.shape[0], x[1:], x.view(-1)), _rows(5, 3, 7, 1)),
    "a largest row that is not there": (lambda m, x: m.layer(x)[2:].amax(0), _rows(5, 4, 7)),
    "rows of a table": (
        lambda m, x: m.layer(x) + m.table[: len(x)],
        _rows(5, 3, 7, 10),
    ),
    "a counter": (_counted, _rows(5, 3, 7, 5)),
    "a mask that is kept": (_cached, _rows(5, 3, 7, 5, 3)),
    "two graphs": (_two_graphs, _rows(6, 3, 7, 6)),
    "an argument that is written to": (_written, [(_randn(n, 4), _randn(4)) for n in (5, 3, 4, 7)]),
    "a custom gradient": (lambda m, x: m.layer(_Times.apply(m.layer(x))), _rows(5, 3, 7, 5)),
    "rows that the data choose": (lambda m, x: m.layer(x[x[:, 0] > 0]).sum(0) * len(x), _rows(5, 3, 7, 9)),
    "parts of a larger tensor": (
        lambda m, x: m.layer(x).tanh(),
        [(_randn(20, 4)[start : start + n],) for start, n in ((0, 5), (5, 3), (8, 7))],
    ),
}


@pytest.mark.sample(every=3)
@pytest.mark.filterwarnings("ignore:ORTModule.*runs in PyTorch:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_size_is_that_of_eager_pytorch(name: str) -> None:
    function, batches = PROGRAMS[name]
    torch.manual_seed(0)
    plain = Of(
        function,
        layer=nn.Linear(4, 4),
        table=torch.randn(10, 4),
        seen=torch.zeros((), dtype=torch.int64),
        mask=None,
    )

    def program(module: nn.Module) -> list[Any]:
        steps = [step(module, *batch, seed=n, differentiate_inputs=False) for n, batch in enumerate(batches)]
        return [*steps, module.seen.clone()]

    # Gradients of up to some hundreds are sums, in another order than PyTorch's.
    compare(plain, program, atol=1e-4)


def test_what_holds_for_one_size_alone_is_not_used_for_another() -> None:
    """The graph for all sizes may turn out to need a size, here in PyTorch's formula of a projected LSTM."""
    plain = nn.LSTM(4, 5, batch_first=True)
    convolution = nn.Conv1d(3, 4, 2)
    module = Of(lambda m, x: m.lstm(m.convolution(x).transpose(1, 2))[0], lstm=plain, convolution=convolution)
    ours, eager = pair(module)
    for rows in (2, 3, 4, 6, 3):
        assert_same_step(ours, eager, torch.randn(rows, 3, 6))
    assert ours.report().runs_in_onnxruntime


def _recording(holds: Callable[[tuple[int, ...]], bool]) -> tuple[BySize, list[Any]]:
    """Returns a `BySize` of functions that return the size they were compiled for, and what was compiled."""
    compiled: list[Any] = []

    def compile_for(size: Any) -> Callable[..., Any]:
        compiled.append(size)
        return lambda *args: size

    return (
        BySize(
            lambda *args: 5,
            lambda *args: None,
            BreakEven(False),
            (5,),
            Batch((None,), ((0, None),), frozenset({0})),
            lambda args: compile_for(args[0]),
            lambda: (compile_for("all"), holds),
        ),
        compiled,
    )


def test_two_sizes_have_graphs_of_their_own_until_a_third_one_comes() -> None:
    graph, compiled = _recording(lambda size: True)
    assert [graph(size) for size in (5, 3, 5, 3, 7, 3, 8, 5)] == [5, 3, 5, 3, "all", "all", "all", 5]
    assert compiled == [3, "all"]


def test_sizes_that_the_graph_for_all_does_not_hold_for_have_graphs_of_their_own() -> None:
    graph, compiled = _recording(lambda size: size > (6,))
    assert [graph(size) for size in (5, 3, 7, 4, 8, 3)] == [5, 3, "all", 4, "all", 3]
    assert compiled == [3, "all", 4]


def test_few_graphs_of_one_size_are_kept() -> None:
    graph, compiled = _recording(lambda size: False)
    for size in range(100):
        assert graph(size) == size
    assert compiled.count("all") == 1
    kept = len(compiled)
    assert graph(99) == 99
    assert len(compiled) == kept
    assert graph(6) == 6  # compiled anew
    assert len(compiled) == kept + 1


def test_one_thread_compiles_at_a_time() -> None:
    """Tracing changes settings of the whole process, whether Dynamo does it or a new size of the batch."""
    lock = torch._dynamo.convert_frame.compile_lock
    free: list[bool] = []

    def try_lock() -> None:
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    def compile_for(size: int) -> Callable[[Any], Any]:
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return lambda value: size

    by_size = BySize(
        lambda value: 5,
        lambda value: None,
        BreakEven(False),
        (5,),
        Batch((None,), ((0, None),), frozenset({0})),
        lambda args: compile_for(args[0]),
        lambda: (compile_for(0), lambda size: True),
    )
    assert [by_size(size) for size in (5, 3, 7)] == [5, 3, 0]
    assert free == [False, False]


def test_threads_bring_sizes_of_their_own() -> None:
    ours, plain = pair(_mlp())

    def work(first: int) -> None:
        for rows in range(first, first + 5):
            x = torch.linspace(-1, 1, 4 * rows).reshape(rows, 4)
            got, want = (
                torch.autograd.grad(net(x).square().sum(), net.parameters()) for net in (ours, plain)
            )
            for found, wanted in zip(got, want, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (2, 4, 5, 9)))
    assert ours.report().runs_in_onnxruntime


def test_containers_that_hold_themselves() -> None:
    x = torch.randn(5, 4)
    items: list[Any] = [1, x]
    items.append(items)
    table: dict[str, Any] = {"x": x}
    table["itself"] = table

    class Net(nn.Module):
        def forward(self, items: list[Any], table: dict[str, Any]) -> torch.Tensor:
            return items[1] * 2 + table["x"]

    torch.testing.assert_close(ORTModule(Net())(items, table), x * 3)
