"""Writes the trained model of a run, with its calibration and the preprocessing of images if asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from onnxtrain.errors import ModelError
from onnxtrain.passes import load_model, save_model
from onnxtrain.runtime.calibration import PROPERTY
from onnxtrain.trainer._fit.calibration import calibrate_graph, stored_calibration
from onnxtrain.trainer._fit.images import image_metadata
from onnxtrain.trainer._fit.state import TrainingState


def export(state: TrainingState, path: str | os.PathLike[str], outputs: Sequence[str] | None) -> None:
    """Writes the trained model of a run; for the arguments, see :meth:`Trainer.export`."""
    calibration = stored_calibration(state)
    metadata = image_metadata(state)
    if calibration is None or (outputs is not None and calibration.output not in outputs):
        state.run.export(path, outputs, metadata)
        return
    metadata[PROPERTY] = calibration.to_json()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        network = Path(folder) / "network.onnx"
        state.run.export(network, outputs, metadata)
        model = load_model(network)
        calibrate_graph(model, calibration)
        try:
            save_model(model, path)
        except OSError as error:
            raise ModelError(
                f"Exporting for inference: writing '{os.fspath(path)}' failed: {error.strerror or error}. An existing "
                "file is unchanged; check that the directory exists, is writable and has free space."
            ) from error
