"""Restores standard ops in convolutional models that onnxruntime has optimized for one type of CPU."""

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
from onnxtrain.passes.tidy.constants import add_initializer
from onnxtrain.passes.tidy.replace_value import replace_node, write_before
from onnxtrain.passes.tidy.unique_names import fresh_name
from onnxtrain.passes.tidy.unused import remove_unread_initializers

_DOMAIN = "com.microsoft.nchwc"
_CHANNELS_FIRST, _CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
# ONNX Runtime's severity of errors.
_ERRORS = 3

Array = npt.NDArray[np.float32]


class BlockedLayoutPass(ir.passes.InPlacePass):
    """Replaces `com.microsoft.nchwc` ops, which onnxruntime's optimizer emits at its highest level.

    Between ReorderInput and ReorderOutput, tensors are stored in blocks of 8 or 16 channels, the width of the CPU's
    vector registers. The last block is padded with zero channels, and weights are packed to match
    (`onnxruntime/core/optimizer/nchwc_transformer.cc`). The pass restores plain tensors, and weights
    `[channels out, channels in / group, height, width]` without padding. A restored initializer is named after the
    packed initializer, with `.weight` or `.bias` appended. A convolution with a fused activation or sum becomes a
    `com.microsoft` FusedConv.

    The file doesn't contain the block size. Like onnxruntime when it runs the file, the pass assumes the block size of
    the current machine.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place; its opset must be the canonical one or newer.

        Raises:
            ModelError: the block size was chosen for a different CPU, or a weight is not stored in the model.
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
    """A convolution in the blocked NCHWc layout, with its unpacked weight.

    Attributes:
        node: the node of the domain `com.microsoft.nchwc`.
        weight: float32 `[out, in / group, height, width]`, including padding.
        bias: float32 `[out]`, including padding, or None without a bias.
        group: number of channel groups.
        is_depthwise: True if each channel is its own group.
    """

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.weight = _unpacked(_stored(node, 1), node)
        self.bias = _stored(node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else None
        self.group = node.attributes.get_int("group", 1)
        self.is_depthwise = self.group > 1 and self.weight.shape[1] == 1

    @property
    def channels_out(self) -> int:
        """Number of output channels, not counting trailing channels whose weights and bias are all zero."""
        rows = np.any(self.weight, axis=(1, 2, 3))
        return _used_channels(rows if self.bias is None else rows | (self.bias != 0))

    @property
    def channels_in(self) -> int:
        """Number of input channels, not counting trailing channels whose weights are all zero."""
        return _used_channels(np.any(self.weight, axis=(0, 2, 3)))

    def rewrite(
        self, model: ir.Model, channels: _Channels, written: dict[tuple[ir.Value, tuple[int, ...]], ir.Value]
    ) -> None:
        """Turns the node into a Conv or FusedConv with plain weights.

        Args:
            model: the model, to which the weights are added.
            channels: channel counts of all blocked tensors.
            written: plain weights created so far, by packed weight and shape, because layers may share a weight.
        """
        node = self.node
        out, into = channels.of(node.outputs[0]), channels.of(node.inputs[0]) if self.group == 1 else None
        arrays = [self.weight[:out, :into], *([] if self.bias is None else [self.bias[:out]])]
        for index, array in enumerate(arrays, start=1):
            packed = node.inputs[index]
            assert packed is not None
            key = packed, array.shape
            if key not in written:
                written[key] = _add_unpacked(model, packed, array, "weight" if index == 1 else "bias")
            node.replace_input_with(index, written[key])
        # The blocked op counts padding channels as groups.
        if self.is_depthwise and out is not None:
            node.attributes["group"] = ir.AttrInt64("group", out)
        fused = bool(node.attributes.get_string("activation", "")) or len(node.inputs) > 3
        node.domain, node.op_type = ("com.microsoft", "FusedConv") if fused else ("", "Conv")
        if fused:
            model.graph.opset_imports.setdefault("com.microsoft", 1)


class _Channels:
    """Channel counts of blocked tensors, without padding.

    The inputs and output of an elementwise op or pooling have the same number of channels. They form a set
    (union-find), whose channel count is the maximum that any member needs.
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
            # onnxruntime only concatenates blocked tensors without padding, so all stored channels count.
            elif inputs and node.op_type == "Concat":
                for value in (*inputs, node.outputs[0]):
                    self._need(value, None)
            elif inputs:
                self._join(*inputs, node.outputs[0])

    def of(self, value: ir.Value | None) -> int | None:
        """Returns the channel count of `value`.

        Returns None if `value` is not blocked, or if all its stored channels are needed.
        """
        if value is None or value not in self._set:
            return None
        root = self._root(value)
        needs = [
            need for member, wanted in self._needs.items() if self._root(member) is root for need in wanted
        ]
        return None if None in needs else max(need for need in needs if need is not None)

    def forget_shapes(self) -> None:
        """Removes the annotated shapes of blocked tensors, because these shapes include padding channels."""
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
    """Returns the number of channels that a ReorderInput reads, or 1, the minimum, if it is unknown."""
    x = entrance.inputs[0]
    axis = -1 if entrance.attributes.get_int("channels_last", 0) else 1
    size = x.shape[axis] if x is not None and x.shape is not None else None
    # If the size is symbolic, the weights of the convolutions that read the tensor determine the channels.
    return size if isinstance(size, int) else 1


