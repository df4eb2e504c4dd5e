"""Objects and numbers of Python that are others in each call: results beside eager PyTorch, and counts of captures."""

from __future__ import annotations

import collections
import datetime
import decimal
import functools
import gc
import math
import operator
import random
import re
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.capture.dynamo._repeated_captures import (
    MAX_CALLS,
    MAX_OBJECT_CAPTURES,
    _is_per_call_object,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

X = torch.tensor([[1.0, 2, 3, 4], [-1, 0.5, 2, -3]])

OBJECTS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "match": (lambda n: re.match(r"(\d+)", str(n)), lambda m: int(m.group(1))),
    "match in a list": (lambda n: [re.match(r"(\d+)", str(n))], lambda m: int(m[0][1])),
    "match of an object": (lambda n: types.SimpleNamespace(m=re.match("x+", "x" * n)), lambda o: o.m.end()),
    "pattern": (lambda n: re.compile("(a)" * n), operator.attrgetter("groups")),
    "list.pop": (lambda n: [float(n)].pop, lambda pop: pop()),
    "dict.get": (lambda n: {0: n}.get, lambda get: get(0)),
    "str.count": (lambda n: ("x" * n).count, lambda count: count("x")),
    "ndarray.item": (lambda n: np.array([float(n)]).item, lambda item: item()),
    "type": (lambda n: type("T", (), {"k": n}), lambda t: t.k),
    "closure": (lambda n: lambda: n, lambda f: f()),
    "partial": (lambda n: functools.partial(max, n), lambda f: f(0)),
    "iterator": (lambda n: iter([n]), next),
    "date": (lambda n: datetime.date(2000, 1, n), lambda d: d.day),
    "Decimal": (decimal.Decimal, float),
    "namedtuple": (lambda n: collections.namedtuple("N", "a")(n), lambda t: t.a),
    "Random": (random.Random, lambda rng: rng.random()),
    "numpy Generator": (np.random.default_rng, lambda rng: rng.random()),
    "RandomState": (np.random.RandomState, lambda rng: rng.rand()),
}


class Scaled(nn.Module):
    """Multiplies by a number that `read` takes from what `make` returns, which a graph cannot hold."""

    def __init__(self, make: Callable[[int], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.make, self.read = make, read

    def forward(self, x: torch.Tensor, n: list[int]) -> torch.Tensor:
        made = _made(self.make, n)
        return self.linear(x) * self.read(made)


@torch.compiler.disable
def _made(make: Callable[[int], Any], n: list[int]) -> Any:
    return make(n[0])


# Where graphs would hold for one call each, PyTorch runs the rest of the function from some call on.
uncaptured = pytest.mark.filterwarnings("ignore:.*of which Dynamo captured no graph")


@pytest.mark.sample(every=3)
@uncaptured
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_new_object_in_each_call_gives_the_number_of_this_call(kind: str) -> None:
    plain, model = Scaled(*OBJECTS[kind]), ORTModule(Scaled(*OBJECTS[kind]))
    n = [0]
    for n[0] in range(1, MAX_OBJECT_CAPTURES + 4):
        torch.testing.assert_close(model(X, n), plain(X, n))


@uncaptured
@pytest.mark.parametrize("kind", ["list.pop", "dict.get", "ndarray.item", "match"])
def test_functions_are_not_captured_anew_for_each_object(kind: str) -> None:
    model = ORTModule(Scaled(*OBJECTS[kind]))
    n = [0]
    captured = []
    for n[0] in range(1, MAX_OBJECT_CAPTURES + 6):
        model(X, n)
        captured.append(len(model.report().graphs))
    assert captured[-1] == captured[-4] <= MAX_OBJECT_CAPTURES + 2


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        ([].append, True), ("a".join, True), (np.ones(2).item, True), (re.compile("a").match, True),
        (re.match("a", "a"), True), (len, False), (operator.add, False), (dict.fromkeys, False),
        (torch.relu, False), (F.gelu, False), (torch._C._get_tracing_state, False), (torch.ones(2).add, False),
        (random.Random().random, False), (lambda: 1, False), (nn.Linear(1, 1).forward, False), (3.0, False),
    ],
)  # fmt: skip
def test_functions_of_modules_do_not_count_as_objects_of_one_call(value: Any, passes: bool) -> None:
    assert _is_per_call_object(value) == passes


