"""Folders of drawn images, and small networks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")


def network(
    classes: int = 3, channels: int = 3, dtype: str = "float", shape: str | None = None
) -> onnx.ModelProto:
    """A convolution, a mean over the pixels and a linear layer."""
    rng = np.random.default_rng(0)
    shape = shape or f"n, {channels}, 24, 24"
    weights = {
        "w": rng.standard_normal((8, channels, 5, 5)) * 0.2,
        "b": np.zeros(8),
        "v": rng.standard_normal((8, classes)) * 0.3,
        "c": np.zeros(classes),
    }
    pixels = (
        "p = Cast<to = 1>(x) s = Constant<value_float = 255.0>() q = Div(p, s)"
        if dtype == "uint8"
        else "q = Identity(x)"
    )
    order = "t = Transpose<perm = [0, 3, 1, 2]>(q)" if shape.endswith(f" {channels}") else "t = Identity(q)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net ({dtype}[{shape}] x) => (float[n, {classes}] scores)
        {{ {pixels} {order} y = Conv<strides = [2, 2]>(t, w, b) r = Relu(y) m = GlobalMaxPool(r)
           f = Flatten(m) scores = Gemm(f, v, c) }}"""
    )
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


def draw(name: str, seed: int, side: int = 40) -> Image.Image:
    """A shape of random place, size and color on a dark background of noise."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 60, (side, side + 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    pen = ImageDraw.Draw(image)
    radius = int(rng.integers(side // 5, side // 3))
    x, y = (int(rng.integers(radius, side - radius)) for _ in range(2))
    color = tuple(int(value) for value in rng.integers(120, 256, 3))
    box = (x - radius, y - radius, x + radius, y + radius)
    if name == "circle":
        pen.ellipse(box, fill=color)
    elif name == "square":
        pen.rectangle(box, fill=color)
    else:
        pen.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=color)
    return image


def write(root: Path, count: int = 12, seed: int = 0, suffix: str = ".png") -> Path:
    """Writes `count` images of each class, and returns the folder."""
    for index, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            draw(name, seed + 1000 * index + number).save(root / name / f"{number:03}{suffix}")
    return root
