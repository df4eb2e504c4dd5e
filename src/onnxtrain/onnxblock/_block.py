"""Defines `Block`, the base class of all blocks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock import _graft
from onnxtrain.onnxblock.model_accessor import ModelAccessor, active_accessor


class Block(ABC):
    """A piece of a graph: calling a block appends the piece to the base model.

    Subclasses implement :meth:`build`. It receives the arguments of the call, by custom the names of values of the base
    model, and returns the name of its result or a tuple of names. A build method calls other blocks, or appends nodes,
    initializers and inputs to `self.base`, an `onnx.ModelProto`.

    Args:
        temp_file_name: ignored. onnxruntime-training wrote temporary files under this name.

    Example:
        >>> from onnxtrain import onnxblock
        >>> class WeightedSum(onnxblock.Block):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = onnxblock.blocks.Constant(0.3)
        ...         self.mul = onnxblock.blocks.Mul()
        ...         self.add = onnxblock.blocks.Add()
        ...     def build(self, first, second):
        ...         return self.add(first, self.mul(self.weight(), second))
    """

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        del temp_file_name

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Appends the block to `self.base` and returns the name or names of its results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block on the base model and returns the name or names of its results.

        Raises:
            TrainingStateError: there is no base model.
            GraphBuildError: a name is unknown, or the base model is no valid ONNX model any more.
        """
        accessor = self._accessor
        accessor.building += 1
        try:
            result = self.build(*args, **kwargs)
        finally:
            accessor.building -= 1
        # Only after the outermost block: the time of a check is proportional to the size of the whole model.
        if not accessor.building:
            self._check(accessor.model)
        return result

    @property
    def base(self) -> onnx.ModelProto:
        """The base model, which :meth:`build` may change in place.

        Raises:
            TrainingStateError: there is no base model.
        """
        return self._accessor.model

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Infers dtypes and shapes of the base model, and returns a copy of it that declares them."""
        accessor = self._accessor
        _graft.infer(accessor)
        model = onnx.ModelProto()
        model.CopyFrom(accessor.model)
        return model

    @property
    def _accessor(self) -> ModelAccessor:
        return active_accessor(self._doing)

    @property
    def _doing(self) -> str:
        return f"building the block {type(self).__name__}"

    def _append(self, write: _graft.Writer, *names: str, wish: str | None = None) -> str:
        """Appends the nodes that `write` emits from the values `names`; returns the name of the first result.

        `write` is called with an emitter and one value per name. The result gets the name `wish`, if it is free.
        """
        return _graft.append(self._accessor, self._doing, names, write, wish=wish)[0]

    def _describe(self, name: str) -> ir.Value:
        return _graft.describe(self._accessor, name, self._doing)

    def _check(self, base: onnx.ModelProto) -> None:
        """Raises GraphBuildError if the base model is no valid ONNX model."""
        # On the proto, as a graph that a block has broken (wrong order, unknown input) cannot be read as onnx_ir.
        skeleton = _skeleton(base)
        try:
            onnx.checker.check_model(skeleton)
            onnx.shape_inference.infer_shapes(skeleton, check_type=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            # onnx has no schema of ONNX Runtime's own ops (domain com.microsoft), and so no opinion on such models.
            if "No Op registered for" in str(error):
                return
            raise GraphBuildError(
                f"{self._doing}: the base model is no valid ONNX model afterwards: {error}"
            ) from error


# Number of elements from which a tensor is a weight: no shape follows from its values.
_BIG_ELEMENTS = 4096


def _skeleton(base: onnx.ModelProto) -> onnx.ModelProto:
    """Copies the base model without its weights, which become inputs."""
    # The checker and shape inference serialize the model, and protobuf ends at 2 GB.
    graph = base.graph
    skeleton = onnx.ModelProto(
        ir_version=base.ir_version, opset_import=base.opset_import, functions=base.functions
    )
    skeleton.graph.name = graph.name or "graph"
    skeleton.graph.node.extend(graph.node)
    for kind in ("input", "output"):
        for info in getattr(graph, kind):
            # The checker insists on shapes. Models without them are valid for runtimes, which infer the shapes.
            if info.type.HasField("tensor_type"):
                info = onnx.ValueInfoProto.FromString(info.SerializeToString())
                info.type.tensor_type.shape.SetInParent()
            getattr(skeleton.graph, kind).append(info)
    declared = {info.name for info in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _BIG_ELEMENTS and tensor.data_location != onnx.TensorProto.EXTERNAL:
            skeleton.graph.initializer.append(tensor)
        # Up to IR version 3, initializers are declared among the inputs as well.
        elif tensor.name not in declared:
            skeleton.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return skeleton
