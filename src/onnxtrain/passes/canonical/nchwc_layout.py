"""Bring convolutional models that onnxruntime has laid out for one kind of CPU back to standard ops."""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.errors import ModelError
from onnxtrain.passes.io.load import CANONICAL_OPSET
from onnxtrain.passes.tidy.replace_value import stand_in, write_before
from onnxtrain.passes.tidy.unique_names import fresh_name
from onnxtrain.passes.tidy.unused import remove_unread_initializers

_DOMAIN = "com.microsoft.nchwc"
_CHANNELS_FIRST, _CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
_ERRORS = 3
"""Severity from which on ONNX Runtime logs."""

Array = npt.NDArray[np.float32]


class BlockedLayoutPass(ir.passes.InPlacePass):
    """Rewrite the ops of the domain `com.microsoft.nchwc`, which onnxruntime's optimizer writes at its highest level.

    What is between a ReorderInput and a ReorderOutput lies in memory in blocks of 8 or 16 channels, as many as a vector
    of the CPU holds, with zeros for those that the last block lacks; weights are packed to match. Here these are the
    plain tensors that they stand for, and weights `[channels out, channels in / group, height, width]` without the
    zeros, under the names of the packed ones with `.weight` or `.bias` behind them. An activation or sum that the
    optimizer has fused makes a `com.microsoft` FusedConv. The layout is that of
    `onnxruntime/core/optimizer/nchwc_transformer.cc`.

    How large the blocks are the file does not say. They are taken to be those of this machine, as onnxruntime does
    when it runs the file.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; for a model of the canonical opset or newer.

        Raises:
            ModelError: The blocks are those of another machine, or a weight is not stored in the model.
        """
        nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.domain == _DOMAIN]
        if not nodes:
            return ir.passes.PassResult(model, modified=False)
        convs = {node: _Conv(node) for node in nodes if node.op_type == "Conv"}
        channels = _Channels(model, convs)
        written: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}
        for conv in convs.values():
            conv.rewrite(model, channels, written)
        channels.forget_shapes()
        remove_unread_initializers(model.graph, [value for value, _ in written])
        for node in (node for node in nodes if node not in convs):
            if node.op_type in ("ReorderInput", "ReorderOutput"):
                _rewrite_reorder(node)
            elif node.op_type == "Upsample":
                _rewrite_upsample(node)
            else:
                node.domain = ""
        return ir.passes.PassResult(model, modified=True)


