"""Ops of com.microsoft: the standard ops that they become compute what ONNX Runtime's own kernels do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from autodiff import test_quantized_ops
from onnxtrain import differentiate
from onnxtrain.errors import NoGradientRule
from onnxtrain.op_bodies import op_bodies
from runtimes import makes_reals_of_spectra, runs_opset

_RNG = np.random.default_rng(0)


def _f(*shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return _RNG.uniform(low, high, shape).astype(np.float32)


def _packed(*shape: int) -> np.ndarray:
    return _RNG.integers(0, 256, shape).astype(np.uint8)


@dataclass(frozen=True)
class Op:
    """A node with its inputs, None for an omitted one; those of floating point in `wrt` are differentiated."""

    op: str
    inputs: Sequence[np.ndarray | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    wrt: Sequence[int] = (0,)
    outputs: Sequence[str] = ("y",)
    name: str = ""
    domain: str = "com.microsoft"
    runs: bool = True
    """True if ONNX Runtime has a kernel for the CPU."""
    stays: bool = False
    """True if the op has a rule of its own, so that its body does not replace it."""

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}" if self.name else self.op


X = _f(2, 5, 8)
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
ANGLES = np.outer(np.arange(10), 0.7 ** np.arange(2)).astype(np.float32)
WIDE = np.outer(np.arange(10), 0.7 ** np.arange(8)).astype(np.float32)
LENGTHS = [np.array([4, 4], np.int32), np.array(5, np.int32)]
PAST = [np.array([6], np.int32), np.array(7, np.int32)]
UNEVEN = [np.array([2, 4], np.int32), np.array(5, np.int32)]
ORDER = np.random.default_rng(2).permutation(np.repeat([0, 1], 16)).astype(np.int32)
GROUPED = ("y", "k", "v")
ML = "ai.onnx.ml"
COEFFICIENTS = _f(12).tolist()
# Entries further from each other than a finite difference reaches: which one is the maximum stays.
APART = _RNG.permutation(np.linspace(0.2, 1.0, 12, dtype=np.float32)).reshape(3, 4)
OPS = [
    Op("FusedMatMul", [_f(3, 4, 2), _f(3, 5, 4)], {"transA": 1, "transB": 1, "alpha": 0.3}, (0, 1)),
    Op("FusedMatMul", [_f(4, 3, 5), _f(3, 5, 2)], {"transBatchA": 1}, (0, 1), name="batch"),
    Op("FusedGemm", [_f(3, 4), _f(5, 4), _f(5)], {"transB": 1, "alpha": 0.5, "activation": "Tanh"}, (0, 1, 2)),
    Op("FusedGemm", [_f(3, 4), _f(4, 5)], {"activation": "LeakyRelu", "activation_alpha": 0.2}, (0, 1), name="leaky"),
    Op("FusedGemm", [_f(3, 4), _f(4, 5)], {"activation": "Softsign"}, (0, 1), name="softsign"),
    Op(
        "FusedGemm",
        [_f(3, 4), _f(4, 5)],
        {"activation": "Selu", "activation_alpha": 1.5, "activation_gamma": 1.1},
        (0, 1),
        name="selu",
    ),
    Op(
        "FusedGemm",  # of integers: no product comes near the threshold, at which the op jumps
        [np.round(3 * _f(3, 4)), np.round(3 * _f(4, 5))],
        {"activation": "ThresholdedRelu", "activation_alpha": 0.5},
        (0, 1),
        name="thresholded",
    ),
    Op("FusedConv", [_f(1, 2, 5, 5), _f(3, 2, 3, 3), _f(3)], {"activation": "Relu", "pads": [1] * 4}, (0, 1, 2)),
    Op("FusedConv", [_f(1, 2, 5, 5), _f(2, 2, 3, 3), _f(2), _f(1, 2, 3, 3)], {}, (0, 1, 3), name="sum"),
    Op(
        "FusedConv", [_f(1, 2, 5, 5), _f(2, 1, 3, 3)],
        {"activation": "HardSigmoid", "activation_params": [0.3, 0.4], "group": 2, "strides": [2, 2]}, (0, 1),
        name="hard sigmoid",
    ),
    Op("Gelu", [X]),
    Op("BiasGelu", [X, _f(8)], {}, (0, 1)),
    Op("FastGelu", [X, _f(8)], {}, (0, 1)),
    Op("FastGelu", [X], name="plain"),
    Op("QuickGelu", [X], {"alpha": 1.3}),
    Op("SkipLayerNormalization", [X, _f(2, 5, 8), _f(8), _f(8), _f(8)], {"epsilon": 1e-5}, range(5)),
    Op(
        "SkipLayerNormalization", [X, _f(2, 5, 8), _f(8), _f(8)], {}, (0, 1, 2, 3), ("y", "", "", "sum"), name="sum",
    ),
    Op("SkipSimplifiedLayerNormalization", [X, _f(2, 5, 8), _f(8)], {"epsilon": 1e-5}, (0, 1, 2)),
    Op("SimplifiedLayerNormalization", [X, _f(8)], {"epsilon": 1e-5, "axis": -1}, (0, 1), domain=""),
    Op("SimplifiedLayerNormalization", [X, _f(5, 8)], {"axis": 1}, (0, 1), domain="", name="two axes"),
    Op(
        "EmbedLayerNormalization",
        [MASK * 3, MASK, _f(6, 4), _f(7, 4), _f(2, 4), _f(4), _f(4), MASK], {}, (2, 3, 4, 5, 6), ("y", "lengths"),
    ),
    Op("EmbedLayerNormalization", [MASK * 3, None, _f(6, 4), _f(7, 4), None, _f(4), _f(4)], {}, (2, 3, 5, 6),
       ("y", "lengths"), name="bare"),
    Op("Attention", [X, _f(8, 12), _f(12)], {"num_heads": 2}, (0, 1, 2)),
    Op("Attention", [X, _f(8, 12), _f(12), MASK], {"num_heads": 2}, (0, 1, 2), name="mask"),
    Op("Attention", [X, _f(8, 12), _f(12), np.array([3, 5], np.int32)], {"num_heads": 2}, (0, 1, 2), name="lengths"),
    Op(
        "Attention", [X, _f(8, 12), _f(12)], {"num_heads": 2, "unidirectional": 1, "scale": 0.4}, (0, 1, 2),
        name="causal",
    ),
    Op(
        "Attention", [X, _f(8, 14), _f(14)], {"num_heads": 2, "qkv_hidden_sizes": [4, 4, 6]}, (0, 1, 2), name="sizes",
    ),
    Op(
        "Attention", [X, _f(8, 12), _f(12), None, _f(2, 2, 2, 3, 2)], {"num_heads": 2, "unidirectional": 1},
        (0, 1, 2, 4), ("y", "present"), name="past",
    ),
    Op(
        "Attention", [X, _f(8, 12), _f(12), np.pad(MASK, [(0, 0), (1, 0)], constant_values=1), _f(2, 2, 2, 1, 2)],
        {"num_heads": 2}, (0, 1, 2, 4), ("y", "present"), name="past and mask",
    ),
    Op("MultiHeadAttention", [X, _f(2, 3, 8), _f(2, 3, 8)], {"num_heads": 2}, (0, 1, 2)),
    Op(
        "MultiHeadAttention", [X, X * 0.3, X * 0.7, _f(24), None, None, _f(2, 2, 3, 4), _f(2, 2, 3, 4)],
        {"num_heads": 2, "unidirectional": 1}, (0, 1, 2, 3, 6, 7), ("y", "k", "v"), name="past",
    ),
    Op(
        "MultiHeadAttention", [X, _f(2, 2, 3, 4), _f(2, 2, 3, 4)], {"num_heads": 2}, (0, 1, 2), name="heads apart",
    ),
    Op("MultiHeadAttention", [_f(2, 5, 2, 3, 4)], {"num_heads": 2}, name="packed", runs=False),
    Op("MultiHeadAttention", [X, _f(2, 3, 2, 2, 4)], {"num_heads": 2}, (0, 1), name="packed keys", runs=False),
    Op(
        "MultiHeadAttention", [X, _f(2, 5, 8), _f(2, 5, 8), _f(24), MASK, _f(1, 2, 5, 5)], {"num_heads": 2},
        (0, 1, 2, 3), name="all",
    ),
    Op("RotaryEmbedding", [_f(2, 5, 8), np.tile(np.arange(5), (2, 1)), np.cos(ANGLES), np.sin(ANGLES)],
       {"num_heads": 2}),
    Op("RotaryEmbedding", [_f(2, 3, 5, 4), np.array([2]), np.cos(ANGLES), np.sin(ANGLES)], {"interleaved": 1},
       name="interleaved"),
    Op("MatMulNBits", [_f(3, 40), _packed(6, 3, 8), _f(18, low=0.1)], {"K": 40, "N": 6, "bits": 4, "block_size": 16},
       (0, 2), stays=True),
    Op(
        "MatMulNBits", [_f(3, 32), _packed(6, 2, 8), _f(12, low=0.1), _RNG.integers(0, 256, 6).astype(np.uint8)],
        {"K": 32, "N": 6, "bits": 4, "block_size": 16}, (0, 2), name="zero points", stays=True,
    ),
    Op("Trilu", [_f(3, 4, 4), np.array(1)], {"upper": 0}),
    Op("BiasSoftmax", [_f(2, 3, 4, 5), _f(2, 1, 1, 5)], {"axis": 3}, (0, 1), runs=False),
    Op("TransposeMatMul", [_f(4, 3), _f(4, 5)], {"transA": 1, "alpha": 0.5}, (0, 1)),
    Op("BiasAdd", [_f(2, 3, 8), _f(8), _f(2, 3, 8)], {}, (0, 1, 2), runs=False),
    Op("NhwcConv", [_f(1, 5, 4, 2), _f(3, 3, 2, 2), _f(3)], {"strides": [2, 1]}, (0, 1, 2), runs=False),
    Op(
        "ConvTransposeWithDynamicPads", [_f(1, 2, 4, 3), _f(2, 3, 3, 2), np.array([1, 0, 1, 1]), _f(3)],
        {"strides": [2, 2], "output_padding": [1, 0]}, (0, 1, 3),
    ),
    Op("SkipGroupNorm", [_f(2, 3, 3, 4), _f(4), _f(4), _f(2, 4), _f(4)], {"groups": 2, "activation": 1},
       range(5), ("y", "sum"), runs=False),
    Op("Rfft", [_f(2, 6)], {"signal_ndim": 1, "normalized": 0, "onesided": 1}, runs=False),
    Op("Irfft", [_f(2, 4, 2)], {"signal_ndim": 1, "normalized": 0, "onesided": 1}, runs=False),
    Op("ComplexMul", [_f(2, 3, 2), _f(2, 3, 2)], {}, (0, 1), runs=False),
    Op("ComplexMulConj", [_f(2, 3, 2), _f(2, 3, 2)], {}, (0, 1), runs=False),
    Op("Inverse", [_f(2, 3, 3) + 2 * np.eye(3, dtype=np.float32)], stays=True),
    Op("Inverse", [_f(2, 1, 3, 3) + 2 * np.eye(3, dtype=np.float32)], stays=True, name="rank 4"),
    Op("CDist", [_f(3, 4), _f(5, 4)], {}, (0, 1), stays=True),
    Op("CDist", [_f(3, 4), _f(5, 4)], {"metric": "euclidean"}, (0, 1), stays=True, name="root"),
    Op("GroupQueryAttention", [_f(2, 5, 64), _f(2, 5, 32), _f(2, 5, 32), None, None, *LENGTHS],
       {"num_heads": 4, "kv_num_heads": 2}, (0, 1, 2), GROUPED),
    Op(
        "GroupQueryAttention", [_f(2, 5, 128), None, None, None, None, *LENGTHS, np.cos(WIDE), np.sin(WIDE)],
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "scale": 0.2, "softcap": 1.5}, (0,), GROUPED, name="packed",
    ),
    Op(
        "GroupQueryAttention",
        [_f(2, 5, 64), _f(2, 5, 32), _f(2, 5, 32), None, None, *LENGTHS, np.cos(WIDE), np.sin(WIDE)],
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "rotary_interleaved": 1, "local_window_size": 2}, (0, 1, 2),
        GROUPED, name="window",
    ),
    Op(
        "GroupQueryAttention", [_f(1, 3, 64), _f(1, 3, 32), _f(1, 3, 32), _f(1, 2, 4, 16), _f(1, 2, 4, 16), *PAST,
         np.cos(WIDE), np.sin(WIDE)],
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, (0, 1, 2, 3, 4), GROUPED, name="past",
    ),
    Op(
        "GroupQueryAttention", [_f(2, 1, 64), _f(2, 1, 32), _f(2, 1, 32), _f(2, 2, 4, 16), _f(2, 2, 4, 16), *UNEVEN,
         np.cos(WIDE), np.sin(WIDE)],
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, (0, 1, 2, 3, 4), GROUPED, name="pasts of two lengths",
    ),
    Op("Scaler", [_f(3, 4)], {"offset": [0.5, 1.0, -1.0, 0.0], "scale": [2.0, 0.5, 1.0, -1.0]}, domain=ML),
    Op("Scaler", [_f(3, 4)], {"offset": [0.5], "scale": [2.0]}, name="one", domain=ML),
    *(Op("Normalizer", [APART], {"norm": norm}, name=norm, domain=ML) for norm in ("MAX", "L1", "L2")),
    Op("Normalizer", [-APART], {"norm": "MAX"}, name="negative", domain=ML),
    Op(
        "LinearRegressor", [_f(3, 4)], {"coefficients": COEFFICIENTS[:8], "intercepts": [0.5, -1.0], "targets": 2},
        domain=ML,
    ),
    Op("LinearRegressor", [_f(3, 4)], {"coefficients": COEFFICIENTS[:4]}, name="plain", domain=ML),
    *(
        Op(
            "LinearRegressor", [_f(3, 4)],
            {"coefficients": COEFFICIENTS[:8], "post_transform": kind, "targets": 2}, name=kind, domain=ML,
        )
        for kind in ("SOFTMAX", "LOGISTIC")
    ),
    Op("ArrayFeatureExtractor", [_f(3, 4), np.array([2, 0, 2])], domain=ML),
    Op("ArrayFeatureExtractor", [_f(4), np.array([[2, 1]])], name="vector", domain=ML),
    Op("FeatureVectorizer", [_f(3, 4), _f(3, 2)], {"inputdimensions": [4, 2]}, (0, 1), domain=ML),
    Op("Imputer", [np.float32([[1, np.nan, 2]])],
       {"imputed_value_floats": [3.0, 4.0, 5.0], "replaced_value_float": math.nan}, domain=ML),
    *(
        Op(
            "LinearClassifier", [_f(3, 4)],
            {"coefficients": COEFFICIENTS, "intercepts": [0.5, -1.0, 0.2], "post_transform": kind,
             "classlabels_ints": [3, 1, 2]},
            outputs=("label", "y"), name=kind, domain=ML, stays=True,
        )
        for kind in ("NONE", "SOFTMAX", "LOGISTIC")
    ),
    Op(
        "LinearClassifier", [_f(3, 4)],
        {"coefficients": COEFFICIENTS[:8], "intercepts": [0.5, -1.0], "post_transform": "LOGISTIC",
         "classlabels_strings": ["a", "b"]},
        outputs=("label", "y"), name="strings", domain=ML, stays=True,
    ),
    Op("GroupNorm", [_f(2, 3, 3, 4), _f(4), _f(4)], {"groups": 2, "activation": 1}, (0, 1, 2), runs=False),
    Op(
        "NhwcFusedConv", [_f(1, 5, 4, 2), _f(3, 2, 3, 2), _f(3), _f(1, 2, 3, 3)],
        {"strides": [2, 1], "activation": "Tanh"}, range(4), runs=False,
    ),
    Op("ExpandDims", [_f(3, 4), np.array(1, np.int32)]),
    Op("ExpandDims", [_f(3, 4), np.array(-1, np.int32)], name="last"),
    Op("BiasSplitGelu", [_f(2, 3, 8), _f(8)], {}, (0, 1), runs=False),
    Op("UnfoldTensor", [_f(2, 7, 3)], {"dim": 1, "size": 3, "step": 2}),
    Op("UnfoldTensor", [_f(2, 7)], {"size": 4}, name="last"),
    *(
        Op(
            "MatMulNBits",
            [_f(2, 3, 40), _packed(6, blocks, size * bits // 8), _f(6 * blocks, low=0.1),
             {"none": None, "codes": _packed(6, math.ceil(blocks * bits / 8)), "floats": _f(6, blocks) * 8}[zeros],
             None, _f(6)],
            {"K": 40, "N": 6, "bits": bits, "block_size": size}, (0, 2, 3, 5) if zeros == "floats" else (0, 2, 5),
            name=f"{bits} bits, blocks of {size}, zero points: {zeros}", stays=True,
        )
        for bits in (2, 4, 8) for size, blocks in ((16, 3), (32, 2), (64, 1)) for zeros in ("none", "codes", "floats")
        if (bits, zeros) != (8, "floats")  # no kernel
    ),
    Op(
        "MatMulNBits", [_f(3, 32), _packed(6, 2, 8), _f(6, 2, low=0.1), None, ORDER],
        {"K": 32, "N": 6, "bits": 4, "block_size": 16}, (0, 2), name="g_idx", stays=True,
    ),
    Op(
        "MatMulNBits", [_f(3, 32), _packed(6, 2, 8), _f(6, 2, low=0.1), np.full((6, 1), 0x88, np.uint8), ORDER],
        {"K": 32, "N": 6, "bits": 4, "block_size": 16}, (0, 2), name="g_idx with zero points of 8", stays=True,
    ),
    *(
        Op(
            "GroupQueryAttention",
            [_f(2, 5, 128), _f(2, 5, 64), _f(2, 5, 64), None, None, *LENGTHS, np.cos(WIDE), np.sin(WIDE)],
            {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "rotary_interleaved": kind}, (0, 1, 2), GROUPED,
            name=f"part of the features, interleaved={kind}",
        )
        for kind in (0, 1)
    ),
    Op("RotaryEmbedding", [_f(2, 3, 16), np.array([[0, 1, 2], [4, 5, 6]]), np.cos(ANGLES), np.sin(ANGLES)],
       {"num_heads": 2, "rotary_embedding_dim": 4}, name="part"),
    Op("RotaryEmbedding", [_f(2, 2, 3, 8), np.array([[0, 1, 2], [4, 5, 6]]), np.cos(ANGLES), np.sin(ANGLES)],
       {"num_heads": 2, "rotary_embedding_dim": 4, "interleaved": 1}, name="part of rank 4"),
]  # fmt: skip


STATIC = dict.fromkeys(("FusedConv", "NhwcConv", "NhwcFusedConv", "ConvTransposeWithDynamicPads"), "x1") | {
    "MatMulNBits": "x5"
}
"""Per op, an input whose sizes the file must know: the rule of Conv asks for those of the kernel, and onnxruntime's
shape inference refuses a MatMulNBits whose bias has not N entries."""


def _model(case: Op, *, symbolic: bool = False) -> onnx.ModelProto:
    names = ["" if value is None else f"x{k}" for k, value in enumerate(case.inputs)]
    node = helper.make_node(case.op, names, list(case.outputs), domain=case.domain, **case.attrs)
    square = helper.make_node("Mul", ["y", "y"], ["squares"])
    loss = helper.make_node("ReduceSum", ["squares"], ["loss"], keepdims=0)
    infos = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(value.dtype),
            [f"{name}_{axis}" for axis in range(value.ndim)]
            if symbolic and not (case.op in STATIC and name == STATIC[case.op])
            else value.shape,
        )
        for name, value in zip(names, case.inputs, strict=True)
        if value is not None and not _is_stored(case, name, value)
    ]
    stored = [
        numpy_helper.from_array(value, name)
        for name, value in zip(names, case.inputs, strict=True)
        if value is not None and _is_stored(case, name, value)
    ]
    outputs = [helper.make_tensor_value_info("loss", 1, []), helper.make_tensor_value_info("y", 1, None)]
    outputs += [helper.make_empty_tensor_value_info(name) for name in case.outputs if name not in ("", "y")]
    graph = helper.make_graph([node, square, loss], "g", infos, outputs, stored)
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid(ML, 3),
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _is_stored(case: Op, name: str, value: np.ndarray) -> bool:
    """Packed weights and their order are initializers, all other values inputs."""
    return value.dtype.kind == "u" or (case.op, name) == ("MatMulNBits", "x4")


def _feeds(case: Op) -> dict[str, np.ndarray]:
    return {
        f"x{k}": value
        for k, value in enumerate(case.inputs)
        if value is not None and not _is_stored(case, f"x{k}", value)
    }


def _run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _skip_what_is_older(case: Op) -> None:
    if case.op == "Irfft" and not makes_reals_of_spectra():
        pytest.skip(f"onnxruntime {ort.__version__} makes no real numbers of half a spectrum")
    if case.op == "GroupQueryAttention" and case.name == "window" and not runs_opset(22):
        pytest.skip(f"onnxruntime {ort.__version__} sees one key more in a window")


@pytest.mark.parametrize("case", OPS, ids=lambda case: case.id)
def test_sizes_may_be_symbolic(case: Op) -> None:
    """Each dimension has a symbol of its own: a body that takes a size from the file, or one for another, differs."""
    _skip_what_is_older(case)
    wrt, feeds = [f"x{k}" for k in case.wrt], _feeds(case)
    static = _run(differentiate(_model(case), "loss", wrt), feeds)
    got = _run(differentiate(_model(case, symbolic=True), "loss", wrt), feeds)
    for name, value in static.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("case", OPS, ids=lambda case: case.id)
def test_gradients_of_what_the_kernel_computes(case: Op) -> None:
    _skip_what_is_older(case)
    proto, feeds = _model(case), _feeds(case)
    step = differentiate(proto, "loss", [f"x{k}" for k in case.wrt])
    left = [node.op_type for node in step.graph.node if node.domain == case.domain]
    assert (case.op in left) is case.stays
    got = _run(step, feeds)
    if case.runs:
        for name, value in _run(proto, feeds).items():
            if case.name == "pasts of two lengths" and name in "kv":
                continue  # behind the keys that count there may be anything
            if value.dtype.kind == "f":
                np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6)
            else:
                np.testing.assert_array_equal(got[name], value)
    rng = np.random.default_rng(1)
    for k in case.wrt:
        value, gradient = feeds[f"x{k}"], got[f"x{k}_grad"]
        assert gradient.shape == value.shape
        assert gradient.dtype == value.dtype
        direction = rng.choice([-1.0, 1.0], value.shape)
        scale = 1e-2
        ends = [
            _run(
                proto if case.runs else step,
                feeds | {f"x{k}": (value + s * scale * direction).astype(np.float32)},
            )
            for s in (1, -1)
        ]
        slope = float(
            np.square(ends[0]["y"], dtype=np.float64).sum() - np.square(ends[1]["y"], dtype=np.float64).sum()
        )
        size = float(np.abs(gradient).sum())
        assert slope / (2 * scale) == pytest.approx(
            float((gradient * direction).sum()), abs=1e-2 * size + 1e-3
        ), k


def _default(attribute: Any) -> Any:
    """The default of an attribute in one of onnxruntime's schemas, None for no default."""
    proto = onnx.AttributeProto.FromString(attribute._default_value)
    value = helper.get_attribute_value(proto) if proto.name else None
    return value.decode() if isinstance(value, bytes) else value


