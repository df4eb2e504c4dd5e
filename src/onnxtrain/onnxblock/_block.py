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
    """A part of a graph: calling a block appends the part to the base model.

    Subclasses implement :meth:`build`. It receives the arguments of the call, usually names of values of the base
    model, and returns the name of its output or a tuple of names. A build method calls other blocks, or appends nodes,
    initializers and inputs to `self.base`, an `onnx.ModelProto`.

    Args:
        temp_file_name: ignored. onnxruntime-training wrote temporary files with this name.

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
        """Appends the block to `self.base` and returns the name or names of its outputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block on the base model and returns the name or names of its outputs.

        Raises:
            TrainingStateError: there is no base model.
            GraphBuildError: a name is unknown, or the base model is no longer valid ONNX.
        """
        accessor = self._accessor
        accessor.building += 1
        try:
            result = self.build(*args, **kwargs)
        finally:
            accessor.building -= 1
        # Only after the outermost block, because a check takes time proportional to the size of the whole model.
        if not accessor.building:
            self._check(accessor.model)
        return result

    @property
    def base(self) -> onnx.ModelProto:
        """The base model, which :meth:`build` may modify in place.

        Raises:
            TrainingStateError: there is no base model.
        """
        return self._accessor.model

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Returns a copy of the base model that declares the inferred dtypes and shapes of its values."""
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
        """Appends the nodes that `write` emits for the values `names`; returns the name of the first output.

        `write` is called with an emitter and one value per name. The output is named `wish` if this name is not in use.
        """
        return _graft.append(self._accessor, self._doing, names, write, wish=wish)[0]

    def _describe(self, name: str) -> ir.Value:
        return _graft.describe(self._accessor, name, self._doing)

    def _check(self, base: onnx.ModelProto) -> None:
        """Raises GraphBuildError if the base model is not valid ONNX."""
        # Checks the proto, because a graph that a block has broken (wrong order, unknown input) cannot be converted to
        # onnx_ir.
        skeleton = _skeleton(base)
        try:
            onnx.checker.check_model(skeleton)
            onnx.shape_inference.infer_shapes(skeleton, check_type=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            # onnx has no schemas of ONNX Runtime's own ops (domain com.microsoft), and cannot check these models.
            if "No Op registered for" in str(error):
                return
            raise GraphBuildError(f"{self._doing}: the resulting model is not valid ONNX: {error}") from error


# Tensors with more elements are weights, whose values do not determine shapes.
_BIG_ELEMENTS = 4096


def _skeleton(base: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of the base model for the checker and shape inference, with large initializers as inputs."""
    # The checker and shape inference serialize the model, and protobuf is limited to 2 GB.
    graph = base.graph
    skeleton = onnx.ModelProto(
        ir_version=base.ir_version, opset_import=base.opset_import, functions=base.functions
    )
    skeleton.graph.name = graph.name or "graph"
    skeleton.graph.node.extend(graph.node)
    for kind in ("input", "output"):
        for info in getattr(graph, kind):
            # The checker requires shapes. Runtimes accept models without them, and infer the shapes.
            if info.type.HasField("tensor_type"):
                info = onnx.ValueInfoProto.FromString(info.SerializeToString())
                info.type.tensor_type.shape.SetInParent()
            getattr(skeleton.graph, kind).append(info)
    declared = {info.name for info in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _BIG_ELEMENTS and tensor.data_location != onnx.TensorProto.EXTERNAL:
            skeleton.graph.initializer.append(tensor)
        # Up to IR version 3, initializers are also declared as inputs.
        elif tensor.name not in declared:
            skeleton.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return skeleton
