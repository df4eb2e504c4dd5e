"""Writes the trained model of a run, with its calibration and the preprocessing of images if asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from onnxtrain.passes import load_model, save_model
from onnxtrain.runtime.calibration import PROPERTY
from onnxtrain.runtime.export import write_error
from onnxtrain.trainer._fit.calibration import calibrate_graph, stored_calibration
from onnxtrain.trainer._fit.image_graph import attach_preprocessing
from onnxtrain.trainer._fit.images import exported_pipeline, image_metadata, raw_image_metadata
from onnxtrain.trainer._fit.state import TrainingState


def export(
    state: TrainingState,
    path: str | os.PathLike[str],
    outputs: Sequence[str] | None,
    *,
    include_preprocessing: bool = False,
) -> None:
    """Writes the trained model of a run; for the arguments, see :meth:`Trainer.export`."""
    calibration = stored_calibration(state)
    if calibration is not None and outputs is not None and calibration.output not in outputs:
        calibration = None
    metadata = image_metadata(state)
    pipeline = exported_pipeline(state) if include_preprocessing else None
    if calibration is None and pipeline is None:
        state.run.export(path, outputs, metadata)
        return
    if calibration is not None:
        metadata[PROPERTY] = calibration.to_json()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        network = Path(folder) / "network.onnx"
        state.run.export(network, outputs, metadata)
        model = load_model(network)
        if calibration is not None:
            calibrate_graph(model, calibration)
        if pipeline is not None:
            attach_preprocessing(model, pipeline)
            model.metadata_props.update(raw_image_metadata(state))
        try:
            save_model(model, path)
        except OSError as error:
            raise write_error(path, error) from error
