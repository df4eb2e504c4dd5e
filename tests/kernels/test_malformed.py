"""Kernels on inputs that no model of onnxtrain gives them, but any file may: an error that names the op, and no crash.

AddressSanitizer, under which `make test-sanitized` runs this, ends the process where a kernel reads beyond its inputs.
`ONNXTRAIN_KERNEL_CASES` is the number of cases; `ONNXTRAIN_KERNEL_SEED` the first one's seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from kernels.against_body import Inputs, needs_kernels, run
from kernels.every_kernel import Call, recorded_calls
from kernels.test_fuzz import CASES, SEED
from onnxtrain.functions import COMPOSITES
from onnxtrain.runtime.kernels import register_kernels

pytestmark = needs_kernels


def _inputs(name: str, *shapes: tuple[int, ...]) -> Inputs:
    composite = COMPOSITES[name]
    dtypes = {
        key: np.int64 if dtype == ir.DataType.INT64 else np.uint8 for key, dtype in composite.dtypes.items()
    }
    return {
        key: np.ones(shape, dtypes.get(key, np.float64))
        for key, shape in zip(composite.inputs, shapes, strict=True)
    }


WINDOWS = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1]}
NORM = {"epsilon": 1e-5, "momentum": 0.9}
ROW = (4,)
REFUSED: dict[str, tuple[Call, str]] = {
    "fewer factors than rows": (
        (
            "InverseRMSNormalizationGradient",
            _inputs("InverseRMSNormalizationGradient", (3, 4), (3, 4), ROW, (2, 1)),
            {},
        ),
        r"one factor per row \(inputs: \[3, 4\], \[3, 4\], \[4\], \[2, 1\]\)",
    ),
    "fewer means than rows": (
        (
            "FlooredRMSNormalizationGradient",
            _inputs("FlooredRMSNormalizationGradient", (3, 4), (3, 4), ROW, (1,), (), ()),
            {},
        ),
        "one root mean square per row",
    ),
    "an empty epsilon": (
        ("InverseRMSNormalization", _inputs("InverseRMSNormalization", (3, 4), ROW, (0,)), {}),
        "one number",
    ),
    "an empty floor": (
        ("FlooredRMSNormalization", _inputs("FlooredRMSNormalization", (3, 4), ROW, (), (0,)), {}),
        "one number",
    ),
    "an empty factor": (
        (
            "FlooredRMSNormalizationGradient",
            _inputs("FlooredRMSNormalizationGradient", (3, 4), (3, 4), ROW, (3,), (0,), ()),
            {},
        ),
        "one number",
    ),
    "an empty epsilon of a series": (
        ("InstanceStandardization", _inputs("InstanceStandardization", (2, 3, 4), (0,)), {"axes": [1]}),
        "one number",
    ),
    "an empty epsilon of series": (
        (
            "ReversibleInstanceNormalization",
            _inputs("ReversibleInstanceNormalization", (2, 3, 4), ROW, ROW, (0,)),
            {"axes": [1]},
        ),
        "one number",
    ),
    "pooling of an empty axis": (
        ("MaxPool", _inputs("MaxPool", (1, 1, 0, 3)), WINDOWS),
        r"an input along each axis \(inputs: \[1, 1, 0, 3\]\)",
    ),
    "pooling of an empty axis behind a norm": (
        (
            "BatchNormalizationMaxPoolRelu",
            _inputs("BatchNormalizationMaxPoolRelu", (1, 1, 3, 0), *[(1,)] * 4),
            {**NORM, **WINDOWS},
        ),
        "an input along each axis",
    ),
    "a kernel without taps": (
        (
            "Convolution",
            _inputs("Convolution", (1, 2, 5, 5), (2, 2, 0, 3), (2,)),
            {"strides": [1, 1], "dilations": [1, 1], "pads": [1, 1, 1, 1], "group": 1},
        ),
        "a tap along each axis",
    ),
    "an image without axes": (
        (
            "Convolution",
            _inputs("Convolution", (), (2, 2, 3, 3), (2,)),
            {"strides": [1, 1], "dilations": [1, 1], "pads": [1, 1, 1, 1], "group": 1},
        ),
        "as many axes as strides, and two",
    ),
    "a transposed convolution of other channels": (
        (
            "ConvolutionTranspose",
            _inputs("ConvolutionTranspose", (1, 3, 5, 5), (2, 2, 3, 3), (2,)),
            {"strides": [1, 1], "dilations": [1, 1], "pads": [1] * 4, "group": 1, "output_padding": [0, 0]},
        ),
        r"channels of x and w must fit \(inputs: \[1, 3, 5, 5\], \[2, 2, 3, 3\], \[2\]\)",
    ),
    "a transposed convolution of no positions": (
        (
            "ConvolutionTranspose",
            _inputs("ConvolutionTranspose", (1, 2, 0, 5), (2, 2, 3, 3), (2,)),
            {"strides": [1, 1], "dilations": [1, 1], "pads": [1] * 4, "group": 1, "output_padding": [0, 0]},
        ),
        "a position along each axis",
    ),
    "more padding than a transposed convolution has": (
        (
            "ConvolutionTranspose",
            _inputs("ConvolutionTranspose", (1, 2, 1, 5), (2, 2, 3, 3), (2,)),
            {"strides": [1, 1], "dilations": [1, 1], "pads": [2] * 4, "group": 1, "output_padding": [0, 0]},
        ),
        "takes away more than there is",
    ),
    "output padding of a stride": (
        (
            "ConvolutionTranspose",
            _inputs("ConvolutionTranspose", (1, 2, 4, 5), (2, 2, 3, 3), (2,)),
            {"strides": [2, 1], "dilations": [1, 1], "pads": [0] * 4, "group": 1, "output_padding": [2, 0]},
        ),
        "smaller than the stride",
    ),
    "a repeated axis": (
        (
            "MatMulPermutedLeftBfloat16",
            _inputs("MatMulPermutedLeftBfloat16", (2, 3), (2, 3)),
            {"perm_a": [0, 0]},
        ),
        "each axis of its factor once",
    ),
    "fewer scales than blocks": (
        (
            "Uint4Product",
            _inputs("Uint4Product", (3, 4), (4, 64), (4, 1), (4, 2)),
            {"block_size": 32},
        ),
        r"a scale and a zero point \(inputs: \[3, 4\], \[4, 64\], \[4, 1\], \[4, 2\]\)",
    ),
    "fewer zero points than blocks": (
        (
            "Uint8ProductFloatZeros",
            _inputs("Uint8ProductFloatZeros", (3, 4), (4, 64), (4, 2), (4, 1)),
            {"block_size": 32},
        ),
        "a scale and a zero point",
    ),
    "other rows of codes": (
        ("Uint8Product", _inputs("Uint8Product", (3, 4), (5, 64), (5, 2), (5, 2)), {"block_size": 32}),
        "as many as the columns of x",
    ),
    "a row of codes that ends within a block": (
        ("Uint8Product", _inputs("Uint8Product", (3, 4), (4, 40), (4, 2), (4, 2)), {"block_size": 32}),
        "whole blocks",
    ),
    "a block without codes": (
        ("Uint4Product", _inputs("Uint4Product", (3, 4), (4, 64), (4, 2), (4, 2)), {"block_size": 0}),
        "a multiple of 16",
    ),
    "fewer codes than K and N say": (
        (
            "PackedMatMul",
            _inputs("PackedMatMul", (3, 40), (6, 2, 8), (6, 3), (6, 2)),
            {"K": 40, "N": 6, "bits": 4, "block_size": 16},
        ),
        "N rows of codes",
    ),
    "zero points without the end of each row": (
        (
            "PackedMatMul",
            _inputs("PackedMatMul", (3, 40), (6, 3, 8), (6, 3), (9,)),
            {"K": 40, "N": 6, "bits": 4, "block_size": 16},
        ),
        "each block must have a zero point",
    ),
    "codes of three bits": (
        (
            "PackedMatMul",
            _inputs("PackedMatMul", (3, 40), (6, 3, 8), (6, 3), (6, 2)),
            {"K": 40, "N": 6, "bits": 3, "block_size": 16},
        ),
        "2, 4 or 8 bits",
    ),
    "fewer than no groups": (
        (
            "GroupNormalizationGradient",
            _inputs("GroupNormalizationGradient", (2, 0, 3), (2, 0, 3), (0,)),
            {"epsilon": 1e-5, "num_groups": -1},
        ),
        "there must be groups",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    (name, inputs, attributes), message = REFUSED[case]
    with pytest.raises(Exception, match=f"{name}_float: .*{message}"):
        run(name, inputs, attributes, native=True)


def test_a_table_with_a_negative_size() -> None:
    inputs = {"ct": np.ones((1, 2)), "indices": np.array([0]), "shape": np.array([-1, -2])}
    assert list(inputs) == list(COMPOSITES["EmbeddingGradient"].inputs)
    with pytest.raises(Exception, match=r"EmbeddingGradient_float: .*must not be negative"):
        run("EmbeddingGradient", inputs, {}, native=True)


def _session(
    op: str,
    shapes: Mapping[str, tuple[int, ...]],
    outputs: list[str],
    attributes: Mapping[str, Any],
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    register_kernels(options)
    node = helper.make_node(
        op,
        list(shapes),
        outputs,
        domain="onnxtrain",
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * len(shape))
            for name, shape in shapes.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs if name],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)],
        ir_version=10,
    )
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


GEOMETRY = {"strides": [1, 1], "dilations": [1, 1], "pads": [1, 1, 1, 1], "group": 1}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kernel", [3, 1])
@pytest.mark.parametrize("channels", [(3, 4), (0, 4), (3, 0), (40, 40)], ids=str)
@pytest.mark.parametrize("form", ["", "Transpose"])
def test_any_output_of_a_convolution_gradient_may_be_unread(
    channels: tuple[int, int], kernel: int, form: str
) -> None:
    inputs, rows = channels
    rng = np.random.default_rng(0)
    geometry = {**GEOMETRY, "pads": [kernel // 2] * 4}
    weights = (inputs, rows) if form else (rows, inputs)
    shapes = {"ct": (2, rows, 5, 5), "x": (2, inputs, 5, 5), "w": (*weights, kernel, kernel)}
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    op = f"Convolution{form}Gradient0_float"
    every = _session(op, shapes, ["dx", "dw", "db"], geometry).run(None, feeds)
    assert [value.shape for value in every] == [shapes["x"], shapes["w"], (rows,)]
    np.testing.assert_allclose(every[2], feeds["ct"].sum((0, 2, 3)), rtol=1e-4, atol=1e-5)
    for index, name in enumerate(("dx", "dw", "db")):
        names = ["", "", ""]
        names[index] = name
        (value,) = _session(op, shapes, names, geometry).run(None, feeds)
        np.testing.assert_array_equal(value, every[index])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("strides", [0, 1]),
        ("dilations", [1, -1]),
        ("pads", [1 << 40] * 4),
        ("dilations", [1 << 62] * 2),
        ("group", 0),
        ("strides", [1]),
    ],
)
def test_attributes_of_no_convolution(attribute: str, value: int | list[int]) -> None:
    shapes = {"x": (1, 2, 5, 5), "w": (2, 2, 3, 3), "b": (2,)}
    for op, more in (("Convolution", {}), ("ConvolutionTranspose", {"output_padding": [0, 0]})):
        with pytest.raises(Exception, match=f"{op}_float: "):
            _session(f"{op}_float", shapes, ["y"], {**GEOMETRY, **more, attribute: value})


def _mutated_shape(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    dims = list(shape)
    kind = rng.integers(7)
    axis = int(rng.integers(len(dims))) if dims else 0
    if kind == 0 and dims:
        del dims[axis]
    elif kind == 1:
        dims.insert(axis, int(rng.integers(3)))
    elif kind == 2 and len(dims) > 1:
        dims.reverse()
    elif dims:
        dims[axis] = int(rng.choice([0, 1, dims[axis] + 1, max(dims[axis] - 1, 0), 2 * dims[axis]]))
    return tuple(dims)


def _mutated(
    rng: np.random.Generator, inputs: dict[str, np.ndarray | None], attributes: dict[str, Any]
) -> tuple[dict[str, np.ndarray | None], dict[str, Any]]:
    """Returns the call with a size changed wherever it is, and with some shapes and attributes changed."""
    inputs, attributes = dict(inputs), dict(attributes)
    sizes = sorted({size for value in inputs.values() if value is not None for size in value.shape})
    if sizes and rng.random() < 0.5:  # the same size everywhere, so that shapes still fit
        before, after = int(rng.choice(sizes)), int(rng.choice([0, 1, 2, 50]))
        for key, value in inputs.items():
            if value is not None:
                shape = tuple(after if size == before else size for size in value.shape)
                inputs[key] = _of_shape(value, shape)
    for _ in range(int(rng.choice([0, 1, 1, 1, 2]))):
        integers = [key for key, value in attributes.items() if not isinstance(value, float)]
        if integers and rng.random() < 0.3:
            key = str(rng.choice(integers))
            if isinstance(attributes[key], int):
                attributes[key] = int(rng.choice([-1, 0, 1, 2, 3, 50]))
                continue
            values = list(attributes[key])
            if values and rng.random() < 0.7:
                values[int(rng.integers(len(values)))] = int(rng.choice([-3, -1, 0, 1, 2, 9]))
            else:
                # onnx.helper (1.23) makes no attribute of an empty list.
                values = [*values, 1] if rng.random() < 0.5 or len(values) < 2 else values[1:]
            attributes[key] = values
            continue
        key = str(rng.choice([key for key, value in inputs.items() if value is not None]))
        value = inputs[key]
        assert value is not None
        if value.dtype == np.int64 and rng.random() < 0.5:
            inputs[key] = value + rng.integers(-3, 4, value.shape)
        else:
            shape = _mutated_shape(rng, value.shape)
            inputs[key] = _of_shape(value, shape)
    return inputs, attributes


def _of_shape(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(value, shape) if value.size else np.ones(shape, value.dtype)


CONVOLUTIONS: list[Call] = [
    ("Convolution", _inputs("Convolution", (2, channels, 9, 8), (rows, channels // group, *kernel), (rows,)),
     {"strides": [stride] * 2, "dilations": [1, 1], "pads": [1, 0, 1, 2], "group": group})
    for channels, rows, group, kernel, stride in (
        (3, 4, 1, (3, 3), 1), (40, 40, 1, (3, 3), 1), (6, 6, 6, (3, 3), 2), (4, 2, 2, (1, 1), 1), (3, 5, 1, (5, 2), 3),
    )
]  # fmt: skip
CONVOLUTIONS += [
    ("ConvolutionTranspose",
     _inputs("ConvolutionTranspose", (2, rows, 9, 8), (rows, channels // group, *kernel), (channels,)),
     {"strides": [stride] * 2, "dilations": [1, 1], "pads": [1, 0, 1, 2], "group": group,
      "output_padding": [0, stride - 1]})
    for channels, rows, group, kernel, stride in (
        (3, 4, 1, (3, 3), 1), (40, 40, 1, (3, 3), 1), (6, 6, 6, (3, 3), 2), (4, 2, 2, (1, 1), 1), (3, 5, 1, (5, 2), 3),
    )
]  # fmt: skip


def test_random_changes() -> None:
    calls = [*recorded_calls(), *CONVOLUTIONS]
    refused = 0
    for seed in range(SEED, SEED + 5 * CASES):
        rng = np.random.default_rng([seed, 21])
        name, inputs, attributes = calls[int(rng.integers(len(calls)))]
        inputs, attributes = _mutated(rng, dict(inputs), attributes)
        shapes = {key: None if value is None else value.shape for key, value in inputs.items()}
        try:
            run(name, inputs, attributes, native=True)
        except Exception as error:
            refused += 1
            if not re.search(f"{name}_float", str(error)):
                error.add_note(f"seed {seed}: {name} {attributes} on {shapes}: the error names no op")
                raise
    assert CASES < refused < 5 * CASES
