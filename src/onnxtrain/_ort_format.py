"""Converts models to ORT format, which minimal builds of ONNX Runtime read."""

from __future__ import annotations

import logging
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.passes import save_model
from onnxtrain.runtime.atomic import FileSet


def write_ort_format(model: ir.Model, files: FileSet, path: Path, custom_op_library: Path | None) -> None:
    """Converts a model to ORT format and adds the resulting files to `files`.

    Args:
        model: the model; not changed.
        files: the files that are written to the output directory as one atomic update.
        path: path of the model's `.onnx` file, which need not exist. The ORT file has the same name, with the suffix
            `.ort`; error messages contain the path.
        custom_op_library: shared library with the model's custom ops; None if it has none.

    Raises:
        ModelError: onnxruntime cannot convert the model.
    """
    # onnxruntime's converter only reads and writes files, so it works in a temporary folder. It writes additional
    # files, such as the list of ops that the model needs: all new files are copied.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source = Path(folder) / path.name
        save_model(model, source)
        before = set(source.parent.iterdir())
        _convert_to_ort(source, path, custom_op_library)
        for made in sorted(set(source.parent.iterdir()) - before):
            files.copy(made, made.name)


def _convert_to_ort(source: Path, path: Path, custom_op_library: Path | None) -> None:
    """Converts an ONNX file to an ORT file in the same directory, without onnxruntime's output on the terminal.

    Args:
        source: the ONNX file, a temporary copy of the model.
        path: path by which error messages refer to the model, instead of the temporary path.
        custom_op_library: shared library with the model's custom ops; None if it has none.

    Raises:
        ModelError: onnxruntime cannot convert the model.
    """
    # Importing the tool configures logging for the whole process, and running it prints its progress.
    root = logging.getLogger()
    handlers = list(root.handlers)
    from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

    root.handlers[:] = handlers
    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            convert_onnx_models_to_ort(
                source,
                output_dir=source.parent,
                custom_op_library_path=custom_op_library,
                optimization_styles=[OptimizationStyle.Fixed],
            )
    # onnxruntime's own exceptions have no common base class but Exception.
    except Exception as error:
        raise ModelError(
            f"Converting '{path}' to ORT format failed: {error}. Nothing has been written; check "
            "custom_op_library, or leave out ort_format."
        ) from error
