"""Derivatives as PyTorch's autograd asks for them: of some outputs, twice, of batches, and freed when they are done."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from onnxtrain.autodiff._registry import RULES
from onnxtrain.ortmodule import ORTModule, ORTModuleFallbackException
from ortmodule.eager import Of, assert_same, compare, compare_steps, gradients, pair, strict
from ortmodule.test_engine import mlp

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.trunk(x).relu()
        return [head(h) for head in self.heads]


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 1, 2)])
def test_heads_that_a_loss_does_not_use_have_no_gradient(used: tuple[int, ...]) -> None:
    compare_steps(
        Heads(), (5, 4), loss=lambda out: sum(out[index].square().sum() for index in used), wrap=strict
    )


def test_weight_decay_leaves_unused_heads_alone() -> None:
    batches = [torch.randn(batch, 4) for batch in (5, 3, 4, 6)]

    def program(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for number, x in enumerate(batches):
            optimizer.zero_grad()
            module(x)[number % 2].square().sum().backward()
            optimizer.step()
        return list(module.parameters())

    compare(Heads(), program, wrap=strict)


class Root(nn.Module):
    """Its second output has no finite derivative at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.w * x
        return h, h.sqrt()


def test_an_unused_output_adds_nothing_where_its_derivative_is_infinite() -> None:
    ours, _ = pair(Root())
    ours(torch.ones(3))[0].sum().backward()
    assert ours.w.grad.tolist() == [1.0, 1.0, 1.0]


def test_pieces_of_one_result() -> None:
    plain = Of(
        lambda m, x: (*m.linear(x).chunk(2, -1), m.other(x)), linear=nn.Linear(4, 6), other=nn.Linear(4, 2)
    )
    # Symbolic from the second batch on.
    ours = compare_steps(plain, (3, 4), (5, 4), loss=lambda out: out[1].square().sum(), wrap=strict)
    assert ours.other.weight.grad is None


def second_derivatives(module: nn.Module, x: torch.Tensor) -> list[Any]:
    """Return those of a gradient penalty, for the input and all parameters, and the buffers."""
    module.zero_grad()
    leaf = x.to(next(module.parameters()).dtype).clone().requires_grad_()
    torch.manual_seed(1)
    out = module(leaf)
    out = out[0] if isinstance(out, tuple) else out
    (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    first.square().sum().backward()
    return [leaf.grad, gradients(module), {name: b.clone() for name, b in module.named_buffers()}]


class Counting(nn.Module):
    """Its buffers change in forward: one is written before it is used, one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        h = self.linear(x).tanh()
        out = h * self.mean.clone() / self.steps
        self.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        return out


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh())


@pytest.mark.parametrize("make", [batch_norm, spectral_norm, Counting])
def test_second_derivatives_of_modules_that_change_buffers(make: Callable[[], nn.Module]) -> None:
    plain, batches = make(), [torch.randn(batch, 4) for batch in (5, 3)]
    ours = compare(
        plain, lambda module: [second_derivatives(module, x) for x in batches], wrap=strict, exact=True
    )
    assert ours.report().runs_in_onnxruntime


def test_an_input_changed_before_a_second_derivative_is_noticed() -> None:
    ours, _ = pair(batch_norm())
    x = torch.randn(5, 4, requires_grad=True)
    out = ours(x).sum()
    with torch.no_grad():
        ours[3].bias.add_(1.0)  # no gradient depends on it
    torch.autograd.grad(out, x, create_graph=True)
    out = ours(x).sum()
    with torch.no_grad():
        ours[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, x, create_graph=True)


def dropped() -> nn.Module:
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Dropout2d(0.5))
    return nn.Sequential(images, nn.Flatten(2), nn.GRU(9, 2, batch_first=True))


def counted() -> nn.Module:
    return nn.Sequential(Counting(), nn.Unflatten(1, (2, 2)), nn.GRU(2, 3, batch_first=True))


@pytest.fixture
def no_rule_of_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent layers have a Scan in their gradient: without its rule they have no second derivative."""
    monkeypatch.delitem(RULES, ("", "Scan"))


RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5), (5, 4)),
    "gru": (lambda: nn.GRU(4, 3, batch_first=True, bidirectional=True), (5, 4)),
    "dropout": (dropped, (3, 8, 8)),
    "counting": (counted, (4,)),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", RECURRENT)
def test_second_derivatives_of_recurrent_layers(name: str) -> None:
    make, shape = RECURRENT[name]
    plain, batches = (
        make(),
        [torch.randn(batch, *shape) for batch in (2, 3, 4)],
    )  # the third graph is symbolic
    ours = compare(plain, lambda module: [second_derivatives(module, x) for x in batches])
    assert ours.report().runs_in_onnxruntime


