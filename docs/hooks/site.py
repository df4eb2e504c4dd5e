"""Completes the pages of the site while mkdocs builds it (`make docs`).

The Markdown files of `docs/` are also read on a code host, beside the code. The site needs five things more:

- Links to files outside `docs/` lead to the repository (`ONNXTRAIN_REPOSITORY_URL`); without an address the text stays.
- `<!-- commands -->` becomes the reference of the command line, made from the program's own declarations.
- `<!-- names -->` becomes the table of the names that `import onnxtrain` offers.
- After the build, every public name of every module in the reference must have an anchor there.
- After the build, the search must find the page that answers a newcomer's question (questions.py).
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

# mkdocs imports this file alone; the other hooks stand beside it.
sys.path.insert(0, str(Path(__file__).parent))
import questions

FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
OUTSIDE_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s]*)\)")
FILE_LABEL = re.compile(r"\[([\w-]+)\.md\]\((?=[\w-]+\.md)")
CODE_SPAN = re.compile(r"(`[^`\n]+`)")
DIRECTIVE = re.compile(r"^::: (onnxtrain[\w.]*)$", re.MULTILINE)

ROOT = Path(__file__).parents[2]
# How much more a match counts in the search of the site, per group of the navigation.
SEARCH_BOOST = {"Get started": 2, "Tutorials": 2, "Guides": 2, "PyTorch": 2, "Devices": 2}
REFERENCE, SOURCES = ROOT / "docs" / "reference", ROOT / "src"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrites a page before mkdocs renders it."""
    group = page.ancestors[-1].title if page.ancestors else ""
    page.meta["search"] = {"boost": SEARCH_BOOST.get(group, 1)}
    page.meta["tags"] = questions.WORDS.get(page.file.src_uri, [])
    parts = FENCE.split(markdown)
    # Every second part is a fenced block, in which nothing is a link or a table.
    parts[::2] = [prepare_text(part, page.file.src_uri, config.repo_url) for part in parts[::2]]
    text = "".join(parts)
    for mark, write in {"<!-- commands -->": command_reference, "<!-- names -->": table_of_names}.items():
        if mark in text:
            text = text.replace(mark, "\n".join(write()))
    return text


def on_post_build(config: Any) -> None:
    """Compares the built reference with the public names.

    Raises:
        LookupError: a public name has no anchor, e.g. because it has no docstring.
    """
    pages = {
        path: path.read_text(encoding="utf-8") for path in Path(config.site_dir, "reference").rglob("*.html")
    }
    anchors = {anchor for text in pages.values() for anchor in re.findall(r'id="(onnxtrain[\w.]*)"', text)}
    names = [f"{module}.{name}" for module in reference_modules() for name in public_names(module)]
    # A module among the names, such as `onnxblock.loss`, has a section of its own.
    names = [name for name in names if name not in reference_modules()]
    if missing := [name for name in names if name not in anchors]:
        raise LookupError(f"public names without an entry in the reference: {', '.join(missing)}")
    questions.check_questions(Path(config.site_dir))


def prepare_text(text: str, page: str, repository: str | None) -> str:
    """Changes links to files outside `docs/`, labels of links, tables, and brackets that are no links.

    Args:
        text: Markdown without fenced blocks.
        page: path of the page below `docs/`, e.g. "reference/index.md".
        repository: address of the repository, e.g. "https://example.org/onnxtrain", or None.
    """

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return match[0]
        return f"[{label}]({repository.rstrip('/')}/blob/main/{path})" if repository else label

    text = "\n".join(_table_row(line) if line.startswith("|") else line for line in text.split("\n"))
    text = OUTSIDE_LINK.sub(link, text)
    # On a code host a link names the file. The site has pages.
    text = FILE_LABEL.sub(r"[\1](", text)
    # Two shapes side by side, "[64, 256] [256, 10]", are no link to the second.
    return re.sub(r"\] \[", r"] \[", text)


def _table_row(line: str) -> str:
    """Changes a row of a table so that Python-Markdown shows what code hosts show."""
    # Odd parts are code. Code hosts need `a\|b` there and show `a|b`; Python-Markdown would show the backslash.
    parts = CODE_SPAN.split(line)
    parts[1::2] = [code.replace("\\|", "|") for code in parts[1::2]]
    # Messages of programs, "<built-in function>", are no HTML.
    parts[::2] = [re.sub(r"<(?=[A-Za-z/])", "&lt;", text) for text in parts[::2]]
    return "".join(parts)


