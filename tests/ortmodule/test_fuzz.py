"""Random modules do under ORTModule what they do in eager PyTorch, or at least what torch.compile makes of them."""

from __future__ import annotations

import os
import re
from types import ModuleType

import pytest
import torch

from ortmodule.fuzz import edges, expressions
from ortmodule.fuzz import judge as judging
from ortmodule.fuzz.generate import Program, generate
from ortmodule.fuzz.judge import judge
from ortmodule.fuzz.run import run
from ortmodule.fuzz.shrink import shrink

MODULES = int(os.environ.get("ONNXTRAIN_FUZZ_MODULES", "20"))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("seed", range(MODULES))
def test_a_random_module_does_what_it_does_in_eager_pytorch(seed: int) -> None:
    program = generate(str(seed))
    verdict = judge(program.text, program.features)
    assert not verdict.is_finding, f"{verdict}\n\n{program.text}"


def test_same_program_of_a_seed() -> None:
    assert generate("11").text == generate("11").text
    assert generate("11").text != generate("12").text


@pytest.mark.parametrize("tables", [edges, expressions], ids=["edges", "expressions"])
def test_templates_begin_with_what_others_depend_on(tables: ModuleType) -> None:
    """`{y}` has the shape of the first tensor, `{d}` is an axis of it; see `Writer.fill`."""
    for table in tables.__all__:
        for template in getattr(tables, table):
            kinds = "".join(re.findall(r"\{([a-zB])\d?=?\}", template))
            assert re.match(r"[cBz]*([xtnmpb]|$)", kinds), f"{table}: {template}"


PROGRAM = Program(
    seed="by hand",
    init=("self.layer = nn.Linear(3, 2)", "self.register_buffer('sum', torch.zeros(2))"),
    arguments=("x0",),
    body=("v1 = x0 * 2", "v2 = self.layer(x0).tanh()", "self.sum += v2.sum(0)", "v3 = v2.exp()"),
    result="(v1, v2, v3)",
    scenario=(
        "x0 = randn(4, 3)",
        "x0.requires_grad_()",
        "inputs = dict(x0=x0)",
        "out = model(x0)",
        "see('out', out)",
        "aliases(net, inputs, out, see)",
        "see('loss', backward(out))",
        "gradients(net, inputs, see)",
        "state(net, see)",
    ),
)


@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        (".tanh()", ".tanh() * 1.0001", "value"),
        (
            "self.layer(x0).tanh()",
            "(t := self.layer(x0).tanh()).detach() + 0.9 * (t - t.detach())",
            "gradient",
        ),
        ("self.layer(x0)", "self.layer(x0.detach())", "gradient"),
        ("self.sum += v2.sum(0)", "self.sum = self.sum + 2 * v2.sum(0)", "value"),
        ("v3 = v2.exp()", "v3 = v2.exp().double()", "dtype"),
        ("v3 = v2.exp()", "v3 = v2.exp()[None]", "dtype"),
        ("v3 = v2.exp()", "v3 = v2.exp().detach()", "dtype"),
        ("v3 = v2.exp()", "v3 = [v2.exp()]", "structure"),
        ("v3 = v2.exp()", "v3 = v2 @ v2", "raises"),
    ],
)
def test_judge_sees(right: str, wrong: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ORTModule is made to compute something wrong, the verdict says so."""
    assert right in PROGRAM.text
    monkeypatch.setattr(
        judging, "run", lambda text, how, attempt=0: run(_of(text, how, right, wrong), _way(how), attempt)
    )
    assert judge(PROGRAM.text).kind == kind


def _of(text: str, how: str, right: str, wrong: str) -> str:
    return text.replace(right, wrong) if how == "ORTModule" else text


def _way(how: str) -> str:
    return "eager" if how in ("ORTModule", "aot_eager") else how


def test_judge_sees_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PROGRAM.text.replace("v1 = x0 * 2", "v1 = x0[1:]")
    monkeypatch.setattr(
        judging,
        "run",
        lambda text, how, attempt=0: run(_of(text, how, "x0[1:]", "x0[1:].clone()"), _way(how), attempt),
    )
    assert judge(text).kind == "aliases"


def test_judge_sees_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PROGRAM.text.replace("v3 = v2.exp()", "v3 = v2 @ v2")
    monkeypatch.setattr(
        judging,
        "run",
        lambda text, how, attempt=0: run(_of(text, how, "v2 @ v2", "v2 + v2"), _way(how), attempt),
    )
    assert judge(text).kind == "accepts"


def test_shrink_keeps_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        judging,
        "run",
        lambda text, how, attempt=0: run(_of(text, how, ".tanh()", ".sin()"), _way(how), attempt),
    )
    small = shrink(PROGRAM)
    assert judge(small.text).kind == "value"
    assert small.body == ("v2 = self.layer(x0).tanh()", "v3 = v2.exp()")
    assert small.result == "(v3,)"


def test_float64_runs_the_same_program() -> None:
    """The reference has the same inputs, parameters and dropped elements."""
    body = ("v1 = F.dropout(self.layer(x0), 0.5)",)
    text = Program("by hand", PROGRAM.init, ("x0",), body, "v1", PROGRAM.scenario).text
    eager, double = (run(text, kind).seen[0][1].value for kind in ("eager", "float64"))
    assert double.dtype == torch.float64
    torch.testing.assert_close(eager, double.float())
    assert (eager == 0).any()
