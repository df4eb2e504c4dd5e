"""Sequences that a Loop appends to are what it scans: values as before, and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch

from onnxtrain import differentiate
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import normal, run

LOOP = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n, 4] x, int64 trips) => ({outputs}) {{
        none = Constant<value_float = 0.5>()  h0 = Mul(x, none)  empty = SequenceEmpty()  pairs = SequenceEmpty()
        zero = Constant<value_int = 0>()  last = Constant<value_int = -1>()
        h, q, p, count = Loop (trips, , h0, empty, pairs, zero) <body = step
            (int64 i, bool c, float[n, 4] h_in, seq(float) q_in, seq(float) p_in, int64 count_in)
            => (bool c_out, float[n, 4] h_out, seq(float) q_out, seq(float) p_out, int64 count_out) {{
                c_out = Identity(c)  one = Constant<value_int = 1>()  count_out = Add(count_in, one)
                s = Add(h_in, x)  h_out = Tanh(s)  q_out = SequenceInsert(q_in, h_out)
                pair = Concat<axis = -1>(s, s)  p_out = SequenceInsert(p_in, pair) }}>
        {read}
    }}"""

READ = {
    "stacked in front": "y = ConcatFromSequence<axis = 0, new_axis = 1>(q)",
    "stacked inside": "y = ConcatFromSequence<axis = 1, new_axis = 1>(q)",
    "stacked behind": "y = ConcatFromSequence<axis = -1, new_axis = 1>(p)",
    "joined": "y = ConcatFromSequence<axis = 1>(p)",
    "joined at the last axis": "y = ConcatFromSequence<axis = -1>(q)",
    "read one by one": "a = SequenceAt(q, zero)  b = SequenceAt(q, last)  y = Mul(a, b)",
    "counted": "k = SequenceLength(q)  f = Cast<to = 1>(k)  y = Mul(h, f)",
    "both": """a = ConcatFromSequence<axis = 0, new_axis = 1>(p)  t = ReduceSum<keepdims = 0>(a)
        b = ConcatFromSequence<axis = 1>(q)  u = Mul(b, t)  f = Cast<to = 1>(count)  y = Mul(u, f)""",
}


def model(read: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(LOOP.format(read=read, outputs="float y"))


def declared(read: str) -> onnx.ModelProto:
    proto = model(read)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize("trips", [1, 3])
def test_values_are_those_of_the_sequence(case: str, trips: int) -> None:
    proto = declared(READ[case])
    rewritten = to_proto(canonicalize(load_model(proto)))
    assert not [node for node in rewritten.graph.node if "Sequence" in node.op_type]
    given = {"x": normal(2, 4), "trips": np.array(trips)}
    np.testing.assert_allclose(run(rewritten, given)[0], run(proto, given)[0], rtol=1e-6)


@pytest.mark.parametrize("case", READ)
def test_gradients(case: str) -> None:
    proto = model(f"{READ[case].replace('y =', 'z =')}  r = Mul(z, z)  y = ReduceSum<keepdims = 0>(r)")
    step = differentiate(proto, "y", ["x"])
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    x = normal(2, 4)
    (got,) = session.run(["x_grad"], {"x": x, "trips": np.array(3)})
    given = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    h, q, p = 0.5 * given, [], []
    for _ in range(3):
        s = h + given
        h = torch.tanh(s)
        q.append(h)
        p.append(torch.cat([s, s], -1))
    z = {
        "stacked in front": lambda: torch.stack(q),
        "stacked inside": lambda: torch.stack(q, 1),
        "stacked behind": lambda: torch.stack(p, -1),
        "joined": lambda: torch.cat(p, 1),
        "joined at the last axis": lambda: torch.cat(q, -1),
        "read one by one": lambda: q[0] * q[-1],
        "counted": lambda: 3 * h,
        "both": lambda: 3 * torch.cat(q, 1) * torch.stack(p).sum(),
    }[case]()
    (expected,) = torch.autograd.grad((z * z).sum(), given)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_no_iterations() -> None:
    proto = declared(READ["stacked in front"])
    rewritten = to_proto(canonicalize(load_model(proto)))
    (y,) = run(rewritten, {"x": normal(2, 4), "trips": np.array(0)})
    assert y.shape[0] == 0


def test_a_sequence_that_grows_after_the_loop_stays() -> None:
    proto = declared("more = SequenceInsert(q, h)  y = ConcatFromSequence<axis = 0, new_axis = 1>(more)")
    rewritten = to_proto(canonicalize(load_model(proto)))
    assert "SequenceInsert" in [node.op_type for node in rewritten.graph.node]
    given = {"x": normal(2, 4), "trips": np.array(2)}
    np.testing.assert_array_equal(run(rewritten, given)[0], run(proto, given)[0])


def test_a_sequence_that_the_body_reads_stays() -> None:
    text = LOOP.format(read=READ["stacked in front"], outputs="float y").replace(
        "count_out = Add(count_in, one)", "long = SequenceLength(q_in)  count_out = Add(long, one)"
    )
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    rewritten = to_proto(canonicalize(load_model(proto)))
    assert "ConcatFromSequence" in [node.op_type for node in rewritten.graph.node]
    given = {"x": normal(2, 4), "trips": np.array(2)}
    np.testing.assert_array_equal(run(rewritten, given)[0], run(proto, given)[0])


class Decoder(torch.nn.Module):
    """Stacks its outputs as a scripted decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        outputs: list[torch.Tensor] = []
        for step in range(x.size(0)):
            h = torch.tanh(self.cell(x[step]) + h)
            outputs.append(h)
        return torch.stack(outputs, dim=1)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the exporter, which is deprecated
def test_a_scripted_loop_that_appends(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Decoder(), torch.randn(4, 2, 3)
    torch.onnx.export(
        torch.jit.script(net), (x,), tmp_path / "net.onnx", dynamo=False, opset_version=17, input_names=["x"],
        output_names=["y"],
    )  # fmt: skip
    step = differentiate(onnx.load(tmp_path / "net.onnx"), "y", ["cell.weight"], cotangent="ct")
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    ct = torch.randn(2, 4, 3)
    y, got = session.run(["y", "cell.weight_grad"], {"x": x.numpy(), "ct": ct.numpy()})
    expected = net(x)
    np.testing.assert_allclose(y, expected.detach(), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(expected, net.cell.weight, ct)
    np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-5)
