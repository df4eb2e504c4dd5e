"""Sequences and optionals of known tensors become these tensors: values and gradients as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain import differentiate
from onnxtrain.errors import NoGradientRule
from onnxtrain.passes import canonicalize, load_model, to_proto

SEQUENCES = {
    "split by sizes": """s = Constant<value_ints = [1, 3]>()  q = SplitToSequence<axis = 1>(x, s)
        a = SequenceAt(q, one)  b = SequenceAt(q, last)  c = SequenceAt(q, zero)
        d = Concat<axis = 1>(a, b, c)  z = Sin(d)""",
    "chunks": """s = Constant<value_int = 3>()  q = SplitToSequence<axis = -1>(x, s)
        a = SequenceAt(q, zero)  b = SequenceAt(q, one)  d = Mul(a, b)  z = Sin(d)""",
    "unbound": """q = SplitToSequence<axis = 1, keepdims = 0>(x)  a = SequenceAt(q, one)  b = SequenceAt(q, last)
        z = Mul(a, b)""",
    "parts of size one": "q = SplitToSequence<axis = 1>(x)  a = SequenceAt(q, one)  z = Mul(a, x)",
    "constructed and stacked": """u = Sin(x)  q = SequenceConstruct(x, u)
        d = ConcatFromSequence<axis = -1, new_axis = 1>(q)  z = Mul(d, d)""",
    "joined": "u = Sin(x)  q = SequenceConstruct(x, u, x)  d = ConcatFromSequence<axis = 1>(q)  z = Mul(d, d)",
    "inserted and erased": """u = Sin(x)  v = Cos(x)  e = SequenceEmpty()  q1 = SequenceInsert(e, x)
        q2 = SequenceInsert(q1, u, zero)  q3 = SequenceInsert(q2, v, last)  q4 = SequenceErase(q3, one)
        q5 = Identity(q4)  q6 = SequenceErase(q5)  a = SequenceAt(q5, zero)  b = SequenceAt(q5, one)
        n = SequenceLength(q6)  m = CastLike(n, x)  c = Mul(a, b)  z = Mul(c, m)""",
    "optional tensor": """u = Sin(x)  o = Optional(u)  a = OptionalGetElement(o)  h = OptionalHasElement(o)
        m = CastLike(h, x)  c = Mul(a, m)  z = Mul(c, x)""",
    "optional that is a tensor": """a = OptionalGetElement(x)  h = OptionalHasElement(x)  m = CastLike(h, x)
        e = OptionalHasElement()  f = CastLike(e, x)  c = Mul(a, m)  d = Mul(c, c)  z = Add(d, f)""",
    "optional sequence": """q = SplitToSequence<axis = 1>(x)  o = Optional(q)  p = Identity(o)
        r = OptionalGetElement(p)  a = SequenceAt(r, one)  z = Mul(a, x)""",
    "optional that decides": """o = Optional(x)  h = OptionalHasElement(o)
        z = If (h) <then_branch = t () => (tz) { ta = OptionalGetElement(o)  tz = Sin(ta) },
                    else_branch = f () => (fz) { fz = Cos(x) }>""",
}


def model(body: str, size: str = "4") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, {size}] x) => (float y) {{
            zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  last = Constant<value_int = -1>()
            {body}  y = ReduceSum<keepdims = 0>(z) }}""")


def run(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )


@pytest.mark.parametrize("body", SEQUENCES.values(), ids=SEQUENCES)
def test_known_sequences_become_tensors(body: str) -> None:
    proto = model(body)
    canonical = to_proto(canonicalize(load_model(proto)))
    onnx.checker.check_model(canonical, full_check=True)
    assert not [
        node.op_type
        for node in canonical.graph.node
        if "Sequence" in node.op_type or "Optional" in node.op_type
    ]
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    (before,) = run(proto, x)
    np.testing.assert_allclose(run(canonical, x)[0], before, rtol=1e-6)
    _, gradient = run(differentiate(proto, "y", ["x"]), x)
    direction = np.random.default_rng(1).normal(size=x.shape)
    step = 1e-2
    ends = [run(proto, (x + sign * step * direction).astype(np.float32))[0] for sign in (1, -1)]
    assert (gradient * direction).sum() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-2, abs=2e-3)


