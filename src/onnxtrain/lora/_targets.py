"""Finds the linear layers of a model that can get an adapter, and names them as PyTorch names their modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.emitter import known_array
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._config import ALL_LINEAR, LoraConfig, is_named
from onnxtrain.passes.parameters.block_order import fault_of_order
from onnxtrain.selection import module_scope, some_names

_MS = "com.microsoft"
# Ops between a weight in the file and the product that reads it; each keeps the elements, Transpose swaps the axes.
_PASSED_ON = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose"})
# Ends of the names of weights: of onnxruntime's quantizers (`_Q4`, `_quantized`), of PyTorch (`.weight`), and of the
# builder of genai (`.MatMul`; `.MatMulNBits.qweight` if the checkpoint was quantized before, e.g. by GPTQ or AWQ), in
# the order in which they are taken off.
_ENDS = (
    r"(_DQ)?_Q\d+(G\d+)?$", r"_quantized$", r"\.(weight|qweight|kernel)$", r"\.(MatMul|MatMulNBits|Gemm|Conv)$",
)  # fmt: skip
# Names that exporters make up for weights; the name of the node tells more.
_MADE_UP = re.compile(r"(val|const|onnx::\w+|_?inlfunc\w*)_\d+.*|/.*|\d+")
# The builder of onnxruntime-genai writes `attn` for what Llama's, Qwen's and Phi's PyTorch modules call `self_attn`.
_BUILDER = re.compile(r"^(model\.layers\.\d+)\.attn\.")
# It writes `o_proj` for what PyTorch's Phi calls `dense`. Of its decoders, Phi alone has an `fc1` (genai 0.18).
_BUILDER_OUTPUT = re.compile(r"^(model\.layers\.\d+)\.attn\.o_proj\b")
# Products of integers (onnxruntime 1.32): input 1 is the scale of the activations, 3 the weight, 4 and 5 its scale and
# zero point; the value holds the inputs that are scale and zero point of the result, and the bias.
INTEGER_PRODUCTS: Mapping[tuple[str, str], tuple[int, int, int]] = {
    ("", "QLinearConv"): (6, 7, 8),
    ("", "QLinearMatMul"): (6, 7, 8),
    (_MS, "QGemm"): (7, 8, 6),
}
_OUTPUT_LAYERS = frozenset({"lm_head", "embed_out"})
_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Target:
    """A linear layer, or one part of the outputs of a layer that computes several, that can get an adapter.

    Attributes:
        module: its path, e.g. "model.layers.0.self_attn.q_proj".
        node: the node of the product: MatMul, Gemm, FusedMatMul, MatMulNBits, Conv or one of INTEGER_PRODUCTS.
        input_size: number of features that it reads.
        output_size: number of features that it computes.
        start: index of its first output feature among those of `node`, e.g. 64 for k_proj behind a q_proj of 64.
        total: number of all output features of `node`.
        is_output_layer: True for the layer of a language model that computes the logits.
    """

    module: str
    node: ir.Node
    input_size: int
    output_size: int
    start: int
    total: int
    is_output_layer: bool = False

    @property
    def is_convolution(self) -> bool:
        """True for a convolution with a kernel of size one, whose features lie along axis 1."""
        return self.node.op_type in ("Conv", "QLinearConv")

    @property
    def is_integer(self) -> bool:
        """True for a product that reads integers, both of activations and of weights."""
        return (self.node.domain, self.node.op_type) in INTEGER_PRODUCTS

    @property
    def weight_index(self) -> int:
        """Index of the weight among the inputs of `node`."""
        return 3 if self.is_integer else 1

    @property
    def input(self) -> ir.Value:
        """The activations that the layer reads."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def dtype(self) -> ir.DataType | None:
        """The dtype of the activations, e.g. float16, or of their scale if they are integers; None if unknown."""
        if self.is_integer:
            return None if self.node.inputs[1] is None else self.node.inputs[1].dtype
        # Exporters need not note the types of values between nodes. The op wants weights, or scales, of the same type.
        return self.input.dtype or dtype_of(self.node.inputs[2 if self.node.op_type == "MatMulNBits" else 1])


