"""Makes the parameters of commands from dataclasses whose fields declare one option each.

A field is declared by :func:`option`, :func:`switch` or :func:`argument`, which take its default and help text. The
class variables `panel` (heading in `--help`) and `kept` (see :class:`Rule`) hold for all fields of a class.

:func:`taking` makes the parameters of a command from the fields of a dataclass. The record of a run (`_remember`) and
the names of options in messages (`_shell_words`) follow from the fields as well, so a new option is one new field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import typer

from onnxtrain.errors import InputError
from onnxtrain.recipe import Recipe, ShellOption

T = TypeVar("T")
Kept = Literal["run", "fit", "anew"]


@dataclass(frozen=True)
class Rule:
    """Says if a run keeps the value of an option, and names the argument of the Python API that the option sets.

    Attributes:
        kept: "run": a run that goes on keeps the value, and another value is an error. "fit": the same until the fit
            that was interrupted has ended; a new fit may have another value. "anew": kept, but may be changed at any
            time. None: as the class variable `kept` of the dataclass says, or not kept.
        python: argument of `Trainer` or `fit` that the option sets, e.g. "clip_grad_norm" for `--clip-norm`. Empty
            for the name of the field.
    """

    # The default keeps nothing: an option of one command alone, such as --overwrite, needs no rule.
    kept: Kept | None = None
    python: str = ""


REQUIRED: Any = MISSING
"""Default of an option that must be given."""


def option(
    metavar: str | None,
    help: str,
    *names: str,
    default: Any = None,
    kept: Kept | None = None,
    python: str = "",
    **settings: Any,
) -> Any:
    """Declares a field as an option of a command.

    Args:
        metavar: name of the value in `--help`, e.g. "STEPS"; None for what typer makes of the type.
        help: help text; it describes the field, too.
        names: spellings, e.g. "--output", "-o"; by default that of :func:`flag`.
        default: value of an option that is not given.
        kept: see :class:`Rule`.
        python: see :class:`Rule`.
        settings: further arguments of `typer.Option`, e.g. min=1.
    """
    settings |= {"metavar": metavar, "help": help}
    metadata = {"make": typer.Option, "names": names, "settings": settings, "rule": Rule(kept, python)}
    return field(default=default, metadata=metadata)


def switch(help: str, python: str = "", kept: Kept | None = None) -> Any:
    """Declares a field as an option without a value, which is False unless it is given; see :func:`option`.

    A second spelling switches it off: `--no-recompute` for `--recompute`, `--shuffle` for `--no-shuffle`. The command
    line can so overrule a file of options.
    """
    return option(None, help, default=False, python=python, kept=kept)


def argument(metavar: str, help: str) -> Any:
    """Declares a field as an argument of a command, which must be given."""
    settings = {"metavar": metavar, "help": help}
    return field(metadata={"make": typer.Argument, "names": (), "settings": settings, "rule": Rule()})


class Option(NamedTuple):
    """A field of a dataclass of options, without the nesting.

    Attributes:
        annotation: type and typer's declaration, e.g. `Annotated[int, typer.Option(min=1)]`.
        default: `inspect.Parameter.empty` for an option that must be given.
        rule: says if a run keeps the value.
        panel: heading of the option in `--help`; None for none.
        key: name of the option in a file of options: its first long spelling without dashes, e.g. "learning-rate".
    """

    annotation: Any
    default: Any
    rule: Rule
    panel: str | None
    key: str


def options_of(kind: type) -> Mapping[str, Option]:
    """Returns the options of a dataclass by name, those of nested dataclasses in their place."""
    options: dict[str, Option] = {}
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            # The parameters of a command have no groups: a name occurs in one group only.
            options |= options_of(hint)
            continue
        metadata = entry.metadata
        rule = replace(metadata["rule"], kept=metadata["rule"].kept or getattr(kind, "kept", None))
        # typer would make "--no-no-shuffle" of a field "no_shuffle".
        names = metadata["names"] or ((f"{flag(entry.name)}/{off_flag(entry.name)}",) if hint is bool else ())
        panel = getattr(kind, "panel", None)
        declared = metadata["make"](*names, rich_help_panel=panel, **metadata["settings"])
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        is_argument = metadata["make"] is typer.Argument
        key = (
            argument_key(metadata["settings"]["metavar"])
            if is_argument
            else (metadata["names"] or (flag(entry.name),))[0]
        )
        options[entry.name] = Option(Annotated[hint, declared], default, rule, panel, key.removeprefix("--"))
    return options


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Returns an object of a dataclass of options, made from the values of :func:`flat`."""
    arguments = {}
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            arguments[name] = build(hint, values)
        # The record of an older run lacks options that were added since: their fields' defaults hold.
        elif name in values:
            arguments[name] = values[name]
    return kind(**arguments)


