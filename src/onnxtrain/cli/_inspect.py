"""Runs `onnxtrain inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain._settings import settings_text
from onnxtrain.cli._command_options import InspectOptions
from onnxtrain.cli._inspect_run import describe_run, run_tables
from onnxtrain.cli._output import print_command, print_json, print_next, print_table, summary_table, table
from onnxtrain.errors import ModelLoadError, OnnxTrainError
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.runtime.artifact_folder import find_manifest, own_file
from onnxtrain.runtime.checkpoint import read_checkpoint
from onnxtrain.runtime.manifest import InputSpec, Manifest, parse_manifest
from onnxtrain.runtime.store import Buffer, Store
from onnxtrain.selection import select_parameters
from onnxtrain.texts._settings import PROPERTY as TEXTS
from onnxtrain.trainer._run.position import PROPERTY, Position


def run_command(options: InspectOptions) -> None:
    """Prints the contents of a run, a directory of artifacts, a checkpoint file or an .onnx file.

    Raises:
        ModelLoadError: the path is none of these, or the model is damaged.
        CheckpointError: the checkpoint is damaged.
    """
    path = options.path
    # Told apart by suffix: checkpoints have none, and .onnx files have no magic number.
    if path.is_file() and path.suffix == ".onnx":
        _inspect_model(path, options.json)
        return
    manifest: Manifest | None = None
    store: Store | None
    if path.is_file():
        store = read_checkpoint(path)
    elif (name := find_manifest(path)) is not None:
        manifest = parse_manifest((path / name).read_bytes(), f"'{path / name}'")
        # A prefix of the artifacts is also part of the checkpoint's name.
        checkpoint = own_file(path, f"{name.removesuffix('manifest.json')}checkpoint")
        store = read_checkpoint(checkpoint) if checkpoint.is_file() else None
    else:
        raise ModelLoadError(
            f"Inspecting '{path}': it is neither a checkpoint nor a directory with a manifest.json. "
            "Generate artifacts with: onnxtrain artifacts MODEL --loss NAME --output DIR"
        )
    document = _document(path, manifest, store)
    run = None
    if manifest is not None and store is not None and PROPERTY in store.properties:
        run = document["run"] = describe_run(path, manifest, store)
    if options.json:
        print_json(document)
        return
    if run is None:
        print_table(summary_table(str(path), _summary(document)))
    else:
        trained = f"{document['trainable_elements']:,} of {document['elements']:,}"
        print_table(*run_tables(path, run, trained))
        for purpose, command in run["next"].items():
            print_command(f"{purpose}: {command}")
    if run is not None and not options.parameters:
        return
    if manifest is not None:
        arguments = [("input", spec) for spec in manifest.inputs] + [
            ("target", spec) for spec in manifest.targets
        ]
        rows = [
            (role, spec.name, spec.dtype.name, _shape(spec.shape), _labels(spec)) for role, spec in arguments
        ]
        print_table(table("Inputs", ("", "name", "dtype", "shape", "class labels"), rows))
    rows = [tuple(row.values()) for row in document["parameters"]]
    columns = ("name", "dtype", "shape", "role", "mean", "std", "largest")
    print_table(table("Parameters and statistics", columns, rows, right=(4, 5, 6)))
    # A run's next steps are among its results, and a checkpoint alone can only be inspected.
    if run is None and manifest is not None and manifest.optimizer is not None and store is not None:
        print_next("train", path, "--data", "FILE")


def _inspect_model(path: Path, json: bool) -> None:
    """Prints the inputs, outputs and initializers of an .onnx file."""
    model = load_model(path)
    # Found in the canonical model, because some files have weights in Constant nodes, subgraphs and functions.
    trained = _trained_by_default(model)
    initializers = {name: value.const_value for name, value in model.graph.initializers.items()}
    tensors = {name: tensor for name, tensor in (initializers | trained).items() if tensor is not None}
    parameters: list[dict[str, Any]] = [
        {**_tensor_row(name, tensor), "trained": name in trained} for name, tensor in tensors.items()
    ]
    values = [
        {"role": role, "name": str(value.name), "dtype": _dtype(value), "shape": _dims(value)}
        for role, group in (("input", model.graph.inputs), ("output", model.graph.outputs))
        for value in group
        if value.name not in model.graph.initializers
    ]
    document = {
        "path": str(path),
        "opset": model.opset_imports.get(""),
        "ir_version": model.ir_version,
        "producer": " ".join(filter(None, (model.producer_name, model.producer_version))) or None,
        "nodes": len(model.graph),
        "elements": sum(tensor.size for tensor in tensors.values()),
        "values": values,
        "parameters": parameters,
    }
    if json:
        print_json(document)
        return
    print_table(summary_table(str(path), _summary({k: v for k, v in document.items() if k != "values"})))
    rows = [tuple(value.values()) for value in values]
    print_table(table("Inputs and outputs", ("", "name", "dtype", "shape"), rows))
    columns = ("name", "dtype", "shape", "trained")
    rows = [(row["name"], row["dtype"], row["shape"], "yes" if row["trained"] else "") for row in parameters]
    print_table(table("Initializers", columns, rows))
    print_next("ops", path)


def _trained_by_default(model: ir.Model) -> dict[str, ir.TensorProtocol | None]:
    """Returns the parameters that are trained by default, as a dict from names to initial values.

    Returns an empty dict if the model cannot be trained. `model` is not modified.
    """
    try:
        model = canonicalize(model)
        names = select_parameters(model, None, None).trainable
    except OnnxTrainError:
        return {}
    return {name: model.graph.initializers[name].const_value for name in names}


def _tensor_row(name: str, tensor: ir.TensorProtocol) -> dict[str, str]:
    return {"name": name, "dtype": tensor.dtype.name.lower(), "shape": _shape(list(tensor.shape))}


def _dtype(value: ir.Value) -> str:
    return "unknown" if value.dtype is None else value.dtype.name.lower()


def _dims(value: ir.Value) -> str:
    return _shape(None if value.shape is None else [getattr(dim, "value", dim) for dim in value.shape])


def _document(path: Path, manifest: Manifest | None, store: Store | None) -> dict[str, Any]:
    document: dict[str, Any] = {"path": str(path)}
    if manifest is not None:
        document |= {
            "inputs": [spec.name for spec in manifest.inputs],
            "targets": [spec.name for spec in manifest.targets],
            "outputs": list(manifest.outputs),
            "optimizer": manifest.optimizer.type if manifest.optimizer else None,
            "optimizer_settings": manifest.optimizer.settings if manifest.optimizer else {},
            "fingerprint": manifest.fingerprint,
        }
    if store is None:
        return document | {"checkpoint": False, "parameters": []}
    progress = store.optimizer
    document |= {
        "checkpoint": True,
        "elements": sum(b.size for b in store.parameters.values()),
        "trainable_elements": sum(store.parameters[name].size for name in store.trainable),
        "step": progress.step if progress else None,
        "learning_rate": progress.learning_rate if progress else None,
        # The trainer's own property is JSON text of thousands of characters; parts of it are added below. That of a run
        # on texts contains a tokenizer.
        "properties": {k: v for k, v in store.properties.items() if k not in (PROPERTY, TEXTS)},
        "parameters": [
            *(
                _row(n, b, "trained" if n in store.trainable else "frozen")
                for n, b in store.parameters.items()
            ),
            *(_row(n, b, "statistic") for n, b in store.statistics.items()),
        ],
    }
    if PROPERTY in store.properties:
        position, *_ = Position.from_json(str(store.properties[PROPERTY]), f"'{path}'")
        document |= {
            "epochs": position.epoch,
            "unfinished": position.unfinished,
            "last_epoch": position.history.last,
        }
    return document


def _row(name: str, buffer: Buffer, role: str) -> dict[str, Any]:
    # bfloat16 is stored as raw bits, and nominal checkpoints have no values.
    values = buffer.read() if buffer.defined and buffer.dtype.name != "bfloat16" and buffer.size else None
    numbers = {"mean": "", "std": "", "largest": ""}
    if values is not None:
        # In float64, because sums in float16 overflow above 65504.
        wide = values.astype(np.float64)
        numbers = {
            "mean": f"{wide.mean():.4g}",
            "std": f"{wide.std():.4g}",
            "largest": f"{np.abs(wide).max():.4g}",
        }
    return {"name": name, "dtype": buffer.dtype.name, "shape": _shape(buffer.shape), "role": role, **numbers}


def _summary(document: dict[str, Any]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for key, value in document.items():
        # Shown as the title, as a table or as separate rows.
        if key in ("path", "parameters", "last_epoch") or value is None or value == {}:
            continue
        if key == "optimizer_settings":
            value = settings_text(value)
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, int):
            value = f"{value:,}"
        rows.append((key.replace("_", " "), value))
    rows += [
        (f"last epoch: {key}", f"{value:.5g}")
        for key, value in document.get("last_epoch", {}).items()
        if key != "epoch"
    ]
    return rows


def _shape(shape: Sequence[object] | None) -> str:
    return "any" if shape is None else "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


def _labels(spec: InputSpec) -> str:
    if spec.class_labels is None:
        return ""
    classes = "0 or more" if spec.class_labels.count is None else f"0 .. {spec.class_labels.count - 1}"
    ignored = spec.class_labels.ignore_index
    return classes if ignored is None else f"{classes}, {ignored} is ignored"
