"""The layers inside ORTModule: values and gradients of eager PyTorch, in few nodes, without a fallback."""

from __future__ import annotations

import copy
from collections import Counter

import onnx
import pytest
import torch
from torch import nn

from nn.layers import (
    LAYERS,
    SIZE,
    TOLERANCE,
    Layer,
    assert_same,
    drawn,
    each_dtype,
    each_shape,
    sampled,
    step,
)
from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule

pytestmark = pytest.mark.torch

RMS = Counter({"FlooredRMSNormalization": 1, "FlooredRMSNormalizationGradient": 1})
RMS_EPS_INSIDE = Counter({"InverseRMSNormalization": 1, "InverseRMSNormalizationGradient": 1})


class LlamaNorm(nn.Module):
    """As models of the Llama family write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class HandWritten(nn.Module):
    """RMSNorm as others write it down."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rms = x.norm(p=2, dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return self.gain * (x / torch.clamp(rms, min=1e-6))


def in_ort(module: nn.Module, directory=None) -> ORTModule:
    """Raises where a graph would run in PyTorch."""
    options = DebugOptions(
        fallback_policy=FallbackPolicy.DISABLE,
        **({} if directory is None else {"save_onnx": True, "onnx_prefix": "norm", "save_path": directory}),
    )
    return ORTModule(module, options)


def joint_ops(directory) -> Counter[str]:
    """The ops of the only training graph, without the Identity nodes that a runtime removes."""
    (path,) = directory.glob("*gradient_training.onnx")
    nodes = onnx.load(path).graph.node
    return Counter(
        node.op_type.rpartition("_")[0] or node.op_type for node in nodes if node.op_type != "Identity"
    )


