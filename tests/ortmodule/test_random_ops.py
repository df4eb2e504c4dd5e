"""Every ATen operator that draws random numbers does under ORTModule what it does in eager PyTorch.

The operators are those that PyTorch tags `nondeterministic_seeded`; each is called with arguments made from its schema.
All overloads of one operator share a program, which draws with each of them twice. Nobody reads the first draw, but all
later ones depend on it. Values, gradients and the next random number are compared.

With `ONNXTRAIN_AOT_EAGER=1` each program also runs under `torch.compile(backend="aot_eager")`, which must agree with
eager PyTorch but for the programs in `REFUSED_BY_AOT_EAGER` and `DIFFERENT_IN_AOT_EAGER`, and for draws nobody reads.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributions as d
from torch import nn
from torch._dynamo.exc import TorchRuntimeError
from torch.nn import functional as F

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.lowering._table import LOWERINGS
from ortmodule.eager import Of, compare, gradients, strict

ELSEWHERE = (
    "cudnn", "miopen", "mps", "flash", "efficient", "mem_eff", "triton", "nested", "overrideable", "_fused_dropout",
)  # fmt: skip
"""In names of operators that have no kernel for the CPU, or none that draws there."""

BY_HAND = {
    "rnn_relu",
    "rnn_tanh",
    "gru",
    "lstm",
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
}
"""Operators that are called through the layer or function that users write: below, in PROGRAMS."""

LEFT_OUT = {
    "aten._fused_sdp_choice.default": "chooses a kernel and returns its number; it draws nothing",
    "aten.rrelu_with_noise.out": "PyTorch 2.13 itself ends the process (segmentation fault)",
    "aten.rrelu_with_noise_functional.default": "its own derivative (PyTorch 2.13) reads slopes before they are drawn",
    "aten.random.from": "Dynamo writes `torch.ops.aten.random.from`, which is no Python; so do the next two",
    "aten.random_.from": "as aten.random.from",
    "aten.normal.out": "PyTorch's fake tensors refuse its own overload with a size",
}

NUMBERS = {
    "size": "[5, 6]", "high": "7", "low": "2", "n": "6", "p": "0.5", "lambd": "1.5", "train": "True",
    "training": "True", "lower": "0.1", "upper": "0.3", "num_samples": "3", "mean": "0.1", "std": "1.2",
    "from": "1", "to": "7", "median": "0.1", "sigma": "1.1", "replacement": "False",
}  # fmt: skip
"""Python expressions for arguments that are no tensors."""


def _drawing() -> Iterator[Any]:
    """Yields the overloads that draw."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            packet = getattr(torch.ops.aten, schema.name[6:], None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if overload is not None and torch.Tag.nondeterministic_seeded in overload.tags:
                yield overload


def _groups() -> dict[str, list[Any]]:
    groups = defaultdict(list)
    for overload in _drawing():
        name = overload._schema.name[6:]
        if (
            str(overload) not in LEFT_OUT
            and name not in BY_HAND
            and not any(word in name for word in ELSEWHERE)
        ):
            groups[name.rstrip("_")].append(overload)
    return dict(groups)


GROUPS = _groups()


def _tensor(argument: Any, name: str) -> str:
    """Returns an expression for a tensor argument; `h` is float [5, 6], between 0 and 1."""
    if argument.is_out:
        integers = "multinomial" in name or "randperm" in name
        mask = "dropout" in name and argument.name == "out1"
        if name == "normal":  # it does not resize
            return "torch.empty(5, 6)"
        return f"torch.empty(0, dtype=torch.{'long' if integers else 'bool' if mask else 'float'})"
    given = {"count": "(h * 10).floor()", "noise": "torch.zeros_like(h)", "high": "torch.tensor(7)"}
    written = argument.alias_info is not None and argument.alias_info.is_write
    return given.get(argument.name, "h.clone()" if written else "h")


def _call(overload: Any) -> str:
    """Returns the call of an overload as Python text."""
    name, kwargs_only, texts = overload._schema.name[6:], False, []
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if "Generator" in kind:
            text = "self.generator" if "generator" in overload._schema.overload_name else "None"
        elif kind.startswith("Tensor"):
            text = _tensor(argument, name)
        elif argument.name in NUMBERS:
            text = NUMBERS[argument.name]
        else:
            assert argument.has_default_value() or kind.startswith("Optional"), f"{overload}: {argument.name}"
            kwargs_only = True
            continue
        kwargs_only = kwargs_only or argument.kwarg_only
        texts.append(f"{argument.name}={text}" if kwargs_only else text)
    packet, _, overload_name = str(overload).rpartition(".")
    return f"getattr(torch.ops.{packet}, '{overload_name}')({', '.join(texts)})"


