"""Runs the code blocks of the pages, and compares what they print with the output blocks that follow them.

    python tests/pages.py README.md            # compares; names each block whose output differs
    python tests/pages.py --write README.md    # writes the outputs and the pictures into the page
    python tests/pages.py --write              # the same for all pages

A block in `python` or `bash` runs; one in `sh`, `text` or another language does not. A `bash` block holds commands of
`onnxtrain`, one per line. A block that prints something is followed by a block in the language `output`. It must be
equal, except for what a comment in front of it allows:

    <!-- output with progress, numbers within 5 %, times vary -->

- `with progress`: the block also shows standard error, to which `fit` writes a line per epoch.
- `numbers within 5 %`: numbers may differ by 5 %, e.g. because another processor rounds otherwise.
- `numbers vary`: numbers are not compared.
- `times vary`: numbers in front of a unit of time are not compared.
- `words vary`: the block prints what depends on the machine; only that it prints something is compared.

A picture that a page shows from its folder `images/<page>/` and that a block saves under the same name is written, too.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
COMMENT = r"(?:^<!-- output (?P<marks>[^\n]*) -->\n)?"
OUTPUT = rf"(?P<gap>\n{COMMENT}^```output\n(?P<output>.*?)^```\n)?"
BLOCK = re.compile(rf"^```(?P<kind>python|bash)\n(?P<code>.*?)^```\n{OUTPUT}", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<path>(?:docs/)?images/[\w-]+/[\w-]+\.png)\)")
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)\b(?!\.\d)")
TIME = re.compile(r"\d[\d.,]*(?= ?(?:samples/s|ms|s|min)\b)|(?<=samples/s)\W+[\d,]+")

# Each page runs from its first block to its last, in one namespace, like a notebook.
STORIES = [
    "docs/index.md",
    "docs/tutorials/first-fine-tuning.md",
    "docs/tutorials/from-pytorch.md",
    "docs/tutorials/on-the-device.md",
    "docs/guides/prepare-your-model.md",
    "docs/guides/feed-your-data.md",
    "docs/guides/choose-a-loss-and-weights.md",
    "docs/guides/train-part-of-a-model.md",
    "docs/guides/learning-rates-by-layer.md",
    "docs/guides/save-stop-and-resume.md",
    "docs/guides/average-and-calibrate.md",
    "docs/guides/fix-a-training-run.md",
    "docs/guides/train-on-images.md",
    "docs/guides/train-on-a-table.md",
    "docs/guides/fine-tune-a-hugging-face-model.md",
    "docs/guides/train-without-a-model-file.md",
    "docs/guides/train-sentence-embeddings.md",
    "docs/guides/read-tables-of-other-formats.md",
    "docs/guides/train-lora-adapters.md",
    "docs/guides/train-an-int8-model.md",
    "docs/guides/train-with-ctc.md",
    "docs/guides/extend-the-trainer.md",
    "docs/guides/compute-derivatives.md",
    "docs/guides/own-ops.md",
    "docs/guides/distil-a-model.md",
    "docs/guides/train-multi-label.md",
    "docs/guides/train-a-detection-head.md",
    "docs/guides/mixed-precision.md",
    "docs/guides/command-line.md",
    "docs/guides/fit-training-into-memory.md",
    "docs/guides/train-on-a-gpu.md",
    "docs/pytorch/use-ortmodule.md",
    "docs/pytorch/migrate.md",
    "docs/devices/ship-training-to-a-device.md",
    "docs/concepts/how-a-training-model-is-made.md",
    "docs/concepts/how-ortmodule-runs-a-module.md",
    "docs/concepts/how-exact-it-is.md",
    "docs/reference/trainer.md",
    "examples/text_classification/README.md",
    "examples/forecasting/personalise.md",
    "README.md",
]
# Each block of these pages runs by itself, in a folder with a model and data for it.
EXAMPLES = [
    "docs/guides/train-a-language-model.md",
    "docs/guides/train-with-several-processes.md",
    "docs/devices/browser.md",
    "docs/devices/bundlers.md",
    "docs/devices/own-host.md",
    "docs/reference/api.md",
    "docs/reference/errors.md",
    "docs/reference/file-formats.md",
    "docs/reference/index.md",
    "docs/reference/losses-and-optimizers.md",
    "docs/reference/nn.md",
]
# A page that begins with a file of another program's: a small one with the same ops.
WITH_A_LANGUAGE_MODEL = {"docs/guides/train-lora-adapters.md"}
# Pages whose blocks another test runs, with the files or processes that they need.
ELSEWHERE = {
    "notes/architecture.md": "tests/test_architecture_page.py",
    "docs/devices/federated.md": "tests/integrations/test_flower.py",
    "docs/guides/fine-tune-real-models.md": "tests/test_gallery.py",
    "docs/pytorch/with-other-tools.md": "tests/distributed/test_engines.py",
}
WITH_DATA = {"docs/reference/losses-and-optimizers.md", "docs/reference/file-formats.md"}


class Block(NamedTuple):
    """A block of a page, and the output that the page shows for it."""

    kind: str
    """Language: "python" or "bash"."""
    code: str
    """Text of the block."""
    shown: str | None
    """Text of the output block, None if there is none."""
    marks: str
    """Allowed differences, e.g. "numbers within 5 %"."""


def read_blocks(page: str) -> list[Block]:
    """Lists the blocks of a page that run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(found["kind"], found["code"], found["output"], found["marks"] or "")
        for found in BLOCK.finditer(text)
    ]


