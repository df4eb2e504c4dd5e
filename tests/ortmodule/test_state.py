"""ORTModule beside eager PyTorch where a graph meets state: masks, statistics, `.data`, optimizers, transforms."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onnxtrain.ortmodule import ORTModule
from ortmodule.custom_functions import Scaling, SetUp, VmapRule
from ortmodule.eager import Of, compare

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Calls(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], p: float = 0.0) -> None:
        super().__init__()
        self.function, self.p = function, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.p)


def result(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the result, the gradient of `x`, and the state of the generator after the call."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    y = model(x)
    y.sin().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, torch.get_rng_state()


MASKED: dict[str, Callable[[float], nn.Module]] = {
    "encoder": lambda p: nn.TransformerEncoderLayer(8, 2, 16, p, batch_first=True),
    "transposed": lambda p: Calls(lambda x, p: functional.dropout(x.transpose(0, 1), p), p),
    "torch.dropout": lambda p: Calls(lambda x, p: torch.dropout(x.transpose(0, 1), p, True), p),
    "alpha": lambda p: Calls(lambda x, p: functional.alpha_dropout(x.transpose(1, 2), p, True), p),
    "bernoulli_": lambda p: Calls(lambda x, p: x.mT * torch.empty_like(x.mT).bernoulli_(p), p),
    "bernoulli": lambda p: Calls(lambda x, p: x.mT * torch.bernoulli(x.mT.detach(), p), p),
}


# A symbolic probability of `alpha_dropout` is left to PyTorch.
@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_does_not_depend_on_other_wrapped_modules(name: str) -> None:
    x = torch.randn(2, 3, 8)
    for p in (0.1, 0.5, 0.0, 0.2):
        model = MASKED[name](p)
        torch.testing.assert_close(result(ORTModule(copy.deepcopy(model)), x), result(model, x))


class ReadsStatistics(nn.Module):
    def __init__(self, norm: Any, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.read = norm, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum() + self.read(self.norm, x)


READS: tuple[Callable[[Any, torch.Tensor], torch.Tensor], ...] = (
    lambda norm, x: (norm.running_var - 1).abs().sum(),
    lambda norm, x: (x * norm.running_mean[:, None]).sum(),
    lambda norm, x: (norm(x) * norm.running_mean.view(-1, 1) * x).sum(),
)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize(("read", "training"), list(itertools.product(READS, (True, False))))
def test_running_statistics_have_no_gradient(layer: Any, read: Any, training: bool) -> None:
    model = ReadsStatistics(layer(4, track_running_stats=True), read).train(training)
    ours, x = ORTModule(copy.deepcopy(model)), torch.randn(3, 4, 5)
    torch.testing.assert_close(result(ours, x), result(model, x))
    torch.testing.assert_close(list(ours.buffers()), list(model.buffers()))


class Swaps(nn.Module):
    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.net, self.average, self.twice = nn.Linear(3, 3), nn.Linear(3, 3), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for swap in (True, self.twice):
            for p, q in zip(self.net.parameters(), self.average.parameters(), strict=True):
                if swap:
                    p.data, q.data = q.data, p.data
            y: torch.Tensor = self.net(x)
        return y


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("twice", [False, True])
def test_swapped_data(twice: bool) -> None:
    model = Swaps(twice)
    ours, x = ORTModule(copy.deepcopy(model)), torch.ones(2, 3)
    for _ in range(3):
        torch.testing.assert_close(ours(x), model(x))
        torch.testing.assert_close(list(ours.parameters()), list(model.parameters()))


class Step(nn.Module):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def forward(self) -> None:
        self.optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_inside_forward(name: str) -> None:
    trained = []
    for wrap in (lambda step: step, ORTModule):
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = OPTIMIZERS[name](net.parameters())
        step = wrap(Step(optimizer))
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            step()
        trained.append((net.state_dict(), [dict(state) for state in optimizer.state.values()]))
    torch.testing.assert_close(trained[1], trained[0])


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "vmap of vmap": lambda f, x: torch.vmap(torch.vmap(f))(x),
    "grad": lambda f, x: torch.func.grad(lambda u: (f(u) * x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x).sum((0, 1)) * x,
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda u: (f(u) * u).sum()))(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("name", "function"), list(itertools.product(TRANSFORMS, (SetUp, VmapRule))))
def test_a_custom_function_inside_a_transform(name: str, function: Any) -> None:
    model = Calls(lambda x, p: TRANSFORMS[name](function.apply, x * 1.3))
    x = torch.randn(2, 3)
    torch.testing.assert_close(result(ORTModule(model), x), result(model, x))


class Drawn(nn.Module):
    """A lazy layer after a dropout, which draws first."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(3), nn.LazyBatchNorm1d())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.lazy(x))


