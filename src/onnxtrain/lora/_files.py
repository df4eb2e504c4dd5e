"""Writes and reads adapters: `.onnx_adapter` files for ONNX Runtime and genai, and PEFT folders."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import safetensors
import safetensors.numpy

from onnxtrain.errors import AdapterMismatchError, CheckpointError, GraphBuildError
from onnxtrain.lora._config import LoraConfig
from onnxtrain.lora._description import METADATA_KEY, AdapterDescription, Pair, base_fingerprint
from onnxtrain.lora._fit import (
    BASE_KEY,
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_named,
    check_whole,
    layer_of,
    layers_of,
    other_base,
    pairs,
    rank_of,
)
from onnxtrain.lora._insert import insert_adapters, loaded_for_adapters
from onnxtrain.passes import ModelSource, as_given
from onnxtrain.runtime.atomic import FileSet, replace_file
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.runtime.tensor_file import require_file
from onnxtrain.selection import some_names

Format = Literal["onnx_adapter", "peft"]
_PREFIX = "base_model.model."
# Settings of PEFT (0.21) that are compatible with plain LoRA: adapted modules, ranks and scalings, and the
# initialization, see `_INITIAL`. Others, such as `use_dora`, change what an adapter computes.
_NEUTRAL = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
        "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version",
        "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters",
        "task_type", "use_rslora",
    }
)  # fmt: skip
# Initializations that do not change the base weights, unlike PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA.
_INITIAL = frozenset({"true", "false", "gaussian", "eva", "orthogonal", "mica"})


def save_adapter(
    state: CheckpointState | ModelSource, path: str | os.PathLike[str], format: Format = "onnx_adapter"
) -> None:
    """Writes trained adapters to an ONNX Runtime adapter file or a PEFT folder.

    Args:
        state: the result of training with `lora=`: a `CheckpointState`, or the path of a checkpoint, e.g.
            "run/checkpoint"; or a model with adapters, from :func:`add_lora` or :func:`load_adapter`, as an
            `onnx_ir.Model`, `ModelProto` or path of an `.onnx` file.
        path: file to write, e.g. "french.onnx_adapter", or folder for PEFT, which is created if missing.
        format: "onnx_adapter" for `RunOptions.add_active_adapter` and genai's `Adapters`, together with a model from
            :func:`adapter_model`. This file has the same names as the output of Olive's `convert-adapters`; A and B are
            transposed, B is multiplied by the scaling, and both have the dtype of the layers' activations. "peft" for
            `PeftModel.from_pretrained`: float32 A [r, in] and B [out, r] in `adapter_model.safetensors`, and
            `adapter_config.json`.

    Raises:
        AdapterMismatchError: `state` has no adapters, or adapters with NaN or infinite values.
        CheckpointError: the file cannot be written.
        ValueError: `format` is neither "onnx_adapter" nor "peft".
    """
    doing = f"saving the adapter '{os.fspath(path)}'"
    if format not in ("onnx_adapter", "peft"):
        raise ValueError(f"{doing}: format is {format!r}; pass 'onnx_adapter' or 'peft'")
    description, weights = _adapters_of(state, doing)
    try:
        if format == "peft":
            _write_peft(Path(path), description, weights)
        else:
            _write_onnx_adapter(Path(path), description, weights)
    except OSError as error:
        raise CheckpointError(
            f"{doing}: {error}. Check that the directory exists and is writable."
        ) from error


def load_adapter(path: str | os.PathLike[str], model: ModelSource) -> onnx.ModelProto | ir.Model:
    """Reads an adapter, checks that it matches a model, and returns the model with the adapter.

    The returned model is like the result of :func:`add_lora`, but with trained weights. It runs in any session, and can
    be trained with `generate_artifacts` or `Trainer`. To convert the adapter to the other format, pass the model to
    :func:`save_adapter`.

    Args:
        path: an `.onnx_adapter` file, or a folder written by PEFT or `save_adapter(..., format="peft")`.
        model: the model without adapters, e.g. in int4: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`.

    Returns:
        The model with adapters: an `onnx_ir.Model` if `model` is one, else a `ModelProto`.

    Raises:
        AdapterMismatchError: the adapter is damaged or incomplete, or belongs to a different model: it has layers that
            `model` lacks, its sizes differ, or it was trained on different weights.
        GraphBuildError: `model` already has adapters.
    """
    loaded = loaded_for_adapters(model)
    base = base_fingerprint(loaded)
    config, weights = read_adapter(path, loaded, base)
    return as_given(insert_adapters(loaded, config, weights, base), model)


def read_adapter(
    path: str | os.PathLike[str], model: ir.Model, base: str
) -> tuple[LoraConfig, dict[str, Pair]]:
    """Reads an adapter, and checks that it matches a loaded model.

    Args:
        path: an `.onnx_adapter` file or a PEFT folder.
        model: the model without adapters.
        base: fingerprint of the model, see :func:`base_fingerprint`.

    Returns:
        A configuration that selects the adapter's modules, and (A, B) by module path, in the shapes of the graph's
        initializers.

    Raises:
        AdapterMismatchError: the adapter cannot be read, is incomplete, or does not match the model.
    """
    where = Path(path)
    doing = f"loading the adapter '{os.fspath(path)}'"
    if not where.is_file() and not where.is_dir():
        raise AdapterMismatchError(f"{doing}: there is no such file or folder; check the path")
    read = _read_peft if where.is_dir() else _read_onnx_adapter
    try:
        return read(where, model, base, doing)
    # The configuration contains an expression that takes too long to match.
    except GraphBuildError as error:
        raise AdapterMismatchError(f"{doing}: {error}") from error


def _adapters_of(
    state: CheckpointState | ModelSource, doing: str
) -> tuple[AdapterDescription, dict[str, Pair]]:
    """Returns the description of the adapters in a checkpoint or model, and their weights (A, B) by module path.

    Args:
        state: the state or the model, or the path of one of them; the path of a model ends in ".onnx".
        doing: what the caller is doing, with which error messages begin.

    Raises:
        AdapterMismatchError: there are no adapters, or weights are missing.
    """
    # Checkpoints have no file extension.
    if isinstance(state, str | os.PathLike) and Path(state).suffix != ".onnx":
        state = CheckpointState.load_checkpoint(state)
    if isinstance(state, CheckpointState):
        text = dict(state.properties).get(METADATA_KEY)
        arrays: Mapping[str, Any] = {name: parameter.data for name, parameter in state.parameters}
    else:
        model = loaded_for_adapters(state)
        text = model.metadata_props.get(METADATA_KEY)
        arrays = {
            name: value.const_value.numpy()
            for name, value in model.graph.initializers.items()
            if value.const_value is not None and ".lora_" in name and not value.is_graph_input()
        }
    if not isinstance(text, str):
        raise AdapterMismatchError(
            f"{doing}: the state or model has no adapters; pass the state of artifacts generated with "
            "lora=, or a model returned by add_lora or load_adapter"
        )
    description = AdapterDescription.from_text(text, doing)
    weights = {}
    for module in description.modules:
        names = [f"{module.path}.lora_{letter}.weight" for letter in "AB"]
        missing = [name for name in names if name not in arrays]
        if missing:
            raise AdapterMismatchError(
                f"{doing}: the weights {', '.join(missing)} are missing; pass the whole state, or a model whose "
                "adapters are initializers"
            )
        a, b = (np.asarray(arrays[name]) for name in names)
        weights[module.path] = (a, b)
    return description, weights


def _write_onnx_adapter(path: Path, description: AdapterDescription, weights: Mapping[str, Pair]) -> None:
    values: dict[str, onnxruntime.OrtValue] = {}
    for module in description.modules:
        a, b = weights[module.path]
        dtype = ir.DataType[module.dtype.upper()]
        for letter, array in (("A", a), ("B", b * np.float32(description.config.scaling(module.path)))):
            name = f"{module.path}.lora_{letter}.weight"
            with np.errstate(over="ignore"):  # refused below
                contiguous = np.ascontiguousarray(array.astype(dtype.numpy()))
            _check_finite(contiguous, name, f"saving the adapter '{path}'")
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(contiguous)
    file = onnxruntime.AdapterFormat()
    # The format has no field for a fingerprint, but two version numbers. One is used for the number of adapters, which
    # detects incomplete files, the other for the beginning of the fingerprint.
    file.set_adapter_version(len(description.modules))
    file.set_model_version(_short(description.base))
    # The values must remain alive until the file is written: onnxruntime 1.32 keeps pointers to their memory.
    file.set_parameters(values)
    # onnxruntime only writes to a path, and would leave an incomplete file if the process is killed.
    with tempfile.TemporaryDirectory() as directory:
        temporary = os.path.join(directory, "adapter")
        file.export_adapter(temporary)
        del values
        content = Path(temporary).read_bytes()
    with replace_file(path) as target:
        target.write(content)


def _check_finite(array: np.ndarray[Any, Any], name: str, doing: str) -> None:
    """Raises AdapterMismatchError if the weight `name` contains NaN or infinite values."""
    if not np.isfinite(array.astype(np.float32)).all():
        raise AdapterMismatchError(
            f"{doing}: {name} contains values that are NaN, infinite, or beyond the range of "
            f"{array.dtype}; save a state from before the training diverged, or train with a smaller "
            "lora_alpha"
        )


def _short(fingerprint: str) -> int:
    """Returns the first 28 bits of a fingerprint, which fit in a signed 32-bit version number."""
    return int(fingerprint[:7], 16)


def _write_peft(path: Path, description: AdapterDescription, weights: Mapping[str, Pair]) -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for module in description.modules:
        for letter, array in zip("AB", weights[module.path], strict=True):
            # PEFT stores each weight in the layout of torch.nn.Linear, [out, in].
            stored = array if module.convolution else array.T
            _check_finite(array, f"{module.path}.lora_{letter}.weight", f"saving the adapter '{path}'")
            tensors[f"{_PREFIX}{module.path}.lora_{letter}.weight"] = np.ascontiguousarray(stored, np.float32)
    config = description.config.to_peft([module.path for module in description.modules])
    # transformers rejects safetensors files without the name of a framework.
    content = safetensors.numpy.save(tensors, {"format": "pt", BASE_KEY: description.base})
    path.mkdir(parents=True, exist_ok=True)
    with FileSet(path.absolute()) as files:
        with files.open(WEIGHTS_FILE) as target:
            target.write(content)
        with files.open(CONFIG_FILE) as target:
            target.write(json.dumps(config, indent=2).encode())


def _read_onnx_adapter(
    path: Path, model: ir.Model, base: str, doing: str
) -> tuple[LoraConfig, dict[str, Pair]]:
    try:
        file = onnxruntime.AdapterFormat.read_adapter(str(path))
        # Copied, because the arrays point to a file that will be closed.
        arrays = {name: np.array(value.numpy()) for name, value in file.get_parameters().items()}
        count, trained_on = file.get_adapter_version(), file.get_model_version()
    # onnxruntime raises various errors for a damaged file.
    except Exception as error:
        raise AdapterMismatchError(
            f"{doing}: it is not an ONNX Runtime adapter ({error}); check the file"
        ) from error
    weights, layers = pairs(arrays, doing), layers_of(model)
    # In files written here, both version numbers are meaningful; other programs write 0 or 1, or a counter.
    if count == len(weights) and trained_on > 1 and trained_on != _short(base):
        raise AdapterMismatchError(other_base(doing))
    # Both version numbers are ours, but adapters are missing.
    if count > len(weights) and trained_on == _short(base):
        raise AdapterMismatchError(
            f"{doing}: it was written with adapters for {count} layers, but contains only {len(weights)}; "
            "save the whole adapter again"
        )
    # The file was written by another program, or its version numbers were changed.
    if count != len(weights):
        check_whole(layers, weights, doing)
    ranks = {
        module: rank_of(layer_of(layers, module, doing), pair, doing) for module, pair in weights.items()
    }
    # B includes the scaling, and alpha = r makes the factor 1.
    return _config_of(ranks, {module: float(rank) for module, rank in ranks.items()}), weights


def _read_peft(path: Path, model: ir.Model, base: str, doing: str) -> tuple[LoraConfig, dict[str, Pair]]:
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            require_file(str(path / name))
        settings: dict[str, Any] = json.loads((path / CONFIG_FILE).read_text())
        with safetensors.safe_open(str(path / WEIGHTS_FILE), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        kind = settings["peft_type"]
        config = _peft_config(settings)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise AdapterMismatchError(
            f"{doing}: it is not a PEFT folder with {CONFIG_FILE} and {WEIGHTS_FILE} ({error}); check the "
            "path"
        ) from error
    # Without these settings, the adapter would silently compute different results than in PEFT.
    refused = sorted(
        name for name in settings.keys() - _NEUTRAL if settings[name] and settings[name] != "none"
    )
    if kind != "LORA" or refused:
        raise AdapterMismatchError(
            f"{doing}: it is of the kind {kind}{f' with {some_names(refused, 5)}' if refused else ''}; "
            "only LoRA of linear layers is supported. Merge it in PEFT and export the result"
        )
    initial = settings.get("init_lora_weights", True)
    if str(initial).lower() not in _INITIAL:
        raise AdapterMismatchError(
            f"{doing}: it was trained with init_lora_weights={str(initial)[:40]!r}, which changes the base "
            "weights, but the model has the original ones. Save it as plain LoRA in PEFT with "
            "save_pretrained(path, path_initial_model_for_weight_conversion=...), or merge it there and "
            "export the result"
        )
    # PEFT itself writes no fingerprint: its adapters belong to the float model, and may be used with quantized models.
    if metadata.get(BASE_KEY, base) != base:
        raise AdapterMismatchError(other_base(doing))
    named = {name.removeprefix(_PREFIX): array for name, array in arrays.items()}
    weights, layers = {}, layers_of(model)
    for module, (a, b) in pairs(named, doing).items():
        weights[module] = (
            (a, b) if layer_of(layers, module, doing).is_convolution else (a.T.copy(), b.T.copy())
        )
    ranks = {
        module: rank_of(layer_of(layers, module, doing), pair, doing) for module, pair in weights.items()
    }
    for module, rank in ranks.items():
        if rank != config.rank(module):
            raise AdapterMismatchError(
                f"{doing}: the adapter of {module} has rank {rank}, but {CONFIG_FILE} says "
                f"{config.rank(module)}; take both files from the same training run"
            )
    # These PEFT settings, which are not supported here, may exclude layers intentionally.
    if not any(settings.get(name) for name in ("layers_to_transform", "target_parameters")):
        check_named(layers, config, weights, doing)
    return _config_of(ranks, {module: config.scaling(module) * ranks[module] for module in ranks}), weights


def _peft_config(settings: Mapping[str, Any]) -> LoraConfig:
    """Converts the settings in PEFT's `adapter_config.json` to a `LoraConfig`."""
    names = (
        "r",
        "lora_alpha",
        "target_modules",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "exclude_modules",
    )
    return LoraConfig(**{name: settings[name] for name in names if settings.get(name) is not None})


def _config_of(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> LoraConfig:
    """Returns a `LoraConfig` in which each module has its own rank and alpha."""
    # The first module's values are the defaults, so that an adapter with a single rank has no patterns.
    first = next(iter(ranks))
    config = LoraConfig(r=ranks[first], lora_alpha=alphas[first], target_modules=tuple(ranks))
    # Unescaped, a dot would match any character.
    return replace(
        config,
        rank_pattern={re.escape(m): rank for m, rank in ranks.items() if rank != config.r} or None,
        alpha_pattern={re.escape(m): alpha for m, alpha in alphas.items() if alpha != config.lora_alpha}
        or None,
    )