def pictures(page: str) -> list[str]:
    """Lists the pictures that a page shows from its own folder, e.g. "images/lora/loss.png"."""
    paths = PICTURE.findall((ROOT / page).read_text(encoding="utf-8"))
    return [path for path in paths if Path(path).parent.name == Path(page).stem]


def run_block(block: Block, names: dict[str, Any]) -> str:
    """Runs a block in the working directory.

    Returns:
        What it printed, without spaces at the ends of lines; with standard error if its marks say so.
    """
    out = io.StringIO()
    errors = out if "with progress" in block.marks else io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of exporters name paths of the machine
        if block.kind == "python":
            exec(compile(block.code, "<block>", "exec"), names)
        else:
            for line in filter(None, block.code.replace("\\\n", "").splitlines()):
                _run_command(line, errors)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().rstrip().splitlines())


def _run_command(line: str, errors: io.StringIO) -> None:
    """Runs a command of onnxtrain in this process.

    Raises:
        RuntimeError: it ended with an exit code other than 0.
    """
    from onnxtrain.cli import main

    arguments, sys.argv = sys.argv, shlex.split(line)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{line!r} ended with code {end.code}: {errors.getvalue()}") from None
    finally:
        sys.argv = arguments


def difference(shown: str | None, printed: str, marks: str) -> str | None:
    """Compares an output block with what its block printed.

    Args:
        shown: text of the output block, None if there is none.
        printed: what the block printed.
        marks: allowed differences, e.g. "numbers within 5 %, times vary".

    Returns:
        None if they agree, else both texts.
    """
    if "words vary" in marks and shown and printed:
        return None
    message = f"The page shows\n{shown or '(nothing)'}\nand the block printed\n{printed or '(nothing)'}"
    parts = []
    for text in (shown or "", printed):
        text = TIME.sub("T", text) if "times vary" in marks else text
        values = [float(value) for value in NUMBER.findall(text)]
        # Numbers of another length move the columns of a table.
        words = re.sub(r"[ \n]+|(?<=[┃│])[ ]*|─+|━+|-{3,}", " ", NUMBER.sub(" N ", text)).split()
        parts.append((text, words, values))
    (text, words, values), (other_text, other_words, other_values) = parts
    tolerance = re.search(r"numbers within ([\d.]+) %", marks)
    if tolerance is None and "numbers vary" not in marks:
        return None if text == other_text else message
    if words != other_words or len(values) != len(other_values):
        return message
    share = float(tolerance[1]) / 100 if tolerance else float("inf")
    near = all(
        a == b or abs(a - b) <= share * max(abs(a), abs(b)) for a, b in zip(values, other_values, strict=True)
    )
    return None if near else message


