"""Saves a block's parameters to a checkpoint, and loads checkpoints into a model's initializers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain.errors import CheckpointError, GraphBuildError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.checkpoint import read_checkpoint, write_checkpoint
from onnxtrain.runtime.store import Buffer, Store
from onnxtrain.selection import some_names
from onnxtrain.training.training_graph import TrainingGraphs

__all__ = ["STATISTIC_KEY", "is_statistic", "load_checkpoint_to_model", "parameter_protos", "save_checkpoint"]

_log = get_logger()

STATISTIC_KEY = "onnxtrain.statistic"
"""Metadata key of a tensor that is a BatchNorm running statistic, not a parameter."""


def parameter_protos(graphs: TrainingGraphs) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
    """Returns the trainable and the frozen parameters of the graphs, as tensors with their initial values.

    The frozen parameters include the BatchNorm running statistics, which are marked in their metadata.
    """
    names = set(graphs.trainable)
    trainable = [_tensor_proto(n, t) for n, t in graphs.parameters.items() if n in names]
    frozen = [_tensor_proto(n, t) for n, t in graphs.parameters.items() if n not in names]
    statistics = [_tensor_proto(n, t) for n, t in graphs.statistics.items()]
    # The API of onnxruntime-training has only two lists, in which statistics are frozen parameters.
    for tensor in statistics:
        tensor.metadata_props.append(onnx.StringStringEntryProto(key=STATISTIC_KEY, value="true"))
    return trainable, frozen + statistics


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Writes the parameters of a model to a checkpoint file, the starting point of training.

    External data is memory-mapped while it is copied, so a model may be larger than the available memory.

    Args:
        parameters: the trainable and the frozen parameters, as returned by :meth:`TrainingBlock.parameters`. Relative
            locations of external data are relative to the working directory.
        path_to_checkpoint: path of the file to write.
        nominal_checkpoint: True to write only the names, dtypes and shapes of the parameters. The data of BatchNorm
            running statistics is written in either case.

    Raises:
        GraphBuildError: `parameters` is not a pair of lists of tensors, or contains a name twice.
        CheckpointError: a tensor cannot be read or has an unsupported dtype, or the file cannot be written.
    """
    doing = f"saving the checkpoint '{os.fspath(path_to_checkpoint)}'"
    try:
        trainable, frozen = ([*group] for group in parameters)
    except (TypeError, ValueError) as error:
        raise GraphBuildError(
            f"{doing}: received {type(parameters).__name__}; pass (trainable, frozen), as "
            "TrainingBlock.parameters() returns them"
        ) from error
    # Counting takes quadratic time, so it is only done for error messages.
    names = [tensor.name for tensor in (*trainable, *frozen)]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise GraphBuildError(
            f"{doing}: {', '.join(twice)} given more than once; each parameter is either trainable or frozen"
        )
    # BatchNorm statistics are among the frozen parameters, but stored separately in a checkpoint.
    statistics = [tensor for tensor in frozen if is_statistic(tensor)]
    store = Store(
        parameters=_buffers([*trainable, *(t for t in frozen if not is_statistic(t))], doing),
        trainable={tensor.name for tensor in trainable},
        statistics=_buffers(statistics, doing),
    )
    write_checkpoint(store, path_to_checkpoint, nominal=nominal_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Copies the values in a checkpoint to the initializers with the same names in a model.

    Parameters that the model lacks, such as those of a training-only head, are skipped with a warning. Initializers
    that the checkpoint lacks are not modified.

    Args:
        path_to_checkpoint: path of a file written by :func:`save_checkpoint` or `CheckpointState.save_checkpoint`.
        model: the model; modified in place.

    Raises:
        CheckpointError: the checkpoint is missing, corrupt or nominal, no name matches, or a dtype or shape differs.
    """
    doing = f"loading the checkpoint '{os.fspath(path_to_checkpoint)}' into the model"
    store = read_checkpoint(path_to_checkpoint)
    store.require_defined(doing)
    values = {**store.parameters, **store.statistics}
    targets = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in values}
    # Without a common name, the checkpoint certainly belongs to another model.
    if not targets:
        initializers = some_names([tensor.name for tensor in model.graph.initializer], 5)
        raise CheckpointError(
            f"{doing}: none of the checkpoint's {len(values)} tensors ({some_names(values, 5)}) is an initializer of "
            f"the model ({initializers}); use this model's checkpoint"
        )
    # All comparisons precede the first modification.
    misfits = [
        f"{name} is {values[name].dtype.name}{list(values[name].shape)} in the checkpoint and "
        f"{ir.DataType(tensor.data_type)}{list(tensor.dims)} in the model"
        for name, tensor in targets.items()
        if (values[name].dtype.onnx, list(values[name].shape)) != (tensor.data_type, list(tensor.dims))
    ]
    if misfits:
        raise CheckpointError(f"{doing}: {'; '.join(misfits[:5])}; use the checkpoint of this model")
    if len(targets) < len(values):
        absent = [name for name in values if name not in targets]
        _log.warning("%s: %d tensors are not in the model: %s", doing, len(absent), some_names(absent, 5))
    # A new proto, because the old one may have its data in typed fields or in an external file.
    for name, tensor in targets.items():
        tensor.CopyFrom(
            onnx.TensorProto(
                name=name,
                data_type=tensor.data_type,
                dims=tensor.dims,
                raw_data=values[name].read().tobytes(),
            )
        )


def _tensor_proto(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """Converts a tensor to a proto named `name`. For an external tensor, the proto refers to the data file."""
    # An absolute path, because the proto has no model directory.
    if isinstance(tensor, ir.ExternalTensor):
        proto = onnx.TensorProto(
            dims=tensor.shape.numpy(), data_type=int(tensor.dtype), data_location=onnx.TensorProto.EXTERNAL
        )
        place = {"location": tensor.path, "offset": tensor.offset or 0, "length": tensor.nbytes}
        proto.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in place.items())
    else:
        proto = ir.serde.serialize_tensor(tensor)
    proto.name = name
    return proto


def is_statistic(tensor: onnx.TensorProto) -> bool:
    """True if a tensor of :meth:`TrainingBlock.parameters` is a BatchNorm running statistic."""
    return any(entry.key == STATISTIC_KEY for entry in tensor.metadata_props)


def _buffers(tensors: Iterable[onnx.TensorProto], doing: str) -> dict[str, Buffer]:
    return {tensor.name: _buffer(tensor, doing) for tensor in tensors}


def _buffer(proto: onnx.TensorProto, doing: str) -> Buffer:
    """Copies a tensor to a buffer; raises CheckpointError if its dtype is not supported or its data cannot be read."""
    dtype = dtypes.BY_ONNX.get(proto.data_type)
    if dtype is None:
        raise CheckpointError(
            f"{doing}: {proto.name!r} is {ir.DataType(proto.data_type)}, which checkpoints cannot store"
        )
    try:
        array = ir.serde.deserialize_tensor(proto, base_path=_directory(proto)).numpy()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{doing}: cannot read the data of {proto.name!r}: {error}") from error
    # bfloat16 of ml_dtypes is stored as its raw bits.
    return Buffer(array.view(dtype.storage), dtype)


def _directory(proto: onnx.TensorProto) -> str:
    """Returns the directory of a tensor's external data."""
    # onnx_ir only reads inside the given directory, so an absolute location needs its own.
    locations = [entry.value for entry in proto.external_data if entry.key == "location"]
    return os.path.dirname(locations[0]) if locations and os.path.isabs(locations[0]) else os.getcwd()