def test_lazy_parameters_are_drawn_when_their_layer_is_reached() -> None:
    results = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        model = wrap(Drawn())
        calls = [model(torch.ones(4, 5)), model(torch.ones(4, 5))]
        results.append([*calls, torch.rand(1), *model.state_dict().values()])
    torch.testing.assert_close(results[1], results[0])
    assert model.report().runs_in_onnxruntime


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("dropout", ["dropout", "dropout1d", "alpha_dropout", "feature_alpha_dropout"])
def test_random_numbers_inside_vmap(dropout: str, randomness: str) -> None:
    function = getattr(nn.functional, dropout)
    model = Calls(lambda x, p: torch.vmap(lambda row: function(row, training=True), randomness=randomness)(x))
    x = torch.randn(4, 2, 6)
    results = []
    for run in (model, ORTModule(model)):
        torch.manual_seed(0)
        results.append([run(x), torch.rand(1)])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["grad", "vjp", "vmap of grad"])
def test_saved_tensors_of_a_custom_function_inside_a_transform(name: str, grad: bool) -> None:
    model = Calls(lambda x, p: TRANSFORMS[name](lambda t: Scaling.apply(t).sin(), x * 1.3))
    ours, x = ORTModule(model), torch.randn(2, 3)
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(ours(x), model(x))


