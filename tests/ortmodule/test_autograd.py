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
from ortmodule.test_engine import gradients, mlp, pair

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
    ours, plain = pair(Heads())
    x = torch.randn(5, 4)
    for module in (ours, plain):
        outputs = module(x)
        sum(outputs[index].square().sum() for index in used).backward()
    for name, want in gradients(plain).items():
        got = gradients(ours)[name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, msg=name)


def test_weight_decay_leaves_unused_heads_alone() -> None:
    ours, plain = pair(Heads())
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (ours, plain)]
    for step, batch in enumerate((5, 3, 4, 6)):
        x = torch.randn(batch, 4)
        for module, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            module(x)[step % 2].square().sum().backward()
            optimizer.step()
    for got, want in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


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


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 6), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *self.linear(x).chunk(2, -1), self.other(x)


def test_pieces_of_one_result() -> None:
    ours, plain = pair(Pieces())
    for batch in (3, 5):  # symbolic from the second on
        x, steps = torch.randn(batch, 4), []
        for module in (ours, plain):
            module.zero_grad()
            module(x)[1].square().sum().backward()
            steps.append(module.linear.weight.grad)
            assert module.other.weight.grad is None
        torch.testing.assert_close(*steps)


def second_derivatives(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Those of a gradient penalty, for the input and all parameters."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = module(leaf)
    out = out[0] if isinstance(out, tuple) else out
    (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    first.square().sum().backward()
    return [leaf.grad, *(p.grad for p in module.parameters())]


def assert_same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> None:
    assert [g is None for g in got] == [w is None for w in want]
    for g, w in zip(got, want, strict=True):
        if g is not None:
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, check_dtype=False)


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
    ours, plain = pair(make())
    exact = copy.deepcopy(plain).double()
    for batch in (5, 3):
        for module in (ours, exact):
            module.zero_grad()
        x = torch.randn(batch, 4)
        assert_same(second_derivatives(ours, x), second_derivatives(exact, x.double()))
    for name, buffer in exact.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, check_dtype=False, msg=name)
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


@pytest.mark.parametrize("name", RECURRENT)
def test_second_derivatives_of_recurrent_layers(name: str) -> None:
    make, shape = RECURRENT[name]
    plain = make()
    ours = ORTModule(copy.deepcopy(plain))
    for batch in (2, 3):  # the second graph is symbolic
        x = torch.randn(batch, *shape)
        for module in (ours, plain):
            module.zero_grad()
        assert_same(second_derivatives(ours, x), second_derivatives(plain, x))
    assert ours.report().runs_in_onnxruntime


@pytest.mark.usefixtures("no_rule_of_scan")
@pytest.mark.parametrize("name", RECURRENT)
def test_second_derivatives_that_onnxruntime_lacks_are_pytorchs(name: str) -> None:
    make, shape = RECURRENT[name]
    plain = make()
    ours = ORTModule(copy.deepcopy(plain))
    for batch, warned in ((2, 1), (2, 0), (3, 1), (4, 0)):  # once per graph; the second one is symbolic
        x = torch.randn(batch, *shape)
        for module in (ours, plain):
            module.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = second_derivatives(ours, x)
        said = [str(w.message) for w in caught if "ORTModule" in str(w.message)]
        assert len(said) == warned
        assert all("second derivative runs in PyTorch: " in message for message in said)
        assert_same(got, second_derivatives(plain, x))
        for buffer, want in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(buffer, want)
    first, *_ = ours.report().fallbacks
    assert first.name == "graph 0, second derivative"
    assert "Scan" in (first.fallback_reason or "")


def test_third_derivatives() -> None:
    plain = nn.Sequential(nn.Conv1d(2, 3, 2), nn.MaxPool1d(2), nn.Tanh())
    ours, results = ORTModule(copy.deepcopy(plain)), []
    x = torch.randn(2, 2, 9)
    for module in (ours, plain):
        leaf = x.clone().requires_grad_()
        value = module(leaf).pow(3).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                (first,) = torch.autograd.grad(value, leaf, create_graph=True)
                value = first.square().sum()
            value.backward()
        results.append([leaf.grad, *(p.grad for p in module.parameters())])
    assert_same(*results)


@pytest.mark.usefixtures("no_rule_of_scan")
def test_a_forbidden_second_derivative_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "DISABLE")
    ours = ORTModule(nn.LSTM(4, 3))
    x = torch.randn(5, 2, 4, requires_grad=True)
    with pytest.raises(ORTModuleFallbackException, match="Scan"):
        torch.autograd.grad(ours(x)[0].sum(), x, create_graph=True)


class LinearThenGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gru = nn.Linear(4, 8), nn.GRU(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).float()
        with torch.autocast("cpu", enabled=False):
            return self.gru(h)[0]


@pytest.mark.usefixtures("no_rule_of_scan")
def test_second_derivatives_by_pytorch_keep_the_autocast_of_the_call() -> None:
    plain = LinearThenGRU()
    ours, results = ORTModule(copy.deepcopy(plain)), []
    for module in (ours, plain):
        leaf = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(leaf)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        results.append(first.detach())
    assert ours.report().fallbacks
    assert torch.equal(*results)


