"""Defines the context managers that set the base model of blocks and its custom op library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.errors import GraphBuildError, TrainingStateError
from onnxtrain.passes import CANONICAL_OPSET

__all__ = [
    "ModelAccessor",
    "active_accessor",
    "base",
    "custom_op_library",
    "custom_op_library_path",
    "empty_base",
]


class ModelAccessor:
    """Holds the base model, which blocks modify in place.

    Attributes:
        building: number of nested blocks that are being built, e.g. 2 while a block calls a loss.
    """

    def __init__(self, model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> None:
        self._model = model
        self._path = os.fspath(model_path) if model_path is not None else None
        self.building = 0

    @property
    def model(self) -> onnx.ModelProto:
        """The current base model."""
        return self._model

    @property
    def path(self) -> str:
        """The path of the base model's file.

        Raises:
            TrainingStateError: no path was given.
        """
        if self._path is None:
            raise TrainingStateError(
                "reading the path of the base model: none was given; call onnxblock.base(model, model_path)"
            )
        return self._path

    @property
    def has_path(self) -> bool:
        """True if the path of the base model is known."""
        return self._path is not None

    def to_ir(self) -> ir.Model:
        """Converts the base model to onnx_ir without copying its tensors or reading external data."""
        model = ir.from_proto(self._model)
        # Locations of external data are relative to the model's file, which is not part of the proto.
        directory = Path(self._path).absolute().parent if self._path is not None else Path.cwd()
        ir.external_data.set_base_dir(model.graph, directory)
        return model


# Context variables, so that each thread has its own base model.
_ACTIVE: ContextVar[ModelAccessor | None] = ContextVar("onnxtrain base model", default=None)
_LIBRARY: ContextVar[str | None] = ContextVar("onnxtrain custom op library", default=None)


def active_accessor(doing: str) -> ModelAccessor:
    """Returns the accessor set by :func:`base` or :func:`empty_base`.

    Raises:
        TrainingStateError: there is no base model; the message begins with `doing`.
    """
    accessor = _ACTIVE.get()
    if accessor is None:
        raise TrainingStateError(
            f"{doing}: there is no base model; call it inside `with onnxblock.base(model):` or "
            "`with onnxblock.empty_base():`"
        )
    return accessor


@contextmanager
def base(model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> Iterator[ModelAccessor]:
    """Context manager that sets a copy of `model` as the base model of blocks called within it.

    Args:
        model: the model to build on; not modified. External data that is not loaded (`onnx.load(path,
            load_external_data=False)`) is not read.
        model_path: path of the file that `model` was loaded from. Its directory contains the external data. Default:
            external data is in the current directory.

    Returns:
        The accessor; its `model` is the model built so far.

    Raises:
        GraphBuildError: `model` is not a `ModelProto`.
        TrainingStateError: there already is a base model.

    Example:
        >>> import onnx
        >>> from onnxtrain import onnxblock
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }''')
        >>> with onnxblock.base(model) as accessor:
        ...     loss = onnxblock.loss.MSELoss()("y")
        >>> [value.name for value in accessor.model.graph.input]
        ['x', 'target']
    """
    if not isinstance(model, onnx.ModelProto):
        raise GraphBuildError(
            f"setting the base model: received {type(model).__name__}; pass an onnx.ModelProto, "
            "or use onnxblock.empty_base() to build a model from nothing"
        )
    # Blocks modify the base model in place, but the user's model must not change.
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with _activated(ModelAccessor(copy, model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Context manager that sets a model without nodes as the base model of blocks called within it.

    Args:
        opset_version: version of the standard domain, e.g. 17. Default: 21, the canonical opset of this package.

    Raises:
        TrainingStateError: there already is a base model.
    """
    opset = opset_version or CANONICAL_OPSET
    imports = [onnx.helper.make_opsetid("", opset)]
    # The oldest IR version for the opset, so that old runtimes load the model, but at least 8, the first with
    # functions.
    model = onnx.ModelProto(
        ir_version=max(8, onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)),
        producer_name="onnxtrain",
        opset_import=imports,
    )
    model.graph.name = "graph"
    with _activated(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def _activated(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    """Context manager that sets the base model to which blocks append nodes; yields its accessor.

    Raises:
        TrainingStateError: a base model is already set.
    """
    # With nested base models, blocks of the outer base model would append to the wrong model.
    if _ACTIVE.get() is not None:
        raise TrainingStateError(
            "setting the base model: another base model is active, and blocks work on one at a time; "
            "leave the outer `with onnxblock.base(...)` first"
        )
    token = _ACTIVE.set(accessor)
    try:
        yield accessor
    finally:
        _ACTIVE.reset(token)


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str]:
    """Context manager that sets the shared library with the custom ops of the base model.

    The library is registered once, to check that ONNX Runtime can load it. Code that creates sessions within the `with`
    block gets its path from :func:`custom_op_library_path`.

    Raises:
        GraphBuildError: there is no such file, or ONNX Runtime cannot register it.
        TrainingStateError: a library is already set.
    """
    path = os.fspath(custom_op_library_path)
    if _LIBRARY.get() is not None:
        raise TrainingStateError(
            f"setting the custom op library '{path}': '{_LIBRARY.get()}' is already set; leave its `with` "
            "block first"
        )
    if not os.path.isfile(path):
        raise GraphBuildError(f"setting the custom op library: no such file: '{path}'; check the path")
    # Here, where the path is given, and not later when a session is created.
    try:
        ort.SessionOptions().register_custom_ops_library(path)
    # Depending on the build, ONNX Runtime raises its own Fail or a RuntimeError.
    except Exception as error:
        raise GraphBuildError(
            f"setting the custom op library '{path}': ONNX Runtime {ort.__version__} cannot register it: "
            f"{error}. It must be a shared library for this platform that exports RegisterCustomOps."
        ) from error
    token = _LIBRARY.set(path)
    try:
        yield path
    finally:
        _LIBRARY.reset(token)


def custom_op_library_path() -> str | None:
    """Returns the path set by :func:`custom_op_library`, or None outside its `with` block."""
    return _LIBRARY.get()
