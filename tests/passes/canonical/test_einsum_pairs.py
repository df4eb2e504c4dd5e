"""Einsum in pairs: the order against all orders, the sizes of what is computed, and the results against PyTorch's."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxtrain import differentiate
from onnxtrain.passes import infer_shapes, load_model, to_proto
from onnxtrain.passes.canonical.einsum_pairs import EinsumPairsPass, contraction_order
from onnxtrain.passes.tidy.einsum_products import EinsumProductsPass

MAMBA = "bcln,bcsn,bhcls,bcshp->bclhp"
SIZES = {"b": 2, "c": 8, "l": 32, "s": 32, "n": 32, "h": 8, "p": 32}
Terms = list[frozenset[str]]


def every_order(count: int) -> Iterator[list[tuple[int, int]]]:
    if count == 1:
        yield []
        return
    for pair in itertools.combinations(range(count), 2):
        for rest in every_order(count - 1):
            yield [pair, *rest]


def cost(
    terms: Terms, output: frozenset[str], sizes: dict[str, int], order: list[tuple[int, int]]
) -> tuple[int, int]:
    """Returns the operations and the largest intermediate result of an order."""
    current, operations, largest = list(terms), 0, 0
    for left, right in order:
        union = current[left] | current[right]
        rest = [term for index, term in enumerate(current) if index not in (left, right)]
        result = union & output.union(*rest)
        operations += math.prod(sizes[label] for label in union)
        largest = max(largest, math.prod(sizes[label] for label in result))
        current = [*rest, result]
    assert len(current) == 1
    return operations, largest


@pytest.mark.parametrize("seed", range(40))
def test_no_order_has_fewer_operations_or_a_smaller_intermediate_result(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {label: draw.choice([1, 2, 3, 8, 32, 100]) for label in "abcdefg"}
    terms = [frozenset(draw.sample("abcdefg", draw.randint(1, 4))) for _ in range(draw.randint(2, 5))]
    output = frozenset(draw.sample(sorted(frozenset().union(*terms)), 1))
    # Labels of a single operand are summed before.
    terms = [
        term & output.union(*(other for other in terms if other is not term)) or output for term in terms
    ]
    best = min(cost(terms, output, sizes, order) for order in every_order(len(terms)))
    assert cost(terms, output, sizes, contraction_order(terms, output, sizes)) == best


@pytest.mark.parametrize("count", [9, 12, 30])
def test_a_chain_of_many_operands_is_as_cheap_from_its_short_end(count: int) -> None:
    """A chain of matrices that ends in a vector: from left to right it takes products of matrices."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFG"
    terms = [frozenset(letters[k : k + 2]) for k in range(count - 1)] + [frozenset(letters[count - 1])]
    sizes = dict.fromkeys(letters, 50)
    operations, largest = cost(terms, frozenset("a"), sizes, contraction_order(terms, frozenset("a"), sizes))
    assert (operations, largest) == (50**2 * (count - 1), 50)


