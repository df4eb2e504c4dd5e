"""The networks that are timed, their batches, and their training artifacts."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Batch = tuple[np.ndarray, np.ndarray]

CLASSES = 10
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def mlp() -> nn.Module:
    """Dense net 784-256-128-10."""
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def cnn() -> nn.Module:
    """Three blocks of conv 3x3, batch norm, relu, max-pool."""
    layers: list[nn.Module] = []
    for source, target in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(source, target, 3, padding=1),
            nn.BatchNorm2d(target),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, CLASSES))


class Attention(nn.Module):
    """Multi-head self-attention from PyTorch's fused scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Pre-norm encoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Token embedding, encoder layers, mean over the sequence."""

    def __init__(self, words: int = 1000, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)).mean(1))


def mobilenet() -> nn.Module:
    """Depthwise separable convolutions, as in MobileNet v1."""

    def block(source: int, target: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        return [
            nn.Conv2d(source, target, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(target),
            nn.ReLU(),
        ]

    layers = block(3, 32, 3, 2)
    for source, target, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += [*block(source, source, 3, stride, source), *block(source, target, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


class Recurrent(nn.Module):
    """An LSTM over the sequence, classified from its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


def _images(batch: int, size: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.normal(size=(batch, 3, size, size)).astype(np.float32)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[np.random.Generator], np.ndarray]]] = {
    "mlp": (mlp, lambda rng: rng.normal(size=(64, 784)).astype(np.float32)),
    "cnn": (cnn, _images(32, 32)),
    "encoder": (Encoder, lambda rng: rng.integers(0, 1000, (8, 128))),
    "mobilenet": (mobilenet, _images(32, 64)),
    "lstm": (Recurrent, lambda rng: rng.normal(size=(16, 64, 64)).astype(np.float32)),
}


def make_net(name: str) -> nn.Module:
    """Returns a net in training mode, with the same weights in every process."""
    torch.manual_seed(0)
    return NETS[name][0]().train()


def make_batch(name: str) -> Batch:
    """Returns inputs and int64 class labels, the same in every process."""
    rng = np.random.default_rng(0)
    inputs = NETS[name][1](rng)
    return inputs, rng.integers(0, CLASSES, len(inputs))


def write_artifacts(name: str, directory: Path) -> None:
    """Exports a net with a symbolic batch size and writes its training artifacts and batch to `directory`."""
    from onnxtrain import artifacts, optimizers

    net, (inputs, labels) = make_net(name), make_batch(name)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as exported:
        warnings.simplefilter("ignore")
        path = Path(exported, "model.onnx")
        torch.onnx.export(
            net,
            (torch.from_numpy(inputs),),
            path,
            dynamo=True,
            optimize=False,
            verbose=False,
            input_names=["x"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
        )
        artifacts.generate_artifacts(
            path,
            requires_grad=[parameter for parameter, _ in net.named_parameters()],
            loss="cross_entropy",
            optimizer=optimizers.AdamW(**ADAMW, adam_mode=0),
            batch_norm="training",
            artifact_directory=directory,
        )
    np.savez(directory / "batch.npz", inputs=inputs, labels=labels)
