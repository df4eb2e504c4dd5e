"""Recurrent layers against the formulas of their ONNX documentation, step by step on torch tensors."""

import numpy as np
import torch

from autodiff.case import Case, F, R

T, B, INPUT, H = 4, 3, 2, 5
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _rnn_step(x, h, c, w, r, wb, rb, *, activation=torch.tanh):
    return activation(x @ w.T + wb + h @ r.T + rb), c


def _gru_step(x, h, c, w, r, wb, rb, *, reset_last):
    (xz, xr, xh), (rz, rr, rh) = (x @ w.T + wb).chunk(3, -1), r.chunk(3)
    bz, br, bh = rb.chunk(3)
    z, s = torch.sigmoid(xz + h @ rz.T + bz), torch.sigmoid(xr + h @ rr.T + br)
    n = torch.tanh(xh + (s * (h @ rh.T + bh) if reset_last else (s * h) @ rh.T + bh))
    return (1 - z) * n + z * h, c


def _lstm_step(x, h, c, w, r, wb, rb, p=None):
    i, o, f, g = (x @ w.T + wb + h @ r.T + rb).chunk(4, -1)
    p_i, p_o, p_f = (0, 0, 0) if p is None else p.chunk(3)
    c = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
    return torch.sigmoid(o + p_o * c) * torch.tanh(c), c


def _run(step, x, w, r, b, lens, h, c, reverse, *peepholes):
    """One direction; a row stops at its length, and a reversed row starts there."""
    rows, finals = [], []
    for row in range(B):
        length = T if lens is None else int(lens[row])
        hi, ci = h[row], c[row]
        outputs = [torch.zeros_like(hi)] * T
        for t in reversed(range(length)) if reverse else range(length):
            hi, ci = step(x[t, row], hi, ci, w, r, *b.chunk(2), *peepholes)
            outputs[t] = hi
        rows.append(torch.stack(outputs))
        finals.append((hi, ci))
    return torch.stack(rows, 1), torch.stack([h for h, _ in finals]), torch.stack([c for _, c in finals])


def _layer(
    op,
    direction="forward",
    *,
    bias=True,
    lens=None,
    initial=True,
    outputs=None,
    step=None,
    layout=0,
    peepholes=False,
    name="",
    **attrs,
):
    backward = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    d, rows = len(backward), GATES[op] * H
    count = outputs or (3 if op == "LSTM" else 2)
    step = step or {"RNN": _rnn_step, "LSTM": _lstm_step}[op]

    def twin(x, w, r, b=None, lengths=None, h=None, c=None, p=None):
        zeros = torch.zeros(d, B, H, dtype=x.dtype)
        b = torch.zeros(d, 2 * rows, dtype=x.dtype) if b is None else b
        x = x.transpose(0, 1) if layout else x
        h, c = (zeros if v is None else v.transpose(0, 1) if layout else v for v in (h, c))
        done = [
            _run(step, x, w[k], r[k], b[k], lengths, h[k], c[k], reverse, *([] if p is None else [p[k]]))
            for k, reverse in enumerate(backward)
        ]
        results = (
            torch.stack([y for y, _, _ in done], 1),
            *(torch.stack([v[k] for v in done]) for k in (1, 2)),
        )
        if layout:
            results = results[0].permute(2, 0, 1, 3), *(v.transpose(0, 1) for v in results[1:])
        return results[:count] if count > 1 else results[0]

    weight = {"low": -0.8, "high": 0.8}
    inputs = [F(*((B, T) if layout else (T, B)), INPUT), F(d, rows, INPUT, **weight), F(d, rows, H, **weight)]
    inputs += [
        F(d, 2 * rows, **weight) if bias else None,
        None if lens is None else R(np.array(lens, np.int32)),
    ]
    inputs += [F(*((B, d) if layout else (d, B)), H, low=-1, high=1)] * (initial * (2 if op == "LSTM" else 1))
    inputs += [None] * (7 - len(inputs)) + [F(d, 3 * H, **weight)] if peepholes else []
    while inputs[-1] is None:
        inputs.pop()
    # The reference evaluator ignores sequence_lens and knows no RNN with Relu; ONNX Runtime has no float64.
    unknown = lens is not None or "Relu" in str(attrs)
    return Case(
        op,
        tuple(inputs),
        twin,
        {"direction": direction, "hidden_size": H, **({"layout": 1} if layout else {}), **attrs},
        count,
        name=f"{direction}{'-' + name if name else ''}",
        symbolic={0: (0, 1), 5: (1 - layout,), 6: (1 - layout,)},
        evaluator="none" if unknown else "reference",
    )


def _relu_step(*args):
    return _rnn_step(*args, activation=torch.relu)


def _reset_last(*args):
    return _gru_step(*args, reset_last=True)


def _reset_first(*args):
    return _gru_step(*args, reset_last=False)


CASES = []
for direction in ("forward", "reverse", "bidirectional"):
    CASES += [
        _layer("RNN", direction),
        _layer("LSTM", direction),
        _layer("GRU", direction, step=_reset_first),
        _layer("GRU", direction, step=_reset_last, linear_before_reset=1, name="linear_before_reset"),
    ]
for direction in ("forward", "bidirectional"):
    lens = {"lens": (4, 2, 1), "name": "lens"}
    CASES += [
        _layer("RNN", direction, **lens),
        _layer("LSTM", direction, **lens),
        _layer("GRU", direction, step=_reset_last, linear_before_reset=1, **lens),
    ]
CASES += [
    _layer("RNN", step=_relu_step, activations=["Relu"], name="relu"),
    _layer("RNN", bias=False, initial=False, outputs=1, name="bare"),
    _layer("LSTM", bias=False, initial=False, outputs=1, name="bare"),
    _layer("GRU", bias=False, initial=False, outputs=1, step=_reset_first, name="bare"),
]
CASES += [
    _layer("RNN", "reverse", layout=1, name="layout"),
    _layer("LSTM", "bidirectional", layout=1, name="layout"),
    _layer("GRU", layout=1, step=_reset_last, linear_before_reset=1, name="layout"),
]
CASES += [
    _layer("LSTM", bias=False, initial=False, outputs=1, peepholes=True, name="peepholes-bare"),
    _layer("LSTM", "bidirectional", peepholes=True, lens=(4, 2, 1), name="peepholes-lens"),
    _layer("LSTM", "bidirectional", peepholes=True, layout=1, name="peepholes-layout"),
]