def dtype_of(value: ir.Value | None) -> ir.DataType | None:
    """Returns the dtype of a weight as a product reads it, which the file need not note; None if it is unknown."""
    while value is not None and value.dtype is None:
        node = value.producer()
        if node is None or node.op_type not in _PASSED_ON - {"QuantizeLinear"}:
            return None
        to = node.attributes.get_int("to", 0) or node.attributes.get_int("output_dtype", 0)
        if to:
            return ir.DataType(to)
        # What DequantizeLinear computes has the dtype of its scale.
        value = node.inputs[1 if node.op_type == "DequantizeLinear" else 0]
    return None if value is None else value.dtype


def find_targets(model: ir.Model) -> list[Target]:
    """Returns all layers that can get an adapter, in graph order.

    The parts of merged queries, keys and values are listed after the whole, e.g. "qkv_proj", "q_proj", "k_proj",
    "v_proj".
    """
    found = []
    # Layers in branches of If and bodies of Loop and Scan are left out: adapters would have to be written there, too.
    named: dict[str, tuple[ir.Value, bool]] = {}
    layers = [(node, *layer) for node in model.graph if (layer := _read_layer(node)) is not None]
    is_phi = any(
        re.match(r"model\.layers\.\d+\.mlp\.fc1\.MatMul", str(weight.name)) for _, weight, *_ in layers
    )
    rows = _rows_of_embeddings(model.graph)
    for node, weight, input_size, output_size, swapped in layers:
        # PEFT and genai exchange adapters by these paths, so a node's own name would not do.
        module = _module_of(node, weight, is_phi)
        # One layer that runs twice has one adapter. Two layers of one name have different weights, or one reads the
        # weight of the other transposed, as a tied decoder does.
        if named.setdefault(module, (weight, swapped)) != (weight, swapped):
            module = _path_of(node.name or str(node.outputs[0].name))
        is_output = module.rpartition(".")[2] in _OUTPUT_LAYERS or (
            output_size in rows and _is_returned(node.outputs[0])
        )
        whole = Target(module, node, input_size, output_size, 0, output_size, is_output)
        found += [whole, *_parts(whole)]
    return found


def _rows_of_embeddings(graph: ir.Graph) -> set[int]:
    """Returns the numbers of rows of all tables in the file from which inputs of the graph choose rows."""
    rows = set()
    for node in graph:
        if not node.op_type.startswith("Gather") or len(node.inputs) < 2:
            continue
        indices, traced = node.inputs[1], _trace(node.inputs[0], also=("Reshape",))
        if traced is None or indices is None or not indices.is_graph_input():
            continue
        _, dims, swapped = traced
        if len(dims) > 1:
            rows.add(dims[1] if swapped else dims[0])
    return rows


def _is_returned(value: ir.Value) -> bool:
    """Says if the graph returns a value [batch, sequence, features], or what a bias or quantization makes of it."""
    # A language model gives a number for each word of its vocabulary. Not every file keeps the name of that layer.
    while not value.is_graph_output():
        readers = [use.node for use in value.uses()]
        if len(readers) != 1 or readers[0].op_type not in _PASSED_ON | {"Add", "QLinearAdd"}:
            return False
        value = readers[0].outputs[0]
    return value.shape is not None and len(value.shape) == 3


def choose_targets(model: ir.Model, config: LoraConfig) -> list[Target]:
    """Returns the layers that a configuration chooses.

    A merged layer is chosen by the names of its parts; by its own name, as PEFT names the module of a Phi-3, it gets
    one adapter for the whole.

    Raises:
        GraphBuildError: no layer is chosen, or one of several names matches none.
    """
    targets = find_targets(model)
    doing = "adding LoRA adapters"
    if not targets:
        raise GraphBuildError(
            f"{doing}: the model has no linear layer with a weight in the file (MatMul, Gemm, MatMulNBits, or a "
            "Conv with a kernel of size 1). Products of quantize_dynamic (MatMulInteger) count as none: pass the model "
            "as it was before, or quantized by quantize_static"
        )
    names = list(dict.fromkeys(target.module for target in targets))
    if config.target_modules == ALL_LINEAR:
        # PEFT leaves the output layer out: an adapter of 32,000 words and more would be most of the weights. It leaves
        # convolutions out, too, as they are no torch.nn.Linear.
        merged = {target.node for target in targets if target.output_size != target.total}
        chosen = [
            target
            for target in targets
            if not target.is_output_layer
            and not target.is_convolution
            and (target.node not in merged or target.output_size != target.total)
        ]
    else:
        chosen = [target for target in targets if config.names(target.module)]
        # A misspelt name in a list of several would otherwise train fewer layers than asked for, silently.
        for name in [] if isinstance(config.target_modules, str) else config.target_modules:
            if not any(is_named(name, module) for module in names):
                raise GraphBuildError(
                    f"{doing}: no layer is named {name!r} (target_modules); there are {some_names(_ends(names))}"
                )
    chosen = [target for target in chosen if not config.excludes(target.module)]
    if not chosen:
        raise GraphBuildError(
            f"{doing}: target_modules={config.target_modules!r} and exclude_modules={config.exclude_modules!r} leave "
            f"no layer; there are {some_names(names)}"
        )
    _check_overlap(chosen, doing)
    for target in chosen:
        _check_blocks(target.node, doing)
    # PEFT ignores such keys, and the layers get the common rank.
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option) or ():
            if not any(config.matches_end(pattern, target.module) for target in chosen):
                raise GraphBuildError(
                    f"{doing}: {pattern!r} of {option} matches no chosen layer; they are "
                    f"{some_names([target.module for target in chosen])}"
                )
    return chosen