class Rows(nn.Module):
    """A size that depends on data, in a graph with a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.p[x[:, 0] > 0]
        return chosen * x[0, 0], Scaling.apply(chosen) * 2


@pytest.mark.filterwarnings("ignore:ORTModule")
def test_a_data_dependent_size_before_a_custom_function() -> None:
    model = Rows()
    ours = ORTModule(model)
    for seed in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        results = []
        for run in (model, ours):
            outputs = run(x)
            results.append([*outputs, *torch.autograd.grad(sum(out.sum() for out in outputs), [model.p])])
        torch.testing.assert_close(results[1], results[0])


def through_an_output(x: torch.Tensor, p: Any) -> torch.Tensor:
    q = x * 1.5
    return torch.autograd.grad(q.tanh().square().sum(), q, create_graph=True)[0] * q


def through_a_custom_function(x: torch.Tensor, p: Any) -> torch.Tensor:
    q = x * 1.5
    return torch.autograd.grad(Scaling.apply(q.sin()).sum(), [q, x], create_graph=True)[0]


def through_several(x: torch.Tensor, p: Any) -> torch.Tensor:
    q = x * 1.5
    r = q.exp()
    y = (r * q).tanh()
    first, second = torch.autograd.grad(y, [q, r], torch.ones_like(y), create_graph=True)
    return first + second * 2


def through_a_view(x: torch.Tensor, p: Any) -> torch.Tensor:
    q = (x * 2).view(-1)[1:]
    with torch.enable_grad():
        y = q.square().sum()
    return torch.autograd.grad(y, q, create_graph=True)[0].sin()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "function", [through_an_output, through_a_custom_function, through_several, through_a_view]
)
def test_autograd_grad_of_an_intermediate_result(function: Any) -> None:
    model, x = Calls(function), torch.randn(2, 3)
    ours = ORTModule(model)
    for _ in range(2):
        torch.testing.assert_close(result(ours, x), result(model, x))
    assert all(graph.fallback_reason is None for graph in ours.report())


class Switches(nn.Module):
    """Switches gradients by a function, not by a context manager."""

    def __init__(self, modes: Sequence[bool], breaks: bool) -> None:
        super().__init__()
        self.p, self.modes, self.breaks = nn.Parameter(torch.ones(3)), modes, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.p
        for mode in self.modes:
            torch.set_grad_enabled(mode)
            y = y * self.p
            if self.breaks:
                torch._dynamo.graph_break()
        return y + 1


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("modes", [(False,), (True,), (False, True), (True, False)])
def test_gradients_stay_as_forward_leaves_them(modes: Any, custom: bool, breaks: bool) -> None:
    model: nn.Module = Switches(modes, breaks)
    if custom:
        model = nn.Sequential(Calls(lambda x, p: Scaling.apply(x * 2)), model)
    ours, x = ORTModule(model), torch.ones(2, 3)
    try:
        for before in (True, False, True, False):
            seen = []
            for run in (model, ours):
                torch.set_grad_enabled(before)
                y = run(x)
                seen.append((torch.is_grad_enabled(), y.requires_grad))
            assert seen[1] == seen[0]
    finally:
        torch.set_grad_enabled(True)


MODES: dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object]]] = {
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        torch.get_default_dtype,
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "warnings": (
        lambda: torch.set_warn_always(True),
        torch.is_warn_always_enabled,
        lambda: torch.set_warn_always(False),
    ),
    "autocast dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    "autocast cache": (
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
        lambda: torch.set_autocast_cache_enabled(True),
    ),
    "flash attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
    "sparse checks": (
        torch.sparse.check_sparse_tensor_invariants.enable,
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        torch.sparse.check_sparse_tensor_invariants.disable,
    ),
}
"""Functions that set a mode, get it, and set its default."""


FAILURES: dict[str, Callable[[Of, torch.Tensor], torch.Tensor]] = {
    "none": lambda module, y: y + torch.ones(3),
    "in Python": lambda module, y: y * module.factor,
    "of the data": lambda module, y: y + torch.ones(3)[(y * 100).long()],
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", MODES)
def test_modes_stay_as_forward_leaves_them(name: str, failure: str) -> None:
    set_mode, get, restore = MODES[name]

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        set_mode()
        return module.finish(module, y)

    def program(model: nn.Module) -> Any:
        seen = []
        for _ in range(3):
            try:
                with contextlib.suppress(AttributeError, IndexError):
                    seen.append(model(torch.ones(3)))
                seen.append(str(get()))
            finally:
                restore()
        return seen

    ours = compare(Of(function, finish=FAILURES[failure]), program)
    assert failure != "none" or ours.report().runs_in_onnxruntime


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y.sin() * x, g * x.exp()


TWICE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "saves": lambda x, p: Scaling.apply(x.sin()),
    "product": lambda x, p: Product.apply(x.sin(), x * 2).tanh(),
    "one after the other": lambda x, p: Scaling.apply(Product.apply(x, x + 1)),
    "linear backward": lambda x, p: SetUp.apply(x) * x,
}


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_through_a_custom_function(name: str) -> None:
    model = Calls(TWICE[name])
    results = []
    for run in (model, ORTModule(model)):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
        results.append([first, second, torch.autograd.grad(second.sum(), x)[0]])
    torch.testing.assert_close(results[1], results[0])


def test_parameters_set_from_a_vector_beside_a_transform() -> None:
    """Tensors inside transforms have no storage of their own."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda t: functional.layer_norm(t, t.shape[-1:]).pow(3).sum())(x)
        vector = torch.nn.utils.parameters_to_vector([module.weight]) * 0.9
        torch.nn.utils.vector_to_parameters(vector, [module.weight])
        return slope + module.weight

    x = torch.randn(3, 4)
    plain = Of(function, weight=nn.Parameter(torch.randn(4)))
    program = lambda module: (module(x), module.weight.detach().clone())
    compare(plain, program, ignore="ORTModule.*torch.func.grad")
