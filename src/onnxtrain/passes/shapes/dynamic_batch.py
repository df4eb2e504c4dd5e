"""Make a batch that was fixed when the model was exported symbolic.

What has the number of samples baked in besides the inputs is rewritten: constant target shapes of Reshape, Expand and
Resize, and constants with one row per sample that are concatenated with samples or are initial states of recurrent ops.
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
from onnxtrain.passes.tidy.constants import mark_constant
from onnxtrain.passes.tidy.unique_names import fresh_name

_MAX_VALUES = 64  # elements of integers that are followed as values: shapes, not data


def fixed_batch(model: ir.Model) -> int | None:
    """Returns the size along axis 0 that all inputs have; None where it is symbolic.

    Raises:
        ModelError: the inputs have several.
    """
    sizes = {
        value.shape[0]
        for value in model.graph.inputs
        if value.name not in model.graph.initializers and value.shape and isinstance(value.shape[0], int)
    }
    if len(sizes) > 1:
        raise ModelError(
            f"Making the batch dynamic: the inputs have different sizes along axis 0 ({sorted(sizes)}), so that it is "
            "not known which is the batch. Export the model with a dynamic batch axis."
        )
    return sizes.pop() if sizes else None


def free_batch(model: ir.Model, batch: int, name: str) -> None:
    """Makes axis 0 of the inputs symbolic, in place, and forgets all shapes that may follow from it."""
    for graph in model.graphs():
        for node in graph:
            for output in node.outputs:
                output.shape = None
    for value in model.graph.inputs:
        if value.name not in model.graph.initializers and value.shape and value.shape[0] == batch:
            value.shape = ir.Shape([name, *value.shape[1:]])


class DynamicBatchPass(ir.passes.InPlacePass):
    """Rewrite what has a fixed number of samples baked in; inputs have a symbolic axis 0 already.

    The result is right only if the model treats its samples one by one, which the caller has to check.
    """

    def __init__(self, batch: int) -> None:
        """Name the number of samples that the model was exported for."""
        super().__init__()
        self._batch = batch

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        walk = _Walk(model, self._batch)
        for node in tuple(model.graph):
            walk.visit(node)
        walk.forget_shapes()
        infer_shapes(model)
        return ir.passes.PassResult(model, modified=walk.modified)


class _Walk:
    """Follows the shapes at the exported number of samples and at another one through a graph."""

    def __init__(self, model: ir.Model, batch: int) -> None:
        self._model = model
        self._batch = batch
        self._symbol = next(
            value for value in model.graph.inputs if value.shape and not isinstance(value.shape[0], int)
        )
        self._before = static_dims_at(model, batch)
        self._after: dict[str, Dims | None] = {}
        self._values: dict[str, np.ndarray] = {}
        self._inside: dict[str, int] = {}
        self._opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.graph.opset_imports.items()]
        self.modified = False
        for value in model.graph.inputs:
            self._after[str(value.name)] = concrete_dims(value, TRIAL)

    def visit(self, node: ir.Node) -> None:
        """Rewrites a node where it has to be, and notes the shapes of its outputs."""
        if node.domain == "":
            rewrite = getattr(self, f"_rewrite_{node.op_type.lower()}", None)
            if node.op_type in RECURRENT:
                self._rewrite_recurrent(node)
            elif rewrite is not None and any(map(self._follows, node.inputs)):
                rewrite(node)
        self._note(node)

    def forget_shapes(self) -> None:
        """Forgets the shapes that have followed from the number of samples."""
        for node in self._model.graph:
            for output in node.outputs:
                if self._carries(output):
                    output.shape = None

    # The rewrites: each for a node of which an input depends on the number of samples.

    def _rewrite_reshape(self, node: ir.Node) -> None:
        data, target = node.inputs[:2]
        wanted = self._constant(target)
        if data is None or wanted is None:
            return
        before, after = self._dims(data), self._after.get(str(data.name))
        stays = before is not None and before[:1] == (self._batch,) and wanted[:1].tolist() == [self._batch]
        if stays and (after is None or after[0] == TRIAL) and 0 not in wanted[1:]:
            node.attributes.pop("allowzero", None)
            self._replace_constant(node, 1, [0, *wanted[1:].tolist()])
            return
        result = self._dims(node.outputs[0])
        if before is None or after is None or result is None:
            raise self._error(node, "the shape of its input is not known")
        place = axis_of_batch(before, after, result, self._batch, self._inside.get(str(data.name), 1))
        if place is None or 0 in result:
            raise self._error(
                node, f"it reshapes {list(before)} to {list(result)}, where no axis is the batch alone"
            )
        axis, self._inside[str(node.outputs[0].name)] = place
        node.attributes.pop("allowzero", None)
        self._replace_constant(node, 1, [-1 if i == axis else size for i, size in enumerate(result)])

    def _rewrite_expand(self, node: ir.Node) -> None:
        data, target = node.inputs[:2]
        before = self._dims(data)
        if data is None or target is None or before is None:
            return
        wanted, known = self._constant(target), self._values.get(str(target.name))
        if wanted is not None and len(wanted) == len(before) and wanted[0] == self._batch:
            self._replace_constant(node, 1, [1, *wanted[1:].tolist()])
        if known is None or len(known) != len(before) or self._carries(data):
            return
        for axis in np.flatnonzero(known == TRIAL).tolist():
            if before[axis] == self._batch:
                node.replace_input_with(0, self._one_row(node, data, before, axis))
                self.modified = True

    def _rewrite_resize(self, node: ir.Node) -> None:
        sizes = self._constant(node.inputs[3]) if len(node.inputs) > 3 else None
        if sizes is not None and "axes" not in node.attributes and sizes[0] == self._batch:
            node.replace_input_with(3, self._shape(node, node.inputs[0], sizes[1:].tolist()))

    def _rewrite_concat(self, node: ir.Node) -> None:
        if node.attributes.get_int("axis", 0) == 0:
            return
        for index, value in enumerate(node.inputs):
            dims = self._dims(value)
            if value is not None and not self._carries(value) and dims and dims[0] == self._batch:
                self._repeat(node, index, value, dims, 0)

    def _rewrite_recurrent(self, node: ir.Node) -> None:
        """Initial states [directions, batch, hidden] that are constants."""
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
                node.replace_input_with(index, None)  # zeros are what they start from
                self.modified = True
            else:
                self._repeat(node, index, value, dims, axis)

    def _repeat(self, node: ir.Node, index: int, value: ir.Value, dims: Dims, axis: int) -> None:
        """Repeats an input that has the same row for each sample as often as there are samples."""
        row = self._one_row(node, value, dims, axis)
        shape = self._shape(node, self._symbol, dims[axis + 1 :], dims[:axis])
        expanded = ir.node("Expand", [row, shape])
        node.prepend(expanded)
        output = expanded.outputs[0]
        output.name, output.type = f"{node.outputs[0].name}/row_per_sample_{index}", value.type
        node.replace_input_with(index, output)
        self._after[output.name] = (*dims[:axis], TRIAL, *dims[axis + 1 :])
        self.modified = True

    def _one_row(self, node: ir.Node, value: ir.Value, dims: Dims, axis: int) -> ir.Value:
        """Returns a value that has one row along an axis, of one that repeats it for each sample."""
        if dims[axis] == 1:
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Expand":
            inner = self._dims(producer.inputs[0])
            if producer.inputs[0] is not None and inner and len(inner) == len(dims) and inner[axis] == 1:
                return producer.inputs[0]
        rows = self._constant(value)
        if rows is None or (rows != rows.take([0], axis)).any():
            raise self._error(node, f"its input {value.name!r} has a row of its own for each")
        tensor = ir.tensor(rows.take([0], axis), name=f"{value.name}/row_{axis}")
        return self._initializer(tensor)

    def _shape(
        self, node: ir.Node, samples: ir.Value | None, tail: Sequence[int], head: Sequence[int] = ()
    ) -> ir.Value:
        """Appends head + [number of samples] + tail before `node`."""
        prefix = f"{node.outputs[0].name}/samples"
        count = ir.node("Shape", [samples], {"start": 0, "end": 1})
        parts = [
            *([self._ints(head, f"{prefix}_head")] if head else []),
            count.outputs[0],
            *([self._ints(tail, f"{prefix}_tail")] if tail else []),
        ]
        shape = ir.node("Concat", parts, {"axis": 0})
        node.prepend([count, shape])
        for built, name in ((count, f"{prefix}_count"), (shape, f"{prefix}_shape")):
            built.outputs[0].name = name
            built.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        self._values[f"{prefix}_shape"] = np.array([*head, TRIAL, *tail])
        self.modified = True
        return shape.outputs[0]

    def _replace_constant(self, node: ir.Node, index: int, numbers: Sequence[int]) -> None:
        node.replace_input_with(index, self._ints(numbers, f"{node.outputs[0].name}/any_batch"))
        self.modified = True

    def _ints(self, numbers: Sequence[int], name: str) -> ir.Value:
        return self._initializer(ir.tensor(np.asarray(numbers, np.int64), name=name))

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        name, shape = fresh_name(self._model, str(tensor.name)), ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        mark_constant(value)
        self._model.graph.register_initializer(value)
        return value

    # What is known of values.

    def _dims(self, value: ir.Value | None) -> Dims | None:
        """The dimensions at the exported number of samples."""
        if value is None:
            return None
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return self._before.get(str(value.name))

    def _carries(self, value: ir.Value | None) -> bool:
        """Whether the shape of a value depends on the number of samples."""
        if value is None or str(value.name) not in self._after:
            return False
        after = self._after[str(value.name)]
        return after is None or after != self._dims(value)

    def _follows(self, value: ir.Value | None) -> bool:
        """Whether the shape of a value, or integers in it, depend on the number of samples."""
        return self._carries(value) or (value is not None and str(value.name) in self._values)

    def _constant(self, value: ir.Value | None) -> np.ndarray | None:
        tensor = value.const_value if value is not None else None
        return None if tensor is None else tensor.numpy()

    def _note(self, node: ir.Node) -> None:
        """Infers the shapes of the outputs at the trial number of samples."""
        inputs = [value for value in node.inputs if value is not None]
        if not any(str(value.name) in self._after or str(value.name) in self._values for value in inputs):
            return
        types, data = {}, {}
        for value in inputs:
            after = self._after.get(str(value.name), self._dims(value))
            element = int(value.dtype) if value.dtype is not None else 0
            types[str(value.name)] = onnx.helper.make_tensor_type_proto(element, after)
            known = self._value(value)
            if known is not None:
                data[str(value.name)] = onnx.numpy_helper.from_array(known)
        inferred = self._infer(node, types, data)
        for output in node.outputs:
            tensor = inferred.get(str(output.name))
            dims = tensor.shape.dim if tensor is not None and tensor.HasField("shape") else None
            static = dims is not None and all(dim.HasField("dim_value") for dim in dims)
            after = tuple(dim.dim_value for dim in dims) if dims is not None and static else None
            self._after[str(output.name)] = after
            if node.op_type != "Reshape":
                inside = [
                    self._inside[str(value.name)] for value in inputs if str(value.name) in self._inside
                ]
                self._inside |= {str(output.name): inside[0]} if inside else {}
        self._follow_values(node)

    def _infer(
        self, node: ir.Node, types: dict[str, onnx.TypeProto], data: dict[str, onnx.TensorProto]
    ) -> dict[str, onnx.TypeProto.Tensor]:
        try:
            schema = onnx.defs.get_schema(
                node.op_type, self._model.graph.opset_imports[node.domain], node.domain
            )
        except (onnx.defs.SchemaError, KeyError):  # not an op of the standard
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
            raise self._error(node, f"it does not take another number: {error}") from error
        return {name: type_.tensor_type for name, type_ in result.items()}

    def _value(self, value: ir.Value) -> np.ndarray | None:
        tensor = value.const_value
        if tensor is not None:
            return tensor.numpy() if tensor.size <= _MAX_VALUES else None
        return self._values.get(str(value.name))

    def _follow_values(self, node: ir.Node) -> None:
        """Computes integers that follow from shapes, such as the target of a Reshape."""
        if node.op_type == "Shape" and node.inputs[0] is not None:
            dims = self._after.get(str(node.inputs[0].name))
            if dims is not None:
                start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
                self._values[str(node.outputs[0].name)] = np.array(dims[start:end], np.int64)
            return
        known = [None if value is None else self._value(value) for value in node.inputs]
        small = any(value is not None and str(value.name) in self._values for value in node.inputs)
        if not small or any(k is None for k, v in zip(known, node.inputs, strict=True) if v is not None):
            return
        proto = onnx.helper.make_model(
            onnx.helper.make_graph(
                [ir.to_proto(node)],
                "shape",
                [
                    onnx.helper.make_value_info(str(v.name), onnx.TypeProto())
                    for v in node.inputs
                    if v is not None
                ],
                [onnx.helper.make_value_info(str(v.name), onnx.TypeProto()) for v in node.outputs],
            ),
            opset_imports=self._opsets,
        )
        feeds = {str(v.name): k for v, k in zip(node.inputs, known, strict=True) if v is not None}
        results = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
        for output, result in zip(node.outputs, results, strict=True):
            if isinstance(result, np.ndarray) and result.size <= _MAX_VALUES:
                self._values[str(output.name)] = result

    def _error(self, node: ir.Node, problem: str) -> ModelError:
        return ModelError(
            f"Making the batch dynamic: the node {node.name or node.outputs[0].name!r} ({node.op_type}) is built for "
            f"{self._batch} samples: {problem}. Export the model with a dynamic batch axis."
        )