def model_of(
    equation: str, shapes: list[list[int | str]], dtype: int = onnx.TensorProto.DOUBLE
) -> onnx.ModelProto:
    names = [f"x{index}" for index in range(len(shapes))]
    info = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("Einsum", names, ["y"], equation=equation),
        onnx.helper.make_node("Mul", ["y", "y"], ["squares"]),
        onnx.helper.make_node("ReduceSum", ["squares"], ["loss"], keepdims=0),
    ]
    inputs = [info(name, dtype, shape) for name, shape in zip(names, shapes, strict=True)]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [info("loss", dtype, [])])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def intermediates(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, int]:
    """Returns the number of elements of each value that the nodes of a model compute."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    computed = [name for node in model.graph.node for name in node.output if name]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return {name: np.size(value) for name, value in zip(computed, session.run(None, inputs), strict=True)}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        (MAMBA, SIZES),
        ("bcln,bhcl,bclhp->bchpn", SIZES),
        ("bcln,bchpn,bhcl->bclhp", SIZES),
        ("ab,bc,cd,d->a", dict.fromkeys("abcd", 40)),
        ("ia,ja,ka->ijk", {"i": 6, "j": 7, "k": 8, "a": 500}),  # CP decomposition
        ("ijk,ia,jb,kc->abc", {"i": 20, "j": 20, "k": 20, "a": 4, "b": 5, "c": 6}),  # Tucker
    ],
)
def test_no_value_of_a_step_is_larger_than_the_best_order_needs(
    equation: str, sizes: dict[str, int], symbolic: bool
) -> None:
    left, output = equation.split("->")
    terms = left.split(",")
    shapes = [[label if symbolic else sizes[label] for label in term] for term in terms]
    model = differentiate(model_of(equation, shapes), of="loss", wrt=[f"x{k}" for k in range(len(terms))])
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal([sizes[label] for label in term]) / 8 for term in terms]
    feeds = {f"x{k}": array for k, array in enumerate(arrays)}
    # Of sizes that are not known, the best order is that of equal sizes.
    sets, out = [frozenset(term) for term in terms], frozenset(output)
    known = dict.fromkeys(sizes, 64) if symbolic else sizes
    costs = [(cost(sets, out, known, order), order) for order in every_order(len(terms))]
    best = max(cost(sets, out, sizes, order)[1] for price, order in costs if price == min(costs)[0])
    allowed = max(best, *(array.size for array in arrays))
    assert max(intermediates(model, feeds).values()) <= allowed
    assert all(len(node.input) <= 2 for node in model.graph.node if node.op_type == "Einsum")

    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    torch.einsum(equation, *tensors).square().sum().backward()
    results = onnxruntime.InferenceSession(model.SerializeToString()).run(
        [f"x{k}_grad" for k in range(len(terms))], feeds
    )
    for result, tensor in zip(results, tensors, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(result, tensor.grad.numpy(), rtol=1e-10, atol=1e-10)


def rewritten(equation: str, *shapes: list[int | str] | None) -> ir.Model:
    model = ir.from_proto(model_of(equation, [shape or [] for shape in shapes]))
    for value, shape in zip(model.graph.inputs, shapes, strict=True):
        value.shape = None if shape is None else value.shape
    infer_shapes(model)
    EinsumPairsPass()(model)
    return model


@pytest.mark.parametrize(
    ("equation", "shapes", "ops"),
    [
        ("bcls,bhcls->bhcls", [[2, 3, 4, 5], [2, 6, 3, 4, 5]], ["Unsqueeze", "Mul"]),
        ("i,j->ij", [[2], [3]], ["Unsqueeze", "Mul"]),
        ("ij,j->ji", [[2, 3], [3]], ["Transpose", "Unsqueeze", "Mul"]),
        ("...i,...->...i", [[2, 3, 4], [2, 3]], ["Unsqueeze", "Mul"]),
        ("ij,jk->ik", [[2, 3], [3, 4]], ["Einsum"]),
        ("ij,jk,k->i", [[2, 3], [3, 4], [4]], ["Einsum", "Einsum"]),
        ("ij,kl,m->im", [[2, 3], [4, 5], [6]], ["ReduceSum", "ReduceSum", "Mul", "Unsqueeze", "Mul"]),
        ("ii,i,i->", [[3, 3], [3], [3]], ["Einsum", "Mul", "Einsum"]),
        # The differentiation rule refuses these.
        ("ij,ij->ij", [[1, 3], [2, 3]], ["Einsum"]),
        ("...,...->...", [[3], [2, 3]], ["Einsum"]),
        ("...,...->...", [None, None], ["Einsum"]),
        ("...i,...i,...->...", [None, None, None], ["Einsum", "Einsum"]),
    ],
)
def test_ops(equation: str, shapes: list[list[int | str] | None], ops: list[str]) -> None:
    written = [node.op_type for node in rewritten(equation, *shapes).graph if node.op_type != "Constant"]
    assert written[:-2] == ops


def test_an_ellipsis_of_unknown_rank_in_pairs() -> None:
    model = ir.to_proto(rewritten("...i,...ij,...j->...", None, None, None))
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(shape) for shape in ((4, 5, 2), (4, 5, 2, 3), (4, 5, 3))]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (loss,) = session.run(["loss"], {f"x{k}": array for k, array in enumerate(arrays)})
    assert loss == pytest.approx((np.einsum("...i,...ij,...j->...", *arrays) ** 2).sum())


def test_many_letters_leave_none_for_the_ellipsis() -> None:
    """A node that cannot be written in pairs is left alone."""
    left = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    equation = ",".join(f"...{label}" for label in left) + "->..."
    assert next(node.op_type for node in rewritten(equation, *[None] * len(left)).graph) == "Einsum"


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_repeated_axis_is_dropped(batch: int) -> None:
    """`k` is the same for all heads, so that its product with `q` has no batch axis for them."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    net (float[b, 6, 4] k, float[b, 2, 3, 5, 4] q) => (float[b, 2, 5, 3, 3] y)
    <int64[1] two = {2}, int64[4] heads = {1, 1, 5, 1}, int64[5] parts = {0, 2, 3, 5, 4}> {
        u = Unsqueeze(k, two)  e = Expand(u, heads)  r = Reshape(e, parts)
        y = Einsum<equation = "bckhd,bcqhd->bchqk">(r, q) }"""
    proto = onnx.parser.parse_model(text)
    model = infer_shapes(load_model(proto))
    assert EinsumPairsPass()(model).modified
    terms = [n.attributes["equation"].as_string() for n in model.graph if n.op_type == "Einsum"]
    assert terms == ["bckd,bcqhd->bchqk"]
    # ONNX Runtime's Einsum divides by zero for an empty batch.
    EinsumProductsPass()(infer_shapes(model))
    rng = np.random.default_rng(0)
    k, q = (rng.standard_normal(s).astype(np.float32) for s in ((batch, 6, 4), (batch, 2, 3, 5, 4)))
    session = onnxruntime.InferenceSession(
        to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    expected = np.einsum("bckd,bcqhd->bchqk", k.reshape(batch, 2, 3, 4), q)
    np.testing.assert_allclose(session.run(None, {"k": k, "q": q})[0], expected, rtol=1e-5, atol=1e-6)


def test_a_repeated_axis_stays_without_another_operand_that_has_it() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    net (float[3, 1] k, float[3, 4] q) => (float[5, 4] y) <int64[2] heads = {3, 5}> {
        e = Expand(k, heads)  y = Einsum<equation = "ih,ij->hj">(e, q) }"""
    model = infer_shapes(load_model(onnx.parser.parse_model(text)))
    assert not EinsumPairsPass()(model).modified
