"""Prints what a model that the page has saved reads in pictures, as JSON.

    python web/photos/test/exported.py things.onnx pictures.json

The JSON file has a list of pictures: {"pixels": [3 * size * size numbers, as the browser scales them], "jpeg": base64}.
Each is read twice: from the browser's pixels, and from the JPEG as Pillow decodes and scales it.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from PIL import Image
from scipy.special import softmax

from onnxtrain.images._model_files import find_image_metadata


def main(path: str, pictures: str) -> None:
    """Prints the classes, and per picture their probabilities for the browser's pixels and for Pillow's."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(path)
    [taken], [given] = session.get_inputs(), session.get_outputs()
    size = taken.shape[2]

    def probabilities(image: np.ndarray) -> list[float]:
        [[scores]] = session.run(None, {taken.name: image.astype(np.float32)[None]})
        return softmax(scores).tolist()

    results = []
    for picture in json.loads(Path(pictures).read_text()):
        with Image.open(io.BytesIO(base64.b64decode(picture["jpeg"]))) as image:
            small = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)) / 255
        browser = np.array(picture["pixels"]).reshape(3, size, size)
        results.append({"browser": probabilities(browser), "pillow": probabilities(small.transpose(2, 0, 1))})
    about = find_image_metadata({entry.key: entry.value for entry in model.metadata_props}, None)
    description = {"classes": about.classes, "side": about.preprocessing.size, "activation": about.activation}
    print(json.dumps({**description, "output": given.name, "input": taken.shape, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
