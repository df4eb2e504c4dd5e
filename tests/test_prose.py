"""Check the language of src: first words of docstrings, descriptions of fields, help texts.

`NOT_YET` lists, per rule, the rooms that still break it. It can only shrink: a room in the list that keeps the rule
fails its test until its name is removed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

import onnxtrain
from onnxtrain.cli._app import app

SRC = Path(onnxtrain.__file__).parent
ROOT = Path(__file__).parents[1]
QUESTION_WORDS = {"what", "which", "whether", "where", "how", "that", "those"}
ARTICLES = {"a", "an", "the"}

NOT_YET: dict[str, str] = {
    "question words": """
    """,
    "articles": """
    """,
    "fields": """
    """,
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A file of src: its path below the package, its lines and its syntax tree."""

    path: Path
    lines: list[str]
    tree: ast.Module


def sources(folder: Path) -> Iterator[Source]:
    """Read all Python files below a folder."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield Source(path.relative_to(folder), text.splitlines(), ast.parse(text))


@functools.cache
def rooms() -> dict[str, list[Source]]:
    """Read src: per room, e.g. "passes/shapes", its files. Files of the package's top level are the room "."."""
    files: dict[str, list[Source]] = {}
    for source in sources(SRC):
        folders = source.path.parent.parts
        # `passes` and `ortmodule` are large enough to have rooms of their own.
        room = "/".join(folders[: 2 if folders[:1] in (("passes",), ("ortmodule",)) else 1]) or "."
        files.setdefault(room, []).append(source)
    return files


