"""Blocks of the pages that give examples run by themselves; links lead somewhere; tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import EXAMPLES, STORIES, Block, difference, read_blocks, run_example

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page}-{index}")
        for page in EXAMPLES
        for index, block in enumerate(read_blocks(page))
    ],
)
def test_a_block_runs_and_prints_what_the_page_shows(page: str, block: Block) -> None:
    assert difference(block.shown, run_example(page, block), block.marks) is None


OTHER_PAGES = [
    "CONTRIBUTING.md",
    "docs/index.md",
    "docs/devices/browser.md",
    "notes/environment-variables.md",
    "examples/forecasting/personalise.md",
    "docs/index.md",
    "docs/install.md",
    "examples/forecasting/README.md",
    "web/README.md",
]


@pytest.mark.parametrize("page", [*STORIES, *EXAMPLES, *OTHER_PAGES])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{page} links to {target}"


def test_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    targets = re.findall(r"^make (\w+)", readme, re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test-all" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_environment_variable_is_in_the_table() -> None:
    """Each is read by its name as a whole; macros and options of CMake are no such names."""
    reads = {
        "*.py": r'"(ONNXTRAIN_[A-Z_]+)"',
        "*.cpp": r'getenv\("(ONNXTRAIN_[A-Z_]+)"\)',
        "*.mjs": r"process\.env\.(ONNXTRAIN_[A-Z_]+)",
        "*.yml": r"!ENV \[(ONNXTRAIN_[A-Z_]+)",
    }
    read: set[str] = set()
    for pattern, name in reads.items():
        for folder in ("src", "tests", "docs/hooks", "benchmarks", "examples", "kernels/csrc", "web"):
            for path in (ROOT / folder).rglob(pattern):
                if "node_modules" not in path.parts and path.is_file():
                    read |= {*re.findall(name, path.read_text(encoding="utf-8"))}
        for path in ROOT.glob(pattern):
            read |= {*re.findall(name, path.read_text(encoding="utf-8"))}
    page = (ROOT / "notes" / "environment-variables.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    assert len(read) > 20
    assert {name for row in rows for name in re.findall(r"`(ONNXTRAIN_[A-Z_]+)`", row)} == read