SCHEMAS = {(schema.domain, schema.name): schema for schema in get_all_operator_schema()}


@pytest.mark.parametrize("key", sorted(op_bodies().keys() & SCHEMAS.keys()), ids="::".join)
def test_bodies_declare_the_attributes_of_onnxruntime(key: tuple[str, str]) -> None:
    """An attribute that is missing here is refused, and another default computes something else without an error."""
    _, signature = op_bodies()[key].args
    names = {name: _default(attribute) for name, attribute in SCHEMAS[key].attributes.items()}
    assert sorted(names.keys() - signature.attributes) == []
    # Where the schema gives no default, the body may have that of the kernel.
    defaults = {name: value for name, value in names.items() if value is not None}
    assert {name: signature.attributes[name] for name in defaults} == pytest.approx(defaults)


def test_undeclared_attributes_are_refused() -> None:
    case = Op("QuickGelu", [X], {"alpha": 1.3, "beta": 2.0})
    with pytest.raises(
        NoGradientRule, match=r"com.microsoft.QuickGelu .* does not support the attribute 'beta'"
    ):
        differentiate(_model(case), "loss", ["x0"])


def test_every_body_has_a_case() -> None:
    quantized = {(case.domain, case.op) for case in test_quantized_ops.CASES}
    quantized |= test_quantized_ops.WITH_A_TEST_OF_THEIR_OWN
    twins = {("com.microsoft", "QuantizeLinear")}  # as the standard op
    assert set(op_bodies()) <= {(case.domain, case.op) for case in OPS} | quantized | twins