def _function(text: str, name: str = "f") -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    function: Callable[..., Any] = scope[name]
    return function


def _first(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
    return tensor


def _has_derivative(call: str) -> bool:
    """Returns whether eager PyTorch differentiates a call, or refuses it for an argument that requires a gradient."""
    h = torch.full((5, 6), 0.5, requires_grad=True).clone()
    owner = nn.Module()
    owner.generator = torch.Generator()
    try:
        result = _first(_function(f"def f(self, h): return {call}")(owner, h))
        if result.requires_grad:
            result.sum().backward()
    except RuntimeError as error:
        if "not implemented" in str(error) or "automatic differentiation" in str(error):
            return False
        raise
    return True


class Drawing(nn.Module):
    """A network with draws between its layers; the dropout at its end shows where the generator is."""

    def __init__(self, draw: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 6)
        self.generator = torch.Generator()
        self.draw = draw
        self.unread = True  # whether to draw once more, for nobody

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).sigmoid()
        y = self.last(h)
        for drawn in self.draw(self, h):
            y = y * torch.cat([drawn.reshape(-1).float(), y.new_ones(30)])[:30].reshape(5, 6)
        return F.dropout(y, 0.5)


def _trained(model: nn.Module, net: Drawing) -> list[torch.Tensor | None]:
    """Returns what two steps give: output, gradients, and the next random number."""
    torch.manual_seed(3)
    net.generator.manual_seed(4)
    seen: list[torch.Tensor | None] = []
    for scale in (1.0, 2.0):
        net.zero_grad()
        output = model(torch.linspace(-scale, scale, 20).reshape(5, 4))
        output.sum().backward()
        seen += [
            output.detach(),
            *(None if p.grad is None else p.grad.clone() for p in net.parameters()),
            torch.rand(1),
        ]
    return seen


REFUSED_BY_AOT_EAGER = frozenset({"rand_like", "randint_like", "randn_like"})
"""Operators that raise: fake tensors of PyTorch 2.13 call the overload with `out=` with an argument too many."""

DIFFERENT_IN_AOT_EAGER = frozenset({"_sample_dirichlet"})
"""Operators whose results differ even if every draw is read.

AOTAutograd (PyTorch 2.13) merges two calls with equal arguments in a training graph: its list of operators that draw
lacks this one.
"""

KEEPS_UNREAD_DRAWS = frozenset({
    "operator rrelu", "operator rrelu_with_noise", "program random_ of a range", "layer LSTM", "layer GRU", "layer RNN",
    "layer RNN of relu",
})  # fmt: skip
"""Programs whose results agree although nobody reads their first draws.

`aot_eager` leaves unread draws out of all others. Each later draw then has the numbers of an earlier one.
"""


def _agrees_in_aot_eager(net: Drawing) -> bool:
    """Tell whether two steps of a network give the same under `aot_eager` as in eager PyTorch."""
    plain, compiled = copy.deepcopy(net), copy.deepcopy(net)
    expected = _trained(plain, plain)
    torch._dynamo.reset()
    found = _trained(torch.compile(compiled, backend="aot_eager"), compiled)
    return all(
        (got is None) == (want is None)
        and (got is None or want is None or torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True))
        for got, want in zip(found, expected, strict=True)
    )


