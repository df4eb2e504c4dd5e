"""Makes the notebooks in examples/notebooks/ from the tutorials, and runs them.

    python tests/notebooks.py            # compares
    python tests/notebooks.py --write    # makes and runs them, and stores their outputs

A name behind it, e.g. `from-pytorch`, chooses a notebook.

A notebook has the text and the blocks of its page. It is never edited by hand.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import nbclient
import nbformat

from pages import BLOCK, PICTURE, ROOT, Block, difference, read_blocks

FOLDER = ROOT / "examples" / "notebooks"
PAGES = {name: f"docs/tutorials/{name}.md" for name in ("first-fine-tuning", "from-pytorch", "on-the-device")}
SAVED = re.compile(r'savefig\("([\w-]+\.png)"\)')
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def make_notebook(page: str) -> nbformat.NotebookNode:
    """Makes a notebook without outputs: a cell per block that runs, and a cell for the text between two blocks."""
    cells = []
    for number, (kind, text) in enumerate(_parts(page)):
        make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        cells.append(make(text, id=f"cell-{number}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _parts(page: str) -> Iterator[tuple[str, str]]:
    """Yields the parts of a page in order: ("code", ...) and ("text", ...)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    # A notebook does not invite to open itself.
    text = re.sub(r"\n[^\n]*(?:\n[^\n]+)*\bas a\s+notebook\]\([^)]*\)\.\n", "\n", text)
    position = 0
    for block in BLOCK.finditer(text):
        yield from _text(page, text[position : block.start()])
        code = block["code"].rstrip()
        if saved := SAVED.findall(code):
            # A page shows the saved picture; a notebook shows it below the cell, as it was saved in this run.
            shown = "\n".join(f'display(Image("{name}"))' for name in saved)
            code = f"{code}\n\nfrom IPython.display import Image, display\n\n{shown}"
        yield "code", code
        position = block.end()
    yield from _text(page, text[position:])


def _text(page: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields a text whose links lead from the folder of the notebooks to where they lead from the page."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[1]))
        return f"]({posixpath.relpath(target, 'examples/notebooks')}"

    if text := LINK.sub(link, PICTURE.sub("", text)).strip():
        yield "text", text


def run_notebook(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells in a kernel of this Python, in an empty directory; stores the outputs in the cells."""
    source = str(ROOT / "src")
    settings = {
        "ONNXTRAIN_KERNELS": "off",
        "PYTHONWARNINGS": "ignore",  # warnings of exporters name paths of the machine
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, **settings})
    for cell in code_cells(notebook):
        # Libraries write there what they miss on this machine, e.g. PyTorch's exporter that there is no torchvision.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def printed(cell: nbformat.NotebookNode) -> str:
    """Joins what a cell has printed to standard output."""
    texts = [output.text for output in cell.outputs if output.get("name") == "stdout"]
    return "".join(texts)


def code_cells(notebook: nbformat.NotebookNode) -> list[Any]:
    """Lists the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def differences(stored: nbformat.NotebookNode, executed: nbformat.NotebookNode, page: str) -> list[str]:
    """Compares outputs of two notebooks of one page; differences that the page allows are none."""
    blocks: list[Block] = read_blocks(page)
    rows = zip(blocks, code_cells(stored), code_cells(executed), strict=True)
    found = [difference(printed(old), printed(new), block.marks) for block, old, new in rows]
    return [text for text in found if text]


def main(arguments: list[str]) -> int:
    """Compares or writes the notebooks that are named, by default all; returns the exit code."""
    failed = 0
    for name in [argument for argument in arguments if argument != "--write"] or PAGES:
        page, path = PAGES[name], FOLDER / f"{name}.ipynb"
        notebook = make_notebook(page)
        run_notebook(notebook)
        if "--write" in arguments:
            nbformat.write(notebook, path)
            continue
        found = differences(nbformat.read(path, as_version=4), notebook, page)
        failed += bool(found)
        print(name, "\n".join(["differs", *found]) if found else "agrees", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