@contextlib.contextmanager
def workplace(page: str) -> Iterator[dict[str, Any]]:
    """Goes to an empty directory; gives the names that the blocks of a page take for granted."""
    before = Path.cwd()
    # A page shows what a reader sees who has installed nothing beside the package, on a terminal of this width.
    settings = {
        "ONNXTRAIN_KERNELS": "off",
        "MPLBACKEND": "Agg",
        "COLUMNS": "100",
        "ORTMODULE_CAPTURE_ALL": "",
    }
    old = {name: os.environ.get(name) for name in settings}
    logger = logging.getLogger("onnxtrain")
    level = logger.level
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ.update(settings)
        try:
            yield _given(page)
        finally:
            os.chdir(before)
            logger.setLevel(level)
            for name, value in old.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _given(page: str) -> dict[str, Any]:
    """Makes the files and names of a page of examples; a story begins with nothing."""
    names: dict[str, Any] = {"__name__": "__main__"}
    if page in STORIES and page not in WITH_A_LANGUAGE_MODEL:
        return names
    import numpy as np
    import onnx

    import models
    from test_generation_models import generation_model

    if page in WITH_A_LANGUAGE_MODEL:
        Path("int4").mkdir()
        onnx.save(generation_model(), "int4/model.onnx")
        return names
    onnx.save(models.mlp(), "model.onnx")
    onnx.save(generation_model(), "llm.onnx")
    if page in WITH_DATA:
        x = np.random.default_rng(0).standard_normal((100, 4))
        names |= {"x": x, "y": x[:, :3].argmax(axis=1)}
    return names


def run_example(page: str, block: Block) -> str:
    """Runs a block of a page of examples by itself; returns what it printed."""
    with workplace(page) as names:
        if 'resume("run")' in block.code:
            from onnxtrain import Trainer

            Trainer("model.onnx", "cross_entropy", directory="run")
        return run_block(block, names)


def run_story(page: str, after: Callable[[dict[str, Any]], None] = lambda names: None) -> list[str]:
    """Runs a page from its first block to its last.

    Args:
        page: path from the root of the repository.
        after: called with the names of the page, in its directory, when all blocks have run.

    Returns:
        What each block printed.
    """
    with workplace(page) as names:
        printed = [run_block(block, names) for block in read_blocks(page)]
        after(names)
    return printed


def saved_pictures(page: str) -> list[str]:
    """Lists the pictures of a page that its blocks have not saved in the working directory."""
    return [path for path in pictures(page) if not Path(Path(path).name).is_file()]


def printed_by(page: str, after: Callable[[dict[str, Any]], None] = lambda names: None) -> list[str]:
    """Runs a page as its kind wants it; returns what each block printed."""
    if page in STORIES:
        return run_story(page, after)
    return [run_example(page, block) for block in read_blocks(page)]


def compare(page: str) -> list[str]:
    """Runs a page; returns a text for each block whose output differs, and for each picture that is not saved."""
    missing: list[str] = []
    printed = printed_by(page, lambda names: missing.extend(saved_pictures(page)))
    blocks = read_blocks(page)
    found = [
        text
        for block, output in zip(blocks, printed, strict=True)
        if (text := difference(block.shown, output, block.marks))
    ]
    return found + [f"No block saved {path}" for path in missing]


def write(page: str) -> bool:
    """Runs a page and writes outputs and pictures into it; outputs that agree stay. Returns if the page has changed."""

    def keep(names: dict[str, Any]) -> None:
        for path in pictures(page):
            target = ROOT / Path(page).parent / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(path).name, target)

    outputs = iter(printed_by(page, keep))

    def renewed(found: re.Match[str]) -> str:
        output, marks = next(outputs), found["marks"]
        if difference(found["output"], output, marks or "") is None:
            return found[0]
        code = f"```{found['kind']}\n{found['code']}```\n"
        comment = f"<!-- output {marks} -->\n" if marks else ""
        return f"{code}\n{comment}```output\n{output}```\n" if output else code

    path = ROOT / page
    before = path.read_text(encoding="utf-8")
    path.write_text(after := BLOCK.sub(renewed, before), encoding="utf-8")
    return after != before


def run_pages(arguments: list[str]) -> int:
    """Compares or writes the pages that are named, by default all; returns the exit code."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    writes = "--write" in arguments
    failed = 0
    for page in [name for name in arguments if name != "--write"] or [*STORIES, *EXAMPLES]:
        page = Path(page).resolve().relative_to(ROOT).as_posix()
        if writes:
            print(page, "changed" if write(page) else "as it was", flush=True)
            continue
        found = compare(page)
        failed += bool(found)
        print(page, "\n".join(["differs", *found]) if found else "agrees", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_pages(sys.argv[1:]))
