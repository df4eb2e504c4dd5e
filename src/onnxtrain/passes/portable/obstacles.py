"""Finds what some stock builds of ONNX Runtime cannot run in a model, or run differently."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes.io.load import MAX_IR_VERSION, MAX_OPSET
from onnxtrain.passes.portable._nodes import every_node


@dataclass(frozen=True)
class Obstacle:
    """A reason why some stock build of ONNX Runtime cannot run a model, or computes different results.

    The cause is either a node, or the model's opset or IR version, which may be too new.

    Attributes:
        op: op type, with its domain if it is nonstandard, e.g. "com.microsoft::Inverse"; "model" for the model itself.
        node: name of the node, e.g. "encoder/cast"; empty for the model itself.
        reason: what a build lacks, e.g. "its dtype bfloat16 has no tensors in onnxruntime-web".
    """

    op: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} (node {self.node!r}): {self.reason}" if self.node else f"{self.op}: {self.reason}"


_NO_STRINGS = "onnxruntime-web's WebGPU bundles have no string ops"
_OTHER_NUMBERS = "it draws different numbers on different hosts, even with a seed"

# Ops without a kernel in the bundle /webgpu of onnxruntime-web 1.30, found with the node tests of onnx 1.23.
_MISSING_OPS = {
    **dict.fromkeys(("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"), _NO_STRINGS),
    "TfIdfVectorizer": _NO_STRINGS,
    **dict.fromkeys(
        ("Optional", "OptionalGetElement", "OptionalHasElement"),
        "onnxruntime-web's WebGPU bundles do not support optional values",
    ),
    **dict.fromkeys(RANDOM_OPS - {"Dropout"}, _OTHER_NUMBERS),
    "Dropout": _OTHER_NUMBERS,
}

# Dtypes that a build does not support for most ops, with the reason.
_MISSING_DTYPES = {
    ir.DataType.BFLOAT16: (
        "onnxruntime-web does not support bfloat16 tensors, and its WebGPU bundles have no Cast to bfloat16"
    ),
    ir.DataType.DOUBLE: "onnxruntime-web's WebGPU bundles have no float64 kernels, not even Cast",
    **dict.fromkeys(
        (
            ir.DataType.FLOAT8E4M3FN,
            ir.DataType.FLOAT8E4M3FNUZ,
            ir.DataType.FLOAT8E5M2,
            ir.DataType.FLOAT8E5M2FNUZ,
            ir.DataType.FLOAT8E8M0,
        ),
        "onnxruntime-web does not support 8-bit floats",
    ),
    **dict.fromkeys(
        (ir.DataType.INT16, ir.DataType.UINT16),
        "onnxruntime-web's WebGPU bundles have no 16-bit integer arithmetic",
    ),
}

# Ops of com.microsoft that were found, one by one, to load on the CPU of onnxruntime-web 1.30's bundles /wasm, /webgpu
# and default. GatherBlockQuantized, for example, is missing in /webgpu.
_SHARED_CONTRIB = frozenset(
    {
        "Attention", "BiasGelu", "CDist", "DynamicQuantizeMatMul", "EmbedLayerNormalization", "ExpandDims", "FastGelu",
        "FusedConv", "FusedGemm", "FusedMatMul", "GatherND", "Gelu", "GroupQueryAttention", "Inverse", "MatMulNBits",
        "MultiHeadAttention", "Pad", "QuickGelu", "RotaryEmbedding", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization", "Trilu", "Unique",
    }
)  # fmt: skip


def find_obstacles(model: ir.Model) -> list[Obstacle]:
    """Returns the nodes of a model that some stock ONNX Runtime build for browsers or phones lacks or runs differently.

    Also reports an opset or IR version that is too new. First infer shapes, and call
    :func:`onnxtrain.passes.portable.make_portable`, which rewrites the obstacles that have a replacement.
    """
    found = []
    opset = model.graph.opset_imports.get("", 0)
    if opset > MAX_OPSET:
        found.append(Obstacle("model", "", f"opset {opset}; stock builds support opsets up to {MAX_OPSET}"))
    if model.ir_version > MAX_IR_VERSION:
        found.append(
            Obstacle(
                "model",
                "",
                f"IR version {model.ir_version}; stock builds support IR versions up to {MAX_IR_VERSION}",
            )
        )
    functions = {(function.domain, function.name) for function in model.functions.values()}
    for node in every_node(model):
        reason = None if (node.domain, node.op_type) in functions else _reason(node)
        if reason is not None:
            op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            found.append(Obstacle(op, node.name or "", reason))
    return found


def _reason(node: ir.Node) -> str | None:
    """Returns why some stock builds cannot run a node, as text for the user, or None if all builds can."""
    if node.domain == "com.microsoft" and node.op_type not in _SHARED_CONTRIB:
        return "some ONNX Runtime builds may not have this com.microsoft op"
    if node.domain not in ("", "com.microsoft", "ai.onnx.ml"):
        return f"an op of the domain {node.domain!r}, which stock builds do not have"
    if not node.domain and node.op_type in _MISSING_OPS:
        return _MISSING_OPS[node.op_type]
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype in _MISSING_DTYPES:
            return _MISSING_DTYPES[value.dtype]
    # CPU builds widen most float16 ops to float32, but a ScatterND that adds fails at run time.
    if (
        node.op_type in ("ScatterND", "ScatterElements")
        and node.attributes.get_string("reduction", "none") != "none"
    ):
        data = node.inputs[0]
        if data is not None and data.dtype == ir.DataType.FLOAT16:
            return "CPU builds cannot add float16 in place; train in float32"
    return None
