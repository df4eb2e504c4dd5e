"""Attention as composite ops: values and gradients beside PyTorch in float64, in one piece with learned masks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from fusion.rewriting import with_gradients
from onnxtrain.emitter import Emitter
from onnxtrain.functions import (
    CompositeOp,
    attention,
    causal_attention,
    masked_attention,
    qkv_attention,
    qkv_causal_attention,
    qkv_masked_attention,
    qkv_safe_masked_attention,
    safe_masked_attention,
)
from tolerances import FINITE_DIFFERENCE, NORM_RELATIVE, norm_relative_error

COMPOSITES = [attention, causal_attention, masked_attention, safe_masked_attention]
SCALE = 0.75
AXES = {
    "q": ("batch", 3, "queries", 4),
    "k": ("batch", 3, "keys", 4),
    "v": ("batch", 3, "keys", 5),
    "mask": (3, 1, "keys"),
    "ct": ("batch", 3, "queries", 5),
}
SIZES = {"batch": 2, "queries": 6, "keys": 7}
each_composite = pytest.mark.parametrize("composite", COMPOSITES, ids=lambda composite: composite.name)


def sampled(composite: CompositeOp) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        name: rng.normal(size=[SIZES.get(axis, axis) for axis in AXES[name]])
        for name in (*composite.inputs, "ct")
    }


def session(composite: CompositeOp, dtype: type, symbolic: bool) -> ort.InferenceSession:
    """y and the gradients of all inputs."""
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="attention")
    for name in composite.inputs:
        axes = [axis if symbolic else SIZES.get(axis, axis) for axis in AXES[name]]
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(axes)))
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    y, log_sum = op.call(composite, *graph.inputs, scale=SCALE, _outputs=2)
    q, v = graph.inputs[0], graph.inputs[2]
    y.name, y.shape = "y", ir.Shape([*q.shape[:3], v.shape[3]])
    log_sum.shape = ir.Shape(q.shape[:3])
    graph.outputs.append(y)
    joint = with_gradients(model, composite.inputs)
    return ort.InferenceSession(joint.SerializeToString(), providers=["CPUExecutionProvider"])


def in_torch(composite: CompositeOp, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The same by PyTorch's own attention."""
    values = {name: torch.from_numpy(value.astype(float)) for name, value in feeds.items()}
    leaves = [values[name].requires_grad_() for name in composite.inputs]
    mask = values.get("mask")
    y = torch.nn.functional.scaled_dot_product_attention(
        *leaves[:3],
        attn_mask=None if mask is None else mask.expand(2, 3, 6, 7),
        is_causal=composite is causal_attention,
        scale=SCALE,
    )
    return [value.detach().numpy() for value in (y, *torch.autograd.grad(y, leaves, values["ct"]))]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@each_composite
def test_values_and_gradients_match_torch(composite: CompositeOp, dtype: type, symbolic: bool) -> None:
    feeds = {name: value.astype(dtype) for name, value in sampled(composite).items()}
    for own, reference in zip(
        session(composite, dtype, symbolic).run(None, feeds), in_torch(composite, feeds), strict=True
    ):
        assert own.dtype == dtype
        assert norm_relative_error(own, reference) <= NORM_RELATIVE[np.dtype(dtype)]


@each_composite
def test_beside_finite_differences(composite: CompositeOp) -> None:
    run, feeds = session(composite, np.float64, False), sampled(composite)
    _, *gradients = run.run(None, feeds)
    for name, gradient in zip(composite.inputs, gradients, strict=True):
        direction = np.random.default_rng(4).normal(size=feeds[name].shape)
        high, low = (
            run.run(["y"], feeds | {name: feeds[name] + step * direction})[0] for step in (1e-5, -1e-5)
        )
        slope = float(((high - low) * feeds["ct"]).sum() / 2e-5)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=FINITE_DIFFERENCE)


def test_a_query_without_keys_has_no_gradient() -> None:
    feeds = {name: value.astype(np.float32) for name, value in sampled(safe_masked_attention).items()}
    feeds["mask"][1] = -np.inf
    y, *gradients = session(safe_masked_attention, np.float32, True).run(None, feeds)
    assert (y[:, 1] == 0).all()
    for gradient in gradients[:3]:
        assert (gradient[:, 1] == 0).all()
        assert np.isfinite(gradient).all()


QKV = [qkv_attention, qkv_causal_attention, qkv_masked_attention, qkv_safe_masked_attention]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("perm", [(2, 0, 3, 1, 4), (2, 1, 3, 0, 4)], ids=str)
@pytest.mark.parametrize("composite", QKV, ids=lambda composite: composite.name)
def test_attention_of_one_tensor_matches_torch(
    composite: CompositeOp, perm: tuple[int, ...], symbolic: bool
) -> None:
    inverse = np.argsort(perm)
    y_perm = [int(i) - 1 for i in inverse if i > 0]
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3, 2, 3, 6, 4)).transpose(inverse)
    feeds = {"x": x, "ct": rng.normal(size=(2, 3, 6, 4)).transpose(y_perm)}
    if "mask" in composite.inputs:
        feeds["mask"] = rng.normal(size=(3, 1, 6))
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="attention")
    axes = {"x": [["batch", "positions"], [2, 6]][not symbolic], "mask": [3, 1, 6]}
    sizes = np.array([3, axes["x"][0], 3, axes["x"][1], 4], dtype=object)
    axes["x"] = [sizes[i] for i in inverse]
    for name in composite.inputs:
        graph.inputs.append(
            ir.Value(name=name, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(axes[name]))
        )
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    y, log_sum = op.call(composite, *graph.inputs, scale=SCALE, perm=list(perm), y_perm=y_perm, _outputs=2)
    y.name, y.shape = "y", ir.Shape([sizes[1:][i] for i in y_perm])
    log_sum.shape = ir.Shape(sizes[1:4])
    graph.outputs.append(y)
    joint = with_gradients(model, composite.inputs)
    own = ort.InferenceSession(joint.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)

    leaves = {name: torch.from_numpy(feeds[name].copy()).requires_grad_() for name in composite.inputs}
    mask = leaves["mask"].expand(2, 3, 6, 6) if "mask" in leaves else None
    result = torch.nn.functional.scaled_dot_product_attention(
        *leaves["x"].permute(*perm),
        attn_mask=mask,
        is_causal=composite is qkv_causal_attention,
        scale=SCALE,
    ).permute(*y_perm)
    reference = [
        result,
        *torch.autograd.grad(result, list(leaves.values()), torch.from_numpy(feeds["ct"].copy())),
    ]
    for value, expected in zip(own, reference, strict=True):
        assert norm_relative_error(value, expected.detach().numpy()) <= NORM_RELATIVE[np.dtype(np.float64)]