def _nbits(*, ordered: bool = False, **attributes: int) -> Op:
    inputs = [_f(3, 32), _packed(6, 2, 8), _f(6, 2, low=0.1), *([_packed(6, 1), ORDER] if ordered else [])]
    return Op("MatMulNBits", inputs, {"K": 32, "N": 6, "bits": 4, "block_size": 16, **attributes})


def test_kernel_takes_wrong_zero_points_where_columns_have_an_order() -> None:
    """The reason why such nodes are refused; see notes/faults-of-others.md."""
    case = _nbits(ordered=True)
    x, codes, scales, zeros, order = (value for value in case.inputs if value is not None)
    codes, zeros = (np.stack([packed & 15, packed >> 4], -1).reshape(6, -1) for packed in (codes, zeros))
    weight = (codes.astype(np.float32) - zeros[:, order]) * scales[:, order]
    assert not np.allclose(_run(_model(case), _feeds(case))["y"], x @ weight.T, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Op("FusedGemm", [_f(2, 2), _f(2, 2)], {"activation": "Round"}), "the activation Round"),
        (Op("Attention", [X, _f(8, 12), _f(12)], {"num_heads": 2, "do_rotary": 1}), "rotary embeddings"),
        (Op("CDist", [_f(2, 2), _f(2, 2)], {"metric": "cosine"}), "the metric 'cosine'"),
        (
            Op("GroupQueryAttention", [_f(2, 5, 128), *[None] * 4, *LENGTHS, *[None] * 4, _f(4)],
               {"num_heads": 4, "kv_num_heads": 2}),
            "GroupQueryAttention.* attention with head_sink",
        ),
        (_nbits(bits=3), "MatMulNBits.* 3-bit weights"),
        (_nbits(weight_prepacked=1), "MatMulNBits.* prepacked weights"),
        (_nbits(ordered=True), "MatMulNBits.* packed zero points other than 8 with g_idx"),
        (_nbits(ordered=True, bits=2, block_size=32), "MatMulNBits.* weights of 2 bits with g_idx"),
        (_nbits(ordered=True, bits=8), "MatMulNBits.* weights of 8 bits with g_idx"),
    ],
    ids=[
        "activation", "rotary", "metric", "sink", "3 bits", "prepacked", "g_idx", "g_idx, 2 bits", "g_idx, 8 bits",
    ],
)  # fmt: skip
def test_what_is_not_written_is_a_clear_error(case: Op, message: str) -> None:
    with pytest.raises(NoGradientRule, match=message):
        differentiate(_model(case), "loss", ["x0"])


