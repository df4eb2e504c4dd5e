"""Behaviour around the graphs: dynamic shapes, mutation, stopped gradients, second backward passes, fallback."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import DebugOptions, ORTModule, ORTModuleFallbackException
from ortmodule.eager import Of, assert_same_step, compare, compare_steps, gradients, pair, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


steps = functools.partial(compare_steps, wrap=strict, differentiate_inputs=False)
"""Compares steps whose inputs require no gradient; a graph that ONNX Runtime does not run is an error."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_batch_sizes_after_the_third_need_no_new_graph() -> None:
    ours = steps(mlp(), *((batch, 4) for batch in (3, 5, 7, 2, 11)))
    assert len(ours.report()) == 3
    assert ours.report().runs_in_onnxruntime


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    plain = Of(
        lambda m, x: m.frozen(torch.tanh(m.used(x))),
        **{name: nn.Linear(4, 4) for name in ("used", "unused", "frozen")},
    )
    plain.frozen.requires_grad_(False)
    ours, plain = pair(plain)
    assert_same_step(ours, plain, torch.randn(3, 4))
    assert ours.unused.weight.grad is None
    assert ours.frozen.weight.grad is None
    ours.frozen.requires_grad_(True)
    plain.frozen.requires_grad_(True)
    assert_same_step(ours, plain, torch.randn(3, 4))