def test_a_sequence_that_is_returned_stays() -> None:
    proto = model("q = SplitToSequence<axis = 1>(x)  a = SequenceAt(q, one)  z = Mul(a, x)")
    proto.graph.output.append(
        onnx.helper.make_tensor_sequence_value_info("q", onnx.TensorProto.FLOAT, ["n", 1])
    )
    canonical = canonicalize(load_model(proto))
    assert "SplitToSequence" in [node.op_type for node in canonical.graph]
    parts = run(to_proto(canonical), np.ones((2, 4), np.float32))[1]
    assert [part.shape for part in parts] == [(2, 1)] * 4


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ("q = SplitToSequence<axis = 1>(x)  a = SequenceAt(q, one)  z = Mul(a, x)", "m"),
        ("""q = SplitToSequence<axis = 1>(x)  i = ArgMax<axis = 0, keepdims = 0>(x)  j = ReduceMax<keepdims = 0>(i)
            a = SequenceAt(q, j)  z = Mul(a, x)""", "4"),
    ],
    ids=["unknown size", "position of the run"],
)  # fmt: skip
def test_what_depends_on_the_run_is_a_clear_error(body: str, size: str) -> None:
    with pytest.raises(
        NoGradientRule, match=r"Sequence.*with constant positions and sizes is replaced by its tensors"
    ):
        differentiate(model(body, size), "y", ["x"])


class Parts(torch.nn.Module):
    """Everything that the Dynamo exporter writes with sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.w
        a, b = x.chunk(2, -1)
        c, d, e = x.split([1, 2, 3], 1)
        first, *_, last = x.unbind(1)
        return (a.sin() * b).sum(1) + c[:, 0] * d.prod(1) + e.sum(1).cos() + first * last


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_parts_in_a_dynamo_export_are_trained_as_in_torch(tmp_path: Path) -> None:
    module = Parts().eval()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    program.save(str(tmp_path / "parts.onnx"))
    proto = onnx.load(tmp_path / "parts.onnx")
    name, output = proto.graph.input[0].name, proto.graph.output[0].name
    step = differentiate(proto, output, ["w"], cotangent="ct")
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(2))
    y = module(x)
    ct = torch.randn(7, generator=torch.Generator().manual_seed(3))
    (expected,) = torch.autograd.grad(y, module.w, ct)
    got, gradient = session.run(None, {name: x.numpy(), "ct": ct.numpy()})
    np.testing.assert_allclose(got, y.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_an_optional_of_a_branch_is_a_clear_error() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x, bool c) => (float y) {
            o = If (c) <then_branch = t () => (to) { to = Optional(x) },
                        else_branch = f () => (fo) { s = Sin(x)  fo = Optional(s) }>
            a = OptionalGetElement(o)  z = Mul(a, a)  y = ReduceSum<keepdims = 0>(z) }""")
    with pytest.raises(NoGradientRule, match="comes from an input or a branch: pass the tensor itself"):
        differentiate(proto, "y", ["x"])


@pytest.mark.parametrize("reader", ["y = SequenceAt(q, one)", "y = ConcatFromSequence<axis = 0>(q)"])
def test_an_axis_that_claims_a_billion_parts_is_not_split(reader: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[1000000000, 2] x) => (float[?, 2] y)
        <int64 one = {{1}}> {{ q = SplitToSequence<axis = 0>(x, one)  {reader} }}"""
    model = to_proto(canonicalize(load_model(onnx.parser.parse_model(text))))
    assert [node.op_type for node in model.graph.node] == [
        "SplitToSequence",
        reader.split()[2].split("(")[0].split("<")[0],
    ]
