"""Writes the models, the checkpoint and the manifest of a training run."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain import onnxblock, optimizers
from onnxtrain.errors import GraphBuildError, ModelError
from onnxtrain.lora import METADATA_KEY as METADATA_KEY_OF_ADAPTERS
from onnxtrain.onnxblock.onnxblock import parameter_protos
from onnxtrain.onnxblock.optim import build_optimizer
from onnxtrain.passes import save_model, write_models
from onnxtrain.passes.portable import find_obstacles, suit_every_host
from onnxtrain.runtime.artifact_folder import is_manifest
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.runtime.checkpoint import encode_checkpoint
from onnxtrain.runtime.manifest import METADATA_KEY
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.selection import match_names
from onnxtrain.training.training_graph import TrainingGraphs

_log = logging.getLogger("onnxtrain")


def write_files(
    graphs: TrainingGraphs,
    optimizer: optimizers.Optimizer | onnxblock.Block | None,
    directory: Path,
    prefix: str,
    nominal_checkpoint: bool,
    ort_format: bool,
    custom_op_library: Path | None,
    adapters: str | None,
) -> None:
    """Writes all files of a run; `adapters` is the JSON text that describes LoRA adapters, if the model has any.

    Raises:
        GraphBuildError: the directory has a manifest.json of something else.
    """
    manifest_path = directory / f"{prefix}manifest.json"
    # Web apps and browser extensions have a file of this name, too.
    if manifest_path.exists() and not is_manifest(manifest_path):
        raise GraphBuildError(
            f"generate_artifacts: '{manifest_path}' is there already and was not written by onnxtrain. Choose another "
            "artifact_directory, or pass a prefix."
        )
    # All models first: nothing is written, not even the directory, if the optimizer model cannot be built.
    models = {"training_model": graphs.training, "eval_model": graphs.eval}
    manifest = graphs.manifest | {"optimizer": None}
    if optimizer is not None:
        models["optimizer_model"], manifest["optimizer"] = _optimizer_model(graphs, optimizer)
    if graphs.inference is not None:
        models["inference_model"] = graphs.inference
    if manifest["profile"] == "portable":
        models = {name: _suit_every_host(name, model) for name, model in models.items()}
    names = [*models, "checkpoint", *(["nominal_checkpoint"] if nominal_checkpoint else [])]
    manifest["files"] = file_names = {
        name: f"{prefix}{name}" + (".onnx" if name in models else "") for name in names
    }
    # Names of data files are new with each write, so only the manifest file has them.
    text = json.dumps(manifest | {"external_data": {}}, indent=2)
    state = CheckpointState.from_arrays(
        {name: tensor.numpy() for name, tensor in graphs.parameters.items()},
        trainable=graphs.trainable,
        statistics={name: tensor.numpy() for name, tensor in graphs.statistics.items()},
        copy=False,
    )
    if adapters is not None:
        # By it the adapters of a checkpoint can be saved without the model.
        state.properties[METADATA_KEY_OF_ADAPTERS] = adapters
    directory.mkdir(parents=True, exist_ok=True)
    # A process that is killed leaves all new files or all old ones.
    with FileSet(directory) as files:
        for name, model in models.items():
            # Also in each model, so that a model file is enough for a device.
            model.metadata_props[METADATA_KEY] = text
            if ort_format:
                _write_ort_format(model, files, directory / file_names[name], custom_op_library)
        data = write_models({file_names[name]: model for name, model in models.items()}, files)
        manifest["external_data"] = {
            name: data[file_names[name]] for name in models if data.get(file_names[name])
        }
        for name in names[len(models) :]:
            encode = encode_checkpoint(
                state._store, f"Writing '{name}'", nominal=name == "nominal_checkpoint"
            )
            with files.open(file_names[name]) as file:
                encode(file)
        with files.open(f"{prefix}manifest.json") as file:
            file.write(json.dumps(manifest, indent=2).encode())
    _log.info("wrote %s to %s", ", ".join(names), directory)


def _suit_every_host(name: str, model: ir.Model) -> ir.Model:
    """Rewrites a model of the portable profile in ops that every build has; `name` is its role, e.g. "eval_model".

    Raises:
        GraphBuildError: some nodes cannot be written so.
    """
    model = suit_every_host(model)
    obstacles = find_obstacles(model)
    if obstacles:
        listed = "; ".join(map(str, obstacles[:3])) + ("; ..." if len(obstacles) > 3 else "")
        raise GraphBuildError(
            f"generate_artifacts with profile='portable': {len(obstacles)} nodes of the {name.replace('_', ' ')} do "
            f"not run on every host: {listed}. Change the model, or leave out profile to train on desks and servers."
        )
    return model


def _optimizer_model(
    graphs: TrainingGraphs, optimizer: optimizers.Optimizer | onnxblock.Block
) -> tuple[ir.Model, dict[str, Any]]:
    """Builds the optimizer model; returns it with the entry of the optimizer in the manifest."""
    if isinstance(optimizer, onnxblock.Block):
        if any("gradient_indices" in entry for entry in graphs.manifest["parameters"]):
            raise GraphBuildError(
                "building the optimizer model: blocks of onnxblock.optim take no sparse gradients; pass an optimizer "
                "of onnxtrain.optimizers, or leave out sparse_gradients"
            )
        return build_optimizer(optimizer, parameter_protos(graphs))
    parameters = [
        optimizers.ParameterSpec(
            entry["name"], entry["dtype"], tuple(entry["shape"]), sparse="gradient_indices" in entry
        )
        for entry in graphs.manifest["parameters"]
        if entry["trainable"]
    ]
    optimizer = _without_unreached(optimizer, graphs)
    model = optimizers.build_optimizer_model(optimizer, parameters, graphs.manifest["opset"])
    return model, optimizers.manifest_entry(optimizer, parameters)


def _without_unreached(optimizer: optimizers.Optimizer, graphs: TrainingGraphs) -> optimizers.Optimizer:
    """Removes the names and patterns of groups that only match parameters which the loss does not depend on."""
    # PyTorch takes groups of parameters without a gradient; the optimizer model knows the trained parameters only.
    groups = []
    for group in optimizer.groups:
        trained = match_names(group.parameters, graphs.trainable)
        unreached = match_names(group.parameters, graphs.unreached)
        names = [name for name in group.parameters if trained[name] or not unreached[name]]
        if names:
            groups.append(dataclasses.replace(group, parameters=names))
    return dataclasses.replace(optimizer, groups=groups)


def _write_ort_format(model: ir.Model, files: FileSet, path: Path, custom_op_library: Path | None) -> None:
    """Adds a model in ORT format to a set of files; `path` is the path of its ONNX file."""
    # onnxruntime's converter reads and writes files only, so it works in a folder of its own. It writes further files
    # beside the model, such as the list of the operators that the model needs: all new files are copied.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source = Path(folder) / path.name
        save_model(model, source)
        before = set(source.parent.iterdir())
        _convert_to_ort(source, path, custom_op_library)
        for made in sorted(set(source.parent.iterdir()) - before):
            files.copy(made, made.name)


def _convert_to_ort(source: Path, path: Path, custom_op_library: Path | None) -> None:
    """Converts the ONNX file `source` to ORT format beside it; `path` is the name of the model in messages."""
    # Importing the tool sets up logging for the whole process, and running it prints its progress.
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
    # onnxruntime's own exceptions share no base class but Exception.
    except Exception as error:
        raise ModelError(
            f"Converting '{path}' to ORT format failed: {error}. Nothing has been written; check "
            "custom_op_library, or leave out ort_format."
        ) from error
