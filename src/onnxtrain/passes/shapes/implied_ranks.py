"""Infers the ranks of values without a shape from the ops that read or write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxtrain.op_facts import REDUCTIONS, SAME_DTYPE, SAME_RANK

# Ranks by value; the key is None for an omitted value, and the rank is None if the node does not determine it.
_Ranks = Mapping[ir.Value | None, int | None]


class ImpliedRanksPass(ir.passes.InPlacePass):
    """Annotates main-graph values without a shape with the rank and dtype that their readers and writers imply.

    Sizes remain unknown. For example, the input and output of a convolution have the rank of its weight, a recurrent
    layer reads a tensor of rank 3, and the input and output of a pooling have the kernel's rank plus two. Elementwise
    ops propagate ranks in both directions, whereas onnx's shape inference only goes forward from declared shapes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Annotates values of the model in place."""
        modified = False
        # Dtypes first, because a proto cannot store a shape without a dtype. They are only propagated forward.
        for node in model.graph:
            if node.domain == "" and node.op_type in SAME_DTYPE and node.outputs[0].type is None:
                node.outputs[0].type = None if node.inputs[0] is None else node.inputs[0].type
                modified |= node.outputs[0].type is not None
        # In reverse order, so that a rank propagates through a chain of elementwise ops to the graph's input.
        for node in reversed(model.graph):
            ends = (*node.inputs, *node.outputs)
            if node.domain != "" or all(value is None or value.shape is not None for value in ends):
                continue
            for value, rank in _ranks(node).items():
                if value is not None and rank is not None and value.shape is None and value.type is not None:
                    value.shape = ir.Shape([None] * rank)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _ranks(node: ir.Node) -> _Ranks:
    """Returns the ranks that a node implies for its inputs and outputs."""
    if node.op_type in SAME_RANK:
        return _equal_ranks(node.inputs[0], node.outputs[0])
    find = _reduction if node.op_type in REDUCTIONS else _RULES.get(node.op_type)
    return {} if find is None else find(node)


def _equal_ranks(*values: ir.Value | None) -> _Ranks:
    """Returns the same rank for all values: the rank of the first value that has a shape.

    The rank is None if no value has a shape.
    """
    rank = next(
        (value.shape.rank() for value in values if value is not None and value.shape is not None), None
    )
    return dict.fromkeys(values, rank)


def reduces_to_scalar(node: ir.Node) -> bool:
    """True if `node` reduces over all axes without keepdims, so that its output is a scalar."""
    return (
        node.domain == ""
        and node.op_type in REDUCTIONS
        and not node.attributes.get_int("keepdims", 1)
        and not node.attributes.get_int("noop_with_empty_axes", 0)
        and "axes" not in node.attributes
        and (len(node.inputs) < 2 or node.inputs[1] is None)
    )


def _reduction(node: ir.Node) -> _Ranks:
    """Returns rank 0 for the output of a reduction to a scalar.

    For other reductions with keepdims=1, returns the same rank for the input and the output.
    """
    if reduces_to_scalar(node):
        return {node.outputs[0]: 0}
    # Without keepdims, the ranks differ by the number of axes, which may be computed.
    if not node.attributes.get_int("keepdims", 1):
        return {}
    return _equal_ranks(node.inputs[0], node.outputs[0])


def _image_ranks(count: int) -> Callable[[ir.Node], _Ranks]:
    """Returns a function that infers the ranks of the inputs and outputs of a convolution or pooling.

    The first `count` inputs and all outputs have one axis per kernel axis, plus two for batch and channels.
    """

    def find(node: ir.Node) -> _Ranks:
        rank = _rank_of_kernel(node)
        return dict.fromkeys([*node.inputs[:count], *node.outputs], rank)

    return find


def _rank_of_kernel(node: ir.Node) -> int | None:
    """Returns the number of kernel axes plus two, for batch and channels, or None if this number is unknown."""
    kernel = node.attributes.get("kernel_shape")
    if kernel is not None:
        return 2 + len(kernel.as_ints())
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    return None if weight is None or weight.shape is None else weight.shape.rank()


