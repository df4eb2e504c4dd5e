"""Prints, as JSON, the accuracy of heads on the backbone's features that have learned five pictures of each thing.

    python web/photos/test/features.py web/photos/dist/model/backbone.onnx

A backbone with random weights is measured in the same way. The pictures are of drawn things that the backbone was not
trained on, and parts of the two photos in scikit-learn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from PIL import Image
from sklearn.datasets import load_sample_images
from sklearn.linear_model import LogisticRegression

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from drawings import SIZE, pictures
from make import backbone, random_weights

LEARNED, TESTED, CLASSES, ROUNDS = 5, 15, 5, 6
# Parts of the photos: number of the photo, and left, top, right and bottom of it.
PARTS = {
    "sky": (0, 0, 0, 640, 130),
    "roof": (0, 150, 150, 450, 260),
    "trees": (0, 0, 260, 200, 427),
    "petals": (1, 230, 90, 450, 330),
    "leaves": (1, 0, 0, 170, 427),
}


def features(model: bytes, images: np.ndarray) -> np.ndarray:
    """Returns the features of pictures, of length 1 as on the page."""
    values = ort.InferenceSession(model).run(None, {"image": images})[0]
    return values / np.linalg.norm(values, axis=1, keepdims=True) * np.sqrt(values.shape[1])


def accuracy(model: bytes, images: np.ndarray) -> float:
    """Returns the accuracy on the last pictures of each class after learning the first.

    Args:
        model: the backbone, as the bytes of its file.
        images: [classes, n, 3, 64, 64].
    """
    x = features(model, images.reshape(-1, *images.shape[2:])).reshape(*images.shape[:2], -1)
    labels = np.arange(len(images))
    fitted = LogisticRegression(C=1.0, max_iter=1000).fit(
        x[:, :LEARNED].reshape(-1, x.shape[-1]), labels.repeat(LEARNED)
    )
    tested = x[:, LEARNED:]
    return fitted.score(tested.reshape(-1, x.shape[-1]), labels.repeat(tested.shape[1]))


def drawn(number: int) -> np.ndarray:
    """Draws pictures of things that the backbone has not seen."""
    first = 10_000 + number * CLASSES
    images, _ = pictures(range(first, first + CLASSES), LEARNED + TESTED, seed=first)
    return images.reshape(CLASSES, LEARNED + TESTED, 3, SIZE, SIZE)


def photographed(number: int) -> np.ndarray:
    """Cuts squares out of the parts of the two photos, at random places and sizes."""
    rng, photos = np.random.default_rng(number), load_sample_images().images
    cut = []
    for photo, left, top, right, bottom in PARTS.values():
        for _ in range(LEARNED + TESTED):
            side = int(rng.integers(48, 100))
            x, y = rng.integers(left, right - side + 1), rng.integers(top, bottom - side + 1)
            square = Image.fromarray(photos[photo]).crop((x, y, x + side, y + side))
            cut.append(np.asarray(square.resize((SIZE, SIZE), Image.Resampling.BOX)))
    images = np.stack(cut).astype(np.float32).transpose(0, 3, 1, 2) / 255
    return images.reshape(len(PARTS), LEARNED + TESTED, 3, SIZE, SIZE)


def main(path: str) -> None:
    """Measures both backbones."""
    samples, _ = pictures(range(100), 3, seed=3)
    models = {
        "trained": Path(path).read_bytes(),
        "random": backbone(random_weights(0), samples).SerializeToString(),
    }
    for model in models.values():
        onnx.checker.check_model(model, full_check=True)
    results = {
        name: {
            "drawn": float(np.mean([accuracy(model, drawn(i)) for i in range(ROUNDS)])),
            "photographed": float(np.mean([accuracy(model, photographed(i)) for i in range(ROUNDS)])),
        }
        for name, model in models.items()
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