def flat(options: object) -> dict[str, Any]:
    """Returns the values of options by name, those of nested dataclasses beside the others."""
    values: dict[str, Any] = {}
    for name, value in vars(options).items():
        values |= flat(value) if is_dataclass(value) else {name: value}
    return values


def with_recipe_options(group: str) -> Callable[[type[T]], type[T]]:
    """Adds the options of a group of the fields of :class:`Recipe`; stands below `@dataclass`.

    Args:
        group: group of the options, as their fields have it, e.g. "model".
    """

    def add(kind: type[T]) -> type[T]:
        hints = dict(kind.__annotations__)
        for entry in fields(Recipe):
            shell = entry.metadata["shell"]
            if not isinstance(shell, ShellOption) or shell.group != group:
                continue
            name = shell.name or entry.name
            python = entry.name if shell.name else ""
            hints[name] = shell.kind
            # A text that is parsed has no default of its own: what is not given is left to the recipe.
            default = None if shell.parse else entry.default
            setattr(kind, name, option(shell.metavar, shell.help, default=default, python=python))
        kind.__annotations__ = hints
        return kind

    return add


def taking(kind: type[T]) -> Callable[[Callable[[T, frozenset[str]], None]], Callable[..., None]]:
    """Gives a command one parameter per option of a dataclass.

    The command itself takes an object of `kind`, and the names of the options that were given, on the command line or
    in a file (`--config`).
    """

    def decorate(command: Callable[[T, frozenset[str]], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            sources = {name: context.get_parameter_source(name) for name in values}
            # Those of a file of options are given, too: a run that goes on must not ignore them.
            # Compared by name: typer 0.29 has its own copy of click, and older versions use the package.
            given_sources = ("COMMANDLINE", "DEFAULT_MAP")
            given_names = {
                name for name, source in sources.items() if source and source.name in given_sources
            }
            for name, value in values.items():
                # A run that records a larger value could not be resumed: numpy and ONNX Runtime have no such integers.
                if isinstance(value, int) and value >= 2**63:
                    raise InputError(
                        f"--{options_of(kind)[name].key} must be less than 2**63, received {value}."
                    )
            command(build(kind, values), frozenset(given_names))

        # Keyword parameters may follow in any order, also a required one after one with a default.
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        for name, option in options_of(kind).items():
            parameters.append(
                inspect.Parameter(name, keyword, annotation=option.annotation, default=option.default)
            )
        # typer reads the signature and the annotations; both say the same.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def argument_key(metavar: str) -> str:
    """Returns the name of an argument in a file of options.

    >>> argument_key("MODEL|DIR")
    'model'
    """
    return metavar.split("|")[0].lower()


def flag(name: str) -> str:
    """Returns the option of a field as it is typed: `--batch-size` for "batch_size"."""
    return f"--{name.replace('_', '-')}"


def off_flag(name: str) -> str:
    """Returns the option that switches a field off.

    >>> [off_flag(name) for name in ("one_hot", "no_shuffle")]
    ['--no-one-hot', '--shuffle']
    """
    return flag(name.removeprefix("no_") if name.startswith("no_") else f"no_{name}")