class _Conv:
    """A convolution, and its weight as a standard one has it.

    Attributes:
        weight: `[out, in / group, height, width]`, filled up with zeros.
        bias: `[out]`, filled up with zeros.
        group: number of groups of channels.
        is_depthwise: whether each channel is a group.
    """

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.weight = _unpacked(_stored(node, 1), node)
        self.bias = _stored(node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else None
        self.group = node.attributes.get_int("group", 1)
        self.is_depthwise = self.group > 1 and self.weight.shape[1] == 1

    @property
    def channels_out(self) -> int:
        """Number of channels up to the last that is not zero."""
        rows = np.any(self.weight, axis=(1, 2, 3))
        return _last(rows if self.bias is None else rows | (self.bias != 0))

    @property
    def channels_in(self) -> int:
        """Number of channels up to the last that counts."""
        return _last(np.any(self.weight, axis=(0, 2, 3)))

    def rewrite(
        self, model: ir.Model, channels: _Channels, written: dict[tuple[ir.Value, tuple[int, ...]], ir.Value]
    ) -> None:
        """Makes it a standard one."""
        node = self.node
        out, into = channels.of(node.outputs[0]), channels.of(node.inputs[0]) if self.group == 1 else None
        arrays = [self.weight[:out, :into], *([] if self.bias is None else [self.bias[:out]])]
        for index, array in enumerate(arrays, start=1):
            packed = node.inputs[index]
            assert packed is not None
            key = packed, array.shape
            if key not in written:
                written[key] = _put(model, packed, array, "weight" if index == 1 else "bias")
            node.replace_input_with(index, written[key])
        if self.is_depthwise and out is not None:
            node.attributes["group"] = ir.AttrInt64("group", out)
        fused = bool(node.attributes.get_string("activation", "")) or len(node.inputs) > 3
        node.domain, node.op_type = ("com.microsoft", "FusedConv") if fused else ("", "Conv")
        if fused:
            model.graph.opset_imports.setdefault("com.microsoft", 1)


class _Channels:
    """How many channels blocked tensors have without the zeros that fill the last block.

    Those that are added, pooled and the like have as many: they are of one set, which has what any of them needs.
    """

    def __init__(self, model: ir.Model, convs: dict[ir.Node, _Conv]) -> None:
        self._set: dict[ir.Value, ir.Value] = {}
        self._needs: defaultdict[ir.Value, list[int | None]] = defaultdict(list)
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            inputs = [value for value in node.inputs if value in self._set and value is not None]
            if node in convs:
                self._add_conv(convs[node])
            elif node.domain == _DOMAIN and node.op_type == "ReorderInput":
                self._need(node.outputs[0], _channels_of(node))
            elif node.domain == _DOMAIN and node.op_type == "ReorderOutput" and inputs:
                self._need(inputs[0], node.attributes["channels"].as_int())
            elif inputs and node.op_type == "Concat":  # of full blocks
                for value in (*inputs, node.outputs[0]):
                    self._need(value, None)
            elif inputs:
                self._join(*inputs, node.outputs[0])

    def of(self, value: ir.Value | None) -> int | None:
        """Returns the number of channels; None where all that is stored are some."""
        if value is None or value not in self._set:
            return None
        root = self._root(value)
        needs = [need for other, given in self._needs.items() if self._root(other) is root for need in given]
        return None if None in needs else max(need for need in needs if need is not None)

    def forget_shapes(self) -> None:
        """Forgets the sizes that count the zeros."""
        for value in self._set:
            value.shape = None

    def _add_conv(self, conv: _Conv) -> None:
        x, y, summand = conv.node.inputs[0], conv.node.outputs[0], [*conv.node.inputs, None, None][3]
        assert x is not None
        full = conv.group > 1 and not conv.is_depthwise
        self._need(y, None if full else conv.channels_out)
        if conv.is_depthwise:
            self._join(x, y)
        elif x in self._set:
            self._need(x, None if full else conv.channels_in)
        if summand is not None:
            self._join(summand, y)

    def _root(self, value: ir.Value) -> ir.Value:
        while (above := self._set.setdefault(value, value)) is not value:
            value = above
        return value

    def _join(self, *values: ir.Value) -> None:
        for value in values:
            self._set[self._root(value)] = self._root(values[0])

    def _need(self, value: ir.Value, channels: int | None) -> None:
        self._root(value)
        self._needs[value].append(channels)


def _channels_of(entrance: ir.Node) -> int:
    x = entrance.inputs[0]
    axis = -1 if entrance.attributes.get_int("channels_last", 0) else 1
    size = x.shape[axis] if x is not None and x.shape is not None else None
    return size if isinstance(size, int) else 1  # those that read it will say


def _last(used: npt.NDArray[np.bool_]) -> int:
    return max([1, *(int(index) + 1 for index in np.flatnonzero(used)[-1:])])


def _stored(node: ir.Node, index: int) -> Array:
    value = node.inputs[index]
    if value is None or value.const_value is None:
        raise ModelError(
            f"Reading the convolution '{node.name}', which onnxruntime has laid out for one kind of CPU: its weight is "
            "not stored in the model. Start from the model before it was optimized."
        )
    return value.const_value.numpy()


def _unpacked(weight: Array, node: ir.Node) -> Array:
    """Returns a weight of which the elements are stored in the order in which a blocked kernel reads them."""
    block = _block()
    out, channels, *window = weight.shape
    if block == 1 or out % block:
        raise ModelError(
            f"Reading the convolution '{node.name}' with {out} channels: onnxruntime has laid this file out for a CPU "
            f"other than this one, which has blocks of {block}. Start from the model before it was optimized, or save "
            "the optimized one with graph_optimization_level ORT_ENABLE_EXTENDED."
        )
    if channels < block:  # of an image, which is not blocked, or one channel for each group
        blocks = weight.reshape(out // block, channels, *window, block)
        return np.moveaxis(blocks, -1, 1).reshape(weight.shape)
    blocks = weight.reshape(out // block, channels // block, *window, block, block)
    return np.moveaxis(blocks, (-1, -2), (1, 3)).reshape(weight.shape)


def _put(model: ir.Model, packed: ir.Value, array: Array, role: str) -> ir.Value:
    """Returns a new initializer: under the name of the packed one a file's reader would look for the packed numbers."""
    name = fresh_name(model, f"{packed.name}.{role}")
    tensor = ir.Tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(name=name, type=packed.type, shape=ir.Shape(array.shape), const_value=tensor)
    value.metadata_props.update(packed.metadata_props)
    model.graph.register_initializer(value)
    return value


def _rewrite_reorder(node: ir.Node) -> None:
    (x,), last = node.inputs, node.attributes.get_int("channels_last", 0)
    assert x is not None
    if last:
        _become(
            node, "Transpose", [x], perm=_CHANNELS_FIRST if node.op_type == "ReorderInput" else _CHANNELS_LAST
        )
    else:
        stand_in(node.outputs[0], x, node)
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def _rewrite_upsample(node: ir.Node) -> None:
    given = node.attributes
    factors = [float(scale) for scale in given["scales"].as_ints()]
    _become(
        node,
        "Resize",
        [node.inputs[0], None, write_before(node, "scales", "Constant", value_floats=factors)],
        mode=given.get_string("mode", "nearest"),
        coordinate_transformation_mode=given.get_string("coordinate_transformation_mode", "asymmetric"),
        nearest_mode="floor",
    )


def _become(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> None:
    """Turns a node into one of a standard op."""
    node.domain, node.op_type = "", op_type
    node.attributes.clear()
    for name, given in attributes.items():
        node.attributes.add(ir.convenience.convert_attribute(name, given))
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


@functools.cache
def _block() -> int:
    """Returns how many channels onnxruntime lays beside each other on this machine; 1 if it lays out none so."""
    x, w, y = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 1, 1, 1]))
        for name in "xwy"
    )
    w.const_value = ir.tensor(np.zeros((1, 1, 1, 1), np.float32), name="w")
    conv = ir.node("Conv", [x, w], outputs=[y])
    graph = ir.Graph([x], [y], nodes=[conv], initializers=[w], opset_imports={"": CANONICAL_OPSET})
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS  # it warns that what it writes is for this machine
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "laid_out.onnx")
        model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        laid_out = ir.load(options.optimized_model_filepath).graph
        weights = [node.inputs[1] for node in laid_out if node.domain == _DOMAIN and node.op_type == "Conv"]
    return 1 if not weights or weights[0] is None or weights[0].shape is None else weights[0].shape.numpy()[0]
