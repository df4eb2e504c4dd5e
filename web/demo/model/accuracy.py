"""Computes in Python how well the model reads the drawings that the page has saved.

    python web/demo/model/accuracy.py web/demo/dist/model handwriting.safetensors drawings.json

Prints the accuracy on the held-out drawings before and after training, as the page shows them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from onnxtrain.api import CheckpointState, Module


def main(artifacts: Path, checkpoint: Path, drawings: Path) -> None:
    """Prints both accuracies as JSON, e.g. {"before": 0.5, "after": 1.0}."""
    saved = json.loads(drawings.read_text())
    held_out = np.array(saved["held_out"])
    images = np.array(saved["images"], np.float32)[held_out]
    labels = np.array(saved["labels"], np.int64)[held_out]
    result = {}
    for name, path in (("before", artifacts / "checkpoint"), ("after", checkpoint)):
        state = CheckpointState.load_checkpoint(path)
        module = Module(artifacts / "training_model.onnx", state, artifacts / "eval_model.onnx").eval()
        _, logits = module(images, labels)
        result[name] = float((np.argmax(logits, 1) == labels).mean())
    print(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
