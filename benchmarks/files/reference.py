"""Ops of com.microsoft in float64, for ONNX's reference evaluator; `rounding.py` has those that round."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx.reference.op_run import OpRun

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from autodiff.contrib_reference import BiasGelu, FastGelu, Gelu, QuickGelu
from autodiff.reference import ReferenceEvaluator

Array = npt.NDArray[Any]
MS = "com.microsoft"
OPS: dict[tuple[str, str], type[OpRun]] = {
    (MS, cls.__name__): cls for cls in (BiasGelu, FastGelu, Gelu, QuickGelu)
}
OPS["", "Gelu"] = Gelu  # onnx's own rounds its error function to float32


def op(domain: str, *names: str) -> Any:
    """Registers an implementation."""

    def register(cls: type[OpRun]) -> type[OpRun]:
        for name in names:
            OPS[domain, name] = type(name, (cls,), {"op_domain": domain})
        return cls

    return register


class Evaluator(ReferenceEvaluator):
    """As that of the tests, with the ops of this module; those that round keep what they have rounded to."""

    def _load_impl(self, node: onnx.NodeProto, input_types: onnx.TypeProto | None = None) -> Any:
        return OPS.get((node.domain, node.op_type)) or super()._load_impl(node, input_types)


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def _norm(x: Array, scale: Array, bias: Array | None, epsilon: float, *, center: bool = True) -> Array:
    x = x - x.mean(-1, keepdims=True) if center else x
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale
    return y if bias is None else y + bias


def _activated(x: Array, name: str | None, numbers: list[float]) -> Array:
    if name == "Relu":
        return np.maximum(x, 0)
    if name == "Clip":
        return np.clip(x, *numbers)
    if name in ("HardSigmoid", "LeakyRelu", "Sigmoid", "Tanh"):
        y = {
            "HardSigmoid": lambda: np.clip(numbers[0] * x + numbers[1], 0, 1),
            "LeakyRelu": lambda: np.where(x < 0, numbers[0] * x, x),
            "Sigmoid": lambda: 1 / (1 + np.exp(-x)),
            "Tanh": lambda: np.tanh(x),
        }[name]()
        return np.asarray(y)
    if name:
        raise NotImplementedError(name)
    return x


@op(MS, "FusedMatMul")
class _FusedMatMul(OpRun):
    def _run(self, a: Array, b: Array, **given: Any) -> tuple[Array]:
        if given.get("transBatchA") or given.get("transBatchB"):
            raise NotImplementedError("transposed batches")
        a, b = (x.swapaxes(-1, -2) if given.get(f"trans{side}") else x for x, side in ((a, "A"), (b, "B")))
        alpha = given.get("alpha")
        return (np.matmul(a, b) * (1.0 if alpha is None else alpha),)


@op(MS, "FusedGemm")
class _FusedGemm(OpRun):
    def _run(self, a: Array, b: Array, c: Array | float = 0.0, **given: Any) -> tuple[Array]:
        a, b = (x.T if given.get(f"trans{side}") else x for x, side in ((a, "A"), (b, "B")))
        alpha, beta = (1.0 if given.get(name) is None else given[name] for name in ("alpha", "beta"))
        numbers = [given.get(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
        y = alpha * (a @ b) + beta * c
        return (_activated(y, given.get("activation"), [n for n in numbers if n is not None]),)


@op(MS, "FusedConv")
class _FusedConv(OpRun):
    def _run(
        self, x: Array, w: Array, b: Array | None = None, z: Array | None = None, **given: Any
    ) -> tuple[Array]:
        y = convolved(x, w, b, given)
        return (
            _activated(
                y if z is None else y + z, given.get("activation"), given.get("activation_params") or []
            ),
        )


def convolved(x: Array, w: Array, b: Array | None, given: dict[str, Any]) -> Array:
    if (given.get("auto_pad") or "NOTSET") != "NOTSET":
        raise NotImplementedError("auto_pad")
    rank = w.ndim - 2
    pads = np.reshape(given.get("pads") or [0] * 2 * rank, (2, rank)).T
    x = np.pad(x, [(0, 0), (0, 0), *map(tuple, pads)])
    tensors = [None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in (x, w, b)]
    conv = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[rank - 1]
    stride, dilation = given.get("strides") or [1] * rank, given.get("dilations") or [1] * rank
    return np.asarray(conv(*tensors, tuple(stride), 0, tuple(dilation), given.get("group") or 1).numpy())


@op(MS, "SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
class _SkipLayerNormalization(OpRun):
    def _run(
        self, x: Array, skip: Array, gamma: Array, *rest: Array | None, epsilon: float | None = None
    ) -> Any:
        simplified = type(self).__name__ == "SkipSimplifiedLayerNormalization"
        beta, bias = (*([None] if simplified else []), *rest, None, None)[:2]
        total = x + skip + (0.0 if bias is None else bias)
        y = _norm(total, gamma, beta, 1e-12 if epsilon is None else epsilon, center=not simplified)
        return (y, np.zeros(0), np.zeros(0), total)[: len(self.onnx_node.output)]


@op("", "SimplifiedLayerNormalization")
@op(MS, "SimplifiedLayerNormalization")
class _SimplifiedLayerNormalization(OpRun):
    def _run(
        self, x: Array, scale: Array, axis: int | None = -1, epsilon: float | None = None, **_: Any
    ) -> Any:
        axes = tuple(range((-1 if axis is None else axis) % x.ndim, x.ndim))
        square = (x**2).mean(axes, keepdims=True)
        return (x / np.sqrt(square + (1e-5 if epsilon is None else epsilon)) * scale,)


@op(MS, "EmbedLayerNormalization")
class _EmbedLayerNormalization(OpRun):
    def _run(
        self, ids: Array, segments: Array | None, words: Array, places: Array, kinds: Array | None, gamma: Array,
        beta: Array, mask: Array | None = None, positions: Array | None = None, epsilon: float | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        total = words[ids] + (places[: ids.shape[1]] if positions is None else places[positions])
        total = total if segments is None or kinds is None else total + kinds[segments]
        lengths = np.zeros(len(ids), np.int32) if mask is None else mask.sum(1).astype(np.int32)
        y = _norm(total, gamma, beta, 1e-12 if epsilon is None else epsilon)
        return (y, lengths, total)[: len(self.onnx_node.output)]


def _heads(x: Array, count: int) -> Array:
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def _attend(q: Array, k: Array, v: Array, bias: Array | float, scale: float | None) -> Array:
    """Of [batch, heads, sequence, size], merged to [batch, sequence, heads * size]."""
    scores = q @ k.swapaxes(-1, -2) * (scale or 1 / np.sqrt(q.shape[-1]))
    y = softmax(scores + bias) @ v
    return y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)


def _mask(mask: Array | None, keys: int, filler: float | None) -> Array | float:
    if mask is None:
        return 0.0
    filler = -10000.0 if filler is None else filler
    if mask.ndim == 1:
        mask = np.arange(keys) < mask[:, None]
    shape = {2: (slice(None), None, None), 3: (slice(None), None)}[mask.ndim]
    return np.where(mask[shape] != 0, 0.0, filler)


def _causal(queries: int, keys: int) -> Array:
    return np.where(np.arange(keys) > np.arange(keys - queries, keys)[:, None], -np.inf, 0.0)


def _joined(past: Array | None, new: Array) -> Array:
    return new if past is None else np.concatenate([past, new], axis=2)


@op(MS, "Attention")
class _Attention(OpRun):
    def _run(
        self, x: Array, w: Array, b: Array | None = None, mask: Array | None = None, past: Array | None = None,
        bias: Array | None = None, num_heads: int = 1, unidirectional: int | None = None, scale: float | None = None,
        qkv_hidden_sizes: list[int] | None = None, mask_filter_value: float | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        joint = x @ w + (0.0 if b is None else b)
        third = joint.shape[-1] // 3
        q, k, v = np.split(joint, np.cumsum(qkv_hidden_sizes or [third] * 3)[:2], axis=-1)
        q, k, v = (_heads(part, num_heads) for part in (q, k, v))
        if past is not None:
            k, v = _joined(past[0], k), _joined(past[1], v)
        extra = _mask(mask, k.shape[2], mask_filter_value) + (0.0 if bias is None else bias)
        extra = extra + (_causal(q.shape[2], k.shape[2]) if unidirectional else 0.0)
        return (_attend(q, k, v, extra, scale), np.stack([k, v]))[: len(self.onnx_node.output)]


@op(MS, "MultiHeadAttention")
class _MultiHeadAttention(OpRun):
    def _run(
        self, q: Array, k: Array | None = None, v: Array | None = None, b: Array | None = None,
        mask: Array | None = None, bias: Array | None = None, past_key: Array | None = None,
        past_value: Array | None = None, num_heads: int = 1, unidirectional: int | None = None,
        scale: float | None = None, mask_filter_value: float | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        if k is None or v is None or q.ndim != 3:
            raise NotImplementedError("packed queries, keys and values")
        if b is not None:
            bounds = np.cumsum([q.shape[-1], k.shape[-1]])
            q, k, v = (part + own for part, own in zip((q, k, v), np.split(b, bounds), strict=True))
        q = _heads(q, num_heads)
        k, v = (x if x.ndim == 4 else _heads(x, num_heads) for x in (k, v))
        k, v = _joined(past_key, k), _joined(past_value, v)
        extra = _mask(mask, k.shape[2], mask_filter_value) + (0.0 if bias is None else bias)
        extra = extra + (_causal(q.shape[2], k.shape[2]) if unidirectional else 0.0)
        return (_attend(q, k, v, extra, scale), k, v)[: len(self.onnx_node.output)]