@pytest.mark.sample(every=2)
@pytest.mark.usefixtures("no_rule_of_scan")
@pytest.mark.parametrize("name", RECURRENT)
def test_second_derivatives_that_onnxruntime_lacks_are_pytorchs(name: str) -> None:
    make, shape = RECURRENT[name]
    plain = make()
    ours = ORTModule(copy.deepcopy(plain))
    for batch, warned in ((2, 1), (2, 0), (3, 0), (4, 0)):  # once per capture, which serves all sizes
        x = torch.randn(batch, *shape)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = second_derivatives(ours, x)
        said = [str(w.message) for w in caught if "ORTModule" in str(w.message)]
        assert len(said) == warned
        assert all("second derivative runs in PyTorch: " in message for message in said)
        assert_same(got, second_derivatives(plain, x))
    first, *_ = ours.report().fallbacks
    assert first.name == "graph 0, second derivative"
    assert "Scan" in (first.fallback_reason or "")


def test_third_derivatives() -> None:
    plain, x = nn.Sequential(nn.Conv1d(2, 3, 2), nn.MaxPool1d(2), nn.Tanh()), torch.randn(2, 2, 9)

    def program(module: nn.Module) -> Any:
        leaf = x.clone().requires_grad_()
        value = module(leaf).pow(3).sum()
        for _ in range(2):
            (first,) = torch.autograd.grad(value, leaf, create_graph=True)
            value = first.square().sum()
        value.backward()
        return leaf.grad, gradients(module)

    compare(plain, program, ignore="")


@pytest.mark.usefixtures("no_rule_of_scan")
def test_a_forbidden_second_derivative_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "DISABLE")
    ours = ORTModule(nn.LSTM(4, 3))
    x = torch.randn(5, 2, 4, requires_grad=True)
    with pytest.raises(ORTModuleFallbackException, match="Scan"):
        torch.autograd.grad(ours(x)[0].sum(), x, create_graph=True)


@pytest.mark.usefixtures("no_rule_of_scan")
def test_second_derivatives_by_pytorch_keep_the_autocast_of_the_call() -> None:
    def program(module: nn.Module) -> torch.Tensor:
        leaf = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(leaf)
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        return first.detach()

    def linear_then_gru(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x).float()
        with torch.autocast("cpu", enabled=False):
            return module.gru(h)[0]

    plain = Of(linear_then_gru, linear=nn.Linear(4, 8), gru=nn.GRU(8, 2))
    assert compare(plain, program, ignore="", rtol=0, atol=0).report().fallbacks


def live_numbers() -> int:
    """Count the elements of all tensors that Python can reach."""
    gc.collect()
    return sum(thing.numel() for thing in gc.get_objects() if type(thing) is torch.Tensor)


def test_backward_frees_what_it_needed() -> None:
    ours, _ = pair(mlp())
    ours(torch.randn(500, 4)).sum().backward()
    ours(torch.randn(300, 4)).sum().backward()
    before, losses = live_numbers(), []
    for _ in range(3):
        losses.append(ours(torch.randn(300, 4)).sum())
        losses[-1].backward()
    assert live_numbers() - before == 3
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


