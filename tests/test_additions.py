"""Callbacks, training options, shell options, passes and host profiles are complete.

Each test lists what is missing and names the file to edit. CONTRIBUTING.md has the recipes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest

import onnxtrain.trainer
from cli.random_options import drawing
from onnxtrain.cli import _command_options
from onnxtrain.cli._declared import options_of
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.passes.profiles import PROFILES
from onnxtrain.recipe import Profile, Recipe, ShellOption

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "onnxtrain"
PACKAGE, CLI = "src/onnxtrain", "src/onnxtrain/cli"


IDENTIFIER, ATTRIBUTE, CALL = r"\w+", r"\.(\w+)", r"(?<!class )\b(\w+)\("
OPTION, GIVEN, PROFILE = r"(?<![\w-])--[\w-]+", r"\"(\w+)\"|\b(\w+)=", r"profile=\"(\w+)\""


@functools.cache
def texts(folder: str, pattern: str = "*.py") -> dict[Path, str]:
    """Read all files below a folder of the repository, except this one."""
    paths = [path for path in (ROOT / folder).rglob(pattern) if path != Path(__file__)]
    return {path: path.read_text(encoding="utf-8") for path in paths}


@functools.cache
def words(expression: str, folder: str, pattern: str = "*.py") -> set[str]:
    """Collect the matches of a regular expression in all files below a folder, or those of its groups."""
    found = [match for text in texts(folder, pattern).values() for match in re.findall(expression, text)]
    return {group for match in found for group in ([match] if isinstance(match, str) else match)}


def report(lacking: list[str]) -> None:
    """Fail with one line for each thing that is missing."""
    if lacking:
        pytest.fail("\n".join(["missing:", *lacking]), pytrace=False)


# ---- callbacks ------------------------------------------------------------------------------------------


class Class(NamedTuple):
    """A class of a file: its name, its bases, and the path of the file."""

    name: str
    bases: list[str]
    path: Path


def classes_below(folder: str) -> list[Class]:
    """Return the public classes that are defined in the files below a folder."""
    return [
        Class(node.name, [ast.unparse(base) for base in node.bases], path)
        for path, text in sorted(texts(folder).items())
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def test_every_callback_is_exported_documented_and_tested() -> None:
    classes = classes_below(f"{PACKAGE}/trainer/_callbacks")
    bases = {base for entry in classes for base in entry.bases}
    callbacks = [entry for entry in classes if entry.name not in bases]
    assert len(callbacks) > 8
    lacking = []
    for name, _, path in callbacks:
        if name not in onnxtrain.trainer.__all__:
            lacking.append(
                f"{name}: import it from {path.name} in src/onnxtrain/trainer/__init__.py, and add it to __all__"
            )
        if name not in words(IDENTIFIER, "docs", "*.md"):
            lacking.append(f"{name}: describe it in docs/guides/extend-the-trainer.md")
        if name not in words(IDENTIFIER, "tests"):
            lacking.append(f"{name}: test it in tests/trainer/test_callbacks.py")
    report(lacking)


# ---- training options -----------------------------------------------------------------------------------


def test_every_training_option_is_read_and_tested() -> None:
    lacking = []
    for entry in fields(Recipe):
        shell, name = entry.metadata["shell"], entry.name
        if name not in words(r"\brecipe\.(\w+)", PACKAGE):
            lacking.append(
                f"{name}: no code reads recipe.{name}; read it in src/onnxtrain/training/ if it changes the training "
                "model, in src/onnxtrain/artifacts.py if it changes the loss or the optimizer"
            )
        if name not in words(GIVEN, "tests"):
            lacking.append(f"{name}: test what it does, with Recipe({name}=...), in tests/test_recipe.py")
        if name not in words(IDENTIFIER, "docs", "*.md"):
            lacking.append(f"{name}: describe it in docs/reference/trainer.md")
        if isinstance(shell, ShellOption):
            option = f"--{(shell.name or name).replace('_', '-')}"
            if option not in words(OPTION, "tests"):
                lacking.append(f"{name}: test {option} in tests/cli/test_train_options.py")
    report(lacking)


# ---- shell options --------------------------------------------------------------------------------------

OPTIONS = {
    name: kind
    for name, kind in {**vars(_command_options), "TrainOptions": TrainOptions}.items()
    if inspect.isclass(kind)
    and name.endswith("Options")
    and kind.__module__ in (_command_options.__name__, TrainOptions.__module__)
}


def test_every_command_declares_its_options_in_a_dataclass() -> None:
    lacking = []
    for node in ast.parse((SRC / "cli" / "_app.py").read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        is_command = any(text.startswith("app.command") for text in decorators)
        if is_command and not any(text.startswith("takes_options(") for text in decorators):
            lacking.append(
                f"{node.name}: declare its options in src/onnxtrain/cli/_command_options.py, and take them by "
                "@takes_options(...) in src/onnxtrain/cli/_app.py"
            )
    assert len(OPTIONS) > 9
    report(lacking)


def options_in_tests_of(command: str) -> set[str]:
    """Collect the options in test files that name a command, e.g. "inspect", as other programs share option names."""
    files = [text for text in texts("tests").values() if re.search(rf'"{command}"', text)]
    return {option for text in files for option in re.findall(OPTION, text)}


def test_every_shell_option_is_read_and_tested() -> None:
    of_recipes = {
        shell.name or entry.name
        for entry in fields(Recipe)
        if isinstance(shell := entry.metadata["shell"], ShellOption)
    }
    lacking = []
    for kind_name, kind in OPTIONS.items():
        command = kind_name.removesuffix("Options").lower()
        tested = options_in_tests_of(command)
        for name, option in options_of(kind).items():
            # Fields of a recipe are checked above. typer itself reads --config.
            if name in of_recipes or name == "config":
                continue
            if name not in words(ATTRIBUTE, CLI):
                lacking.append(
                    f"{kind_name}.{name}: nothing reads it; read it in src/onnxtrain/cli, in the module of the command"
                )
            is_argument = "Argument" in type(get_args(option.annotation)[1]).__name__
            if not is_argument and f"--{option.key}" not in tested:
                lacking.append(
                    f"{kind_name}.{name}: test --{option.key} of `onnxtrain {command}` in tests/cli/"
                )
    report(lacking)


def _of_texts(hint: Any) -> bool:
    """Tell whether an option takes any text, e.g. `list[str] | None`."""
    if get_origin(hint) is Literal:
        return False
    return hint is str or any(_of_texts(part) for part in get_args(hint))


@pytest.mark.parametrize("kind", ["TrainOptions", "ArtifactsOptions"])
def test_every_shell_option_of_texts_can_be_drawn(kind: str) -> None:
    """Random jobs of the command line draw all options; they need texts to draw from."""
    lacking = [
        f"{name}: name texts to draw for --{option.key} in TEXTS of tests/cli/random_options/drawing.py"
        for name, option in options_of(OPTIONS[kind]).items()
        if name not in drawing.LEFT_OUT | drawing.TEXTS.keys() and _of_texts(get_args(option.annotation)[0])
    ]
    report(lacking)


# ---- passes ---------------------------------------------------------------------------------------------

# Passes whose test file has another name.
TESTED_BY = {
    "canonical/explicit_defaults.py": "tests/autodiff/test_signal.py",
    "parameters/torch_parameters.py": "tests/exported/test_merged.py",
    "shapes/implied_ranks.py": "tests/autodiff/test_odd_sizes.py",
    "shapes/resize_sizes.py": "tests/exported/test_classical.py",
    **dict.fromkeys(
        (
            "portable/convolution.py",
            "portable/cum_sum.py",
            "portable/max_pool.py",
            "portable/reductions.py",
            "portable/slices.py",
        ),
        "tests/passes/portable/test_rewrites.py",
    ),
}


def test_every_pass_is_in_a_list_and_tested() -> None:
    passes = [
        entry
        for entry in classes_below(f"{PACKAGE}/passes")
        if any(base.endswith(("InPlacePass", "FunctionalPass")) for base in entry.bases)
    ]
    assert len(passes) > 40
    test_files = {path.name for path in texts("tests")}
    lacking = []
    for name, _, path in passes:
        place = path.relative_to(SRC / "passes").as_posix()
        if name not in words(CALL, PACKAGE):
            lacking.append(
                f"{name}: nothing runs it; call it in the list of its place (notes/architecture.md)"
            )
        tested = place in TESTED_BY or f"test_{path.name}" in test_files or name in words(IDENTIFIER, "tests")
        if not tested:
            lacking.append(f"{name}: test it in tests/passes/{path.parent.name}/test_{path.name}")
    report(lacking)
    assert [test for test in TESTED_BY.values() if not (ROOT / test).is_file()] == []


def test_every_fault_that_a_pass_avoids_is_on_the_page_of_faults() -> None:
    page = (ROOT / "notes" / "faults-of-others.md").read_text(encoding="utf-8")
    lacking = [
        f"{path.name}: name the project, its version and the fault in notes/faults-of-others.md, with `{path.name}`"
        for path in sorted((SRC / "passes" / "runtime_faults").glob("*.py"))
        if path.name not in ("__init__.py", "pipeline.py") and f"{path.name}`" not in page
    ]
    report(lacking)


# ---- host profiles --------------------------------------------------------------------------------------


def test_every_host_profile_can_be_chosen_and_is_documented_and_tested() -> None:
    names = get_args(Profile)
    lacking = [
        f"{name}: add it to PROFILES in src/onnxtrain/passes/profiles.py"
        for name in names
        if name not in PROFILES
    ]
    lacking += [
        f"{name}: add it to Profile in src/onnxtrain/recipe.py" for name in PROFILES if name not in names
    ]
    for name in PROFILES:
        if name != "default" and name not in words(PROFILE, "docs", "*.md"):
            lacking.append(f'{name}: describe profile="{name}" in docs/devices/own-host.md')
        if name not in words(GIVEN, "tests"):
            lacking.append(f"{name}: test it in tests/hosts/test_{name}_profile.py")
    report(lacking)