def _check_overlap(chosen: Sequence[Target], doing: str) -> None:
    """Raises GraphBuildError if a merged layer is chosen as a whole and in parts."""
    # A regular expression such as ".*proj" matches both. Two adapters of the same features would be trained twice.
    whole = {target.node: target for target in chosen if target.output_size == target.total}
    for target in chosen:
        other = whole.get(target.node)
        if other is not None and other is not target and target.output_size != target.total:
            raise GraphBuildError(
                f"{doing}: target_modules chooses {other.module!r} and its part {target.module!r}; choose either"
            )


def _check_blocks(node: ir.Node, doing: str) -> None:
    """Raises GraphBuildError for a MatMulNBits that onnxruntime (1.32) does not know, or computes wrongly."""
    if node.op_type != "MatMulNBits":
        return
    bits, size = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
    # A power of two.
    if bits not in (2, 4, 8) or size < 16 or size & (size - 1):
        raise GraphBuildError(
            f"{doing}: the weight of MatMulNBits '{node.name}' has {bits} bits in blocks of {size}; onnxruntime knows "
            "2, 4 and 8 bits, and blocks of 16, 32, 64 and so on. Quantize the model again, or leave the layer out by "
            "exclude_modules"
        )
    if (fault := fault_of_order(node)) is not None:
        raise GraphBuildError(
            f"{doing}: MatMulNBits '{node.name}' has {fault}, of which onnxruntime computes something else than the "
            "op's definition says. Quantize the model again without such an order (GPTQ: desc_act=False), or leave the "
            "layer out by exclude_modules"
        )


