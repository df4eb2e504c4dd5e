"""Attention, as PyTorch's exporters write it, becomes one op, with one for the gradient, and computes the same."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch.nn import functional

from fusion.rewriting import ops, rewritten, with_gradients
from onnxtrain.fusion import AttentionPass
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import run
from tolerances import norm_relative_error

SIZES = {"q": (2, 3, 6, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, 5)}


def graph(
    scores: str, *more: str, declared: str = "", shapes: dict[str, tuple[object, ...]] | None = None
) -> onnx.ModelProto:
    """softmax(scores) v, where `scores` are computed from q and kt, k with its last axes exchanged."""
    sizes = SIZES | (shapes or {})
    inputs = ", ".join(
        [f"float[{', '.join(map(str, shape))}] {name}" for name, shape in sizes.items()] + list(more)
    )
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net ({inputs}) => (float[b, h, q, w] y) {declared} {{
        kt = Transpose<perm = [0, 1, 3, 2]>(k)
        {scores}
        p = Softmax<axis = -1>(scores)
        y = MatMul(p, v) }}"""
    )


def sampled(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {v.name: [d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def check(proto: onnx.ModelProto, name: str) -> ir.Model:
    """The rewritten model has the op, and the values and gradients of the one that was not rewritten."""
    model = rewritten(proto, AttentionPass())
    assert f"{name}_float" in ops(model), ops(model)
    assert "Softmax" not in ops(model)
    feeds = sampled(proto)
    feeds["ct"] = np.random.default_rng(1).standard_normal(run(proto, feeds)[0].shape).astype(np.float32)
    wrt = [n for n in feeds if n != "ct"]
    plain = canonicalize(load_model(proto))
    results = [run(with_gradients(each, wrt), feeds) for each in (model, plain)]
    for own, reference in zip(*results, strict=True):
        assert norm_relative_error(own, reference) <= 2e-6
    return model


SCALED = [
    "scores = MatMul(q, kt)",
    "c = Constant<value_float = 0.5>()  s = MatMul(q, kt)  scores = Mul(s, c)",
    "c = Constant<value_float = 2.5>()  s = MatMul(q, kt)  scores = Div(s, c)",
    "c = Constant<value_float = 0.7>()  a = Mul(q, c)  b = Mul(c, kt)  scores = MatMul(a, b)",
]


@pytest.mark.parametrize("scores", SCALED)
def test_scaled_scores_become_attention(scores: str) -> None:
    check(graph(scores), "Attention")


def test_keys_that_were_transposed_with_others() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[2, 3, 6, 4] q, float[2, 7, 3, 4] k, float[2, 3, 7, 5] v) => (float[b, h, q, w] y) {
        kt = Transpose<perm = [0, 2, 3, 1]>(k)  scores = MatMul(q, kt)
        p = Softmax<axis = -1>(scores)  y = MatMul(p, v) }"""
    )
    assert ops(check(proto, "Attention"))["Transpose"] == 2


@pytest.mark.parametrize(
    "mask", ["float[7] mask", "float[6, 7] mask", "float[2, 1, 1, 7] mask", "float[2, 3, 6, 7] mask"]
)
def test_masked_scores_become_attention(mask: str) -> None:
    check(graph("s = MatMul(q, kt)  scores = Add(s, mask)", mask), "MaskedAttention")


WINDOWS = {"q": (4, 3, 6, 4), "k": (4, 3, 7, 4), "v": (4, 3, 7, 5)}
SPLIT = "five = Constant<value_ints = [-1, 2, 3, 6, 7]>()  four = Constant<value_ints = [-1, 3, 6, 7]>()"


@pytest.mark.parametrize(
    "mask",
    ["float[2, 1, 6, 7] mask", "float[1, 2, 1, 6, 7] mask", "float[2, 3, 1, 7] mask", "float[6, 7] mask"],
)
@pytest.mark.parametrize("add", ["Add(split, mask)", "Add(mask, split)"])
def test_masks_of_windows_become_attention(mask: str, add: str) -> None:
    scores = f"{SPLIT}  s = MatMul(q, kt)  split = Reshape(s, five)  m = {add}  scores = Reshape(m, four)"
    check(graph(scores, mask, shapes=WINDOWS), "MaskedAttention")


@pytest.mark.parametrize("biased", ["Add(s, bias)", "Add(bias, s)"])
def test_masks_of_windows_beside_a_bias(biased: str) -> None:
    scores = f"""{SPLIT}  s = MatMul(q, kt)  t = {biased}  split = Reshape(t, five)  m = Add(split, mask)
        scores = Reshape(m, four)"""
    more = "float[1, 3, 6, 7] bias", "float[2, 1, 6, 7] mask"
    check(graph(scores, *more, shapes=WINDOWS), "MaskedAttention")


def test_windows_of_no_images() -> None:
    scores = f"{SPLIT}  s = MatMul(q, kt)  split = Reshape(s, five)  m = Add(split, mask)  scores = Reshape(m, four)"
    sizes = {name: ("b", *shape[1:]) for name, shape in WINDOWS.items()}
    model = rewritten(graph(scores, "float[2, 1, 6, 7] mask", shapes=sizes), AttentionPass())
    assert "MaskedAttention_float" in ops(model)
    feeds = {name: np.zeros((0, *shape[1:]), np.float32) for name, shape in WINDOWS.items()}
    feeds["mask"] = np.zeros((2, 1, 6, 7), np.float32)
    assert run(to_proto(model), feeds)[0].shape == (0, 3, 6, 5)


@pytest.mark.parametrize(
    ("constants", "mask"),
    [
        # Heads and queries are regrouped.
        ("five = Constant<value_ints = [4, 3, 2, 3, 7]>()", "float[1, 1, 2, 3, 7] mask"),
        ("five = Constant<value_ints = [4, 1, 3, 6, 7]>()", "float[4, 1, 3, 6, 7] mask"),
    ],
    ids=["other axes", "a mask for each image"],
)
def test_other_reshaped_scores_stay(constants: str, mask: str) -> None:
    scores = f"""{constants}  four = Constant<value_ints = [-1, 3, 6, 7]>()  s = MatMul(q, kt)
        split = Reshape(s, five)  m = Add(split, mask)  scores = Reshape(m, four)"""
    assert "Softmax" in ops(rewritten(graph(scores, mask, shapes=WINDOWS), AttentionPass()))


def test_two_masks_become_one() -> None:
    scores = "s = MatMul(q, kt)  t = Add(s, bias)  scores = Add(mask, t)"
    check(graph(scores, "float[3, 6, 7] bias", "float[2, 1, 6, 7] mask"), "MaskedAttention")


CAUSAL = {
    "of numbers": """ones = Expand(one, size)  t = Trilu<upper = 0>(ones)  masked = Equal(t, zero)
        mask = Where(masked, low, zero)""",
    "of booleans": """ones = Expand(yes, size)  t = Trilu<upper = 0>(ones)  mask = Where(t, zero, low)""",
}


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("mask", CAUSAL.values(), ids=list(CAUSAL))
def test_a_mask_of_the_past_becomes_causal_attention(mask: str, low: float) -> None:
    proto = graph(
        f"{mask}  s = MatMul(q, kt)  scores = Add(s, mask)",
        declared="<float zero, float one, float low, bool yes, int64[2] size>",
    )
    constants = {"zero": 0.0, "one": 1.0, "low": low}
    del proto.graph.value_info[:]
    proto.graph.initializer.extend(
        [numpy_helper.from_array(np.float32(value), name) for name, value in constants.items()]
        + [numpy_helper.from_array(np.array(True), "yes"), numpy_helper.from_array(np.array([6, 7]), "size")]
    )
    check(proto, "CausalAttention")


def with_mask(mask: np.ndarray) -> onnx.ModelProto:
    sizes = ", ".join(map(str, mask.shape))
    proto = graph("s = MatMul(q, kt)  scores = Add(s, mask)", declared=f"<float[{sizes}] mask>")
    del proto.graph.value_info[:]
    proto.graph.initializer.append(numpy_helper.from_array(mask.astype(np.float32), "mask"))
    return proto


@pytest.mark.parametrize("shape", [(6, 7), (1, 1, 6, 7)])
def test_a_constant_causal_mask(shape: tuple[int, ...]) -> None:
    check(with_mask(np.where(np.tri(6, 7) == 1, 0, -np.inf).reshape(shape)), "CausalAttention")


@pytest.mark.parametrize(
    "mask",
    [np.where(np.tri(6, 7, 1) == 1, 0, -np.inf), np.where(np.tri(6, 7) == 1, 0, -5), np.tri(6, 7)],
    ids=["one further", "not nothing", "not zero"],
)
def test_other_constant_masks(mask: np.ndarray) -> None:
    check(with_mask(mask), "MaskedAttention")


@pytest.mark.parametrize(
    "proto",
    [
        graph("s = MatMul(q, kt)  scores = Clip(s)"),
        graph("s = MatMul(q, kt)  scores = Add(s, mask)", "float[1, 2, 3, 6, 7] mask"),
        graph("s = MatMul(q, kt)  scores = Mul(s, m)", "float[6, 7] m"),
        graph("scores = MatMul(q, kt)", shapes={"k": (2, 1, 7, 4)}),
        graph("scores = MatMul(q, kt)", shapes={"q": (1, 3, 6, 4)}),
        graph(
            "scores = MatMul(q, kt)", shapes={"q": ("a", 3, 6, 4), "k": ("b", 3, 7, 4), "v": ("a", 3, 7, 5)}
        ),
    ],
    ids=[
        "another op",
        "a mask of five axes",
        "a factor per score",
        "shared keys",
        "shared queries",
        "unknown sizes",
    ],
)
def test_other_graphs_stay(proto: onnx.ModelProto) -> None:
    assert "Softmax" in ops(rewritten(proto, AttentionPass()))


def test_probabilities_that_are_returned_stay() -> None:
    proto = graph("scores = MatMul(q, kt)")
    proto.graph.output.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, (2, 3, 6, 7)))
    assert "Softmax" in ops(rewritten(proto, AttentionPass()))


class _Block(torch.nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = torch.nn.Linear(12, 36), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return mixed.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(("causal", "dynamo"), [(True, True), (True, False), (False, False)])
def test_what_the_exporters_of_pytorch_write(tmp_path: Path, causal: bool, dynamo: bool) -> None:
    path, block = tmp_path / "block.onnx", _Block(causal=causal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            block, (torch.randn(2, 6, 12),), path, dynamo=dynamo, opset_version=18, verbose=False
        )
    proto = onnx.load(path)
    model = rewritten(proto, AttentionPass())
    assert {"CausalAttention_float" if causal else "Attention_float"} <= ops(model).keys()
    x = np.random.default_rng(0).standard_normal((2, 6, 12)).astype(np.float32)
    own = run(to_proto(model), {model.graph.inputs[0].name: x})[0]
    np.testing.assert_allclose(own, block(torch.from_numpy(x)).detach().numpy(), atol=1e-6)
