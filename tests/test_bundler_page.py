"""The files on the page about bundlers are those of web/bundlers, which `make test-bundlers` builds and runs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = ROOT / "web" / "bundlers"
PAGE = (ROOT / "docs" / "devices" / "bundlers.md").read_text(encoding="utf-8")
TITLES = {"Vite": "vite", "webpack": "webpack", "esbuild": "esbuild", "Next.js": "next"}
FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Next.js has a component for what this file does.
NOT_IN = {"next": {"src/main.js"}}


def shown(project: str) -> dict[str, str]:
    """Returns the files that the page shows for a project: those of all projects, and those of its section."""
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    (title,) = [title for title, name in TITLES.items() if name == project]
    common = dict(FILE.findall(sections["Write the training loop"]))
    own = FILE.findall(sections[title])
    assert len(own) >= 4
    return {name: text for name, text in common.items() if name not in NOT_IN.get(project, ())} | dict(own)


@pytest.mark.parametrize("project", TITLES.values())
def test_the_page_shows_every_file_of_the_project(project: str) -> None:
    folder = PROJECTS / project
    listed = subprocess.run(["git", "ls-files", "."], cwd=folder, capture_output=True, text=True, check=True)
    tracked = listed.stdout.split()
    assert shown(project) == {name: (folder / name).read_text(encoding="utf-8") for name in tracked}


def test_the_projects_name_the_package_that_npm_packs() -> None:
    package = json.loads((ROOT / "web" / "package.json").read_text(encoding="utf-8"))
    archive = f"{package['name']}-{package['version']}.tgz"
    assert f"`{archive}`" in PAGE
    for project in TITLES.values():
        described = json.loads((PROJECTS / project / "package.json").read_text(encoding="utf-8"))
        assert described["dependencies"]["onnxtrain-web"] == f"file:{archive}"
        exact = described["dependencies"] | described.get("devDependencies", {})
        assert all(re.fullmatch(r"\d+\.\d+\.\d+|file:\S+", version) for version in exact.values())
        assert exact["onnxruntime-web"] == package["devDependencies"]["onnxruntime-web"]


def test_messages_on_the_page_are_those_of_the_package() -> None:
    source = (ROOT / "web" / "src" / "start.ts").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
    assert len(quoted) >= 6
    for part in (
        "did not start",
        "does not load",
        "does not compute in WebAssembly",
        "not cross-origin isolated",
    ):
        assert part in source
        assert any(part in message for message in quoted)
    assert "docs/devices/bundlers.md" in source
