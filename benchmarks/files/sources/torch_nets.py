"""Small networks, by both exporters of PyTorch at several opsets."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from sources.torch_layers import (
    Fn,
    Residual,
    SqueezeExcite,
    Tensors,
    causal,
    decoder_only,
    dense,
    experts,
    graph,
    head,
    images,
    p,
    patches,
    recurrent,
    resized,
    rotary,
    rows,
    sequences,
    spectrum,
    split,
    state_space,
    tokens,
    transformer,
    unet,
    vae,
    warped,
)

__all__ = ["NETS", "export", "make"]

SCRIPT_OPSETS = (13, 17, 20, 15, 11, 18)
DYNAMO_OPSETS = (18, 21, 20, 23, 19, 22)

Net = tuple[Callable[[], nn.Module], Callable[[], Tensors]]
NETS: dict[str, Net] = {
    "linear": (lambda: nn.Linear(8, 3), rows),
    "mlp-relu": (lambda: dense(8, 16, 3), rows),
    "mlp-sequence": (lambda: dense(8, 16, 3, act=nn.GELU), sequences),
    **{
        f"mlp-{act.__name__}": (lambda act=act: dense(8, 12, 3, act=act), rows)
        for act in (
            nn.Tanh,
            nn.Sigmoid,
            nn.ELU,
            nn.SELU,
            nn.GELU,
            nn.SiLU,
            nn.Mish,
            nn.Softplus,
            nn.LeakyReLU,
            nn.Hardswish,
            nn.Hardsigmoid,
            nn.Hardtanh,
            nn.PReLU,
            nn.CELU,
            nn.Softsign,
            nn.ReLU6,
            nn.LogSigmoid,
            nn.Tanhshrink,
            nn.Hardshrink,
            nn.Softshrink,
        )
    },
    "mlp-batchnorm": (
        lambda: nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(), nn.Linear(12, 3)),
        rows,
    ),
    "lenet": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(6, 8),
            nn.ReLU(),
            nn.Linear(8, 4),
            nn.LogSoftmax(1),
        ),
        lambda: images(1, 12),
    ),
    "resnet": (lambda: nn.Sequential(Residual(3, 6, 1), Residual(6, 8, 2), *head(8)), images),
    "mobile": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1, bias=False),
            nn.BatchNorm2d(6),
            nn.Hardswish(),
            nn.Conv2d(6, 6, 3, 1, 1, groups=6),
            nn.BatchNorm2d(6),
            nn.ReLU6(),
            SqueezeExcite(6),
            nn.Conv2d(6, 8, 1),
            *head(8),
        ),
        images,
    ),
    "vgg-avgpool": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, 1, ceil_mode=True),
            nn.Conv2d(6, 6, 3),
            *head(6),
        ),
        images,
    ),
    "dilated": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2), nn.ReLU(), nn.Conv2d(4, 2, 3, padding="same")),
        images,
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(6, 8, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(8, 4, 1)), sequences,
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.ReLU(), nn.AvgPool3d(2)),
        lambda: (torch.randn(2, 2, 6, 6, 6),),
    ),
    "deconv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3, 2, 1, output_padding=1)
        ),
        images,
    ),
    "autoencoder": (
        lambda: nn.Sequential(dense(8, 6, 3, act=nn.Tanh), nn.Tanh(), dense(3, 6, 8, act=nn.Tanh)), rows,
    ),
    "unet": (unet, images),
    "super-resolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1), nn.PixelShuffle(2)
        ),
        lambda: images(1, 8),
    ),
    "style": (
        lambda: nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(3, 4, 3),
            nn.InstanceNorm2d(4, affine=True),
            nn.ReLU(),
            nn.ReplicationPad2d(1),
            nn.Conv2d(4, 3, 3),
            nn.Tanh(),
        ),
        images,
    ),
    "group-norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), *head(4)), images,
    ),
    "layer-norm": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), sequences,
    ),
    "rms-norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-5), nn.Linear(8, 2)), sequences),
    "local-response": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.LocalResponseNorm(3), *head(6)), images),
    "weight-norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), nn.Linear(6, 2)), rows,
    ),
    "rnn": (recurrent(nn.RNN), sequences),
    "rnn-relu": (recurrent(nn.RNN, nonlinearity="relu", num_layers=2), sequences),
    "lstm": (recurrent(nn.LSTM), sequences),
    "lstm-bidirectional": (recurrent(nn.LSTM, bidirectional=True), sequences),
    "lstm-2-layers": (recurrent(nn.LSTM, num_layers=2), sequences),
    "gru": (recurrent(nn.GRU), sequences),
    "gru-bidirectional": (recurrent(nn.GRU, bidirectional=True, num_layers=2), sequences),
    "lstm-cell": (
        lambda: Fn(
            lambda m, x: m.b(m.cell(x[:, 1], m.cell(x[:, 0]))[0]), cell=nn.LSTMCell(8, 5), b=nn.Linear(5, 2)
        ),
        sequences,
    ),
    "crnn": (
        lambda: Fn(
            lambda m, x: m.head(m.rnn(m.conv(x).relu().mean(2).transpose(1, 2))[0]).log_softmax(-1),
            conv=nn.Conv2d(3, 6, 3),
            rnn=nn.LSTM(6, 5, batch_first=True, bidirectional=True),
            head=nn.Linear(10, 4),
        ),
        images,
    ),
    "encoder-post-norm": (transformer, tokens),
    "encoder-pre-norm-gelu": (lambda: transformer(True, "gelu"), tokens),
    "causal": (causal, tokens),
    "decoder": (
        lambda: Fn(
            decoder_only,
            words=nn.Embedding(30, 8),
            lift=nn.Linear(4, 8),
            head=nn.Linear(8, 30),
            decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1),
        ),
        lambda: (torch.randn(2, 5, 4), torch.randint(0, 30, (2, 6))),
    ),
    "attention": (
        lambda: Fn(
            lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)
        ),
        sequences,
    ),
    "vit": (
        lambda: Fn(
            patches,
            cut=nn.Conv2d(3, 8, 4, 4),
            first=p(1, 1, 8),
            places=p(1, 10, 8),
            norm=nn.LayerNorm(8),
            head=nn.Linear(8, 4),
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        images,
    ),
    "rotary": (lambda: Fn(rotary, q=nn.Linear(8, 8, bias=False), k=nn.Linear(8, 8, bias=False)), sequences),
    "mixture-of-experts": (lambda: Fn(experts, gate=nn.Linear(8, 4), experts=p(4, 8, 5)), rows),
    "embedding-bag": (
        lambda: Fn(lambda m, t: m.b(m.a(t).mean(1)), a=nn.Embedding(30, 6), b=nn.Linear(6, 2)), tokens,
    ),
    "embedding-bag-op": (
        lambda: Fn(lambda m, t: m.b(m.a(t)), a=nn.EmbeddingBag(30, 6), b=nn.Linear(6, 2)), tokens,
    ),
    "factorisation": (
        lambda: Fn(
            lambda m, a, b: (m.u(a) * m.v(b)).sum(-1) + m.c(b).squeeze(-1),
            u=nn.Embedding(9, 4),
            v=nn.Embedding(7, 4),
            c=nn.Embedding(7, 1),
        ),
        lambda: (torch.randint(0, 9, (5,)), torch.randint(0, 7, (5,))),
    ),
    "split": (
        lambda: Fn(split, a=nn.Linear(8, 8), b=nn.Linear(4, 6)), lambda: (torch.randn(2, 4, 8)[..., :8],),
    ),
    "einsum": (lambda: Fn(lambda m, x: torch.einsum("bti,ij,bsj->bts", x, m.w, x), w=p(8, 8)), sequences),
    "bilinear": (lambda: Fn(lambda m, x: m.a(x, x.tanh()), a=nn.Bilinear(8, 8, 3)), rows),
    "nearest": (resized(scale_factor=2, mode="nearest"), images),
    "bilinear-corners": (resized(size=(15, 17), mode="bilinear", align_corners=True), images),
    "bicubic": (resized(scale_factor=2, mode="bicubic"), images),
    "adaptive-max": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        images,
    ),
    "warp": (lambda: Fn(warped, where=nn.Linear(3, 6), b=nn.Conv2d(3, 2, 3)), images),
    "fold": (
        lambda: Fn(
            lambda m, x: functional.fold(
                m.a(functional.unfold(x, 3).transpose(1, 2)).transpose(1, 2), (12, 12), 3
            ),
            a=nn.Linear(27, 18),
        ),
        images,
    ),
    "spectrum": (
        lambda: Fn(
            spectrum,
            filter=nn.Conv1d(1, 1, 5, padding=2),
            window=nn.Parameter(torch.hann_window(16) + 0.1),
            head=nn.Linear(9, 3),
        ),
        lambda: (torch.randn(2, 64),),
    ),
    "graph": (
        lambda: Fn(graph, a=nn.Linear(8, 5), b=nn.Linear(13, 3)),
        # The old exporter takes no node that two edges lead to: it sets where index_add adds.
        lambda: (torch.randn(6, 8), torch.stack([torch.randint(0, 6, (6,)), torch.randperm(6)])),
    ),
    "vae": (
        lambda: Fn(vae, a=dense(8, 12, 8), b=dense(4, 12, 8)), lambda: (torch.randn(4, 8), torch.randn(4, 4)),
    ),
    "state-space": (
        lambda: Fn(state_space, gate=nn.Linear(8, 8), inner=nn.Linear(8, 8), scale=p(8), out=nn.Linear(8, 4)),
        sequences,
    ),
    "masked": (
        lambda: Fn(
            lambda m, x: torch.where(x > 0, m.a(x), x).masked_fill(x < -1, 0.5) * m.b.exp(),
            a=nn.Linear(8, 8),
            b=p(8),
        ),
        rows,
    ),
    "cosine": (
        lambda: Fn(lambda m, x: functional.cosine_similarity(m.a(x), m.b, -1), a=nn.Linear(8, 5), b=p(1, 5)),
        rows,
    ),
    "distances": (lambda: Fn(lambda m, x: torch.cdist(m.a(x), m.b), a=nn.Linear(8, 5), b=p(6, 5)), rows),
    "sorted": (lambda: Fn(lambda m, x: m.b(m.a(x).sort(-1)[0]), a=nn.Linear(8, 6), b=nn.Linear(6, 2)), rows),
    "logsumexp": (lambda: Fn(lambda m, x: torch.logsumexp(m.a(x), 1), a=nn.Linear(8, 6)), sequences),
    "normalised": (
        lambda: Fn(lambda m, x: functional.normalize(m.a(x), dim=-1) @ m.b, a=nn.Linear(8, 6), b=p(6, 4)),
        rows,
    ),
    "statistics": (
        lambda: Fn(
            lambda m, x: m.b(torch.cat([(y := m.a(x)).mean(1), y.std(1), y.amax(1), y.prod(1)], -1)),
            a=nn.Linear(8, 3),
            b=nn.Linear(12, 2),
        ),
        sequences,
    ),
    "max-unpool": (
        lambda: Fn(
            lambda m, x: m.b(
                functional.max_unpool2d(*functional.max_pool2d(m.a(x), 2, return_indices=True), 2)
            ),
            a=nn.Conv2d(3, 4, 3, padding=1),
            b=nn.Conv2d(4, 2, 3),
        ),
        images,
    ),
}  # fmt: skip


def export(net: nn.Module, inputs: Tensors, path: Path, dynamo: bool, opset: int) -> None:
    """Writes a file and, beside it, its inputs. The first axis of the inputs is free with the old exporter."""
    buffer = io.BytesIO()
    names = [f"x{i}" for i in range(len(inputs))]
    rows = {
        name: "batch" if len(t) == len(inputs[0]) else f"{name}_rows"
        for name, t in zip(names, inputs, strict=True)
    }
    axes = {} if dynamo else {"dynamic_axes": {name: {0: rows[name]} for name in names}}
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, inputs, buffer, input_names=names, opset_version=opset, dynamo=dynamo, verbose=False, **axes
        )  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    np.savez(path.with_suffix(".npz"), **{n: t.detach().numpy() for n, t in zip(names, inputs, strict=True)})


def spread(net: nn.Module) -> None:
    """Moves parameters and statistics away from where they start, where all norms are alike."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if "window" not in name else None
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


def make(folder: Path) -> None:
    """Exports every network twice, by one exporter each, at opsets that change from network to network."""
    for number, (name, (new, inputs)) in enumerate(NETS.items()):
        for dynamo, opsets in ((False, SCRIPT_OPSETS), (True, DYNAMO_OPSETS)):
            torch.manual_seed(number)
            net = new().eval()
            spread(net)
            opset = opsets[number % len(opsets)]
            exporter = "dynamo" if dynamo else "torchscript"
            path = folder / f"torch-{exporter}" / f"{name}-{opset}.onnx"
            try:
                export(net, inputs(), path, dynamo, opset)
            except Exception as error:
                print(
                    f"{exporter} {name} {opset}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
                )
