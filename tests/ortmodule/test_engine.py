"""What happens around the graphs: dynamic shapes, mutation, stopped gradients, second backward passes, fallback."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule, ORTModuleFallbackException

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def pair(module: nn.Module) -> tuple[ORTModule, nn.Module]:
    """An ORTModule that may not fall back, and a plain copy."""
    plain = copy.deepcopy(module)
    return ORTModule(module, DebugOptions(fallback_policy=FallbackPolicy.DISABLE)), plain


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same_step(ours: nn.Module, plain: nn.Module, *args: Any) -> None:
    """Same outputs and same gradients, for the loss sum(out * out)."""
    results = []
    for module in (ours, plain):
        module.zero_grad()
        out = module(*args)
        (out * out).sum().backward()
        results.append(out.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    for name, gradient in gradients(plain).items():
        got = gradients(ours)[name]
        assert (got is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-5, msg=name)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_batch_sizes_after_the_second_need_no_new_graph() -> None:
    ours, plain = pair(mlp())
    for batch in (3, 5, 7, 2, 11):
        assert_same_step(ours, plain, torch.randn(batch, 4))
    assert len(ours.report()) <= 2
    assert ours.report().runs_in_onnxruntime


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(torch.tanh(self.used(x)))

    ours, plain = pair(Net())
    assert_same_step(ours, plain, torch.randn(3, 4))
    assert ours.unused.weight.grad is None
    assert ours.frozen.weight.grad is None
    ours.frozen.requires_grad_(True)
    plain.frozen.requires_grad_(True)
    assert_same_step(ours, plain, torch.randn(3, 4))


def test_detach_and_no_grad_stop_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            with torch.no_grad():
                k = self.b(x)
            return h * h.detach() + k

    ours, plain = pair(Net())
    assert_same_step(ours, plain, torch.randn(3, 4))
    assert ours.b.weight.grad is None


def test_buffers_set_in_forward() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", None)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            batch_mean = h.detach().mean(0)
            self.mean = batch_mean if self.mean is None else self.mean * 0.9 + batch_mean * 0.1
            self.steps += 1
            return h - self.mean

    ours, plain = pair(Running())
    for _ in range(4):
        assert_same_step(ours, plain, torch.randn(5, 4))
        torch.testing.assert_close(ours.mean, plain.mean)
        assert ours.steps == plain.steps


def test_gradients_of_inputs_and_second_derivatives() -> None:
    ours, plain = pair(mlp())
    x = torch.randn(3, 4, requires_grad=True)
    results = []
    for module in (ours, plain):
        (first,) = torch.autograd.grad((module(x) ** 2).sum(), x, create_graph=True)
        second = torch.autograd.grad((first**2).sum(), [x, *module.parameters()], allow_unused=True)
        results.append([first.detach(), *(g for g in second if g is not None)])
    assert len(results[0]) == len(results[1]) > 4
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [nn.GELU(), nn.Softmax(-1), nn.LayerNorm(4), nn.Mish(), nn.RMSNorm(4)],
    ids=lambda layer: repr(layer),
)
def test_second_derivatives_of_layers(layer: nn.Module) -> None:
    """As of a gradient penalty."""
    ours, plain = pair(nn.Sequential(nn.Linear(4, 4), layer))
    exact = copy.deepcopy(plain).double()
    x, results = torch.randn(5, 4), []
    for module, inputs in ((ours, x), (exact, x.double())):
        leaf = inputs.requires_grad_()
        (first,) = torch.autograd.grad((module(leaf) ** 3).sum(), leaf, create_graph=True)
        ((first.norm(dim=1) - 1) ** 2).sum().backward()
        results.append([leaf.grad, *(p.grad for p in module.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def test_backward_twice() -> None:
    ours, _ = pair(mlp())
    out = ours(torch.randn(3, 4)).sum()
    out.backward(retain_graph=True)
    first = copy.deepcopy(gradients(ours))
    out.backward()
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, 2 * first[name])
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_a_parameter_changed_before_backward_is_noticed() -> None:
    ours, _ = pair(mlp())
    out = ours(torch.randn(3, 4)).sum()
    with torch.no_grad():
        ours[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_nested_inputs_and_outputs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any], scale: float = 1.0, *, mask: Any = None) -> dict[str, Any]:
            h = self.linear(batch["x"][0]) * scale
            return {"h": [h, None, batch["n"] + 1], "kept": batch["x"][0], "positive": h > 0}

    ours, plain = pair(Net())
    batch = {"x": (torch.randn(3, 4),), "n": 5}
    got, want = ours(batch, 2.0, mask=None), plain(batch, 2.0, mask=None)
    torch.testing.assert_close(got["h"][0], want["h"][0])
    assert got["h"][1:] == [None, 6]
    assert got["kept"] is batch["x"][0]
    assert torch.equal(got["positive"], want["positive"])


def test_training_and_inference_are_separate_graphs() -> None:
    ours, plain = pair(mlp())
    x = torch.randn(3, 4)
    assert_same_step(ours, plain, x)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))
    assert {graph.mode for graph in ours.report()} == {"training", "inference"}


class Unsupported(nn.Module):
    """The singular values have no ONNX op."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(self.linear(x))


