"""Names of a stranger in models, runs, tables, adapters and paths, and what commands print and write of them."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import models
from cli.conftest import Result, Runner
from cli.processes import environment
from onnxtrain.lora import LoraConfig, add_lora, save_adapter

# Sets a terminal's title, clears the screen (also by C1), writes to the clipboard, reverses text, ends rich's markup,
# begins a line of its own and one of CSV, HTML and a formula.
EVIL = "\x1b]0;title\x07\x1b[2J\x9b2J\x1b]52;c;Zm9v\x07\u202e\u2066[/cls][bold]\nerror: run\r\x7f|`<img src=x>$a$b$,\"'"
FILE = EVIL.replace("/", "")  # as the name of a file
SHOWN = "\\x1b]0;title\\x07\\x1b[2J\\x9b2J"


def named(text: str) -> str:
    return f"{text}{EVIL}"


def hostile_mlp() -> onnx.ModelProto:
    """`models.mlp` in which every text that a writer chooses is hostile."""
    model = models.mlp()
    graph = model.graph
    values = [*graph.input, *graph.output, *graph.initializer]
    new = {value.name: named(value.name) for value in values}
    new |= {name: named(name) for node in graph.node for name in node.output}
    for value in values:
        value.name = new[value.name]
    for node in graph.node:
        node.name = named(node.name or node.op_type)
        node.doc_string = EVIL
        names = [new.get(name, name) for name in node.input], [new[name] for name in node.output]
        del node.input[:], node.output[:]
        node.input.extend(names[0])
        node.output.extend(names[1])
    for info in (*graph.input, *graph.output):
        info.doc_string = EVIL
        info.type.tensor_type.shape.dim[0].dim_param = named("batch")
    graph.name, graph.doc_string = named("graph"), EVIL
    model.producer_name, model.producer_version, model.domain, model.doc_string = (EVIL,) * 4
    onnx.helper.set_model_props(model, {EVIL: EVIL})
    return model


def characters(text: str) -> set[str]:
    """The characters that a terminal may obey, and that readers do not see."""
    return {c for c in text if not c.isprintable()} - {"\n"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of hostile files: models, arrays, a table, a run on each, artifacts, an adapter."""
    path = tmp_path_factory.mktemp("names") / FILE
    path.mkdir()
    onnx.save(hostile_mlp(), path / "model.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 4)).astype(np.float32)
    y = x[:, :3].argmax(axis=1)
    np.savez(path / "data.npz", x=x, y=y)
    with open(path / "table.csv", "w", encoding="utf-8", newline="") as file:
        columns = [named(name) for name in "abcd"]
        rows = [
            [*map(str, row), named(f"class {label}"), named("id")] for row, label in zip(x, y, strict=True)
        ]
        csv.writer(file).writerows([[*columns, named("target"), named("id")], *rows])
    adapted = add_lora(path / "model.onnx", LoraConfig(r=2, init_lora_weights=False))
    save_adapter(adapted, path / "adapter", "peft")
    save_adapter(adapted, path / "mine.onnx_adapter")
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as patch:
        yield Runner(patch)


@pytest.fixture(scope="module")
def trained(folder: Path, run: Runner) -> dict[str, Result]:
    """The commands that write runs and artifacts."""
    model, loss = folder / "model.onnx", ("--loss", "cross_entropy")
    fit = (*loss, "--epochs", 1, "--validation", 0.2, "--train", "*")
    table = ("--target", named("target"), "--id", named("id"))
    return {
        "arrays": run(
            "train",
            model,
            "--data",
            folder / "data.npz",
            *fit,
            "-o",
            folder / "run",
            "--log",
            folder / "run" / "log.csv",
        ),
        "table": run("train", model, "--data", folder / "table.csv", *fit, *table, "-o", folder / "table"),
        "artifacts": run("artifacts", model, *loss, "-o", folder / "artifacts"),
    }


# In the folder, after the commands of `trained`. Exit codes: 0, or 1 for what is refused.
COMMANDS: list[tuple[int, str]] = [
    (0, "inspect model.onnx"),
    (0, "inspect model.onnx --json"),
    (0, "inspect run"),
    (0, "inspect run --parameters"),
    (0, "inspect run --json"),
    (0, "inspect table --parameters"),
    (0, "inspect table --json"),
    (0, "inspect run/checkpoint"),
    (0, "inspect artifacts"),
    (1, "inspect missing"),
    (0, "ops model.onnx"),
    (0, "ops model.onnx --json"),
    (0, "check model.onnx --of EVIL(logits) --parameter *w1*"),
    (0, "check model.onnx --of EVIL(logits) --parameter *w1* --json"),
    (1, "check model.onnx --parameter EVIL(no)"),
    (1, "check model.onnx --of EVIL(no)"),
    (1, "check model.onnx --dim EVIL(no)=2"),
    (1, "artifacts model.onnx --loss EVIL(no) -o other"),
    (1, "artifacts model.onnx --loss cross_entropy --train EVIL(no) -o other"),
    (1, "artifacts model.onnx --loss cross_entropy --loss-input EVIL(no) -o other"),
    (1, "artifacts model.onnx --loss cross_entropy --batch-norm EVIL(no) -o other"),
    (1, "plan model.onnx --loss cross_entropy --memory 1MB"),
    (0, "train run --data data.npz --epochs 1 --log log.csv"),
    (1, "train model.onnx --data table.csv --loss cross_entropy -o other"),
    (1, "train model.onnx --data table.csv --loss cross_entropy --target EVIL(no) -o other"),
    (1, "train model.onnx --data table.csv --loss cross_entropy --target EVIL(target) --positive EVIL(no) -o other"),
    (1, "train model.onnx --data table.csv --loss cross_entropy --target EVIL(a) -o other"),
    (1, "train model.onnx --data data.npz --loss cross_entropy --metric EVIL(no) -o other"),
    (1, "train run --data data.npz --train EVIL(no)"),
    (1, "train --config missing.toml"),
    (0, "evaluate run --data data.npz"),
    (0, "evaluate table --data table.csv"),
    (0, "evaluate table --data table.csv --json"),
    (0, "evaluate model.onnx --data data.npz"),
    (0, "predict run --data data.npz -o run.csv"),
    (0, "predict table --data table.csv -o table-predictions.npz"),
    (0, "predict table --data table.csv -o table-predictions.parquet --json"),
    (0, "predict model.onnx --data data.npz -o model.npz"),
    (0, "predict table/trained.onnx --data table.csv -o exported.csv"),
    (1, "predict table --data table.csv --id EVIL(no) -o no.csv"),
    (0, "export run -o exported.onnx"),
    (0, "export table -o exported.onnx --json"),
    (1, "export run -o exported.onnx --outputs EVIL(no)"),
    (0, "merge model.onnx adapter -o merged.onnx"),
    (0, "merge model.onnx mine.onnx_adapter -o merged.onnx --json"),
    (1, "merge table/trained.onnx adapter -o merged.onnx"),
    (1, "merge model.onnx run -o merged.onnx"),
    (2, "EVIL(no)"),
    (2, "inspect --EVIL(no)"),
    (2, "train model.onnx --data data.npz --precision EVIL(no)"),
    (2, "evaluate run --data data.npz --batch-size EVIL(no)"),
]  # fmt: skip
_FOLDERS = ("run", "table", "artifacts", "other", "missing", "adapter")
_FILE = re.compile(r"[\w-]+[.](onnx|onnx_adapter|npz|csv|parquet|toml)")


def words(command: str, folder: Path) -> list[str]:
    """The words of a command: EVIL(name) is a hostile name, and names of files and folders are paths in `folder`."""
    found = []
    for index, word in enumerate(command.split()):
        is_path = word.partition("/")[0] in _FOLDERS or _FILE.fullmatch(word)
        found.append(
            str(folder / word) if index and is_path else re.sub(r"EVIL\((\w+)\)", lambda m: named(m[1]), word)
        )
    return found


def unescaped(result: Result) -> set[str]:
    return characters(result.out + result.err)


@pytest.mark.parametrize("name", ["arrays", "table", "artifacts"])
def test_commands_that_write_runs_escape_names(trained: dict[str, Result], name: str) -> None:
    result = trained[name]
    assert result.code == 0, result.err
    assert unescaped(result) == set()


@pytest.mark.parametrize(("code", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_commands_escape_names(
    trained: dict[str, Result], run: Runner, folder: Path, code: int, command: str
) -> None:
    result = run(*words(command, folder))
    assert result.code == code, result.err
    assert unescaped(result) == set()
    # The name is there, escaped; click's box and tables break long lines.
    shown = (result.out + result.err).replace("\n", "")
    assert SHOWN in shown or "\\u001b]0;title" in shown or code == 2 or command.startswith("ops")


def test_text_files_of_commands_have_no_raw_names(
    trained: dict[str, Result], run: Runner, folder: Path
) -> None:
    # Another worker may have run the tests above.
    for _, command in COMMANDS:
        if command.endswith((" -o run.csv", " -o exported.csv")):
            assert run(*words(command, folder)).code == 0
    texts = [
        path
        for path in folder.rglob("*")
        if path.suffix in (".toml", ".json", ".csv") and path.name != "table.csv"
    ]
    assert {path.name for path in texts} >= {
        "run.toml",
        "manifest.json",
        "log.csv",
        "run.csv",
        "exported.csv",
    }
    for path in texts:
        # Values of a table, such as the classes, stay what they are.
        text = path.read_text(encoding="utf-8").partition("\n")[0 if path.suffix == ".csv" else 2]
        assert characters(text) == set(), path.name
    tomllib.loads((folder / "table" / "run.toml").read_text(encoding="utf-8"))


@pytest.mark.sample(every=3)
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize(
    "command",
    [
        "inspect model.onnx",
        "inspect table --parameters",
        "evaluate table --data table.csv",
        "check model.onnx --parameter EVIL(no)",
        "--debug check model.onnx --parameter EVIL(no)",
        "train model.onnx --data table.csv --target EVIL(target) --id EVIL(id) --loss cross_entropy -o other",
    ],
)
def test_a_terminal_gets_no_sequence_of_a_name(
    trained: dict[str, Result], folder: Path, command: str
) -> None:
    import pty

    main, terminal = pty.openpty()
    arguments = [sys.executable, "-m", "onnxtrain", *words(command, folder)]
    with subprocess.Popen(
        arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment(), start_new_session=True
    ) as process:
        os.close(terminal)
        output = b""
        # On Linux reading fails when the last writer has closed the terminal.
        with contextlib.suppress(OSError):
            while part := os.read(main, 1 << 16):
                output += part
    os.close(main)
    text = output.decode()
    assert process.returncode == (1 if "check" in command else 0), text
    assert "\\x1b]0;title" in text
    # What is left without rich's colours, and the sequences that redraw a bar.
    rest = re.sub(r"\x1b\[[0-9;]*m|\x1b\[[12]?K|\x1b\[1?A|\x1b\[\?25[hl]", "", text)
    assert characters(rest) <= {"\r"}
    assert "\x1b[2J" not in text


def test_a_traceback_escapes_names(folder: Path) -> None:
    """An error that no code expects: Python prints its traceback itself."""
    code = (
        "import sys, onnxtrain.cli._inspect as inspect; from onnxtrain.cli import main\n"
        "def fail(path, *_): raise LookupError(str(path))\n"
        "inspect.run_command = fail; sys.argv = ['onnxtrain', 'inspect', sys.argv[1]]; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert "LookupError: " in result.stderr
    assert SHOWN in result.stderr
    assert characters(result.stderr) == set()
