"""Every method of `torch.nn.Module` does on an ORTModule what it does on the plain module.

`python tests/ortmodule/test_api_table.py` (with src and tests on the path) writes notes/ortmodule-api.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException
from ortmodule import scenarios_hooks, scenarios_state  # noqa: F401 - they file their scenarios
from ortmodule.eager import compare
from ortmodule.scenarios import PUBLIC, SCENARIOS, SPECIAL, Net, Scenario, observe

PAGE = Path(__file__).parents[2] / "notes" / "ortmodule-api.md"
DIFFERENT = {
    "add_module": "raises `ORTModuleTorchModelException`, as in onnxruntime-training; "
    "`register_module` and assignment add children"
}

HEAD = """# ORTModule: every method of `torch.nn.Module`

Use an `ORTModule` like the PyTorch module that it wraps: this table compares every method. With
`model = ORTModule(net)`:

- **Attributes** belong to `net`: `model.fc` reads, sets and deletes `net.fc`.
- **Names** have no prefix: `model.state_dict()` has the keys of `net.state_dict()`, e.g. "fc.weight".
- **The root module** is `net`, which is `model.module`, wherever a method returns modules or passes modules to a
  function: `modules()`, `named_modules()`, `get_submodule("")`, hooks and `apply`.
- **Methods that return `self`**, e.g. `model.train()`, return `model`.
- **Methods of your own class** run with `model` as `self`.

`tests/ortmodule/test_api_table.py` writes this page. It does the same to a plain module and to an `ORTModule` around a
copy of the module, and compares what the last column names.

| method | same as on the plain module | compared |
|---|---|---|
"""


def check(scenario: Scenario) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    # The gradient of a plain sum through batch norm is zero: what remains of terms that cancel is rounding, magnified
    # by 1/sqrt(variance) of a small batch. Hence the absolute tolerance.
    compare(
        scenario.make(),
        lambda model: observe(model, scenario.run(model)),
        rtol=1e-5,
        atol=5e-5,
        equal_nan=True,
    )


def is_same(scenario: Scenario) -> bool:
    try:
        check(scenario)
    except AssertionError:
        return False
    return True


def page(same: Callable[[Scenario], bool]) -> str:
    lines = []
    for method in [*PUBLIC, *SPECIAL]:
        if method in DIFFERENT:
            lines.append(f"| `{method}` | no, on purpose | {DIFFERENT[method]} |")
            continue
        mine = [scenario for scenario in SCENARIOS if scenario.method == method]
        verdict = "yes" if mine and all(map(same, mine)) else "no"
        lines.append(f"| `{method}` | {verdict} | {'; '.join(scenario.says for scenario in mine)} |")
    return HEAD + "\n".join(lines) + "\n"


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_same_as_on_the_plain_module(scenario: Scenario) -> None:
    check(scenario)


def test_every_method_has_a_scenario() -> None:
    assert {scenario.method for scenario in SCENARIOS} | {*DIFFERENT} == {*PUBLIC, *SPECIAL}
    assert all(scenario.says for scenario in SCENARIOS)


def test_every_special_method_is_looked_at() -> None:
    of_module = {name for name, value in vars(torch.nn.Module).items() if inspect.isfunction(value)}
    special = {name for name in of_module if name.startswith("__")}
    assert special - {"__init__"} == {*SPECIAL}


def test_add_module_is_refused() -> None:
    with pytest.raises(ORTModuleTorchModelException, match=r"register_module\('extra'"):
        ORTModule(Net()).add_module("extra", torch.nn.ReLU())


def test_page_is_current() -> None:
    """It says of every scenario that it is the same; those that are not fail above."""
    expected = page(lambda scenario: True)
    assert PAGE.read_text(encoding="utf-8") == expected, f"write it anew: python {Path(__file__).name}"


if __name__ == "__main__":
    PAGE.write_text(page(is_same), encoding="utf-8")