def test_fallback_warns_once_and_says_why() -> None:
    plain = Unsupported()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(4, 4)
    with pytest.warns(UserWarning, match="runs in PyTorch.*svd") as caught:
        ours(x).sum().backward()
    assert len(caught) == 1
    plain(x).sum().backward()
    torch.testing.assert_close(gradients(ours)["linear.weight"], gradients(plain)["linear.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(x)
    (graph,) = ours.report().fallbacks
    assert "svd" in (graph.fallback_reason or "")
    assert not ours.report().runs_in_onnxruntime


def test_fallback_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "DISABLE")
    ours = ORTModule(Unsupported())
    for call in (ours, ours.forward):
        with pytest.raises(ORTModuleFallbackException, match="svd"):
            call(torch.randn(4, 4))


def test_saved_graphs_are_ordinary_models(tmp_path: Path) -> None:
    ours = ORTModule(mlp(), DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path))
    ours(torch.randn(3, 4)).sum().backward()
    files = sorted(path.name for path in tmp_path.glob("*.onnx"))
    assert files
    assert all(name.startswith("net_") and name.endswith("_training.onnx") for name in files)
    for name in files:
        onnx.checker.check_model(onnx.load(tmp_path / name))
        ort.InferenceSession(tmp_path / name)


class Sevenfold(torch.autograd.Function):
    """tanh with a wrong derivative, to see whose backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return 7 * cotangent


class Between(nn.Module):
    """Two linear layers with something in between."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x)))


def _sevenfold(h: torch.Tensor) -> torch.Tensor:
    return Sevenfold.apply(h)


# Dynamo itself makes an instance of the function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_custom_autograd_function_keeps_its_backward() -> None:
    ours, plain = pair(Between(_sevenfold))
    assert_same_step(ours, plain, torch.randn(3, 4))
    assert ours.report().runs_in_onnxruntime
    assert len(ours.report()) == 2  # before and behind it


def _negated_if_positive(h: torch.Tensor) -> torch.Tensor:
    return -h if h.sum() > 0 else h * 2


def test_data_dependent_branch() -> None:
    ours, plain = pair(Between(_negated_if_positive))
    for _ in range(4):
        assert_same_step(ours, plain, torch.randn(3, 4))
    assert ours.report().runs_in_onnxruntime


def _positive_rows(h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h[h.sum(1) > 0])


