"""Defines the context managers that set the base model of blocks, and the custom op library that it needs."""

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
    """Holds the base model, which blocks change in place.

    Attributes:
        building: number of blocks that are being built, one inside the other, e.g. 2 while a block calls a loss.
    """

    def __init__(self, model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> None:
        self._model = model
        self._path = os.fspath(model_path) if model_path is not None else None
        self.building = 0

    @property
    def model(self) -> onnx.ModelProto:
        """The base model as it is now."""
        return self._model

    @property
    def path(self) -> str:
        """The file of the base model.

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
        """Converts the base model to onnx_ir; tensors are shared, and external data stays on disk."""
        model = ir.from_proto(self._model)
        # Locations of external data are relative to the model's file, which the proto does not know.
        directory = Path(self._path).absolute().parent if self._path is not None else Path.cwd()
        ir.external_data.set_base_dir(model.graph, directory)
        return model


# Context variables, so that each thread has a base model of its own.
_ACTIVE: ContextVar[ModelAccessor | None] = ContextVar("onnxtrain base model", default=None)
_LIBRARY: ContextVar[str | None] = ContextVar("onnxtrain custom op library", default=None)


def active_accessor(doing: str) -> ModelAccessor:
    """Returns the accessor that :func:`base` or :func:`empty_base` has set.

    Raises:
        TrainingStateError: there is no base model; `doing` begins the message.
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
    """Sets a copy of `model` as the base model of the blocks that are called inside the `with` block.

    Args:
        model: the model to build on; it is not changed. External data that is not loaded
            (`onnx.load(path, load_external_data=False)`) stays on disk.
        model_path: path of the file of `model`; external data is looked for in its directory.

    Returns:
        The accessor; its `model` is the model that the blocks have built.

    Raises:
        GraphBuildError: `model` is no `ModelProto`.
        TrainingStateError: there is a base model already.

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
    # Blocks change the base model in place, and the user's model must stay as it is.
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with _activated(ModelAccessor(copy, model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Sets a model without nodes as the base model of the blocks that are called inside the `with` block.

    Args:
        opset_version: version of the standard domain, e.g. 17. Default: 21, the canonical opset of this package.

    Raises:
        TrainingStateError: there is a base model already.
    """
    opset = opset_version or CANONICAL_OPSET
    imports = [onnx.helper.make_opsetid("", opset)]
    # The oldest IR version of the opset, so that old runtimes load the model, and at least 8, the first with functions.
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
    """Sets the base model until the `with` block ends; TrainingStateError if there is one already."""
    # In a nested base, blocks of the outer one would append to the wrong model.
    if _ACTIVE.get() is not None:
        raise TrainingStateError(
            "setting the base model: there is one already, and blocks work on one at a time; "
            "leave the outer `with onnxblock.base(...)` first"
        )
    token = _ACTIVE.set(accessor)
    try:
        yield accessor
    finally:
        _ACTIVE.reset(token)


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str]:
    """Sets the shared library with the custom ops of the base model.

    The library is registered once, to see that ONNX Runtime takes it. :func:`custom_op_library_path` returns it to code
    that creates sessions inside the `with` block.

    Raises:
        GraphBuildError: there is no such file, or ONNX Runtime cannot register it.
        TrainingStateError: a library is set already.
    """
    path = os.fspath(custom_op_library_path)
    if _LIBRARY.get() is not None:
        raise TrainingStateError(
            f"setting the custom op library '{path}': '{_LIBRARY.get()}' is set already; "
            "leave its `with` block first"
        )
    if not os.path.isfile(path):
        raise GraphBuildError(f"setting the custom op library: there is no file '{path}'; check the path")
    # Here, where the path is given, and not when a session is created somewhere later.
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
    """Returns the path that :func:`custom_op_library` has set, None outside of its `with` block."""
    return _LIBRARY.get()