class Replacing(nn.Module):
    """Writes to its input, which afterwards leads back to the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.weight.expand(len(x), 4)).square()


def test_graphs_that_are_not_differentiated_are_freed() -> None:
    ours, _ = pair(Replacing())
    ours(torch.randn(300, 4, requires_grad=True) * 1).sum().backward()
    before = live_numbers()
    for _ in range(3):
        ours(torch.randn(300, 4, requires_grad=True) * 1)
    assert live_numbers() == before


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["copied", "checkpoint"])
def test_hooks_on_saved_tensors(kind: str, create_graph: bool) -> None:
    plain, x = batch_norm(), torch.randn(5, 4)

    def program(module: nn.Module) -> Any:
        leaf = x.clone().requires_grad_()
        if kind == "copied":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                out = module(leaf)
        else:
            out = torch.utils.checkpoint.checkpoint(module, leaf, use_reentrant=False)
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=create_graph)
        if create_graph:
            first.square().sum().backward()
        return first.detach(), leaf.grad, gradients(module)

    compare(plain, program, wrap=strict)


def batched_by_flag(out: torch.Tensor, x: torch.Tensor, cotangents: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(out, x, cotangents, is_grads_batched=True)[0]


def batched_by_vmap(out: torch.Tensor, x: torch.Tensor, cotangents: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda ct: torch.autograd.grad(out, x, ct, retain_graph=True)[0])(cotangents)


@pytest.mark.parametrize("gradient", [batched_by_flag, batched_by_vmap])
def test_batched_cotangents(gradient: Any) -> None:
    plain, cotangents = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.4)), torch.randn(5, 2, 3)

    def program(module: nn.Module) -> Any:
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        return gradient(module(x), x, cotangents)

    compare(plain, program, warns="batched gradient runs in PyTorch")


@pytest.mark.filterwarnings("ignore:ORTModule. graph:UserWarning")
def test_vectorized_jacobians_and_hessians() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    ours, x = ORTModule(copy.deepcopy(plain)), torch.randn(3)
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    torch.testing.assert_close(jacobian(ours, x, vectorize=True), jacobian(plain, x))
    got = hessian(lambda v: ours(v).square().sum(), x, vectorize=True)
    torch.testing.assert_close(got, hessian(lambda v: plain(v).square().sum(), x))


# PyTorch loads its formulas of forward-mode derivatives by it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_derivatives_are_pytorchs() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    ours = ORTModule(copy.deepcopy(plain))
    x, tangent = torch.randn(2, 3), torch.randn(2, 3)
    with forward_ad.dual_level(), pytest.warns(UserWarning, match="forward-mode derivative runs in PyTorch"):
        got = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, tangent))).tangent
    _, want = torch.func.jvp(plain, (x,), (tangent,))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours(x), plain(x))


class Remembering(nn.Module):
    """Writes all of a buffer before anything reads it, so that a call needs nothing of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last[0] = self.weight
        return (x * self.weight).tanh()


def test_a_call_whose_gradients_reach_no_earlier_one() -> None:
    """The buffer leads to the call before, whose graph is freed, but nothing comes that way."""

    def program(module: nn.Module) -> Any:
        for number in range(3):
            module(torch.tensor([0.5 + number])).sum().backward()
        return module.weight.grad, module.last.detach()

    compare(Remembering(), program, wrap=strict)


AGAIN: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "convolution": lambda m, x: m.convolution(x[:, None]).sum(1),  # linear: zeros, all the same
    "linear": lambda m, x: m.linear(x),
    "tanh": lambda m, x: m.linear(x).tanh(),
    "product": lambda m, x: x * m.linear.weight[0] + m.linear.bias,
    "normalization": lambda m, x: m.norm(m.linear(x)),
    "behind a sign": lambda m, x: m.linear(x).sign() * x,
    "input alone": lambda m, x: x.exp(),
    "stopped": lambda m, x: x.square() * m.linear(x).detach(),
}


@pytest.mark.parametrize(("of_input", "frozen"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", AGAIN)
def test_which_gradients_can_be_differentiated_again(name: str, of_input: bool, frozen: bool) -> None:
    """A second derivative exists if eager PyTorch has one, and is equal to it."""
    start = torch.randn(3, 4)
    layers = {
        "linear": nn.Linear(4, 4),
        "convolution": nn.Conv1d(1, 3, 3, padding=1),
        "norm": nn.LayerNorm(4),
    }
    plain = Of(AGAIN[name], **layers)
    plain.linear.weight.requires_grad_(not frozen)

    def program(module: nn.Module) -> Any:
        x = start.clone().requires_grad_(of_input)
        out = module(x)
        if not out.requires_grad:
            return None
        leaves = [leaf for leaf in (x, *module.parameters()) if leaf.requires_grad]
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True, allow_unused=True)
        again = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
        second: Any = [None] * len(leaves)
        if again:
            total = sum(gradient.square().sum() for gradient in again)
            second = torch.autograd.grad(total, leaves, allow_unused=True)
        return (
            [gradient is not None and gradient.requires_grad for gradient in first],
            [torch.zeros(()) if gradient is None else gradient.detach() for gradient in first],
            [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, second, strict=True)],
        )

    compare(plain, program, wrap=strict)


