"""The site: every page stands in its navigation, every public name and every option in its reference.

`make docs` builds the site and compares the built pages with the public names (docs/hooks/site.py). What needs no
mkdocs is tested here.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import typer.main

import onnxtrain
from onnxtrain.cli._app import app

ROOT = Path(__file__).parents[1]
DOCS, NOTES = ROOT / "docs", ROOT / "notes"
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def hook(name: str) -> Any:
    """Import a file of docs/hooks/."""
    spec = importlib.util.spec_from_file_location(f"site_hooks_{name}", DOCS / "hooks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = hook("site")
questions = hook("questions")


def pages_in_navigation() -> list[str]:
    (navigation,) = re.findall(r"^nav:\n((?:[ \n].*\n?)+)", SETTINGS, re.MULTILINE)
    return re.findall(r"([\w/.-]+\.md)$", navigation, re.MULTILINE)


def test_every_page_stands_in_the_navigation_once() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(pages_in_navigation()) == sorted(pages)


def test_the_navigation_has_its_groups() -> None:
    groups = re.findall(r"^  - ([\w -]+):$", SETTINGS, re.MULTILINE)
    assert groups[:7] == ["Get started", "Tutorials", "Guides", "PyTorch", "Devices", "Concepts", "Reference"]


def test_labels_of_the_navigation_are_the_titles_of_the_pages() -> None:
    labels = re.findall(r'^ +- "?([^"\n]+?)"?: ([\w/.-]+\.md)$', SETTINGS, re.MULTILINE)
    assert len(labels) == len(pages_in_navigation())
    for label, page in labels:
        title = (DOCS / page).read_text(encoding="utf-8").splitlines()[0]
        assert title.replace("`", "") == f"# {label}", page


@pytest.mark.parametrize(
    "page", [page for page in pages_in_navigation() if not page.startswith("reference/")]
)
def test_a_page_has_at_most_2000_words(page: str) -> None:
    assert len((DOCS / page).read_text(encoding="utf-8").split()) <= 2000


def test_other_pages_link_to_every_page() -> None:
    linked = set()
    for page in pages_in_navigation():
        for target in re.findall(r"\]\(([\w./-]+\.md)[)#]", (DOCS / page).read_text(encoding="utf-8")):
            path = (DOCS / page).parent.joinpath(target).resolve()
            if path.is_relative_to(DOCS) and path != DOCS / page:
                linked.add(path.relative_to(DOCS).as_posix())
    assert set(pages_in_navigation()) - linked <= {"index.md"}


def test_every_module_that_pages_import_is_in_the_reference() -> None:
    imported = set()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            imported |= set(re.findall(r"^\s*(?:from|import) (onnxtrain[\w.]*)", block, re.MULTILINE))
    assert len(imported) > 8
    # The page of `onnxtrain` is a table of links; it is compared below.
    assert imported - {"onnxtrain"} <= set(site.reference_modules())


@pytest.mark.torch
def test_names_that_the_site_reads_are_those_of_python() -> None:
    for module in site.reference_modules():
        # Flower is not installed beside the other tests; tests/integrations compares its names.
        if module != "onnxtrain.integrations.flower":
            assert site.public_names(module) == sorted(importlib.import_module(module).__all__), module


def test_every_name_of_the_package_is_linked() -> None:
    rows = list(site.table_of_names())
    assert {re.sub(r"\W", "", row.split("`")[1]) for row in rows[2:]} == set(onnxtrain.__all__)
    targets = dict(re.findall(r"\[`(\w+)`\]\[([\w.]+)\]", "\n".join(rows)))
    assert targets["Trainer"] == "onnxtrain.trainer.Trainer"
    page = (DOCS / "reference" / "onnxtrain.md").read_text(encoding="utf-8")
    for name, target in targets.items():
        module = target.rpartition(".")[0]
        of_module = module in site.reference_modules() and name in site.public_names(module)
        assert of_module or f"::: {target}\n" in page, name


def test_every_command_and_option_is_in_the_reference() -> None:
    text = "\n".join(site.command_reference())
    sections = dict(re.findall(r"^## onnxtrain (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        for parameter in command.params:
            for spelling in parameter.opts if parameter.param_type_name == "option" else []:
                assert f"`{spelling}`" in sections[name], (name, spelling)
    assert "`--precision` `fp32|bf16`" in sections["train"]
    assert "Default: `10`." in sections["train"].partition("`--epochs`")[2].splitlines()[1]


@pytest.mark.parametrize(
    ("text", "repository", "expected"),
    [
        (
            "see [this](../CONTRIBUTING.md)",
            "https://e.org/x/",
            "see [this](https://e.org/x/blob/main/CONTRIBUTING.md)",
        ),
        ("see [this](../CONTRIBUTING.md)", None, "see this"),
        (
            "[a](../kernels/README.md#b)",
            "https://e.org/x",
            "[a](https://e.org/x/blob/main/kernels/README.md#b)",
        ),
        ("[ops](ops.md) [ops.md](ops.md#a)", None, "[ops](ops.md) [ops](ops.md#a)"),
        ("| `A\\|B` | <built-in> `<x>` |", None, "| `A|B` | &lt;built-in> `<x>` |"),
        ("[64, 256] [256, 10]", None, "[64, 256] \\[256, 10]"),
    ],
)
def test_text_is_made_ready_for_the_site(text: str, repository: str | None, expected: str) -> None:
    assert site.prepare_text(text, "page.md", repository) == expected


def test_links_to_pages_of_the_site_stay() -> None:
    assert site.prepare_text("[a](../ops.md)", "reference/index.md", None) == "[a](../ops.md)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("See :func:`sub`.\n\n>>> a()\n[3,\n 4]\n\nEnd.", "See `sub`.\n\n```pycon\n>>> a()\n[3,\n 4]\n```\n\nEnd."),
        ("Adds.\n\n    >>> add(1, 2)\n    3", "Adds.\n\n```pycon\n>>> add(1, 2)\n3\n```"),
        ("Example:\n    >>> 1\n    1", "Example:\n    ```pycon\n    >>> 1\n    1\n    ```"),
        ("Examples:\n    >>> 1\n    1", "Examples:\n    >>> 1\n    1"),
        ("Blocks.\n\n::\n\n    x = 1", "Blocks.\n\n\n    x = 1"),
        ("So::\n\n    x = 1", "So:\n\n    x = 1"),
    ],
)  # fmt: skip
def test_docstrings_become_markdown(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    griffe = types.ModuleType("griffe")
    griffe.Extension = griffe.Object = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    assert hook("docstrings").to_markdown(text) == expected


def test_every_extra_is_on_the_page_about_installing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    # The other extras are for development, and for running all examples.
    assert set(re.findall(r"`(\w+)`", rows)) == set(extras) - {"dev", "docs", "examples"}


def sections(page: str) -> list[dict[str, Any]]:
    """Makes the entries of the search index for a page: one for its beginning, one per heading of the second level."""
    text = site.FENCE.sub("", (DOCS / page).read_text(encoding="utf-8"))
    location = "" if page == "index.md" else page.removesuffix(".md") + "/"
    first, *others = re.split(r"^## ", text, flags=re.MULTILINE)
    title = re.search(r"^# (.*)", first, re.MULTILINE)
    # Of the pages of the reference only titles are known here: mkdocs fills them.
    entries = [{"location": location, "title": title[1] if title else page, "text": first}]
    for number, part in enumerate(others):
        heading, _, body = part.partition("\n")
        entries.append({"location": f"{location}#{number}", "title": heading, "text": body})
    boost = site.SEARCH_BOOST.get(group_of(page), 1)
    entries[0]["tags"] = questions.WORDS.get(page, [])
    return [{**entry, "boost": boost} for entry in entries]


def group_of(page: str) -> str:
    """Finds the group of the navigation that a page stands in, e.g. "How-to"."""
    before = SETTINGS[: SETTINGS.index(f" {page}\n")]
    return re.findall(r"^  - ([\w -]+):$", before, re.MULTILINE)[-1]


def test_the_search_answers_what_newcomers_ask() -> None:
    entries = [entry for page in pages_in_navigation() for entry in sections(page)]
    assert questions.unanswered(questions.build_search(entries)) == []


def test_a_question_without_a_page_is_noticed() -> None:
    pages = [page for page in pages_in_navigation() if page != "guides/fix-a-training-run.md"]
    lost = questions.unanswered(questions.build_search([entry for page in pages for entry in sections(page)]))
    assert any(text.startswith("'loss nan' finds ") for text in lost)


def test_questions_are_answered_on_their_pages() -> None:
    assert len(questions.QUESTIONS) >= 10
    for question in questions.QUESTIONS:
        assert question.answer in (DOCS / question.page).read_text(encoding="utf-8"), question
    assert [page for page in questions.WORDS if not (DOCS / page).is_file()] == []


def test_the_start_page_links_to_every_guide() -> None:
    start = (DOCS / "index.md").read_text(encoding="utf-8")
    for folder in ("tutorials", "guides", "pytorch", "devices", "concepts"):
        for path in sorted((DOCS / folder).glob("*.md")):
            assert f"({folder}/{path.name})" in start, path


def test_links_to_other_sites_are_well_formed() -> None:
    """Their form only: other sites change, and tests do not depend on them."""
    for path in [ROOT / "README.md", *DOCS.rglob("*.md"), *NOTES.glob("*.md")]:
        text = site.FENCE.sub("", path.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\((\w+:[^)]*)\)?", re.sub(r"`[^`\n]*`", "", text)):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./~%#?=&+@:-]*)?", target), (
                f"{path.name}: {target}"
            )


def anchors(page: str) -> set[str]:
    """Returns the anchors of the headings of a page, e.g. "what-is-sent"; `page` is a path below the repository."""
    text = site.FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    names = set()
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        names.add(name if name not in names else f"{name}_{sum(n.startswith(name) for n in names)}")
    return names


PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *NOTES.glob("*.md"),
        *ROOT.glob("examples/*/*.md"),
        *(ROOT / name / "README.md" for name in ("web", "kernels")),
    ]
)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = site.FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        other = (ROOT / page).parent.joinpath(target).resolve() if target else ROOT / page
        assert other.exists(), f"{page}: {target}"
        # mkdocs makes further anchors in the reference.
        if anchor and other.suffix == ".md" and other.parent != DOCS / "reference":
            assert anchor in anchors(other.relative_to(ROOT).as_posix()), f"{page}: {target}#{anchor}"


def test_notes_are_listed_on_their_first_page() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (NOTES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in NOTES.glob("*.md") if path.name != "README.md")