def _doubled_where_positive(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    positive = h > 0
    h[positive] = torch.sin(h[positive])
    return h


@pytest.mark.parametrize("function", [_positive_rows, _doubled_where_positive])
def test_masks(function: Any) -> None:
    """Their sizes depend on the data, down to none: ONNX Runtime selects, and nothing is captured again for it."""
    plain = Between(function)
    ours = ORTModule(copy.deepcopy(plain))
    none_positive = torch.zeros(3, 4) - 1e3 * plain.first.weight.detach().sum(0).sign()  # likely
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in (*(torch.randn(batch, 4) for batch in (6, 8, 7)), none_positive):
            assert_same_step(ours, plain, x)
    assert not [str(w.message) for w in caught if "ORTModule" in str(w.message)]
    report = ours.report()
    assert report.runs_in_onnxruntime
    assert len(report) == 2  # the second one, from the second batch size on, is symbolic
    assert not any(graph.break_reason for graph in report)


def _dropped_rows(h: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(h[h.sum(1) > 0], 0.5)


def test_random_numbers_of_a_size_that_depends_on_data_are_pytorchs() -> None:
    plain = Between(_dropped_rows)
    ours = ORTModule(copy.deepcopy(plain))
    x, outputs = torch.randn(9, 4), []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for module in (ours, plain):
            torch.manual_seed(1)
            outputs.append(module(x))
    torch.testing.assert_close(*outputs)
    assert ours.report().runs_in_onnxruntime


def _checkpointed(h: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t * 2), h, use_reentrant=False)


def test_activation_checkpointing() -> None:
    ours, plain = pair(Between(_checkpointed))
    assert_same_step(ours, plain, torch.randn(3, 4))


def test_autocast_to_bfloat16() -> None:
    ours, plain = pair(Between(torch.tanh))
    x, steps = torch.randn(16, 4), []
    for module in (ours, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        out.float().pow(2).mean().backward()
        steps.append([out.detach().float(), *(p.grad for p in module.parameters())])
    for got, want in zip(*steps, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert ours.report().runs_in_onnxruntime


def test_dropout_equals_eager_for_the_same_seed() -> None:
    ours, plain = pair(Between(nn.Dropout(0.5)))
    for batch in (3, 5, 6):
        x, outputs = torch.randn(batch, 4), []
        for module in (ours, plain):
            torch.manual_seed(batch)
            outputs.append(module(x))
        torch.testing.assert_close(*outputs)
    assert not torch.equal(ours(x), ours(x))


def test_empty_batch() -> None:
    ours, plain = pair(mlp())
    assert_same_step(ours, plain, torch.randn(3, 4))
    assert_same_step(ours, plain, torch.randn(0, 4))


def test_not_contiguous_inputs() -> None:
    ours, plain = pair(mlp())
    assert_same_step(ours, plain, torch.randn(4, 3).t())


def test_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    ours, plain = pair(Tied())
    assert ours.first.weight is ours.second.weight
    assert_same_step(ours, plain, torch.randn(3, 4))


@dataclasses.dataclass
class Result:
    """A custom output."""

    score: torch.Tensor
    note: str
    size: int


class WithDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Result:
        return Result(self.linear(x), "fine", len(x))


def test_dataclass_output() -> None:
    ours, plain = pair(WithDataclass())
    x = torch.randn(3, 4)
    got, want = ours(x), plain(x)
    assert isinstance(got, Result)
    assert (got.note, got.size) == ("fine", 3)
    torch.testing.assert_close(got.score, want.score)
    got.score.sum().backward()
    assert ours.linear.weight.grad is not None


def test_parameters_may_be_updated_loaded_and_replaced() -> None:
    ours, plain = pair(mlp())
    x = torch.randn(3, 4)
    assert_same_step(ours, plain, x)
    for module in (ours, plain):
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert_same_step(ours, plain, x)
    state = {name: torch.full_like(value, 0.25) for name, value in plain.state_dict().items()}
    for module in (ours, plain):
        module.load_state_dict(state)
    assert_same_step(ours, plain, x)
    for module in (ours, plain):
        module[0].weight = nn.Parameter(torch.full((8, 4), 0.5))
    assert_same_step(ours, plain, x)
    assert ours.report().runs_in_onnxruntime


def test_all_batch_sizes() -> None:
    ours, plain = pair(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)))
    for batch in (3, 5, 7, 1, 0, 2):
        assert_same_step(ours, plain, torch.randn(batch, 4))
    assert ours.report().runs_in_onnxruntime
    assert len(ours.report()) <= 4


def test_batch_norm_statistics_are_those_of_pytorch() -> None:
    ours, plain = pair(nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU()))
    for batch in (4, 6, 5):
        assert_same_step(ours, plain, torch.randn(batch, 2, 6, 6))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, msg=name)
    for module in (ours, plain):
        module.eval()
    x = torch.randn(2, 2, 6, 6)
    torch.testing.assert_close(ours(x), plain(x))


def _writer(log: list[str], kind: str) -> Any:
    return lambda layer, *rest: log.append(f"{kind} {layer.__class__.__name__}")


def test_hooks_on_root_and_submodules() -> None:
    ours, plain = pair(mlp())
    logs: list[list[str]] = [[], []]
    for module, log in zip((ours, plain), logs, strict=True):
        module.register_forward_hook(lambda layer, args, out: out * 2)
        for layer in (module, module[1]):
            layer.register_forward_pre_hook(_writer(log, "before"))
            layer.register_forward_hook(_writer(log, "after"))
            layer.register_full_backward_hook(_writer(log, "backward"))
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        module(x).sum().backward()
        module[1].register_forward_hook(lambda layer, args, out: out + 1)  # after the first call
        log.append(str(round(float(module(x).sum().detach()), 4)))
    assert logs[0] == logs[1]
    assert len(logs[0]) >= 10


def test_a_gradient_that_is_zero_everywhere_is_zero_and_not_none() -> None:
    ours, plain = pair(Between(torch.floor))
    assert_same_step(ours, plain, torch.randn(3, 4))
    assert torch.equal(ours.first.weight.grad, torch.zeros(4, 4))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)

    def forward(self, indices: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.embedding(indices), labels)


@pytest.mark.parametrize(
    ("indices", "labels", "error"),
    [
        ([1, 9], [0, 1], IndexError),  # no row of the embedding
        ([1, 2], [0, 7], IndexError),  # no class
        ([1, 2], [0], ValueError),  # another batch size
        ([1.0, 2.0], [0, 1], RuntimeError),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_bad_data_raises_what_eager_pytorch_raises(
    indices: list[float], labels: list[int], error: type[Exception], first: bool
) -> None:
    plain = Loss()
    model = ORTModule(plain)
    good = torch.tensor([1, 2]), torch.tensor([0, 1])
    if not first:
        model(*good)
    bad = torch.tensor(indices), torch.tensor(labels)
    with pytest.raises(error) as theirs:
        plain(*bad)
    with pytest.raises(error) as mine:
        model(*bad)
    assert type(mine.value) is type(theirs.value)
    assert str(mine.value) == str(theirs.value)
    torch.testing.assert_close(model(*good), plain(*good))
    assert model.report().runs_in_onnxruntime