class ViewsOfOneResult(nn.Module):
    """Returns views of one result, which are taken of what ONNX Runtime returns, and not in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        view = nn.functional.prelu(x, self.weight)[1:]
        with torch.no_grad():
            other = view[:2]
        return [view.expand_as(view), other]


class HalvesOfStates(nn.GRU):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        states = super().forward(x)[0]
        return [states[:2], states[2:]]


def test_gradients_of_views_of_one_result_can_be_differentiated_again() -> None:
    x = torch.tensor([-1.0, 0.5, -0.75, 2.0, -0.25])
    seen = []
    for module in pair(ViewsOfOneResult()):
        weight = module.get_parameter("weight")
        (first,) = torch.autograd.grad(module(x)[0].sum(), weight, create_graph=True)
        seen.append([torch.tensor(first.requires_grad), first.detach()])
    assert_same(*seen)


@pytest.mark.usefixtures("no_rule_of_scan")
def test_second_derivatives_by_pytorch_of_views_of_one_result() -> None:
    seen = []
    plain = HalvesOfStates(3, 2)
    for module in (ORTModule(copy.deepcopy(plain)), plain):
        leaf = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (first,) = torch.autograd.grad(module(leaf)[1].square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        seen.append([first.detach(), second])
    assert_same(*seen)


class NumberBesideAConvolution(nn.Module):
    """Returns a number that Python reads, and a result whose gradient can be differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(2, 3, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if self.scale.exp().item() > 0:
            return h * 2
        return h


def test_a_gradient_can_be_differentiated_again_beside_a_number_that_is_read() -> None:
    x = torch.randn(2, 2, 3, 3)
    seen = []
    for module in pair(NumberBesideAConvolution()):
        (first,) = torch.autograd.grad(
            module(x).sum(), module.get_parameter("layer.weight"), create_graph=True
        )
        seen.append([torch.tensor(first.requires_grad), first.detach()])
    assert_same(*seen)


class Unused(nn.Module):
    """One parameter is only looked at, another one not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -0.5]))
        self.looked_at = nn.Parameter(torch.tensor([0.25]))
        self.unused = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(self.looked_at.detach().tanh())
        _ = self.unused * 2
        return (x * self.weight).tanh()


def test_hooks_of_what_no_gradient_comes_to_are_not_called() -> None:
    """A hook of a tensor takes a gradient; None it could not work with."""

    def program(module: nn.Module) -> Any:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
        module(torch.tensor([0.5, 2.0])).sum().backward()
        return gradients(module)

    compare(Unused(), program, wrap=strict)


def written_after_a_break() -> Of:
    """Writes to what a parameter gave in an earlier graph, and returns something else."""

    def function(module: Of, x: torch.Tensor) -> list[torch.Tensor]:
        h = module.other * 2
        torch._dynamo.graph_break()
        h.mul_(3)
        return [module.trunk(x)]

    return Of(function, trunk=nn.Linear(4, 4), other=nn.Parameter(torch.ones(4)))


@pytest.mark.parametrize("make", [Heads, written_after_a_break])
def test_hooks_of_what_only_other_outputs_depend_on_are_not_called(make: Callable[[], nn.Module]) -> None:
    def program(module: nn.Module) -> Any:
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        called: list[int] = []
        for index, parameter in enumerate(module.parameters()):
            parameter.register_hook(lambda gradient, index=index: called.append(index))
            handle = parameter.register_hook(lambda gradient: gradient * 3)
            parameter.register_hook(lambda gradient: gradient * 2)
        module(x)[0].sum().backward()
        handle.remove()  # one of the last parameter's; the others stay
        sum(output.sum() for output in module(x)).backward()
        return sorted(called), gradients(module)

    compare(make(), program, wrap=strict)


def shrinking(function: Callable[[torch.Tensor], torch.Tensor]) -> Of:
    """Its gradient reads its result, where PyTorch's reads what it divides."""
    return Of(lambda m, x: function(x * m.weight), weight=nn.Parameter(torch.tensor([0.5, -1.5, 2.0])))


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h / (1 + h.square()).sqrt(),
        lambda h: torch.nn.functional.local_response_norm(h[None, None], 2)[0, 0],
    ],
    ids=["division", "local_response_norm"],
)
def test_a_result_may_be_changed_where_pytorch_allows_it(function: Any) -> None:
    def program(module: nn.Module) -> Any:
        out = module(torch.tensor([1.0, 2.0, 3.0]))
        with torch.no_grad():
            out.add_(1)
        (out * torch.tensor([1.0, -1.0, 2.0])).sum().backward()
        return module.weight.grad, out.detach()

    compare(
        shrinking(function),
        program,
        ignore="ORTModule: graph 0, gradient runs in PyTorch: the caller has written to a result",
    )


@pytest.mark.parametrize("name", ["tanh", "exp", "sigmoid", "sqrt"])
def test_a_changed_result_is_refused_where_pytorch_refuses_it(name: str) -> None:
    for module in pair(shrinking(lambda h: getattr(h.square() + 1, name)())):
        out = module(torch.tensor([1.0, 2.0, 3.0]))
        with torch.no_grad():
            out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