def _used_channels(used: npt.NDArray[np.bool_]) -> int:
    """Returns the number of channels up to the last used one, at least 1."""
    return max([1, *(int(index) + 1 for index in np.flatnonzero(used)[-1:])])


def _stored(node: ir.Node, index: int) -> Array:
    """Returns the content of an input. Raises ModelError if it is not stored in the model."""
    value = node.inputs[index]
    if value is None or value.const_value is None:
        raise ModelError(
            f"Cannot read the convolution '{node.name}', which onnxruntime has optimized for one kind of "
            "CPU (NCHWc layout): its weight is not stored in the model. Use the model from before that "
            "optimization."
        )
    return value.const_value.numpy()


def _unpacked(weight: Array, node: ir.Node) -> Array:
    """Returns a weight `[out, in / group, height, width]` from its packed form for a blocked kernel."""
    block = _block()
    out, channels, *window = weight.shape
    if block == 1 or out % block:
        raise ModelError(
            f"Cannot read the convolution '{node.name}' with {out} channels: onnxruntime has optimized "
            f"this file for another CPU (NCHWc layout), and this CPU uses blocks of {block} channels. Use "
            "the model from before that optimization, or optimize it with graph_optimization_level "
            "ORT_ENABLE_EXTENDED."
        )
    # Only output channels are blocked: the input is an image, or each group has one channel.
    if channels < block:
        blocks = weight.reshape(out // block, channels, *window, block)
        return np.moveaxis(blocks, -1, 1).reshape(weight.shape)
    blocks = weight.reshape(out // block, channels // block, *window, block, block)
    return np.moveaxis(blocks, (-1, -2), (1, 3)).reshape(weight.shape)


def _add_unpacked(model: ir.Model, packed: ir.Value, array: Array, role: str) -> ir.Value:
    """Adds a plain weight as an initializer named after the packed weight and `role`.

    The packed weight is kept, because other nodes may still read it.
    """
    name = fresh_name(model, f"{packed.name}.{role}")
    value = add_initializer(model.graph, ir.Tensor(np.ascontiguousarray(array), name=name))
    value.metadata_props.update(packed.metadata_props)
    return value


def _rewrite_reorder(node: ir.Node) -> None:
    """Removes a ReorderInput or ReorderOutput, or replaces it with a Transpose if it also transposes."""
    (x,), last = node.inputs, node.attributes.get_int("channels_last", 0)
    assert x is not None
    if last:
        _become(
            node, "Transpose", [x], perm=_CHANNELS_FIRST if node.op_type == "ReorderInput" else _CHANNELS_LAST
        )
    else:
        replace_node(node, x)


def _rewrite_upsample(node: ir.Node) -> None:
    """Turns a blocked Upsample into a Resize."""
    attributes = node.attributes
    factors = [float(scale) for scale in attributes["scales"].as_ints()]
    _become(
        node,
        "Resize",
        [node.inputs[0], None, write_before(node, "scales", "Constant", value_floats=factors)],
        mode=attributes.get_string("mode", "nearest"),
        coordinate_transformation_mode=attributes.get_string("coordinate_transformation_mode", "asymmetric"),
        nearest_mode="floor",
    )


def _become(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> None:
    """Turns `node` into the standard op `op_type` with these inputs and attributes."""
    node.domain, node.op_type = "", op_type
    node.attributes.clear()
    for name, setting in attributes.items():
        node.attributes.add(ir.convenience.convert_attribute(name, setting))
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


@functools.cache
def _block() -> int:
    """Returns onnxruntime's block size on this machine, e.g. 16 with AVX-512, or 1 if it does not block channels.

    onnxruntime has no API for this number. The function lets onnxruntime optimize a Conv with one channel, and returns
    the number of channels to which its weight was padded.
    """
    x, w, y = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 1, 1, 1]))
        for name in "xwy"
    )
    w.const_value = ir.tensor(np.zeros((1, 1, 1, 1), np.float32), name="w")
    conv = ir.node("Conv", [x, w], outputs=[y])
    graph = ir.Graph([x], [y], nodes=[conv], initializers=[w], opset_imports={"": CANONICAL_OPSET})
    options = ort.SessionOptions()
    # onnxruntime warns that the optimized model is specific to this machine, which is intended here.
    options.log_severity_level = _ERRORS
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "laid_out.onnx")
        model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        laid_out = ir.load(options.optimized_model_filepath).graph
        weights = [node.inputs[1] for node in laid_out if node.domain == _DOMAIN and node.op_type == "Conv"]
    return 1 if not weights or weights[0] is None or weights[0].shape is None else weights[0].shape.numpy()[0]