def live_numbers() -> int:
    """How many numbers all tensors hold that Python can reach."""
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
    """What its input is afterwards leads back to the graph."""

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
    ours, plain = pair(batch_norm())
    x, results = torch.randn(5, 4), []
    for module in (ours, plain):
        leaf = x.clone().requires_grad_()
        if kind == "copied":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                out = module(leaf)
        else:
            out = torch.utils.checkpoint.checkpoint(module, leaf, use_reentrant=False)
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=create_graph)
        if create_graph:
            first.square().sum().backward()
        results.append([first.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    assert_same(*results)


def batched_by_flag(out: torch.Tensor, x: torch.Tensor, cotangents: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(out, x, cotangents, is_grads_batched=True)[0]


def batched_by_vmap(out: torch.Tensor, x: torch.Tensor, cotangents: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda ct: torch.autograd.grad(out, x, ct, retain_graph=True)[0])(cotangents)


@pytest.mark.parametrize("gradient", [batched_by_flag, batched_by_vmap])
def test_batched_cotangents(gradient: Any) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.4))
    ours, results = ORTModule(copy.deepcopy(plain)), []
    cotangents = torch.randn(5, 2, 3)
    for module in (ours, plain):
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        torch.manual_seed(3)
        out = module(x)
        if module is ours:
            with pytest.warns(UserWarning, match="batched gradient runs in PyTorch"):
                results.append(gradient(out, x, cotangents))
        else:
            results.append(gradient(out, x, cotangents))
    torch.testing.assert_close(*results)


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
    seen = []
    for module in pair(Remembering()):
        for number in range(3):
            module(torch.tensor([0.5 + number])).sum().backward()
        seen.append((module.weight.grad, module.last.detach()))
    torch.testing.assert_close(seen[0], seen[1])


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


class Again(nn.Module):
    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(("of_input", "frozen"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", AGAIN)
def test_which_gradients_can_be_differentiated_again(name: str, of_input: bool, frozen: bool) -> None:
    """Whether a second derivative may be asked for is what eager PyTorch says, and so is what it is."""
    start = torch.randn(3, 4)
    seen = []
    for module in pair(Again(AGAIN[name])):
        module.linear.weight.requires_grad_(not frozen)
        x = start.clone().requires_grad_(of_input)
        out = module(x)
        if not out.requires_grad:
            return
        leaves = [leaf for leaf in (x, *module.parameters()) if leaf.requires_grad]
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True, allow_unused=True)
        again = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
        second = [None] * len(leaves)
        if again:
            total = sum(gradient.square().sum() for gradient in again)
            second = torch.autograd.grad(total, leaves, allow_unused=True)
        seen.append(
            (
                [gradient is not None and gradient.requires_grad for gradient in first],
                [torch.zeros(()) if gradient is None else gradient.detach() for gradient in first],
                [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, second, strict=True)],
            )
        )
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1:], seen[1][1:], rtol=1e-4, atol=1e-5)


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
    x = torch.tensor([0.5, 2.0])
    seen = []
    for module in pair(Unused()):
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
        module(x).sum().backward()
        seen.append([p.grad for p in module.parameters()])
    assert_same(*seen)


class WrittenAfterABreak(nn.Module):
    """Writes to what a parameter gave in an earlier graph, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.other = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.other * 2
        torch._dynamo.graph_break()
        h.mul_(3)
        return [self.trunk(x)]


@pytest.mark.parametrize("kind", [Heads, WrittenAfterABreak])
def test_hooks_of_what_only_other_outputs_depend_on_are_not_called(kind: type[nn.Module]) -> None:
    seen = []
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    for module in pair(kind()):
        called: list[int] = []
        for index, parameter in enumerate(module.parameters()):
            parameter.register_hook(lambda gradient, index=index, called=called: called.append(index))
            handle = parameter.register_hook(lambda gradient: gradient * 3)
            parameter.register_hook(lambda gradient: gradient * 2)
        module(x)[0].sum().backward()
        handle.remove()  # one of the last parameter's; the others stay
        sum(output.sum() for output in module(x)).backward()
        seen.append([torch.tensor(sorted(called)), *(p.grad for p in module.parameters())])
    assert_same(*seen)


class Shrinking(nn.Module):
    """Its gradient reads its result, where PyTorch's reads what it divides."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.5, 2.0]))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def test_a_result_may_be_changed_where_pytorch_allows_it() -> None:
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda h: h / (1 + h.square()).sqrt(),
        lambda h: torch.nn.functional.local_response_norm(h[None, None], 2)[0, 0],
    ]
    for function in functions:
        seen = []
        plain = Shrinking(function)
        for module in (ORTModule(copy.deepcopy(plain)), plain):
            out = module(torch.tensor([1.0, 2.0, 3.0]))
            with torch.no_grad():
                out.add_(1)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "ORTModule: graph 0, gradient runs in PyTorch: a result")
                (out * torch.tensor([1.0, -1.0, 2.0])).sum().backward()
            seen.append([module.weight.grad, out.detach()])
        assert_same(*seen)


@pytest.mark.parametrize("name", ["tanh", "exp", "sigmoid", "sqrt"])
def test_a_changed_result_is_refused_where_pytorch_refuses_it(name: str) -> None:
    for module in pair(Shrinking(lambda h: getattr(h.square() + 1, name)())):
        out = module(torch.tensor([1.0, 2.0, 3.0]))
        with torch.no_grad():
            out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