def test_detach_and_no_grad_stop_gradients() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = module.a(x)
        with torch.no_grad():
            k = module.b(x)
        return h * h.detach() + k

    ours = steps(Of(function, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (3, 4))
    assert ours.b.weight.grad is None


def test_buffers_set_in_forward() -> None:
    def running(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x)
        batch_mean = h.detach().mean(0)
        module.mean = batch_mean if module.mean is None else module.mean * 0.9 + batch_mean * 0.1
        module.steps += 1
        return h - module.mean

    plain = Of(running, linear=nn.Linear(4, 4), steps=torch.zeros((), dtype=torch.int64))
    plain.register_buffer("mean", None)
    assert steps(plain, *[(5, 4)] * 4).steps == 4


def test_gradients_of_inputs_and_second_derivatives() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def program(module: nn.Module) -> Any:
        (first,) = torch.autograd.grad((module(x) ** 2).sum(), x, create_graph=True)
        second = torch.autograd.grad((first**2).sum(), [x, *module.parameters()], allow_unused=True)
        assert sum(g is not None for g in second) > 3
        return first.detach(), second

    compare(mlp(), program, wrap=strict)


@pytest.mark.parametrize(
    "layer",
    [nn.GELU(), nn.Softmax(-1), nn.LayerNorm(4), nn.Mish(), nn.RMSNorm(4)],
    ids=lambda layer: repr(layer),
)
def test_second_derivatives_of_layers(layer: nn.Module) -> None:
    """As of a gradient penalty."""
    plain = nn.Sequential(nn.Linear(4, 4), layer)
    x = torch.randn(5, 4)

    def program(module: nn.Module) -> Any:
        leaf = x.to(next(module.parameters()).dtype).clone().requires_grad_()
        (first,) = torch.autograd.grad((module(leaf) ** 3).sum(), leaf, create_graph=True)
        ((first.norm(dim=1) - 1) ** 2).sum().backward()
        return leaf.grad, gradients(module)

    compare(plain, program, wrap=strict, exact=True)


def test_backward_twice_adds_gradients_if_the_graph_is_retained() -> None:
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
    def forward(m: Of, batch: dict[str, Any], scale: float = 1.0, mask: Any = None) -> dict[str, Any]:
        h = m.linear(batch["x"][0]) * scale
        return {"h": [h, None, batch["n"] + 1], "kept": batch["x"][0], "positive": h > 0}

    batch = {"x": (torch.randn(3, 4),), "n": 5}

    def program(module: nn.Module) -> Any:
        result = module(batch, 2.0, mask=None)
        assert result["h"][1:] == [None, 6]
        assert result["kept"] is batch["x"][0]
        return result

    compare(Of(forward, linear=nn.Linear(4, 4)), program, wrap=strict)


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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_custom_autograd_function_keeps_its_backward() -> None:
    ours = steps(Between(_sevenfold), (3, 4))
    assert ours.report().runs_in_onnxruntime
    assert len(ours.report()) == 2  # before and behind it


def _negated_if_positive(h: torch.Tensor) -> torch.Tensor:
    return -h if h.sum() > 0 else h * 2


def test_data_dependent_branch() -> None:
    assert steps(Between(_negated_if_positive), *[(3, 4)] * 4).report().runs_in_onnxruntime


def _positive_rows(h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h[h.sum(1) > 0])


def _doubled_where_positive(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    positive = h > 0
    h[positive] = torch.sin(h[positive])
    return h


@pytest.mark.parametrize("function", [_positive_rows, _doubled_where_positive])
def test_sizes_that_a_mask_decides_need_no_new_graph(function: Any) -> None:
    """Their sizes depend on the data, down to none: ONNX Runtime selects, and nothing is captured again for it."""
    plain = Between(function)
    none_positive = torch.zeros(3, 4) - 1e3 * plain.first.weight.detach().sum(0).sign()  # likely
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = steps(plain, (6, 4), (8, 4), (7, 4), none_positive, wrap=ORTModule)
    assert not [str(w.message) for w in caught if "ORTModule" in str(w.message)]
    report = ours.report()
    assert report.runs_in_onnxruntime
    assert len(report) == 3  # one for each of the first two sizes, one for all others
    assert not any(graph.break_reason for graph in report)


def _dropped_rows(h: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(h[h.sum(1) > 0], 0.5)


def test_random_numbers_of_a_size_that_depends_on_data_are_pytorchs() -> None:
    x = torch.randn(9, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = compare(Between(_dropped_rows), lambda module: [module(x), torch.rand(2)])
    assert ours.report().runs_in_onnxruntime


def _checkpointed(h: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t * 2), h, use_reentrant=False)


def test_activation_checkpointing_matches_eager_pytorch() -> None:
    steps(Between(_checkpointed), (3, 4))


def test_autocast_to_bfloat16() -> None:
    x = torch.randn(16, 4)

    def program(module: nn.Module) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        out.float().pow(2).mean().backward()
        return out.detach(), gradients(module)

    ours = compare(Between(torch.tanh), program, wrap=strict, rtol=2e-2, atol=2e-2)
    assert ours.report().runs_in_onnxruntime


def test_dropout_equals_eager_for_the_same_seed() -> None:
    ours = steps(Between(nn.Dropout(0.5)), (3, 4), (5, 4), (6, 4))
    x = torch.randn(6, 4)
    assert not torch.equal(ours(x), ours(x))


def test_an_empty_batch_matches_eager_pytorch() -> None:
    steps(mlp(), (3, 4), (0, 4))


def test_inputs_may_be_not_contiguous() -> None:
    steps(mlp(), torch.randn(4, 3).t())


def test_tied_parameters_stay_tied() -> None:
    layer = nn.Linear(4, 4)
    tied = Of(lambda m, x: m.second(torch.tanh(m.first(x))), first=layer, second=nn.Linear(4, 4))
    tied.second.weight = layer.weight
    ours = steps(tied, (3, 4))
    assert ours.first.weight is ours.second.weight


def test_a_dataclass_is_returned_as_such() -> None:
    Result = dataclasses.make_dataclass("Result", ["score", "note", "size"])
    plain = Of(lambda m, x: Result(m.linear(x), "fine", len(x)), linear=nn.Linear(4, 1))

    def program(module: nn.Module) -> Any:
        result = module(torch.ones(3, 4))
        assert isinstance(result, Result)
        result.score.sum().backward()
        assert module.linear.weight.grad is not None
        return vars(result)

    compare(plain, program, wrap=strict)


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
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    ours = steps(plain, *((batch, 4) for batch in (3, 5, 7, 1, 0, 2)))
    assert ours.report().runs_in_onnxruntime
    assert len(ours.report()) <= 5


def test_batch_norm_statistics_are_those_of_pytorch() -> None:
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU())
    ours = steps(plain, *((batch, 2, 6, 6) for batch in (4, 6, 5)))
    x = torch.randn(2, 2, 6, 6)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_hooks_on_root_and_submodules() -> None:
    def program(module: nn.Module) -> list[Any]:
        log: list[Any] = []

        def writer(kind: str) -> Any:
            return lambda layer, *rest: log.append(f"{kind} {layer.__class__.__name__}")

        module.register_forward_hook(lambda layer, args, out: out * 2)
        for layer in (module, module[1]):
            layer.register_forward_pre_hook(writer("before"))
            layer.register_forward_hook(writer("after"))
            layer.register_full_backward_hook(writer("backward"))
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        module(x).sum().backward()
        module[1].register_forward_hook(lambda layer, args, out: out + 1)  # after the first call
        log.append(module(x).sum().detach())
        assert len(log) >= 10
        return log

    compare(mlp(), program, wrap=strict)


def test_a_gradient_that_is_zero_everywhere_is_zero_and_not_none() -> None:
    ours = steps(Between(torch.floor), (3, 4))
    assert torch.equal(ours.first.weight.grad, torch.zeros(4, 4))


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
    plain = Of(
        lambda m, indices, labels: nn.functional.cross_entropy(m.embedding(indices), labels),
        embedding=nn.Embedding(5, 3),
    )
    good = torch.tensor([1, 2]), torch.tensor([0, 1])

    def program(module: nn.Module) -> Any:
        before = None if first else module(*good)
        with pytest.raises(error) as raised:
            module(torch.tensor(indices), torch.tensor(labels))
        return before, type(raised.value).__name__, str(raised.value), module(*good)

    assert compare(plain, program).report().runs_in_onnxruntime
