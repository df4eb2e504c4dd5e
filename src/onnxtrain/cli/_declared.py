"""Declares the options of commands as fields of dataclasses, one field per option.

A field is declared with :func:`option`, :func:`switch` or :func:`argument`, to which its default and help text are
passed. The class variables `panel` (heading in `--help`) and `kept` (see :class:`Rule`) apply to all fields of a class.

:func:`takes_options` creates a command with one parameter per field. The settings saved with a run (`_remember`) and
the option names in messages (`_shell_words`) are also derived from the fields. So to add an option, just add a field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from onnxtrain.cli._complete import completion_of
from onnxtrain.errors import InputError
from onnxtrain.recipe import Recipe, ShellOption

T = TypeVar("T")
Kept = Literal["run", "fit", "anew"]


@dataclass(frozen=True)
class Rule:
    """Metadata of a command-line option: whether its value is saved with a run, and which Python argument it sets.

    Attributes:
        kept: when the user may override the saved value while resuming a run. "run": never. "fit": for a new call to
            `fit`, but not if an interrupted call is resumed. "anew": always. None: the class variable `kept` of the
            dataclass applies; if the class has no such variable, the value is not saved.
        python: argument of `Trainer` or `fit` that the option sets, e.g. "clip_grad_norm" for `--clip-norm`; "" if the
            argument has the same name as the field.
    """

    # By default nothing is kept: options for a single command, such as --overwrite, need no rule.
    kept: Kept | None = None
    python: str = ""


REQUIRED: Any = MISSING
"""Value of `default` that marks an option as required."""


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
        metavar: name of the value in `--help`, e.g. "STEPS"; None for typer's default, which depends on the type.
        help: help text, which also documents the field.
        names: spellings of the option, e.g. "--output", "-o". Default: the result of :func:`flag`.
        default: value if the option is not given.
        kept: when the user may override the saved value while resuming a run: "run", "fit" or "anew", as in
            :class:`Rule`. None to use the class variable `kept`.
        python: argument of `Trainer` or `fit` that the option sets; "" if the argument has the same name as the field.
        settings: additional arguments for `typer.Option`, e.g. min=1.
    """
    settings |= {"metavar": metavar, "help": help}
    metadata = {"make": typer.Option, "names": names, "settings": settings, "rule": Rule(kept, python)}
    return field(default=default, metadata=metadata)


def switch(help: str, python: str = "", kept: Kept | None = None, default: bool | None = False) -> Any:
    """Declares a field as a switch: a Boolean option that takes no value and defaults to False, or to None.

    Each switch also has an opposite spelling, which turns off a switch that an options file turns on: `--no-recompute`
    for `--recompute`, `--shuffle` for `--no-shuffle`. For the arguments, see :func:`option`.
    """
    return option(None, help, default=default, python=python, kept=kept)


def argument(metavar: str, help: str, default: Any = REQUIRED) -> Any:
    """Declares a field as a positional argument of a command. It is required unless `default` is given."""
    settings = {"metavar": metavar, "help": help}
    return field(
        default=default, metadata={"make": typer.Argument, "names": (), "settings": settings, "rule": Rule()}
    )


class Option(NamedTuple):
    """A command-line option or argument: a field of an options dataclass, or of a dataclass nested in it.

    Attributes:
        annotation: annotation for typer, e.g. `Annotated[int, typer.Option(min=1)]`.
        default: default value; `inspect.Parameter.empty` for a required option.
        rule: whether the value is saved with a run, and which Python argument it sets.
        panel: heading of the option in `--help`; None for no heading.
        key: name of the option in an options file: its first long spelling without dashes, e.g. "learning-rate".
    """

    annotation: Any
    default: Any
    rule: Rule
    panel: str | None
    key: str


