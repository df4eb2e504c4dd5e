"""The notebooks are the tutorials, and print what is stored in them."""

from __future__ import annotations

import nbformat
import pytest

import notebooks


def without_outputs(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_has_the_text_and_the_blocks_of_its_page(name: str) -> None:
    stored = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(stored)
    made = notebooks.make_notebook(notebooks.PAGES[name])
    assert without_outputs(stored) == without_outputs(made), "run: python tests/notebooks.py --write"


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_links_of_a_notebook_lead_somewhere(name: str) -> None:
    stored = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)
    targets = [t for cell in stored.cells for t in notebooks.LINK.findall(cell.source) if "/" in t]
    assert len(targets) > 3
    for target in targets:
        assert (notebooks.FOLDER / target).exists(), target


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of jupyter_client, about event loops
@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_prints_what_is_stored_in_it(name: str) -> None:
    page = notebooks.PAGES[name]
    stored = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)
    executed = notebooks.make_notebook(page)
    notebooks.run_notebook(executed)
    assert notebooks.differences(stored, executed, page) == []
    pictures = [
        out
        for cell in notebooks.code_cells(executed)
        for out in cell.outputs
        if "image/png" in out.get("data", {})
    ]
    assert len(pictures) == len(
        notebooks.PICTURE.findall((notebooks.ROOT / page).read_text(encoding="utf-8"))
    )
    assert any(notebooks.printed(cell) for cell in notebooks.code_cells(stored))
    assert "/home/" not in nbformat.writes(stored)
    assert "/tmp/" not in nbformat.writes(stored)


def test_all_notebooks_are_made_from_a_page() -> None:
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == set(notebooks.PAGES)