def is_text(statement: ast.AST | None) -> bool:
    """Tell whether a statement is a bare string: a docstring, or the description of the field before it."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def first_word(text: str) -> str:
    """Return the first word of a text in lower case, without quotes and punctuation."""
    return next(iter(text.split()), "").strip("`'\":,.").lower()


def texts(source: Source) -> Iterator[tuple[ast.AST, ast.Expr, str]]:
    """Yield every docstring and field description: the node that it stands in, its statement, its text."""
    for node in ast.walk(source.tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if is_text(statement):
                yield node, statement, statement.value.value


def question_words(files: list[Source]) -> list[str]:
    """Find docstrings and field descriptions that begin with What, Which, Whether, Where, How, That or Those."""
    return [
        f"{source.path}:{statement.lineno}: {text.splitlines()[0]}"
        for source in files
        for _, statement, text in texts(source)
        if first_word(text) in QUESTION_WORDS
    ]


def articles(files: list[Source]) -> list[str]:
    """Find functions whose docstring begins with an article. Properties may: they are described as fields are."""
    return [
        f"{source.path}:{statement.lineno}: {text.splitlines()[0]}"
        for source in files
        for node, statement, text in texts(source)
        if isinstance(node, Definition) and statement is node.body[0] and first_word(text) in ARTICLES
        if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def undescribed_fields(files: list[Source]) -> list[str]:
    """Find fields of public dataclasses without a description: a string below the field, or a line of the docstring."""
    found = []
    for source in files:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            docstring = ast.get_docstring(node) or ""
            for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                field = statement.target.id
                # Class variables are no fields. An option of a command is described by its help text.
                if field.startswith("_") or "ClassVar" in ast.unparse(statement.annotation):
                    continue
                if (
                    source.path.parts[0] == "cli"
                    and node.name.endswith("Options")
                    and field in option_names()
                ):
                    continue
                if not is_text(after) and not re.search(
                    rf"^\s*(`*\w+`*, )*`*{field}`*\b[^\n]*:", docstring, re.MULTILINE
                ):
                    found.append(f"{source.path}:{statement.lineno}: {node.name}.{field}")
    return found


RULES: dict[str, Callable[[list[Source]], list[str]]] = {
    "question words": question_words,
    "articles": articles,
    "fields": undescribed_fields,
}


@pytest.mark.parametrize("rule", RULES)
def test_texts_of_src_keep_the_rule(rule: str) -> None:
    broken = {room: places for room, files in rooms().items() if (places := RULES[rule](files))}
    listed = set(NOT_YET[rule].split())
    new = "\n".join(f"{room}: {place}" for room in broken.keys() - listed for place in broken[room])
    assert not new, f"texts that break the rule of {rule}:\n{new}"
    clean = listed - broken.keys()
    assert not clean, f"remove these rooms from NOT_YET[{rule!r}], they keep the rule now: {sorted(clean)}"


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_texts_of_tests_and_benchmarks_begin_with_no_question_word(folder: str) -> None:
    found = question_words(list(sources(ROOT / folder)))
    assert not found, "\n".join(found)


@functools.cache
def options_of(command: str) -> dict[str, Any]:
    """Return the options of a command of the shell by name. Arguments and --help are left out."""
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {p.name: p for p in parameters if p.param_type_name == "option" and p.name != "help"}


@functools.cache
def option_names() -> set[str]:
    """Collect the names of the options of all commands."""
    return {
        name
        for command in typer.main.get_command(app).commands
        for name in options_of(command)  # type: ignore[attr-defined]
    }


OPTIONS = [
    (command, name) for command in typer.main.get_command(app).commands for name in options_of(command)
]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("command", "name"), OPTIONS)
def test_help_text_of_an_option_stands_alone(command: str, name: str) -> None:
    """A sentence that begins with a verb; an example for a value; the default, said or appended by typer."""
    option = options_of(command)[name]
    text = option.help or ""
    assert text[:1].isupper(), text
    assert text.endswith("."), text
    assert len(text.split()) >= 4, text
    nouns_and_fillers = {"Of", "The", "A", "Like", "So", "How", "What", "Where", "Samples", "Name", "Names"}
    assert text.split()[0] not in nouns_and_fillers, text
    if option.required:  # typer appends "[required]"
        return
    if option.is_flag:  # typer shows no default of a flag
        assert "Default" in text, text
        return
    assert "Default" in text or "Required" in text or option.default is not None, text
    choices = "|" in (option.metavar or "") or ".npz, .csv" in text or ": " in text
    assert choices or "e.g. " in text, text


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("question words", '"""What it does."""'),
        ("question words", 'def f():\n    """`Whether`, it says."""'),
        ("question words", 'class A:\n    x: int\n    """How many."""'),
        ("articles", 'def f():\n    """The sum."""'),
        ("fields", "@dataclass\nclass A:\n    x: int"),
        (
            "fields",
            '@dataclass(frozen=True)\nclass A:\n    """Hold x and y.\n\n    x: one.\n    """\n    x: int\n    y: int',
        ),
    ],
)
def test_a_breach_of_the_rule_is_found(rule: str, code: str) -> None:
    assert len(RULES[rule]([Source(Path("a.py"), code.splitlines(), ast.parse(code))])) == 1


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("question words", 'def f():\n    """Return what is left."""'),
        ("articles", '@property\ndef f():\n    """The sum."""'),
        ("articles", 'class A:\n    """A sum."""'),
        (
            "fields",
            '@dataclass\nclass A:\n    """Hold x.\n\n    Args:\n        x: one, e.g. 1.\n    """\n    x: int',
        ),
        (
            "fields",
            '@dataclass\nclass A:\n    x: int\n    """One, e.g. 1."""\n@dataclass\nclass _B:\n    x: int',
        ),
        (
            "fields",
            '@dataclass\nclass A:\n    """Hold x and y.\n\n    x, y: numbers.\n    """\n    x: int\n    y: int',
        ),
        ("fields", "@dataclass\nclass A:\n    x: ClassVar[int] = 1"),
    ],
)
def test_what_keeps_the_rule_is_left_alone(rule: str, code: str) -> None:
    assert RULES[rule]([Source(Path("a.py"), code.splitlines(), ast.parse(code))]) == []
