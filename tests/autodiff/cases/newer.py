"""Ops that opsets 27 and 28 have brought: they are written in opset 26 when a model is loaded."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as fn

from autodiff.case import Case, F


def _heads(t: torch.Tensor, heads: int) -> torch.Tensor:
    """`[batch, time, heads * size]` to `[time, batch, heads, size]`."""
    return t.reshape(*t.shape[:2], heads, -1).transpose(0, 1)


def _linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor | None = None,
    decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str = "gated_delta",
    scale: float = 0.0,
) -> Any:
    """The recurrences of the specification, one position after the other."""
    q, k, v = _heads(query, q_num_heads), _heads(key, kv_num_heads), _heads(value, kv_num_heads)
    size, shared = q.shape[-1], q_num_heads // kv_num_heads
    if state is None:
        state = q.new_zeros(q.shape[1], kv_num_heads, k.shape[-1], v.shape[-1])
    g = None if decay is None else _heads(decay, kv_num_heads)
    b = None if beta is None else _heads(beta, kv_num_heads)
    outputs = []
    for step in range(len(q)):
        if "gated" in update_rule:
            state = g[step].exp().unsqueeze(-1) * state
        new = v[step]
        if "delta" in update_rule:
            new = b[step] * (new - torch.einsum("bhkv,bhk->bhv", state, k[step]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[step], new)
        read = torch.einsum("bhk,bhkv->bhv", q[step], state.repeat_interleave(shared, 1))
        outputs.append((scale or 1 / math.sqrt(size)) * read)
    return torch.stack(outputs, 1).flatten(2), state


def _linear(*inputs: F | None, **attributes: Any) -> Case:
    def twin(*tensors: torch.Tensor | None) -> Any:
        return _linear_attention(*tensors, **attributes)

    given = "".join("-" if x is None else "x" for x in inputs)
    name = f"{attributes.get('update_rule', 'default')}-{given}-{attributes['q_num_heads']}"
    # onnx's body computes in float32, whatever the inputs are.
    return Case("LinearAttention", inputs, twin, attributes, outputs=2, opset=27, name=name, evaluator="none")


def _causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    past: torch.Tensor | None = None,
    *,
    activation: str = "none",
) -> Any:
    kept = weight.shape[-1] - 1
    padded = fn.pad(x, (kept, 0)) if past is None else torch.cat([past, x], -1)
    y = fn.conv1d(padded, weight, bias, groups=x.shape[1])
    return fn.silu(y) if activation != "none" else y, padded[..., padded.shape[-1] - kept :]


def _conv(*inputs: F | None, **attributes: Any) -> Case:
    name = f"{attributes.get('activation', 'default')}-{len(inputs)}"
    return Case(
        "CausalConvWithState",
        inputs,
        lambda *tensors: _causal_conv(*tensors, **attributes),
        attributes,
        outputs=2,
        opset=27,
        name=name,
        symbolic={0: (0, 2), 3: (0,)},
        evaluator="none",
    )


Q, K, V = F(2, 5, 8), F(2, 5, 8, low=-0.7, high=0.7), F(2, 5, 6)
STATE, DECAY, BETA = F(2, 2, 4, 3), F(2, 5, 8, low=-1.0, high=0.0), F(2, 5, 2, low=0.1, high=0.9)
HEADS = {"q_num_heads": 2, "kv_num_heads": 2}

CASES = [
    Case("SwiGLU", (F(3, 4), F(3, 4)), lambda a, b: fn.silu(a) * b, opset=28),
    Case(
        "SwiGLU", (F(2, 3, 4), F(2, 3, 4)), lambda a, b: a * torch.sigmoid(1.5 * a) * b, {"alpha": 1.5},
        opset=28,
    ),
    _conv(F(2, 3, 5), F(3, 1, 4)),
    _conv(F(2, 3, 5), F(3, 1, 4), F(3), F(2, 3, 3), activation="silu"),
    _conv(F(2, 3, 5), F(3, 1, 2), None, F(2, 3, 1), activation="swish"),
    _linear(Q, K, V, update_rule="linear", **HEADS),
    _linear(Q, K, V, STATE, DECAY, update_rule="gated", **HEADS),
    _linear(Q, K, V, STATE, None, BETA, update_rule="delta", scale=0.3, **HEADS),
    _linear(Q, K, V, None, DECAY, BETA, **HEADS),
    _linear(Q, K, V, STATE, DECAY, BETA, **HEADS),
    _linear(
        F(2, 3, 16), F(2, 3, 8), F(2, 3, 6), None, F(2, 3, 8, low=-1.0, high=0.0), F(2, 3, 2), q_num_heads=4,
        kv_num_heads=2,
    ),
]  # fmt: skip
