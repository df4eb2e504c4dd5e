"""Sizes that a model merely claims cost no memory: it is canonicalized within a bound, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("resource", reason="limits of memory are set by Unix")

BOUND = 1 << 30

BODIES = {
    "sum of vectors": "z = Add(x, x)  y = Identity(z)",
    "sum of vectors, with shapes computed": "z = Add(x, x)  s = Shape(z)  y = Expand(z, s)",
    "joined vectors": "z = Concat<axis = 0>(x, x)  s = Shape(z)  y = Expand(z, s)",
    "range": """a = Constant<value_int = 0>()  b = Constant<value_int = 2147483648>()  c = Constant<value_int = 1>()
        r = Range(a, b, c)  f = Cast<to = 1>(r)  y = Add(x, f)""",
    "filled": "s = Constant<value_ints = [2147483648]>()  c = ConstantOfShape(s)  y = Add(x, c)",
    "filled with integers": """s = Constant<value_ints = [2147483648]>()
        c = ConstantOfShape<value = int64[1] {3}>(s)  f = Cast<to = 1>(c)  y = Add(x, f)""",
    "tiled": """s = Constant<value_ints = [2147483648]>()  o = Constant<value_ints = [1]>()  e = Tile(o, s)
        f = Cast<to = 1>(e)  y = Add(x, f)""",
    "expanded": """s = Constant<value_ints = [65536, 65536]>()  o = Constant<value_ints = [1]>()  e = Expand(o, s)
        f = Cast<to = 1>(e)  y = ReduceSum(f)""",
    "computed size": """h = Constant<value_ints = [65536]>()  q = Constant<value_ints = [32768]>()  s = Mul(h, q)
        c = ConstantOfShape(s)  d = Add(c, c)  t = Shape(d)  y = Expand(d, t)""",
}

CANONICALIZE = """
import resource, sys, onnx
from onnxtrain.passes import canonicalize, load_model
from onnx.reference import ReferenceEvaluator
model = load_model(onnx.parser.parse_model(sys.argv[1]))
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
canonicalize(model)
"""


@pytest.mark.sample(every=3)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_claim_of_two_billion_elements_costs_nothing(body: str) -> None:
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[2147483648] x) => (float y) {{ {body} }}'
    subprocess.run([sys.executable, "-c", CANONICALIZE, text, str(BOUND)], check=True)