def _fixed(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Callable[[ir.Node], _Ranks]:
    """Returns a function that returns the ranks of a node's inputs and outputs, for an op with fixed ranks.

    Args:
        inputs: ranks of the first inputs, e.g. (2, 2) for Gemm.
        outputs: ranks of the first outputs, e.g. (2,) for Gemm.
    """

    def find(node: ir.Node) -> _Ranks:
        ends = [*zip(node.inputs, inputs, strict=False), *zip(node.outputs, outputs, strict=False)]
        return dict(ends)

    return find


def _transpose(node: ir.Node) -> _Ranks:
    """Returns the length of `perm` as the rank of the input and the output, or None without `perm`."""
    perm = node.attributes.get("perm")
    return dict.fromkeys([node.inputs[0], node.outputs[0]], None if perm is None else len(perm.as_ints()))


def _einsum(node: ir.Node) -> _Ranks:
    """Returns the number of labels of each operand and of the output as their ranks, e.g. 2 for "ij".

    The rank of an operand with an ellipsis is None. The output is omitted if it has an ellipsis or is implicit.
    """
    # An ellipsis stands for any number of axes.
    left, _, output = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    ranks = {
        value: None if "..." in term else len(term)
        for value, term in zip(node.inputs, left.split(","), strict=False)
    }
    return ranks | ({node.outputs[0]: len(output)} if output and "..." not in output else {})


def _per_axis_input(*places: int, per_axis: int = 1, axes: int | None = None) -> Callable[[ir.Node], _Ranks]:
    """Returns a function that infers the rank of a node's input 0 and output 0 from the length of another input.

    For example, the pads of a Pad have two elements per axis, so 8 pads imply rank 4.

    Args:
        places: indices of the inputs with a fixed number of elements per axis. The first one of known length is used.
        per_axis: number of elements per axis, e.g. 2 for pads.
        axes: index of an optional input that selects axes. If this input or an attribute `axes` is present, the length
            does not determine the rank, and the function returns None as the rank.
    """

    def find(node: ir.Node) -> _Ranks:
        named = "axes" in node.attributes or (
            axes is not None and len(node.inputs) > axes and node.inputs[axes] is not None
        )
        lists = [node.inputs[place] for place in places if place < len(node.inputs)]
        sizes = [v.shape[0] for v in lists if v is not None and v.shape is not None and v.shape.rank() == 1]
        count = next((size for size in sizes if isinstance(size, int) and size), None)
        rank = None if named or count is None else count // per_axis
        return dict.fromkeys([node.inputs[0], node.outputs[0]], rank)

    return find


def _attention_ranks(count: int, attribute: str) -> Callable[[ir.Node], _Ranks]:
    """Returns a function that infers the ranks of the inputs and outputs of an attention op.

    The first `count` inputs and the first output have rank 3 if the node has `attribute`, and rank 4 otherwise.
    """

    def find(node: ir.Node) -> _Ranks:
        return dict.fromkeys(
            [*node.inputs[:count], node.outputs[0]], 3 if attribute in node.attributes else 4
        )

    return find


# X, W, R, B, sequence_lens, initial_h, initial_c, P; Y, Y_h, Y_c. With layout=1 the ranks are the same.
_RECURRENT = _fixed((3, 3, 3, 2, 1, 3, 3, 2), (4, 3, 3))
_RULES: Mapping[str, Callable[[ir.Node], _Ranks]] = {
    "AffineGrid": _fixed((3,), ()),
    "Attention": _attention_ranks(3, "q_num_heads"),
    "AveragePool": _image_ranks(1),
    "CausalConvWithState": _fixed((3, 3), (3,)),
    "Col2Im": _fixed((3, 1, 1), ()),
    "Concat": lambda node: _equal_ranks(*node.inputs, node.outputs[0]),
    "Conv": _image_ranks(2),
    "ConvTranspose": _image_ranks(2),
    "DeformConv": _image_ranks(3),
    "DepthToSpace": _fixed((4,), (4,)),
    "Einsum": _einsum,
    "GRU": _RECURRENT,
    "Gemm": _fixed((2, 2), (2,)),
    "LSTM": _RECURRENT,
    "LinearAttention": _fixed((3, 3, 3), (3,)),
    "LpPool": _image_ranks(1),
    "MaxPool": _image_ranks(1),
    "MaxRoiPool": _fixed((4, 2), (4,)),
    "MaxUnpool": _image_ranks(2),
    "Pad": _per_axis_input(1, per_axis=2, axes=3),
    "RNN": _RECURRENT,
    "Resize": _per_axis_input(2, 3),
    "RoiAlign": _fixed((4, 2, 1), (4,)),
    "RotaryEmbedding": _attention_ranks(1, "num_heads"),
    "STFT": _fixed((3,), (4,)),
    "SpaceToDepth": _fixed((4,), (4,)),
    "Tile": _per_axis_input(1),
    "Transpose": _transpose,
}