def options_of(kind: type) -> Mapping[str, Option]:
    """Returns the options that a dataclass and the dataclasses nested in it declare, by field name, in order."""
    options: dict[str, Option] = {}
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            # A command's parameters have no groups, so names are unique among all nested dataclasses.
            options |= options_of(hint)
            continue
        metadata = entry.metadata
        rule = replace(metadata["rule"], kept=metadata["rule"].kept or getattr(kind, "kept", None))
        # For a field "no_shuffle", typer would generate "--no-no-shuffle".
        is_switch = hint in (bool, bool | None)
        names = metadata["names"] or ((f"{flag(entry.name)}/{off_flag(entry.name)}",) if is_switch else ())
        panel = getattr(kind, "panel", None)
        settings = metadata["settings"]
        if settings["metavar"] is None and (choices := _choices(hint)):
            settings = {**settings, "metavar": "|".join(choices)}
        # Choices and switches have their own completion.
        if (
            hint is not bool
            and (complete := completion_of(entry.name, metadata["settings"]["metavar"])) is not None
        ):
            settings = {"autocompletion": complete, **settings}
        declared = metadata["make"](*names, rich_help_panel=panel, **settings)
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        is_argument = metadata["make"] is typer.Argument
        key = (
            argument_key(metadata["settings"]["metavar"])
            if is_argument
            else (metadata["names"] or (flag(entry.name),))[0]
        )
        options[entry.name] = Option(Annotated[hint, declared], default, rule, panel, key.removeprefix("--"))
    return options


def _choices(hint: Any) -> list[str]:
    """Returns the values of a Literal, or of an optional one; [] for other types."""
    literal = next((one for one in (hint, *get_args(hint)) if get_origin(one) is Literal), None)
    return list(map(str, get_args(literal)))


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Creates an instance of an options dataclass from a dict of values by field name; the inverse of :func:`flat`."""
    arguments = {}
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            arguments[name] = build(hint, values)
        # Missing values get the defaults of their fields.
        elif name in values:
            arguments[name] = values[name]
    return kind(**arguments)


def flat(options: object) -> dict[str, Any]:
    """Returns the values of an options dataclass and of the dataclasses nested in it as a single dict by field name."""
    values: dict[str, Any] = {}
    for name, value in vars(options).items():
        values |= flat(value) if is_dataclass(value) else {name: value}
    return values


def with_recipe_options(group: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that adds an option for each :class:`Recipe` field whose `ShellOption` belongs to a group.

    Place it below `@dataclass`, so that the options are added before the class becomes a dataclass.

    Args:
        group: value of `ShellOption.group`, e.g. "model".
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
            # A parsed option has no default of its own: if it is not given, the recipe's default applies.
            default = None if shell.parse else entry.default
            setattr(kind, name, option(shell.metavar, shell.help, default=default, python=python))
        kind.__annotations__ = hints
        return kind

    return add


def takes_options(kind: type[T]) -> Callable[[Callable[[T, frozenset[str]], None]], Callable[..., None]]:
    """Decorates a command so that typer sees one parameter per option of the dataclass `kind`.

    The decorated function is called with an instance of `kind`, and the names of the options that were given on the
    command line or in an options file (`--config`).
    """

    def decorate(command: Callable[[T, frozenset[str]], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            sources = {name: context.get_parameter_source(name) for name in values}
            # Options from a file count as given, because a resumed run must not ignore them.
            # Compared by name, because typer 0.29 has its own copy of click, and older versions use the package.
            given_sources = ("COMMANDLINE", "DEFAULT_MAP")
            given_names = {
                name for name, source in sources.items() if source and source.name in given_sources
            }
            for name, value in values.items():
                # A run with a larger integer could not be resumed: numpy and ONNX Runtime do not support it.
                if isinstance(value, int) and value >= 2**63:
                    raise InputError(
                        f"--{options_of(kind)[name].key} must be less than 2**63, received {value}."
                    )
            command(build(kind, values), frozenset(given_names))

        # Keyword-only, so that a required parameter may follow one with a default.
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        for name, option in options_of(kind).items():
            parameters.append(
                inspect.Parameter(name, keyword, annotation=option.annotation, default=option.default)
            )
        # typer reads both the signature and the annotations.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def argument_key(metavar: str) -> str:
    """Returns the key of a positional argument in an options file.

    >>> argument_key("MODEL|DIR")
    'model'
    """
    return metavar.split("|")[0].lower()


def flag(name: str) -> str:
    """Returns the option that sets a field, e.g. `--batch-size` for "batch_size"."""
    return f"--{name.replace('_', '-')}"


def off_flag(name: str) -> str:
    """Returns the option that turns off the switch of a field.

    >>> [off_flag(name) for name in ("one_hot", "no_shuffle")]
    ['--no-one-hot', '--shuffle']
    """
    return flag(name.removeprefix("no_") if name.startswith("no_") else f"no_{name}")