def reference_modules() -> list[str]:
    """Lists the modules that have an entry of their own in the reference, e.g. "onnxtrain.api"."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md"))]
    entries = [name for text in texts for name in DIRECTIVE.findall(text)]
    return [name for name in entries if source_file(name)]


def source_file(module: str) -> Path | None:
    """Finds the file of a module; None if the name is not a module's."""
    path = SOURCES.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def public_names(module: str) -> list[str]:
    """Reads `__all__` of a module, without importing it: some modules need PyTorch, and the site does not.

    Raises:
        LookupError: the module has no `__all__` that is a list of texts.
    """
    file = source_file(module)
    assert file is not None
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return sorted(ast.literal_eval(statement.value))
    raise LookupError(f"{module} has no __all__")


def table_of_names() -> Iterator[str]:
    """Writes a table of the names in `onnxtrain.__all__`: each with a link and the first line of its docstring."""
    import onnxtrain

    yield "| name | |"
    yield "|---|---|"
    for name in sorted(set(onnxtrain.__all__) - {"__version__"}, key=str.lower):
        home = onnxtrain._HOME[name]
        # Packages such as `autodiff` are not for users: of them the name itself stands on this page.
        target = (
            f"onnxtrain.{home}.{name}" if f"onnxtrain.{home}" in reference_modules() else f"onnxtrain.{name}"
        )
        first_line = (inspect.getdoc(getattr(onnxtrain, name)) or "").split("\n\n")[0].replace("\n", " ")
        first_line = re.sub(r":\w+:(?=`)", "", first_line)  # a role of Sphinx
        yield f"| [`{name}`][{target}] | {first_line.replace('|', chr(92) + '|')} |"
    yield f"| `__version__` | Version of the package, e.g. `{onnxtrain.__version__!r}`. |"


def command_reference() -> Iterator[str]:
    """Writes the arguments and options of every command, as `onnxtrain COMMAND --help` has them."""
    import typer.main

    from onnxtrain.cli._app import app
    from onnxtrain.cli._help import full_help

    program = typer.main.get_command(app)
    for name, command in sorted(program.commands.items()):
        yield from (f"## onnxtrain {name}", "", _paragraphs(command.help), "")
        usage = [_usage(parameter) for parameter in command.params if not _is_option(parameter)]
        yield from ("```", " ".join(["onnxtrain", name, *usage, "[OPTIONS]"]), "```", "")
        groups: dict[str, list[Any]] = {}
        for parameter in command.params:
            heading = "Arguments" if not _is_option(parameter) else parameter.rich_help_panel or "Options"
            groups.setdefault(heading, []).append(parameter)
        for heading, parameters in groups.items():
            yield from (f"**{heading}**", "")
            for parameter in parameters:
                yield from (
                    _spelling(parameter),
                    f":   {_paragraphs(full_help(parameter))}{_default(parameter)}",
                    "",
                )


def _is_option(parameter: Any) -> bool:
    """Tells options from arguments."""
    return bool(parameter.param_type_name == "option")


def _paragraphs(help: str | None) -> str:
    """Makes Markdown of a help text; an asterisk or an angle bracket in it stands for itself."""
    return re.sub(r"([*<\\_])", r"\\\1", inspect.cleandoc(help or "")).replace("\n\n", "\n\n    ")


def _usage(argument: Any) -> str:
    """Writes an argument as in the first line of `--help`, e.g. "[MODEL]"."""
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _spelling(parameter: Any) -> str:
    """Writes the spellings of an option and the name of its value, e.g. "`--output`, `-o` `FILE`"."""
    if not _is_option(parameter):
        return f"`{_usage(parameter)}`"
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return names
    # typer names no value of an option whose type lists the choices.
    value = parameter.metavar or "|".join(get_args(parameter.type_descriptor.annotation))
    return f"{names} `{value}`"


def _default(parameter: Any) -> str:
    """Writes the default of an option if its help text does not."""
    if parameter.required and _is_option(parameter):
        return " Required."
    default = parameter.default
    if "Default:" in (parameter.help or "") or default in (None, False, "") or parameter.required:
        return ""
    return f" Default: `{getattr(default, 'value', default)}`."