class EachOnItsOwn(nn.Module):
    """Modules each with a slice of the input: captured once, as most of a capture's time is what any takes."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(piece) for part, piece in zip(self.parts, x.unbind(), strict=True)])


def steps(modules: list[nn.Module], x: torch.Tensor, in_runtime: bool) -> list[dict[str, torch.Tensor]]:
    """Return the results of `step` for each module."""
    module = EachOnItsOwn(modules)
    if in_runtime:
        module = in_ort(module)
    found = step(module, x.expand(len(modules), *x.shape))
    if in_runtime:
        (record,) = module.report().graphs
        assert record.fallback_reason is None
        assert record.mode == "training"
    return [
        {"y": found["y"][k], "x": found["x"][k]}
        | {name: g for name, g in found.items() if name.startswith(f"parts.{k}.")}
        for k in range(len(modules))
    ]


@pytest.mark.sample(every=3)
@each_dtype
@each_shape
def test_values_and_gradients_of_darts(shape, dtype):
    x = sampled(shape, dtype)
    ours = steps([layer.ours(dtype) for layer in LAYERS], x, True)
    theirs = steps([layer.theirs(dtype) for layer in LAYERS], x, False)
    for got, want in zip(ours, theirs, strict=True):
        assert_same(got, want)


def test_darts_own_layers():
    x = sampled((3, 5, SIZE), torch.float32)
    ours, theirs = ([layer.theirs() for layer in LAYERS] for _ in range(2))
    for got, want in zip(steps(ours, x, True), steps(theirs, x, False), strict=True):
        assert_same(got, want)


@each_dtype
@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Layer("RMSNorm").ours(), RMS),
        (Layer("RMSNorm").theirs(), RMS),
        (drawn(HandWritten(SIZE)), RMS),
        (drawn(nn.RMSNorm(SIZE, eps=1e-6)), RMS_EPS_INSIDE),
        (drawn(LlamaNorm(SIZE)), RMS_EPS_INSIDE),
    ],
    ids=["ours", "darts", "hand-written", "torch", "Llama"],
)
def test_rms_norms_are_two_nodes(module, expected, dtype, tmp_path):
    module = copy.deepcopy(module).to(dtype)
    x = sampled((3, 5, SIZE), dtype)
    want = step(module, x)
    ort = in_ort(module, tmp_path)
    assert_same(step(ort, x), want)
    (record,) = ort.report().graphs
    assert (record.forward_nodes, record.backward_nodes) == (1, 1)
    assert joint_ops(tmp_path) == expected


@pytest.mark.parametrize("layer", [Layer("LayerNorm"), Layer("LayerNormNoBias")], ids=str)
def test_layer_norms_are_two_nodes(layer, tmp_path):
    ort = in_ort(layer.ours(), tmp_path)
    step(ort, sampled((3, 5, SIZE), torch.float32))
    assert joint_ops(tmp_path) == {"LayerNormalization": 1, "LayerNormalizationGradient": 1}


@each_dtype
@each_shape
def test_rin_norm_is_two_nodes(shape, dtype, tmp_path):
    """Beside Identity nodes: of mean and stdev, which have no gradient, and of the scale, kept for backward."""
    ort = in_ort(Layer("RINorm").ours(dtype), tmp_path)
    step(ort, sampled(shape, dtype))
    assert joint_ops(tmp_path) == {
        "ReversibleInstanceNormalization": 1,
        "ReversibleInstanceNormalizationGradient": 1,
    }
    (record,) = ort.report().graphs
    assert (record.forward_nodes, record.backward_nodes) == (4, 1)


def test_rin_norm_without_parameters_is_two_nodes(tmp_path):
    ort = in_ort(Layer("RINorm", {"affine": False}).ours(), tmp_path)
    step(ort, sampled((3, 5, SIZE), torch.float32))
    assert joint_ops(tmp_path) == {"InstanceStandardization": 1, "Div": 1}


@each_dtype
@pytest.mark.parametrize("frozen", ["x", "affine_weight", "affine_bias"])
def test_rin_norm_of_which_a_part_needs_no_gradient(frozen, dtype):
    x = sampled((3, 5, SIZE), dtype)
    gradients = []
    for module in (Layer("RINorm").ours(dtype), in_ort(Layer("RINorm").ours(dtype))):
        leaves = dict(module.named_parameters()) | {"x": x.clone().requires_grad_()}
        leaves.pop(frozen).requires_grad_(False)
        (module(leaves.get("x", x)) ** 3).sum().backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    assert_same(gradients[1], gradients[0])


@each_dtype
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_a_whole_forecast(affine, dtype):
    """forward, transform and inverse around layers, on batches of different sizes, as eager PyTorch has it."""

    class Forecaster(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(SIZE, SIZE)
            self.norm = Layer("RINorm", {"affine": affine}).ours()
            self.ahead = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.mix(x)
            y = self.norm(x) + self.norm.transform(x * 2)
            y = self.ahead(y.transpose(1, 2)).transpose(1, 2)
            return self.norm.inverse(y.unsqueeze(-1))

    eager = drawn(Forecaster()).to(dtype)
    ort = in_ort(copy.deepcopy(eager))
    for batch in (3, 4, 2):
        x = sampled((batch, 5, SIZE), dtype)
        assert_same(step(ort, x), step(eager, x), None if dtype == torch.float64 else 3e-6)
    assert all(record.fallback_reason is None for record in ort.report().graphs)
    torch.testing.assert_close(ort.norm.mean, eager.norm.mean)


@each_dtype
def test_inverse_of_a_weight_of_zero_is_the_mean(dtype):
    class ThereAndBack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Layer("RINorm").ours()
            nn.init.zeros_(self.norm.affine_weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm.inverse(self.norm(x).unsqueeze(-1)).squeeze(-1)

    x = sampled((3, 5, SIZE), dtype) * 10 + 350
    y = in_ort(ThereAndBack().to(dtype))(x)
    torch.testing.assert_close(y, x.mean(1, keepdim=True).expand_as(x), rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rin_norm_of_large_numbers_in_narrow_dtypes(dtype):
    layer = Layer("RINorm").ours(dtype)
    x = (sampled((3, 96, SIZE), torch.float32) * 500 + 1000).to(dtype)
    want = step(layer, x)
    assert want["y"].std() > 0.5
    assert_same(step(in_ort(layer), x), want, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("layer", [Layer("RMSNorm"), Layer("RINorm")], ids=str)
def test_bad_sizes_raise(layer):
    module = ORTModule(layer.ours())
    with pytest.raises(RuntimeError, match="must have size 6"):
        module(torch.zeros(3, 5, SIZE + 1))


@each_dtype
@pytest.mark.parametrize("layer", [Layer("RMSNorm"), Layer("RINorm")], ids=str)
def test_second_derivatives_match_eager_pytorch(layer, dtype):
    """Through the composite ops of the first gradient."""
    results = []
    for module in (layer.ours(dtype), in_ort(layer.ours(dtype))):
        x = sampled((3, 5, SIZE), dtype)[1:].requires_grad_()
        (slope,) = torch.autograd.grad((module(x) ** 3).sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad((slope**2).sum(), x)
        results.append({"slope": slope.detach(), "curvature": curvature})
    assert_same(results[1], results[0], None if dtype == torch.float64 else 1e-5)