def _assert_listed_of_aot_eager(kind: str, name: str, net: Drawing) -> None:
    """Assert that `aot_eager` does otherwise than eager PyTorch in the listed ways alone, if the environment asks."""
    if not os.environ.get("ONNXTRAIN_AOT_EAGER"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "operator" and name in REFUSED_BY_AOT_EAGER:
            with pytest.raises(TorchRuntimeError, match="fake tensor"):
                _agrees_in_aot_eager(net)
            return
        net.unread = False
        assert _agrees_in_aot_eager(net) != (name in DIFFERENT_IN_AOT_EAGER)
        net.unread = True
        assert _agrees_in_aot_eager(net) == (f"{kind} {name}" in KEEPS_UNREAD_DRAWS)


def _assert_as_eager(net: Drawing) -> ORTModule:
    """Assert that two steps of a network draw and give the same under ORTModule; return the ORTModule."""
    # Dynamo (PyTorch 2.13) makes an object of the class when it captures Dirichlet.
    ignore = "ORTModule: |.*autograd.function.Function.* should not be instantiated"
    return compare(net, lambda module: _trained(module, module), ignore=ignore, equal_nan=True)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_operator_draws_as_in_eager(name: str) -> None:
    lines = ["def f(self, h):", "    drawn = []", "    constant = h.detach()"]
    for call in map(_call, GROUPS[name]):
        of_constant = f"(lambda h: {call})(constant)"
        lines.append(f"    if self.unread: {of_constant}")
        lines.append(f"    drawn.append({call if _has_derivative(call) else of_constant})")
    lines.append("    return [r[0] if isinstance(r, (tuple, list)) else r for r in drawn]")
    torch.manual_seed(0)
    net = Drawing(_function("\n".join(lines)))
    _assert_listed_of_aot_eager("operator", name, net)
    _assert_as_eager(net)


def test_every_operator_that_draws_is_tested() -> None:
    """A new operator of PyTorch is generated, or stands in one of the lists; nothing in the lists is out of date."""
    names = {overload._schema.name[6:] for overload in _drawing()}
    assert names >= BY_HAND
    assert set(LEFT_OUT) <= set(map(str, _drawing()))
    assert len(GROUPS) > 25
    assert sum(map(len, GROUPS.values())) > 90


def _twice(function: Callable[[torch.Tensor], Any]) -> Callable[..., list[torch.Tensor]]:
    """Returns what draws by `function` for nobody, then for the network."""

    def draw(self: Drawing, h: torch.Tensor) -> list[torch.Tensor]:
        if self.unread:
            function(h.detach())
        return [function(h)]

    return draw


def _attended(h: torch.Tensor) -> torch.Tensor:
    q = h.reshape(1, 1, 5, 6)
    return F.scaled_dot_product_attention(q, q * 2, q + 1, dropout_p=0.3)


PROGRAMS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "rrelu": _twice(lambda h: F.rrelu(h - 0.5, training=True)),
    "rrelu in place": _twice(lambda h: F.rrelu_(h - 0.5, 0.2, 0.4, training=True)),
    "two of them": _twice(lambda h: F.rrelu(F.rrelu(h - 0.5, training=True) - 0.1, training=True)),
    "alpha_dropout": _twice(lambda h: F.alpha_dropout(h, 0.3, training=True)),
    "feature_alpha_dropout": _twice(
        lambda h: F.feature_alpha_dropout(h[None, :, :, None], 0.3, training=True)
    ),
    "gumbel_softmax": _twice(lambda h: F.gumbel_softmax(h, tau=0.7)),
    "hard gumbel_softmax": _twice(lambda h: F.gumbel_softmax(h, hard=True)),
    "fractional_max_pool": _twice(lambda h: F.fractional_max_pool2d(h[None, None], 2, output_size=(2, 3))),
    "scaled_dot_product_attention": _twice(_attended),
    "init": _twice(lambda h: nn.init.normal_(torch.empty(5, 6)) + nn.init.uniform_(torch.empty(5, 6))),
    "methods": _twice(
        lambda h: torch.empty(5, 6).log_normal_() + torch.empty(5, 6).geometric_(0.4).cauchy_()
    ),
    "random_ of a range": _twice(lambda h: torch.empty(5, 6).random_(1, 7) + torch.empty(5, 6).random_(9)),
    "Normal": _twice(lambda h: d.Normal(h, h + 0.1, validate_args=False).rsample()),
    "Gamma": _twice(lambda h: d.Gamma(h + 0.5, h + 0.1, validate_args=False).rsample()),
    "Beta": _twice(lambda h: d.Beta(h + 0.5, h + 0.1, validate_args=False).rsample()),
    "Dirichlet": _twice(lambda h: d.Dirichlet(h + 0.5, validate_args=False).rsample()),
    "StudentT": _twice(lambda h: d.StudentT(h + 3.0, validate_args=False).rsample()),
    "Laplace": _twice(lambda h: d.Laplace(h, h + 0.1, validate_args=False).rsample()),
    "Binomial": _twice(lambda h: d.Binomial(5, h, validate_args=False).sample()),
    "Categorical": _twice(lambda h: d.Categorical(h, validate_args=False).sample()),
    "Poisson": _twice(lambda h: d.Poisson(h * 5, validate_args=False).sample()),
}
"""Programs as users write them that draw: each returns tensors, and draws once more without using the result."""

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(6, 6, num_layers=2, dropout=0.4),
    "GRU": lambda: nn.GRU(6, 6, num_layers=2, dropout=0.4),
    "RNN": lambda: nn.RNN(6, 6, num_layers=2, dropout=0.4),
    "RNN of relu": lambda: nn.RNN(6, 6, num_layers=2, dropout=0.4, nonlinearity="relu"),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_users_write_draws_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    net = Drawing(PROGRAMS[name])
    _assert_listed_of_aot_eager("program", name, net)
    _assert_as_eager(net)


