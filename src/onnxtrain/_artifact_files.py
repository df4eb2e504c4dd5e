"""Writes the artifacts: models, checkpoint and manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain import onnxblock, optimizers
from onnxtrain._ort_format import write_ort_format
from onnxtrain._printable import get_logger
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora import METADATA_KEY as METADATA_KEY_OF_ADAPTERS
from onnxtrain.onnxblock.checkpoint_utils import parameter_protos
from onnxtrain.onnxblock.optim import build_optimizer
from onnxtrain.passes import ModelSource, write_models
from onnxtrain.passes.io.shared_weights import SharedWeights, share_weights, unused_data_files
from onnxtrain.passes.profiles import suit_hosts
from onnxtrain.runtime.artifact_folder import is_manifest
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.runtime.checkpoint import encode_checkpoint
from onnxtrain.runtime.manifest import METADATA_KEY
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.selection import reached_patterns
from onnxtrain.training.training_graph import TrainingGraphs

_log = get_logger()

Describe = Callable[[Sequence[ir.Model], Sequence[str]], Mapping[str, str]]
"""Function that returns the properties of a run's first checkpoint, e.g. {"onnxtrain.trainer": "..."}.

It receives the training and eval models, and the names of the model's outputs that they return after the loss.
"""


@dataclass(frozen=True)
class Files:
    """Output settings of `generate_artifacts`: directory, file names and formats.

    Attributes:
        directory: directory for the files; created if missing.
        prefix: text before every file name, e.g. "net_".
        nominal_checkpoint: True to also write a checkpoint without the parameters' data.
        ort_format: True to also write the models in ORT format.
        custom_op_library: shared library with the models' custom ops, which the conversion to ORT format needs.
        share_weights: True to store all weights that models have in common once. False to do so only for large models.
        base: the model that is trained, whose files may contain the shared weights; None if there is none.
        describe: function that returns a trainer's settings as properties of the checkpoint; None for artifacts without
            a trainer. The manifest records that there are settings.
    """

    directory: Path
    prefix: str = ""
    nominal_checkpoint: bool = False
    ort_format: bool = False
    custom_op_library: Path | None = None
    share_weights: bool = False
    base: ModelSource | None = None
    describe: Describe | None = None


def write_files(
    graphs: TrainingGraphs, optimizer: optimizers.Optimizer | onnxblock.Block | None, wanted: Files
) -> None:
    """Writes all artifacts to a directory, atomically.

    Args:
        graphs: the training, eval and inference models, the parameters and the manifest.
        optimizer: optimizer or onnxblock from which to build the optimizer model; None for no optimizer model.
        wanted: directory, names and formats of the files.

    Raises:
        GraphBuildError: the directory contains a manifest.json that onnxtrain did not write, or a model cannot be
            built.
        ModelError: a model cannot be converted to ORT format.
    """
    directory, prefix = wanted.directory, wanted.prefix
    manifest_path = directory / f"{prefix}manifest.json"
    # Web apps and browser extensions also have a file of this name.
    if manifest_path.exists() and not is_manifest(manifest_path):
        raise GraphBuildError(
            f"generate_artifacts: '{manifest_path}' already exists and was not written by onnxtrain. Choose another "
            "artifact_directory, or pass a prefix."
        )
    # All models are built first: if that fails, nothing is written, not even the directory.
    models = {"training_model": graphs.training, "eval_model": graphs.eval}
    manifest = graphs.manifest | {"optimizer": None}
    if optimizer is not None:
        models["optimizer_model"], manifest["optimizer"] = _optimizer_model(graphs, optimizer)
    if graphs.inference is not None:
        models["inference_model"] = graphs.inference
    models = {name: suit_hosts(model, manifest["profile"], name) for name, model in models.items()}
    names = [*models, "checkpoint", *(["nominal_checkpoint"] if wanted.nominal_checkpoint else [])]
    manifest["files"] = file_names = {
        name: f"{prefix}{name}" + (".onnx" if name in models else "") for name in names
    }
    if wanted.describe is not None:
        manifest["trainer"] = True
    state = CheckpointState.from_arrays(
        {name: tensor.numpy() for name, tensor in graphs.parameters.items()},
        trainable=graphs.trainable,
        statistics={name: tensor.numpy() for name, tensor in graphs.statistics.items()},
        copy=False,
    )
    if graphs.adapters is not None:
        # Lets the adapters of a checkpoint be saved without the model.
        state.properties[METADATA_KEY_OF_ADAPTERS] = graphs.adapters
    if wanted.describe is not None:
        # With the artifacts, so that no moment exists at which a killed process leaves a run without its settings.
        opened = models["training_model"], models["eval_model"]
        for name, value in wanted.describe(opened, manifest["outputs"][1:]).items():
            state.properties[name] = value
    directory.mkdir(parents=True, exist_ok=True)
    # If the process is killed, the directory has either all new files or all old ones.
    with FileSet(directory) as files:
        shared = SharedWeights({}, ())
        if wanted.share_weights:
            own_names = [manifest_path.name, *file_names.values()]
            shared = share_weights(models.values(), files, directory, base=wanted.base, own_names=own_names)
            manifest["data_files"] = {
                file.name: {"bytes": file.size, "sha256": file.sha256} for file in shared.data_files
            }
        # Other data files get a new name each time, which only the manifest file contains.
        text = json.dumps(manifest | {"external_data": {}}, separators=(",", ":"))
        for name, model in models.items():
            # The manifest is embedded in each model, so that a device needs only the model file.
            model.metadata_props[METADATA_KEY] = text
            if wanted.ort_format:
                write_ort_format(model, files, directory / file_names[name], wanted.custom_op_library)
        data = write_models(
            {file_names[name]: model for name, model in models.items()}, files, placed=shared.placed
        )
        manifest["external_data"] = {
            name: data[file_names[name]] for name in models if data.get(file_names[name])
        }
        for name in unused_data_files(
            directory, manifest_path.name, kept=[file.name for file in shared.data_files]
        ):
            files.remove(name)
        for name in names[len(models) :]:
            encode = encode_checkpoint(
                state._store, f"Writing '{name}'", nominal=name == "nominal_checkpoint"
            )
            with files.open(file_names[name]) as file:
                encode(file)
        with files.open(f"{prefix}manifest.json") as file:
            file.write(json.dumps(manifest, indent=2).encode())
    _log.info("wrote %s to %s", ", ".join(names), directory)


def _optimizer_model(
    graphs: TrainingGraphs, optimizer: optimizers.Optimizer | onnxblock.Block
) -> tuple[ir.Model, dict[str, Any]]:
    """Builds the optimizer model, the graph that updates the trained parameters with their gradients.

    Args:
        graphs: the models of the training run, with the parameters to update.
        optimizer: the optimizer, or a block of `onnxblock.optim` that builds the model.

    Returns:
        The model, and the optimizer's entry in the manifest.

    Raises:
        GraphBuildError: the optimizer is an onnxblock, and a parameter has a sparse gradient, which blocks do not
            support.
    """
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
    # PyTorch accepts groups with parameters that get no gradient; the optimizer model only contains trained parameters.
    groups = [
        dataclasses.replace(group, parameters=names)
        for group in optimizer.groups
        if (names := reached_patterns(group.parameters, graphs.trainable, graphs.unreached))
    ]
    optimizer = dataclasses.replace(optimizer, groups=groups)
    optimizer = optimizers.with_learning_rate_scales(optimizer, graphs.learning_rate_scales)
    model = optimizers.build_optimizer_model(optimizer, parameters, graphs.manifest["opset"])
    return model, optimizers.manifest_entry(optimizer, parameters)