def _complex(a: np.ndarray) -> np.ndarray:
    return np.asarray(a[..., 0] + 1j * a[..., 1])


def _parts(a: np.ndarray) -> np.ndarray:
    return np.stack([a.real, a.imag], -1)


def _bias_split_gelu(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    left, right = torch.from_numpy(x + bias).chunk(2, -1)
    return (left * torch.nn.functional.gelu(right)).numpy()


def _nhwc_conv(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    first = [torch.from_numpy(a).permute(0, 3, 1, 2) for a in (x, w)]
    return torch.nn.functional.conv2d(*first, torch.from_numpy(b), (2, 1)).permute(0, 2, 3, 1).numpy()


def _nhwc_fused_conv(x: np.ndarray, w: np.ndarray, b: np.ndarray, z: np.ndarray) -> np.ndarray:
    return np.tanh(_nhwc_conv(x, w.transpose(0, 2, 3, 1), b) + z)


def _skip_group_norm(
    x: np.ndarray, g: np.ndarray, b: np.ndarray, skip: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    total = torch.from_numpy(x + skip[:, None, None] + bias).permute(0, 3, 1, 2)
    y = torch.nn.functional.group_norm(total, 2, torch.from_numpy(g), torch.from_numpy(b))
    return torch.nn.functional.silu(y).permute(0, 2, 3, 1).numpy()


WITHOUT_A_KERNEL: dict[str, Callable[..., np.ndarray]] = {
    "BiasAdd": lambda x, bias, skip: x + bias + skip,
    "BiasSplitGelu": _bias_split_gelu,
    "ComplexMul": lambda a, b: _parts(_complex(a) * _complex(b)),
    "ComplexMulConj": lambda a, b: _parts(_complex(a) * _complex(b).conj()),
    "Irfft": lambda x: np.fft.irfft(_complex(x)),
    "NhwcConv": _nhwc_conv,
    "NhwcFusedConv": _nhwc_fused_conv,
    "Rfft": lambda x: _parts(np.fft.rfft(x)),
    "SkipGroupNorm": _skip_group_norm,
}


@pytest.mark.parametrize("op", WITHOUT_A_KERNEL)
def test_what_has_no_kernel_for_the_cpu_computes_what_it_says(op: str) -> None:
    (case,) = (case for case in OPS if case.op == op)
    _skip_what_is_older(case)
    got = _run(differentiate(_model(case), "loss", ["x0"]), _feeds(case))["y"]
    want = WITHOUT_A_KERNEL[op](*(value for value in case.inputs if value is not None))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["packed", "packed keys"])
def test_packed_attention_is_that_of_its_parts(name: str) -> None:
    (case,) = (case for case in OPS if case.op == "MultiHeadAttention" and case.name == name)
    got = _run(differentiate(_model(case), "loss", ["x0"]), _feeds(case))["y"]
    *before, packed = case.inputs
    parts = [packed[:, :, :, k].reshape(*packed.shape[:2], -1) for k in range(packed.shape[3])]
    plain = Op("MultiHeadAttention", [*before, *parts], case.attrs)
    np.testing.assert_allclose(got, _run(_model(plain), _feeds(plain))["y"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean"])
def test_gradient_of_cdist_is_that_of_torch_also_between_equal_rows(metric: str) -> None:
    a, b = _f(3, 4), _f(5, 4)
    # Small integers: the kernel's |a|² + |b|² - 2ab is then exactly 0 between equal rows.
    a[1] = b[2] = [1.0, -2.0, 0.0, 2.0]
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[m, 4] a, float[k, 4] b) => (float loss, float[m, k] y) {{
            y = com.microsoft.CDist<metric="{metric}">(a, b)
            loss = ReduceSum<keepdims=0>(y)
        }}""")
    got = _run(differentiate(proto, "loss", ["a", "b"]), {"a": a, "b": b})
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (a, b)]
    distances = torch.cdist(*inputs)
    # Not the square of `distances`, whose gradient is zero between equal rows whatever that of the root is.
    loss = distances.sum() if metric == "euclidean" else (inputs[0][:, None] - inputs[1]).square().sum()
    loss.backward()
    assert got["y"][1, 2] == 0.0
    for name, x in zip(("a_grad", "b_grad"), inputs, strict=True):
        np.testing.assert_allclose(got[name], x.grad, rtol=2e-5, atol=2e-5)