def _through_layer(self: Drawing, h: torch.Tensor) -> list[torch.Tensor]:
    assert self.layer is not None
    if self.unread:
        self.layer(h.detach()[:, None])
    return [_first(self.layer(h[:, None]))]


@pytest.mark.parametrize("name", LAYERS)
def test_layer_draws_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    net = Drawing(_through_layer, LAYERS[name]())
    _assert_listed_of_aot_eager("layer", name, net)
    _assert_as_eager(net)


DRAWN_AGAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.4),
    "cauchy_": lambda h: torch.empty_like(h).cauchy_(),
    "exponential_": lambda h: torch.empty_like(h).exponential_(),
    "geometric_": lambda h: torch.empty_like(h).geometric_(0.4),
    "log_normal_": lambda h: torch.empty_like(h).log_normal_(),
    "normal_": lambda h: torch.empty_like(h).normal_(),
    "uniform_": lambda h: torch.empty_like(h).uniform_(),
    "normal": lambda h: torch.normal(0.5, 2.0, (5, 6)),
    "rand": lambda h: torch.rand(5, 6) + torch.rand_like(h),
    "randn": lambda h: torch.randn(5, 6) + torch.randn_like(h),
    "randint": lambda h: torch.randint(7, (5, 6)) + torch.randint_like(h, 2, 5),
    "randperm": lambda h: torch.randperm(6).float(),
    "multinomial": lambda h: torch.multinomial(h.detach(), 2).float().sum(1, keepdim=True),
    "multinomial with replacement": lambda h: (
        torch.multinomial(h.detach(), 9, True).float().sum(1, keepdim=True)
    ),
}


@pytest.mark.parametrize("name", DRAWN_AGAIN)
def test_gradients_computed_again_have_the_same_draws(name: str) -> None:
    """If a result has been written to, PyTorch computes the graph again for its gradient."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight * DRAWN_AGAIN[name](x)
        return (
            h / (1 + h.square()).sqrt()
        )  # its gradient reads its result, where PyTorch's reads what it divides

    def program(module: nn.Module) -> Any:
        torch.manual_seed(2)
        result = module(torch.linspace(0.2, 0.9, 30).reshape(5, 6))
        with torch.no_grad():
            result.add_(1)
        result.sum().backward()
        return result.detach(), gradients(module), torch.rand(1)

    plain = Of(function, weight=nn.Parameter(torch.linspace(0.1, 1.0, 30).reshape(5, 6)))
    ignore = "ORTModule: graph 0, gradient runs in PyTorch: the caller has written to a result"
    compare(plain, program, ignore=ignore, rtol=1.3e-6)


def test_draws_of_every_lowering_are_tested_again() -> None:
    lowered = {str(o).split(".")[1] for o in _drawing() if str(o) in LOWERINGS}
    lowered.remove("rrelu_with_noise_functional")  # in evaluation, where it draws nothing
    tested = {
        *(name.split()[0].rstrip("_") for name in DRAWN_AGAIN),
        *("native_dropout", "normal_functional", "rand_like", "randn_like", "randint_like"),
    }
    assert lowered <= tested


IN_PYTORCH = {
    "poisson": "aten.poisson",
    "binomial": "aten.binomial",
    "rrelu": "aten.rrelu_with_noise_functional",
    "_standard_gamma": "aten._standard_gamma",
}
CALLS = {
    "poisson": "torch.poisson(h)",
    "binomial": "torch.binomial((h * 5).detach().floor(), h.detach())",
    "rrelu": "torch.rrelu(h - 0.5, training=True)",
    "_standard_gamma": "torch._standard_gamma(h + 0.5)",
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
def test_draw_in_pytorch_is_reported_and_can_be_forbidden(name: str, read: bool) -> None:
    text = f"def f(self, h):\n    r = {CALLS[name]}\n    return [r] if {read} else []"
    torch.manual_seed(0)
    net = Drawing(_function(text))
    report = _assert_as_eager(net).report()
    assert not report.runs_in_onnxruntime
    assert any(IN_PYTORCH[name] in op.op for graph in report.graphs for op in graph.in_pytorch)
    forbidding = strict(copy.deepcopy(net))
    with pytest.raises(Exception, match=IN_PYTORCH[name].replace("_functional", "")):
        forbidding(torch.zeros(5, 4))