DRAWS: dict[str, Callable[[random.Random], Any]] = {
    "random": lambda rng: rng.random(),
    "uniform": lambda rng: rng.uniform(1, 2),
    "randint": lambda rng: rng.randint(1, 100),
    "randrange": lambda rng: rng.randrange(1, 100),
    "sample": lambda rng: rng.sample(range(10), 2)[0],
    "shuffle": lambda rng: _shuffled(rng)[0],
    "choice": lambda rng: rng.choice([1, 2, 3]),
    "gauss": lambda rng: rng.gauss(0, 1),
    "branch": lambda rng: 1 if rng.random() < 0.5 else 2,
    "getstate": lambda rng: (rng.getstate()[1][-1] % 7, rng.random())[0],
    "seed": lambda rng: (rng.seed(5), rng.random() + rng.random())[1],
    "two": lambda rng: rng.random() + 2 * rng.randint(1, 9),
}


def _shuffled(rng: random.Random) -> list[int]:
    numbers = [1, 2, 3, 4, 5]
    rng.shuffle(numbers)
    return numbers


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[random.Random], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.rng, self.draw = random.Random(0), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.draw(self.rng)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("draw", DRAWS)
def test_generators_of_a_module_draw_on(draw: str) -> None:
    plain, model = Drawing(DRAWS[draw]), Drawing(DRAWS[draw])
    wrapped = ORTModule(model)
    for _ in range(6):
        torch.testing.assert_close(wrapped(X), plain(X))
    assert model.rng.getstate() == plain.rng.getstate()


NUMBERS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "mul": lambda x, v: x * v,
    "add": lambda x, v: x + v,
    "rsub": lambda x, v: v - x,
    "div": lambda x, v: x / v,
    "rdiv": lambda x, v: v / (x * x + 1),
    "temperature": lambda x, v: torch.softmax(x / v, -1),
    "where": lambda x, v: torch.where(x > v, x, v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "full": lambda x, v: x * torch.full((4,), v),
    "mixed": lambda x, v: x * v + x.flip(0) * (1 - v),
    "mathematics": lambda x, v: x * (math.cos(v) + math.sin(v) + math.tanh(v) + math.sqrt(v)),
    "float16": lambda x, v: (x.half() * v).float(),
    "bfloat16": lambda x, v: (x.bfloat16() / v).float(),
    "dropout": lambda x, v: F.dropout(x, 0 * v, training=False) * v,
}


