"""Private names of PyTorch are imported in one module, and a PyTorch that lacks one is refused in a sentence."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain

PACKAGE = Path(onnxtrain.__file__).parent
OPERATORS = ("torch.ops.", "torch._foreach_")  # the names of operators, which files and graphs hold


def _chain(node: ast.expr) -> str:
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _private(tree: ast.AST) -> set[str]:
    """Returns the names below `torch` with a part that is private."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(_chain(node))
    return {
        name
        for name in names
        if name.startswith("torch.")
        and not name.startswith(OPERATORS)
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }


def test_private_names_are_found() -> None:
    imports = "import torch._refs\nfrom torch.utils import _pytree\n"
    code = imports + "torch._C._nn.one_hot\ntorch.ops.aten._ctc_loss\ntorch.__file__"
    found = _private(ast.parse(code))
    assert {"torch._refs", "torch.utils._pytree", "torch._C._nn.one_hot"} <= found
    assert not any("ctc" in name or "__file__" in name for name in found)


@pytest.mark.parametrize("room", ["ortmodule", "optim", "utils"])
def test_one_module_takes_what_is_private(room: str) -> None:
    files = [path for path in (PACKAGE / room).rglob("*.py") if path.name != "_torch.py"]
    assert files
    found = {path.name: _private(ast.parse(path.read_text())) for path in files}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_version_that_lacks_one_is_refused_by_name() -> None:
    program = "import torch; del torch._assert_async; import onnxtrain.ortmodule"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ORTModule cannot run on PyTorch 2.")
    assert "_assert_async" in last
    assert "onnxtrain[torch]" in last