def _ends(names: Sequence[str]) -> list[str]:
    """Returns the last parts of paths, e.g. ["q_proj", "fc1"]."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _read_layer(node: ir.Node) -> tuple[ir.Value, int, int, bool] | None:
    """Reads a product of activations with a matrix in the file.

    Returns:
        The weight, the numbers of its inputs and outputs, and True if it is stored as [outputs, inputs].
    """
    kind = (node.domain, node.op_type)
    if kind == (_MS, "MatMulNBits"):
        weight = node.inputs[1]
        # A weight that another node computes has no file in which an adapter could be merged.
        if weight is None or not weight.is_initializer():
            return None
        return weight, node.attributes["K"].as_int(), node.attributes["N"].as_int(), True
    if kind not in {("", "MatMul"), ("", "Gemm"), ("", "Conv"), (_MS, "FusedMatMul"), *INTEGER_PRODUCTS}:
        return None
    traced = _trace(node.inputs[3 if kind in INTEGER_PRODUCTS else 1])
    if traced is None or any(
        node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")
    ):
        return None
    weight, dims, swapped = traced
    if node.op_type in ("Conv", "QLinearConv"):
        # `group` divides the channels: A would have to be a convolution of as many groups.
        plain = node.attributes.get_int("group", 1) == 1 and not any(node.attributes.get_ints("pads", ()))
        if len(dims) < 3 or not plain or any(size != 1 for size in dims[2:]):
            return None
        return weight, dims[1], dims[0], True
    # Weights of three axes are those of experts or heads: a product for each, which LoRA of one matrix does not have.
    if len(dims) != 2:
        return None
    # Only the second input is looked at: ONNX exporters write `x W`, and `W x` multiplies along another axis.
    swapped ^= bool(node.attributes.get_int("transB", 0))
    rows, columns = reversed(dims) if swapped else dims
    return weight, rows, columns, swapped


def _trace(value: ir.Value | None, also: Sequence[str] = ()) -> tuple[ir.Value, list[int], bool] | None:
    """Walks from the second input of a product back to its weight.

    Args:
        value: the input.
        also: further ops to walk through, whose effect on the dimensions is left out.

    Returns:
        The weight, its dimensions as stored, and True if the product reads it transposed.
    """
    swapped = False
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.domain not in ("", _MS) or node.op_type not in _PASSED_ON.union(also):
            return None
        if node.op_type == "Transpose":
            # Without `perm` ONNX reverses the axes.
            order = node.attributes.get_ints("perm", (1, 0))
            if sorted(order) != [0, 1]:
                return None
            swapped ^= list(order) == [1, 0]
        value = node.inputs[0]
    # A graph input of the same name makes an initializer a default that callers may replace: no weight.
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    dims = [int(size) for size in value.const_value.shape.numpy()]
    return value, dims, swapped


def _module_of(node: ir.Node, weight: ir.Value, is_phi: bool) -> str:
    """Returns the path of the module of a layer, e.g. "model.layers.0.mlp.up_proj"."""
    name = str(weight.name)
    if is_phi:
        name = _BUILDER_OUTPUT.sub(r"\1.attn.dense", name)
    # A weight that an embedding reads, too, has the embedding's name.
    tied = any(reader.op_type.startswith("Gather") for reader in _readers(weight))
    if not tied and not _MADE_UP.fullmatch(name):
        return _path_of(name)
    # PyTorch's Dynamo exporter folds the Transpose of a weight into a new one, `val_3`, and notes the module.
    return module_scope(node) or _path_of(node.name or name)


def _path_of(name: str) -> str:
    """Returns the path of a module for the name of its weight or node, e.g. "fc" for "fc.weight" or "/fc/MatMul"."""
    path = name.strip("/").replace("/", ".")
    for end in _ENDS:
        path = re.sub(end, "", path)
    return _BUILDER.sub(r"\1.self_attn.", path)


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the nodes that read a value, or what Transpose, Reshape and the like make of it."""
    for use in value.uses():
        yield use.node
        if use.node.op_type in _PASSED_ON | {"Reshape"}:
            yield from _readers(use.node.outputs[0])


def _parts(whole: Target) -> list[Target]:
    """Returns queries, keys and values of a layer that computes all three; [] for any other layer."""
    # The name alone decides: PyTorch's GPT-2 has a merged layer, too, which PEFT adapts as one, and calls it `c_attn`.
    path, _, last = whole.module.rpartition(".")
    sizes = _part_sizes(whole) if last == "qkv_proj" else None
    if sizes is None:
        return []
    starts = (0, sizes[0], sizes[0] + sizes[1])
    return [
        replace(whole, module=f"{path}.{name}" if path else name, output_size=size, start=start)
        for name, size, start in zip(_QKV, sizes, starts, strict=True)
    ]


def _part_sizes(whole: Target) -> list[int] | None:
    """Returns the numbers of features of queries, keys and values, as the reader of the product divides them."""
    value = whole.node.outputs[0]
    while True:
        readers = [use.node for use in value.uses()]
        # Two readers may divide the features in two ways.
        if len(readers) != 1:
            return None
        reader = readers[0]
        # A bias, and a QuantizeLinear and DequantizeLinear behind the product, keep the features.
        if reader.op_type in {"Add", "QuantizeLinear", "DequantizeLinear"}:
            value = reader.outputs[0]
            continue
        break
    sizes: list[int] | None = None
    if reader.op_type == "GroupQueryAttention":
        # The op's packed layout: all queries, then all keys, then all values.
        heads, groups = (reader.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
        size = whole.total // (heads + 2 * groups)
        sizes = [heads * size, groups * size, groups * size]
    # Qwen3 normalizes queries and keys: there the builder splits the product itself.
    elif reader.op_type == "Split":
        # An attribute before opset 13.
        written = (
            known_array(reader.inputs[1])
            if len(reader.inputs) > 1
            else reader.attributes.get_ints("split", ())
        )
        sizes = None if written is None else [int(size) for size in written]
    return sizes if sizes is not None and len(sizes) == 3 and sum(sizes) == whole.total else None
