"""Makes the batch size symbolic in a model that was exported with a fixed batch size.

The batch size is hard-coded in the inputs' shapes, in constant target shapes of Reshape, Expand and Resize, and in
constants with one row per sample: operands of Concat and initial states of recurrent layers. All are rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.op_facts import RECURRENT
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.shapes.two_batches import TRIAL, Dims, axis_of_batch, concrete_dims, static_dims_at
from onnxtrain.passes.tidy.constants import add_constant
from onnxtrain.passes.tidy.fold_constants import run_node
from onnxtrain.passes.tidy.replace_value import write_before
from onnxtrain.passes.tidy.unique_names import fresh_name

# Maximum number of elements of tensors whose content is tracked. Shapes are small; larger tensors are data.
_MAX_VALUES = 64


def fixed_batch(model: ir.Model) -> int | None:
    """Returns the size of axis 0 of the inputs, e.g. 32; None if it is symbolic in all of them.

    Raises:
        ModelError: inputs have different static sizes along axis 0.
    """
    sizes = {
        value.shape[0]
        for value in model.graph.inputs
        if value.name not in model.graph.initializers and value.shape and isinstance(value.shape[0], int)
    }
    if len(sizes) > 1:
        raise ModelError(
            f"Making the batch dynamic: the inputs have different sizes along axis 0 ({sorted(sizes)}), so "
            "the batch size is ambiguous. Export the model with a dynamic batch axis."
        )
    return sizes.pop() if sizes else None


def free_batch(model: ir.Model, batch: int, name: str) -> None:
    """Makes axis 0 of the inputs symbolic and removes all inferred shapes, in place.

    Args:
        model: the model.
        batch: current size of axis 0; inputs with a different size are not modified.
        name: name of the symbolic dimension, e.g. "batch".
    """
    for graph in model.graphs():
        for node in graph:
            for output in node.outputs:
                output.shape = None
    for value in model.graph.inputs:
        if value.name not in model.graph.initializers and value.shape and value.shape[0] == batch:
            value.shape = ir.Shape([name, *value.shape[1:]])


class DynamicBatchPass(ir.passes.InPlacePass):
    """Rewrites ops that hard-code the batch size. Axis 0 of the inputs must be symbolic: see :func:`free_batch`.

    The result supports any batch size if the model treats samples independently, which the caller must check.
    """

    def __init__(self, batch: int) -> None:
        """Creates the pass.

        Args:
            batch: batch size for which the model was exported, e.g. 1.
        """
        super().__init__()
        self._batch = batch

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        walk = _Walk(model, self._batch)
        for node in tuple(model.graph):
            walk.visit(node)
        walk.forget_shapes()
        infer_shapes(model)
        return ir.passes.PassResult(model, modified=walk.modified)


class _Walk:
    """Rewrites nodes that hard-code the exported batch size.

    Shapes are inferred at that batch size and at a trial batch size: a dimension that differs depends on the batch.
    """

    def __init__(self, model: ir.Model, batch: int) -> None:
        self._model = model
        self._batch = batch
        self._symbol = next(
            value for value in model.graph.inputs if value.shape and not isinstance(value.shape[0], int)
        )
        # Dimensions by value name, at the exported and at the trial batch size; None if inference fails.
        self._before = static_dims_at(model, batch)
        self._after: dict[str, Dims | None] = {}
        # Content of small tensors that are computed from shapes, at the trial batch size.
        self._values: dict[str, np.ndarray] = {}
        # For values whose batch axis is merged with others, [T·batch, ...]: T, the product of the outer axes.
        self._inside: dict[str, int] = {}
        self._opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.graph.opset_imports.items()]
        self.modified = False
        for value in model.graph.inputs:
            self._after[str(value.name)] = concrete_dims(value, TRIAL)

    def visit(self, node: ir.Node) -> None:
        """Rewrites `node` if it hard-codes the batch size, and infers its output shapes at the trial batch size."""
        if node.domain == "":
            rewrite = getattr(self, f"_rewrite_{node.op_type.lower()}", None)
            if node.op_type in RECURRENT:
                self._rewrite_recurrent(node)
            elif rewrite is not None and any(map(self._follows, node.inputs)):
                rewrite(node)
        self._note(node)

    def forget_shapes(self) -> None:
        """Removes annotated shapes that depend on the batch."""
        for node in self._model.graph:
            for output in node.outputs:
                if self._carries(output):
                    output.shape = None

    # Rewrites by op type, for nodes with an input that depends on the batch.

    def _rewrite_reshape(self, node: ir.Node) -> None:
        """Replaces the batch size in a constant target shape with 0 or -1, so that this axis follows the input."""
        data, target = node.inputs[:2]
        wanted = self._constant(target)
        # The input may be a computed size, whose content depends on the batch but whose shape does not.
        if data is None or wanted is None or not self._carries(data):
            return
        before, after = self._dims(data), self._after.get(str(data.name))
        # If the batch remains axis 0, a 0 copies its size from the input, and -1 can be used for another axis.
        stays = before is not None and before[:1] == (self._batch,) and wanted[:1].tolist() == [self._batch]
        if stays and (after is None or after[0] == TRIAL) and 0 not in wanted[1:]:
            node.attributes.pop("allowzero", None)
            self._replace_constant(node, 1, [0, *wanted[1:].tolist()])
            return
        result = self._dims(node.outputs[0])
        if before is None or after is None or result is None:
            raise self._error(node, "the shape of its input is unknown")
        # Otherwise the axis with the batch becomes -1, which is possible for one axis only.
        place = axis_of_batch(before, after, result, self._batch, self._inside.get(str(data.name), 1))
        if place is None or 0 in result:
            raise self._error(
                node, f"it reshapes {list(before)} to {list(result)}, where no axis is the batch axis alone"
            )
        axis, self._inside[str(node.outputs[0].name)] = place
        node.attributes.pop("allowzero", None)
        self._replace_constant(node, 1, [-1 if i == axis else size for i, size in enumerate(result)])

    def _rewrite_expand(self, node: ir.Node) -> None:
        """Makes an Expand follow the batch size.

        Replaces the batch size in a constant target shape with 1, or the equal rows of an expanded constant with one
        row.
        """
        data, target = node.inputs[:2]
        before = self._dims(data)
        if data is None or target is None or before is None:
            return
        wanted, computed = self._constant(target), self._values.get(str(target.name))
        # Expand broadcasts in both directions: a 1 in the target keeps the input's size, the batch.
        if wanted is not None and len(wanted) == len(before) and wanted[:1].tolist() == [self._batch]:
            self._replace_constant(node, 1, [1, *wanted[1:].tolist()])
        if computed is None or len(computed) != len(before) or self._carries(data):
            return
        # The computed target shape follows the batch, to which a constant with one row per sample cannot be expanded.
        for axis in np.flatnonzero(computed == TRIAL).tolist():
            if before[axis] == self._batch:
                node.replace_input_with(0, self._one_row(node, data, before, axis))
                self.modified = True

    def _rewrite_resize(self, node: ir.Node) -> None:
        """Replaces the batch size in constant `sizes` with the size of the input's axis 0 at run time."""
        sizes = self._constant(node.inputs[3]) if len(node.inputs) > 3 else None
        if sizes is not None and "axes" not in node.attributes and sizes[:1].tolist() == [self._batch]:
            node.replace_input_with(3, self._shape(node, node.inputs[0], sizes[1:].tolist()))

    def _rewrite_concat(self, node: ir.Node) -> None:
        """Replaces each constant that repeats one row per sample, e.g. a class token, with an Expand of that row."""
        # Along the batch axis, any number of rows may be appended.
        if node.attributes.get_int("axis", 0) == 0:
            return
        for index, value in enumerate(node.inputs):
            dims = self._dims(value)
            if value is not None and not self._carries(value) and dims and dims[0] == self._batch:
                self._repeat(node, index, value, dims, 0)

    def _rewrite_recurrent(self, node: ir.Node) -> None:
        """Expands constant initial states [directions, batch, hidden] at run time, or removes them if they are zero."""
        axis = 0 if node.attributes.get_int("layout", 0) else 1
        if not self._carries(node.inputs[0]):
            return
        for index in (5, 6):
            value = node.inputs[index] if len(node.inputs) > index else None
            dims = self._dims(value)
            if value is None or self._carries(value) or not dims or len(dims) != 3:
                continue
            tensor = value.const_value
            if tensor is not None and not np.any(tensor.numpy()):
                # An omitted state means zeros.
                node.replace_input_with(index, None)
                self.modified = True
            else:
                self._repeat(node, index, value, dims, axis)

    def _repeat(self, node: ir.Node, index: int, value: ir.Value, dims: Dims, axis: int) -> None:
        """Replaces an input whose rows are all equal with one row, expanded to the batch size at run time.

        Args:
            node: the node.
            index: index of the input.
            value: the input, a constant.
            dims: its dimensions.
            axis: the axis of the rows.
        """
        row = self._one_row(node, value, dims, axis)
        shape = self._shape(node, self._symbol, dims[axis + 1 :], dims[:axis])
        rows = write_before(node, f"row_per_sample_{index}", "Expand", row, shape)
        rows.type = value.type
        node.replace_input_with(index, rows)
        self._after[str(rows.name)] = (*dims[:axis], TRIAL, *dims[axis + 1 :])
        self.modified = True

    def _one_row(self, node: ir.Node, value: ir.Value, dims: Dims, axis: int) -> ir.Value:
        """Returns the first row along `axis` of a constant whose rows are all equal.

        Raises:
            ModelError: the rows differ.
        """
        if dims[axis] == 1:
            return value
        # If an Expand repeats one row, that row is its input.
        producer = value.producer()
        if producer is not None and producer.op_type == "Expand":
            inner = self._dims(producer.inputs[0])
            if producer.inputs[0] is not None and inner and len(inner) == len(dims) and inner[axis] == 1:
                return producer.inputs[0]
        rows = self._constant(value)
        if rows is None or (rows != rows.take([0], axis)).any():
            raise self._error(node, f"its input {value.name!r} has a different row for each sample")
        tensor = ir.tensor(rows.take([0], axis), name=f"{value.name}/row_{axis}")
        return self._initializer(tensor)

    def _shape(
        self, node: ir.Node, samples: ir.Value | None, tail: Sequence[int], head: Sequence[int] = ()
    ) -> ir.Value:
        """Emits the int64 shape [*head, axis 0 of `samples`, *tail] before `node`."""
        prefix = f"{node.outputs[0].name}/samples"
        count = write_before(node, "samples_count", "Shape", samples, start=0, end=1)
        parts = [
            *([self._ints(head, f"{prefix}_head")] if head else []),
            count,
            *([self._ints(tail, f"{prefix}_tail")] if tail else []),
        ]
        shape = write_before(node, "samples_shape", "Concat", *parts, axis=0)
        count.type = shape.type = ir.TensorType(ir.DataType.INT64)
        self._values[str(shape.name)] = np.array([*head, TRIAL, *tail])
        self.modified = True
        return shape

    def _replace_constant(self, node: ir.Node, index: int, numbers: Sequence[int]) -> None:
        node.replace_input_with(index, self._ints(numbers, f"{node.outputs[0].name}/any_batch"))
        self.modified = True

    def _ints(self, numbers: Sequence[int], name: str) -> ir.Value:
        return self._initializer(ir.tensor(np.asarray(numbers, np.int64), name=name))

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = fresh_name(self._model, str(tensor.name))
        return add_constant(self._model.graph, tensor)

    # Queries about values.

    def _dims(self, value: ir.Value | None) -> Dims | None:
        """Returns the dimensions of a value at the exported batch size, or None if they are unknown."""
        if value is None:
            return None
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return self._before.get(str(value.name))

    def _carries(self, value: ir.Value | None) -> bool:
        """True if the shape of a value depends on the batch."""
        # Values that do not depend on an input, such as constants, are in no table.
        if value is None or str(value.name) not in self._after:
            return False
        after = self._after[str(value.name)]
        return after is None or after != self._dims(value)

    def _follows(self, value: ir.Value | None) -> bool:
        """True if a value's shape depends on the batch, or its content is computed from shapes.

        An example of such content is the target shape of a Reshape.
        """
        return self._carries(value) or (value is not None and str(value.name) in self._values)

    def _constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Returns the content of an initializer, or None for other values."""
        tensor = value.const_value if value is not None else None
        return None if tensor is None else tensor.numpy()

    def _note(self, node: ir.Node) -> None:
        """Infers and stores the shapes of a node's outputs at the trial batch size."""
        inputs = [value for value in node.inputs if value is not None]
        if not any(str(value.name) in self._after or str(value.name) in self._values for value in inputs):
            return
        types, data = {}, {}
        for value in inputs:
            after = self._after.get(str(value.name), self._dims(value))
            element = int(value.dtype) if value.dtype is not None else 0
            types[str(value.name)] = onnx.helper.make_tensor_type_proto(element, after)
            content = self._value(value)
            if content is not None:
                data[str(value.name)] = onnx.numpy_helper.from_array(content)
        inferred = self._infer(node, types, data)
        for output in node.outputs:
            tensor = inferred.get(str(output.name))
            dims = tensor.shape.dim if tensor is not None and tensor.HasField("shape") else None
            static = dims is not None and all(dim.HasField("dim_value") for dim in dims)
            after = tuple(dim.dim_value for dim in dims) if dims is not None and static else None
            self._after[str(output.name)] = after
            # `_rewrite_reshape` has stored the outer axes of its result. Other ops keep the order of their axes, and so
            # the outer axes.
            if node.op_type != "Reshape":
                inside = [
                    self._inside[str(value.name)] for value in inputs if str(value.name) in self._inside
                ]
                self._inside |= {str(output.name): inside[0]} if inside else {}
        self._follow_values(node)

    def _infer(
        self, node: ir.Node, types: dict[str, onnx.TypeProto], data: dict[str, onnx.TensorProto]
    ) -> dict[str, onnx.TypeProto.Tensor]:
        """Infers the dtypes and shapes of a node's outputs at the trial batch size.

        Args:
            node: the node.
            types: type of each input, by name.
            data: known contents of inputs, by name, e.g. of a target shape.

        Returns:
            The tensor types by output name; empty if onnx does not know the op.

        Raises:
            ModelError: the node only supports the exported batch size, e.g. because it adds a constant that has one row
                per sample.
        """
        try:
            schema = onnx.defs.get_schema(
                node.op_type, self._model.graph.opset_imports[node.domain], node.domain
            )
        # onnx does not know the op, so the shapes of its outputs remain unknown.
        except (onnx.defs.SchemaError, KeyError):
            return {}
        try:
            result = onnx.shape_inference.infer_node_outputs(
                schema,
                ir.to_proto(node),
                types,
                data,
                opset_imports=self._opsets,
                ir_version=self._model.ir_version,
            )
        except onnx.shape_inference.InferenceError as error:
            raise self._error(node, f"it does not support another batch size: {error}") from error
        return {name: type_.tensor_type for name, type_ in result.items()}

    def _value(self, value: ir.Value) -> np.ndarray | None:
        """Returns the elements of a small tensor that is constant or computed from shapes.

        If they depend on the batch size, e.g. in the target shape of a Reshape, they are computed for the trial size.

        Returns:
            The elements; None if the tensor has more than `_MAX_VALUES` elements, or depends on other data.
        """
        tensor = value.const_value
        if tensor is not None:
            return tensor.numpy() if tensor.size <= _MAX_VALUES else None
        return self._values.get(str(value.name))

    def _follow_values(self, node: ir.Node) -> None:
        """Computes a node's outputs for the trial batch size if they are small and derived from shapes.

        An example is the target shape of a Reshape.
        """
        # onnx's data propagation is not available: `infer_node_outputs` infers the shapes of a single node.
        if node.op_type == "Shape" and node.inputs[0] is not None:
            dims = self._after.get(str(node.inputs[0].name))
            if dims is not None:
                start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
                self._values[str(node.outputs[0].name)] = np.array(dims[start:end], np.int64)
            return
        contents = [None if value is None else self._value(value) for value in node.inputs]
        follows = any(value is not None and str(value.name) in self._values for value in node.inputs)
        if not follows or any(c is None for c, v in zip(contents, node.inputs, strict=True) if v is not None):
            return
        results = run_node(node, contents, self._model.graph.opset_imports[""]) or []
        for output, result in zip(node.outputs, results, strict=False):
            if result.size <= _MAX_VALUES:
                self._values[str(output.name)] = result

    def _error(self, node: ir.Node, problem: str) -> ModelError:
        """Returns the error for a node that cannot be rewritten."""
        return ModelError(
            f"Making the batch dynamic: the node {node.name or node.outputs[0].name!r} ({node.op_type}) "
            f"requires exactly {self._batch} samples: {problem}. Export the model with a dynamic batch "
            "axis."
        )
