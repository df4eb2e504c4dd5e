"""Writes the preprocessing of images into a model, which then takes uint8 images of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.images._pipeline import Pipeline
from onnxtrain.passes.tidy.unique_names import fresh_name

FUNCTION = "PrepareImages"
"""Name of the function, of domain "onnxtrain", that exported models call."""

_DOING = "Exporting with the preprocessing"
# Pillow's fixed-point weights have this many bits after the point.
_BITS = 22


class _Body:
    """Nodes of a function. Calling it adds a node and returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def const(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> str:
        return self("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))


def attach_preprocessing(model: ir.Model, pipeline: Pipeline) -> None:
    """Makes a model take uint8 images [batch, height, width, channels] of any size, in place.

    Pillow resizes horizontally and then vertically, with weights of 22 bits, and rounds after each pass. In float64,
    these sums are exact, so the graph computes the same bits. Pillow 13 resizes some images vertically first
    (https://github.com/python-pillow/Pillow/pull/9549), which changes pixel values by at most 1 if bilinear; the cubic
    overshoots at sharp edges, and is clipped after the first pass, so there it may be more.

    Args:
        model: model with one input, of images.
        pipeline: pipeline of the model's input.

    Raises:
        InputError: the model has several inputs, or the pipeline resizes in another way than bilinear or bicubic, or
            takes four channels.
    """
    graph = model.graph
    interpolation = pipeline.preprocessing.interpolation or "bilinear"
    channels = pipeline.shape[-1] if pipeline.channels_last else pipeline.shape[0]
    if len(graph.inputs) != 1:
        names = ", ".join(str(value.name) for value in graph.inputs)
        raise InputError(f"{_DOING}: the model has the inputs {names}; only a single one can take images.")
    if interpolation not in ("bilinear", "bicubic") or channels == 4:
        raise InputError(
            f"{_DOING}: images of {channels} channels with {argument('interpolation', interpolation)} cannot be "
            "resized in the model as they were in training; only bilinear and bicubic resizing of 1 or 3 channels can. "
            "Export without it."
        )
    old = graph.inputs[0]
    assert old.dtype is not None
    function = _function(pipeline, old.dtype, model.opset_imports[""], interpolation, channels)
    loaded: Any = ir.from_proto(function)
    model.functions[("onnxtrain", FUNCTION, "")] = loaded
    model.opset_imports.setdefault("onnxtrain", 1)
    batch = "batch" if old.shape is None else old.shape[0]
    images = ir.Value(
        name=old.name,
        type=ir.TensorType(ir.DataType.UINT8),
        shape=ir.Shape([batch, "height", "width", channels]),
    )
    graph.inputs[0] = images
    call = ir.node(FUNCTION, [images], domain="onnxtrain", name=fresh_name(model, "prepare_images"))
    prepared = call.outputs[0]
    prepared.name, prepared.type, prepared.shape = (
        fresh_name(model, f"{old.name}.prepared"),
        old.type,
        old.shape,
    )
    old.replace_all_uses_with(prepared, replace_graph_outputs=True)
    graph.insert_before(graph[0], call)


def _function(
    pipeline: Pipeline, dtype: ir.DataType, opset: int, interpolation: str, channels: int
) -> onnx.FunctionProto:
    op = _Body()
    height, width = (
        op("Squeeze", op("Shape", "images", start=axis, end=axis + 1), op.const([0], np.int64))
        for axis in (1, 2)
    )
    new_width, new_height = _resized(op, pipeline, width, height)
    across = _weights(op, width, new_width, pipeline.size[1], interpolation)
    down = _weights(op, height, new_height, pipeline.size[0], interpolation)
    pixels = op("Cast", op("Transpose", "images", perm=[0, 3, 1, 2]), to=TensorProto.DOUBLE)
    pixels = _rounded(op, op("MatMul", pixels, op("Transpose", across, perm=[1, 0])))
    pixels = _rounded(op, op("MatMul", down, pixels))
    settings = pipeline.preprocessing
    if settings.bgr:
        pixels = op("Gather", pixels, op.const(list(range(channels))[::-1], np.int64), axis=1)
    if settings.mean is not None and settings.std is not None:
        # In float32 and in the order of `Pipeline.table`.
        values = op("Cast", pixels, to=TensorProto.FLOAT)
        inverse = 1 / settings.scale
        if inverse == 255:
            values = op("Div", values, op.const(inverse, np.float32))
        else:
            values = op("Mul", values, op.const(settings.scale, np.float32))
        mean, std = (np.reshape(entry, (1, -1, 1, 1)) for entry in (settings.mean, settings.std))
        pixels = op("Div", op("Sub", values, op.const(mean, np.float32)), op.const(std, np.float32))
    if pipeline.channels_last:
        pixels = op("Transpose", pixels, perm=[0, 2, 3, 1])
    op.nodes.append(helper.make_node("Cast", [pixels], ["prepared"], to=dtype.value))
    return helper.make_function(
        "onnxtrain", FUNCTION, ["images"], ["prepared"], op.nodes, [helper.make_opsetid("", opset)]
    )


def _resized(op: _Body, pipeline: Pipeline, width: str, height: str) -> tuple[str, str]:
    """Returns width and height after resizing and before the center crop, as `images._pipeline.resized` does."""
    resize = pipeline.preprocessing.resize
    if isinstance(resize, tuple):
        return op.const(resize[1], np.int64), op.const(resize[0], np.int64)
    rows, columns = (op.const(side, np.int64) for side in pipeline.size)
    if resize is None:
        by_width = op("LessOrEqual", op("Mul", width, rows), op("Mul", height, columns))
    else:
        rows = columns = op.const(resize, np.int64)
        by_width = op("LessOrEqual", width, height)
    # Integer divisions round down, as int() does with these quotients.
    wide = op("Div", op("Mul", rows, width), height)
    high = op("Div", op("Mul", columns, height), width)
    return op("Where", by_width, columns, wide), op("Where", by_width, high, rows)


def _weights(op: _Body, size: str, new: str, kept: int, interpolation: str) -> str:
    """Returns the weights of Pillow's resampling along one axis, multiplied by 2**22, double [kept, size].

    They are those of `precompute_coeffs` and `normalize_coeffs_8bpc` in Pillow's Resample.c, for the pixels that the
    center crop keeps.

    Args:
        op: the nodes.
        size: number of pixels of the image, int64.
        new: number of pixels after resizing, int64.
        kept: number of pixels after the crop.
        interpolation: "bilinear" or "bicubic".
    """

    def double(value: float) -> str:
        return op.const(value, np.float64)

    zero, one, two = (op.const(number, np.int64) for number in (0, 1, 2))
    # The first pixel that the crop keeps is half of the rest, where halves are rounded to even.
    rest = op("Sub", new, op.const(kept, np.int64))
    first = op("Div", op("Add", rest, op("Mod", op("Div", rest, two), two)), two)
    target = op(
        "Cast", op("Range", first, op("Add", first, op.const(kept, np.int64)), one), to=TensorProto.DOUBLE
    )
    source = op("Cast", op("Range", zero, size, one), to=TensorProto.DOUBLE)
    scale = op("Div", op("Cast", size, to=TensorProto.DOUBLE), op("Cast", new, to=TensorProto.DOUBLE))
    inverse = op("Div", double(1), op("Max", scale, double(1)))
    center = op("Unsqueeze", op("Mul", op("Add", target, double(0.5)), scale), op.const([1], np.int64))
    distance = op("Mul", op("Add", op("Sub", source, center), double(0.5)), inverse)
    weights = _filter(op, op("Abs", distance), interpolation, double)
    total = op("ReduceSum", weights, op.const([1], np.int64))
    fixed = op("Mul", op("Div", weights, total), double(2**_BITS))
    # Rounded half away from zero.
    size_of = op("Floor", op("Add", op("Abs", fixed), double(0.5)))
    return op("Mul", op("Sign", fixed), size_of)


def _filter(op: _Body, x: str, interpolation: str, double: Any) -> str:
    """Returns the filter at the distances `x` >= 0: a triangle, or the cubic with a = -0.5."""
    if interpolation == "bilinear":
        return op("Max", op("Sub", double(1), x), double(0))
    near = op("Add", op("Mul", op("Mul", op("Sub", op("Mul", double(1.5), x), double(2.5)), x), x), double(1))
    inner = op("Add", op("Mul", op("Sub", x, double(5)), x), double(8))
    far = op("Mul", op("Sub", op("Mul", inner, x), double(4)), double(-0.5))
    outside = op("Where", op("Less", x, double(2)), far, double(0))
    return op("Where", op("Less", x, double(1)), near, outside)


def _rounded(op: _Body, sums: str) -> str:
    """Returns fixed-point sums as whole pixel values, from 0 to 255."""
    half, whole = op.const(2.0 ** (_BITS - 1), np.float64), op.const(2.0**_BITS, np.float64)
    floor = op("Floor", op("Div", op("Add", sums, half), whole))
    return op("Clip", floor, op.const(0, np.float64), op.const(255, np.float64))
