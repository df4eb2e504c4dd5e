"""Writes the files that the tests of the page give to it into a folder: photos, files that are none, and backbones.

python web/photos/test/fixtures.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from drawings import Thing

THINGS = {"cup": 20_001, "pen": 20_002, "key": 20_006}
PHOTOS = 5


def photos(folder: Path) -> None:
    """Writes photos of drawn things, 160 x 120: cup-0.png and so on, and a film of the cup."""
    for name, seed in THINGS.items():
        rng = np.random.default_rng(seed)
        for i in range(PHOTOS):
            pixels = (Thing(seed).draw(rng).transpose(1, 2, 0) * 255).astype(np.uint8)
            Image.fromarray(pixels).resize((160, 120)).save(folder / f"{name}-{i}.png")
    # What a camera sees: JPEG pictures one after the other, over and over.
    with (folder / "camera.mjpeg").open("wb") as film:
        for i in range(PHOTOS):
            Image.open(folder / f"cup-{i}.png").resize((320, 240)).save(film, "jpeg")


def strange_files(folder: Path) -> None:
    """Writes files that are no photos, or strange ones."""
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("A text that was renamed.")
    Image.new("1", (10_000, 10_000)).save(folder / "huge.png")
    Image.new("RGB", (1, 1), "red").save(folder / "pixel.png")
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("blue", "yellow")]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:], duration=100)
    # Its upper half is green once it is turned as its EXIF data says: by a quarter, clockwise.
    turned = Image.new("RGB", (80, 80), "white")
    turned.paste("green", (0, 0, 40, 80))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "turned.jpg", exif=exif, quality=95)
    whole = (folder / "turned.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[:200])
    Image.new("RGBA", (50, 50), (0, 0, 0, 0)).save(folder / "transparent.png")


def backbone(
    shape: list[int | str], out: list[int | str], last: str = "Conv", dtype: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """Returns a small backbone from `image` to `scores`: a convolution, and the nodes that `last` names."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(0, 0.3, (6, 3, 3, 3)).astype(np.float32), "weight")
    conv = helper.make_node(
        "Conv", ["image", "weight"], ["scores" if last == "Conv" else "map"], strides=[2, 2]
    )
    nodes = {
        "Conv": [conv],
        "Flatten": [
            conv,
            helper.make_node("GlobalMaxPool", ["map"], ["most"]),
            helper.make_node("Flatten", ["most"], ["scores"]),
        ],
        "Log": [
            conv,
            helper.make_node("Neg", ["map"], ["negative"]),
            helper.make_node("Abs", ["negative"], ["positive"]),
            helper.make_node("Neg", ["positive"], ["below"]),
            helper.make_node("Log", ["below"], ["scores"]),
        ],
        "Cast": [helper.make_node("Cast", ["image"], ["scores"], to=TensorProto.FLOAT)],
        "Loss": [conv, helper.make_node("ReduceMean", ["map"], ["scores"], keepdims=0)],
    }[last]
    graph = helper.make_graph(
        nodes,
        "backbone",
        [helper.make_tensor_value_info("image", dtype, shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, out)],
        [] if last == "Cast" else [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


def backbones(folder: Path) -> None:
    """Writes backbones, the wrong ones with names that begin with "wrong"."""
    models = {
        "map": backbone(["n", 3, "h", "w"], ["n", 6, "a", "b"]),
        "fixed": backbone([1, 3, 32, 32], [1, 6], "Flatten"),
        "wrong-order": backbone([1, 32, 32, 3], [1, 32, 32, 3], "Cast"),
        "wrong-dtype": backbone([1, 3, 32, 32], [1, 3, 32, 32], "Cast", TensorProto.UINT8),
        "wrong-batch": backbone([8, 3, 32, 32], [8, 6], "Flatten"),
        "wrong-side": backbone([1, 3, 32, 48], [1, 6], "Flatten"),
        "wrong-output": backbone([1, 3, 32, 32], [], "Loss"),
        "wrong-values": backbone([1, 3, 32, 32], [1, 6, 15, 15], "Log"),
    }
    for name, model in models.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    (folder / "wrong-file.onnx").write_text("no model")


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    photos(directory)
    strange_files(directory)
    backbones(directory)
    print(json.dumps(sorted(path.name for path in directory.iterdir())))
