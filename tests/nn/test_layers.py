"""The layers in eager PyTorch: darts' values, gradients, state dicts and errors, and what every module can do."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import onnxtrain.nn
from nn.layers import (
    LAYERS,
    SIZE,
    TOLERANCE,
    Layer,
    assert_same,
    darts_layers,
    each_dtype,
    each_layer,
    each_shape,
    sampled,
    step,
)
from onnxtrain.nn import LayerNorm, LayerNormNoBias, RINorm, RMSNorm, stop_gradient

pytestmark = pytest.mark.torch

INPUT_NORMS = pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])


@pytest.mark.sample(every=2)
@each_dtype
@each_shape
@each_layer
def test_values_and_gradients_of_darts(layer, shape, dtype):
    x = sampled(shape, dtype)
    assert_same(step(layer.ours(dtype), x), step(layer.theirs(dtype), x))


@each_layer
def test_state_dicts_go_both_ways(layer):
    ours, theirs = layer.ours(), layer.theirs()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    fresh = type(ours)(SIZE, **layer.kwargs)
    fresh.load_state_dict(theirs.state_dict())
    x = sampled((3, 5, SIZE), torch.float32)
    assert_same(step(fresh, x), step(theirs, x))
    for parameter in ours.parameters():
        nn.init.uniform_(parameter)
    theirs.load_state_dict(ours.state_dict())
    assert_same(step(theirs, x), step(ours, x))


def test_all_of_them_are_there():
    assert set(onnxtrain.nn.__all__) == {"LayerNorm", "LayerNormNoBias", "RINorm", "RMSNorm", "stop_gradient"}


def test_the_four_have_the_attributes_of_darts():
    for layer in (Layer("RMSNorm"), Layer("RINorm"), Layer("LayerNorm"), Layer("LayerNormNoBias")):
        ours, theirs = layer.ours(), layer.theirs()
        for name in ("eps", "scale", "input_dim", "affine", "normalized_shape", "elementwise_affine"):
            assert getattr(ours, name, None) == getattr(theirs, name, None)
    assert issubclass(LayerNorm, nn.LayerNorm)
    with pytest.raises(TypeError, match="elementwise_affine"):
        LayerNormNoBias(SIZE, elementwise_affine=True)


@INPUT_NORMS
@pytest.mark.parametrize("shape", [(3, 5, SIZE), (2, 3, 4, SIZE)], ids=["3d", "4d"])
def test_transform_reuses_the_statistics(shape, affine):
    norm = Layer("RINorm", {"affine": affine}).ours(torch.float64)
    x = sampled(shape, torch.float64)
    y = norm(x)
    torch.testing.assert_close(norm.transform(x), y, rtol=0, atol=1e-14)
    longer = torch.cat([x, x], dim=1) * 3
    want = (longer - norm.mean) / norm.stdev
    if affine:
        want = want * norm.affine_weight + norm.affine_bias
    torch.testing.assert_close(norm.transform(longer), want, rtol=0, atol=1e-12)


@each_dtype
@INPUT_NORMS
def test_inverse_undoes_forward(affine, dtype):
    norm = Layer("RINorm", {"affine": affine}).ours(dtype)
    x = sampled((3, 5, SIZE), dtype)
    back = norm.inverse(norm(x).unsqueeze(-1))
    assert back.shape == (3, 5, SIZE, 1)
    # With eps² beside the weight the way back is exact to about 1e-10.
    tolerance = 1e-9 if affine and dtype == torch.float64 else 1e-6
    torch.testing.assert_close(back.squeeze(-1), x, rtol=tolerance, atol=tolerance)


@each_dtype
@INPUT_NORMS
def test_inverse_of_darts(affine, dtype):
    layer = Layer("RINorm", {"affine": affine})
    forecast = sampled((3, 4, SIZE, 2), dtype)
    results = []
    for norm in (layer.ours(dtype), layer.theirs(dtype)):
        y = forecast.clone().requires_grad_()
        x = sampled((3, 5, SIZE), dtype).requires_grad_()
        norm(x)
        z = norm.inverse(y)
        (z * z).sum().backward()
        assert x.grad is None
        gradients = {name: p.grad for name, p in norm.named_parameters()}
        results.append({"z": z.detach(), "y": y.grad, **gradients})
    assert_same(*results)


@each_dtype
@pytest.mark.parametrize("weight", [0.0, 1e-4])
def test_inverse_of_a_small_weight_is_that_of_darts(weight, dtype):
    """With a weight of zero the mean, exactly: the bias must not meet the large factor."""
    x = sampled((3, 5, SIZE), dtype) * 10 + 350
    results = []
    for norm in (Layer("RINorm").ours(dtype), Layer("RINorm").theirs(dtype)):
        nn.init.constant_(norm.affine_weight, weight)
        nn.init.constant_(norm.affine_bias, 0.7)
        results.append(norm.inverse(norm(x).unsqueeze(-1)).squeeze(-1))
    if weight == 0:
        assert torch.equal(results[0], norm.mean.expand_as(x))
    torch.testing.assert_close(*results, rtol=TOLERANCE[dtype], atol=0)


def test_statistics_carry_no_gradient():
    norm = RINorm(SIZE).double()
    x = sampled((3, 5, SIZE), torch.float64).requires_grad_()
    y = norm(x)
    assert not norm.mean.requires_grad
    assert not norm.stdev.requires_grad
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, (norm.affine_weight / norm.stdev).expand_as(x))


@pytest.mark.parametrize("wrong", [1, SIZE - 1, SIZE + 1])
def test_bad_sizes_raise(wrong):
    norm, x = RINorm(wrong), sampled((3, 5, SIZE), torch.float32)
    with pytest.raises(
        RuntimeError, match=rf"RINorm\.forward: axis -1 .* must have size {wrong}, .*\(3, 5, 6\)"
    ):
        norm(x)
    with pytest.raises(RuntimeError, match="the last axis of the input must have size"):
        RMSNorm(wrong)(x)
    with pytest.raises(RuntimeError):
        LayerNorm(wrong)(x)
    norm = RINorm(SIZE)
    norm(x)
    with pytest.raises(RuntimeError, match=r"RINorm\.inverse: axis -2"):
        norm.inverse(sampled((3, 5, wrong, 1), torch.float32))
    with pytest.raises(RuntimeError, match=r"RINorm\.transform: axis -1"):
        norm.transform(sampled((3, 5, wrong), torch.float32))


@each_layer
def test_darts_raises_a_runtime_error_for_a_bad_size_too(layer):
    x = sampled((3, 5, SIZE - 1), torch.float32)
    for module in (layer.theirs(), layer.ours()):
        if layer.kwargs.get("affine") is False:  # nothing has that size then
            assert module(x).shape == x.shape
            continue
        with pytest.raises(RuntimeError):
            module(x)


def test_a_layer_of_size_1_does_not_broadcast_as_darts_does():
    x = sampled((3, 5, SIZE), torch.float32)
    for name in ("RMSNorm", "RINorm"):
        assert getattr(darts_layers(), name)(1)(x).shape == x.shape
        with pytest.raises(RuntimeError, match="must have size 1"):
            getattr(onnxtrain.nn, name)(1)(x)


@pytest.mark.parametrize("method", ["inverse", "transform"])
def test_without_statistics_the_way_back_is_unknown(method):
    with pytest.raises(RuntimeError, match=f"RINorm.{method}: there are no statistics yet"):
        getattr(RINorm(SIZE), method)(torch.zeros(2, 3, SIZE, SIZE))


def _copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def _saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("twin", [_copied, _pickled, _saved])
@each_layer
def test_copies_compute_the_same(layer, twin):
    module, x = layer.ours(), sampled((3, 5, SIZE), torch.float32)
    want = step(module, x)
    other = twin(module)
    assert_same(step(other, x), want)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert_same(step(module, x), want)
    assert repr(other) == repr(module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_layer
def test_narrow_dtypes_round_as_in_darts(layer, dtype):
    x = sampled((3, 5, SIZE), torch.float32)[1:].to(dtype)
    got = step(layer.ours().to(dtype), x)
    want = step(layer.theirs().to(dtype), x)
    resolution = torch.finfo(dtype).eps
    assert_same(got, want, 8 * resolution)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rin_norm_of_large_numbers_in_narrow_dtypes(dtype):
    """float16 holds neither the squares of these differences nor, to within a deviation, their mean."""
    generator = torch.Generator().manual_seed(0)
    for scale, level in [(100, 1000), (5000, 0), (1, 1000)]:
        x = (torch.randn(4, 96, SIZE, generator=generator) * scale + level).to(dtype)
        norm, wide = RINorm(SIZE).to(dtype), x.double()
        y = norm(x)
        stdev = (wide.var(1, keepdim=True, correction=0) + norm.eps).sqrt()
        want = (wide - wide.mean(1, keepdim=True).to(dtype)) / stdev
        assert norm.mean.dtype == norm.stdev.dtype == y.dtype == dtype
        resolution = torch.finfo(dtype).eps
        torch.testing.assert_close(norm.stdev.double(), stdev, rtol=resolution, atol=0)
        torch.testing.assert_close(y.double(), want, rtol=4 * resolution, atol=resolution)


@each_layer
def test_meta_device_and_materialisation(layer):
    with torch.device("meta"):
        module = type(layer.ours())(SIZE, **layer.kwargs)
    assert all(p.is_meta for p in module.parameters())
    assert module(torch.empty(3, 5, SIZE, device="meta")).shape == (3, 5, SIZE)
    module = module.to_empty(device="cpu")
    module.load_state_dict(layer.ours().state_dict())
    x = sampled((3, 5, SIZE), torch.float32)
    assert_same(step(module, x), step(layer.ours(), x))


@each_layer
def test_torch_compile_in_one_graph(layer):
    torch._dynamo.reset()
    module, x = layer.ours(torch.float64), sampled((3, 5, SIZE), torch.float64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(
        {name.removeprefix("_orig_mod."): value for name, value in step(compiled, x).items()},
        step(layer.ours(torch.float64), x),
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@each_dtype
@pytest.mark.parametrize("layer", [one for one in LAYERS if one.name != "RINorm"], ids=str)
def test_torch_jit_script(layer, dtype):
    """All that darts' classes can be scripted: not RINorm."""
    scripted = torch.jit.script(nn.Sequential(layer.ours(dtype)))
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    x = sampled((3, 5, SIZE), dtype)
    want = step(nn.Sequential(layer.theirs(dtype)), x)
    for module in (scripted, torch.jit.load(buffer)):
        assert_same(step(module, x), want)
        with pytest.raises((torch.jit.Error, RuntimeError)):
            module(x[..., 1:])


def test_stop_gradient_is_detach():
    x = torch.ones(2, requires_grad=True)
    y = stop_gradient(x * 3)
    assert not y.requires_grad
    assert y.tolist() == [3.0, 3.0]


def test_without_parameters_to_train():
    module = RINorm(SIZE, affine=False)
    assert list(module.parameters()) == []
    x = sampled((3, 5, SIZE), torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(slope, (1 / module.stdev).expand_as(x))
