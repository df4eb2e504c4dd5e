"""notes/other-trainers.md: every row names a test that is there, or says what to do instead."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notes" / "other-trainers.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_row_is_run_by_a_test() -> None:
    assert len(rows()) > 30
    for feature, *_, ours, reference in rows():
        if not reference.startswith("`tests/"):
            assert ours == "no", feature
            continue
        path, _, name = reference.strip("`").partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert any(test.startswith("test_") for test in tests), reference
        assert not name or name in tests, reference