class Numbered(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.use, self.number = use, 0.0

    def forward(self, x: torch.Tensor, v: float | None = None) -> torch.Tensor:
        return self.use(self.linear(x), self.number if v is None else v)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("place", ["argument", "attribute"])
@pytest.mark.parametrize("use", NUMBERS)
def test_floats_that_change_become_inputs_of_the_graph(use: str, place: str) -> None:
    plain, model = Numbered(NUMBERS[use]), Numbered(NUMBERS[use])
    wrapped = ORTModule(model)
    captured = []
    for v in (0.5, 0.25, 1.75, 1 / 3, 1e-3, 16777217.0):
        results, gradients = [], []
        for net, call in ((plain, plain), (model, wrapped)):
            net.number = v
            net.zero_grad()
            result = call(X, v) if place == "argument" else call(X)
            result.sum().backward()
            results.append(result)
            gradients.append(net.linear.weight.grad)
        torch.testing.assert_close(*results, equal_nan=True)
        torch.testing.assert_close(*gradients, equal_nan=True)
        captured.append(len(wrapped.report().graphs))
    assert captured[1:] == captured[1:2] * 5


@pytest.mark.parametrize("use", ["mul", "add", "rdiv", "div", "where", "float16"])
def test_floats_that_change_may_be_infinite_or_nan(use: str) -> None:
    plain, model = Numbered(NUMBERS[use]), ORTModule(Numbered(NUMBERS[use]))
    for v in (0.5, 1.5, math.inf, -math.inf, math.nan, 0.0, -0.0, 2, True, 1e-50):
        torch.testing.assert_close(model(X, v), plain(X, v), equal_nan=True)


def test_random_numbers_of_python_are_captured_twice_at_most() -> None:
    plain = Drawing(lambda _: random.random() + np.random.rand())
    model = ORTModule(Drawing(lambda _: random.random() + np.random.rand()))
    captured = []
    for seed in range(6):
        results = []
        for net in (plain, model):
            random.seed(seed)
            np.random.seed(seed)
            results.append(net(X))
        torch.testing.assert_close(*results)
        captured.append(len(model.report().graphs))
    assert captured[-1] == captured[1]


def test_objects_of_guards_live_as_long_as_the_model() -> None:
    class Word(str):
        pass

    class Times(nn.Module):
        def forward(self, x: torch.Tensor, match: re.Match[str]) -> torch.Tensor:
            return x * int(match.group(1))

    word = Word("7")
    model = ORTModule(Times())
    assert model(X, re.match(r"(\d+)", word)).tolist() == (X * 7).tolist()
    assert any(isinstance(referrer, re.Match) for referrer in gc.get_referrers(word))
    del model
    gc.collect()
    assert not any(isinstance(referrer, re.Match) for referrer in gc.get_referrers(word))


class Keeping(nn.Module):
    """Keeps numbers, and does `step` in each call."""

    def __init__(self, step: Callable[[Any, torch.Tensor], Any], width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.n, self.counts, self.kept, self.step = 0, {"calls": 0}, [], step
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.step(self, x)


def _counted(net: Any, x: torch.Tensor) -> Any:
    net.n += 1
    return net.n


def _counted_in_a_dict(net: Any, x: torch.Tensor) -> Any:
    net.counts["calls"] += 1
    return net.counts["calls"]


def _warmed_up(net: Any, x: torch.Tensor) -> Any:
    net.n += 1
    return min(1.0, net.n / 4)


def _every_third(net: Any, x: torch.Tensor) -> Any:
    net.n += 1
    return 2 if net.n % 3 == 0 else 3


def _bits(net: Any, x: torch.Tensor) -> Any:
    net.n += 1
    return (net.n & 3) + (net.n | 4) + (net.n >> 1) + net.n % 3 + net.n // 2


def _appended(net: Any, x: torch.Tensor) -> Any:
    net.kept.append(x.mean())
    return len(net.kept)


def _named(net: Any, x: torch.Tensor) -> Any:
    net.n += 1
    net.label = f"step {net.n}"
    return len(net.label)


@pytest.mark.parametrize("step", [_counted, _counted_in_a_dict, _warmed_up, _every_third, _bits])
def test_integers_of_a_module_that_change_become_inputs_of_the_graph(step: Any) -> None:
    plain, model = Keeping(step), Keeping(step)
    wrapped = ORTModule(model)
    captured = []
    for _ in range(8):
        plain.zero_grad()
        model.zero_grad()
        results = [plain(X), wrapped(X)]
        torch.testing.assert_close(*results)
        for result in results:
            result.sum().backward()
        torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
        captured.append(len(wrapped.report().graphs))
    assert captured[2:] == captured[2:3] * 6
    assert (model.n, model.counts) == (plain.n, plain.counts)
    assert type(model.n) is int


def test_integers_of_layers_that_do_not_change_stay_numbers(tmp_path: Path) -> None:
    """Layers of one class share their code, and their widths differ."""

    class Narrow(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : self.width].sum(1, keepdim=True) + x

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Narrow(width) for width in (1, 2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    plain, model = Layers(), ORTModule(Layers())
    for rows in (5, 3, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), plain(x))
    graphs = [ir.load(path).graph for path in model.export_training_graph(tmp_path)]
    assert [len(graph.inputs) for graph in graphs] == [1] * len(graphs)


@pytest.mark.sample(every=2)
@uncaptured
@pytest.mark.parametrize("step", [_appended, _named])
def test_functions_that_each_call_captures_run_in_pytorch_after_a_while(step: Any) -> None:
    plain, model = Keeping(step), ORTModule(Keeping(step))
    captured = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # By itself, `step` is captured in as many calls as `forward` was.
        for _ in range(2 * MAX_CALLS + 4):
            torch.testing.assert_close(model(X), plain(X))
            captured.append(len(model.report().graphs))
    texts = [str(warning.message) for warning in caught]
    said = [
        text for text in texts if f"captured again in each of {MAX_CALLS} calls. From now on it runs" in text
    ]
    assert 1 <= len(said) <= 2
    assert "Keeping.forward (line " in said[0]
    assert captured[MAX_CALLS - 1] >= MAX_CALLS
    assert captured[-1] == captured[-3]
