"""Reads the options of a command from a TOML file, and writes the options of a run to such a file.

Keys are the long names of options without the leading dashes: `learning-rate = 0.01`. The positional argument of a
command also has a key: `model` for `onnxtrain train`, `model` or `run` for `onnxtrain evaluate`.
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomlkit
import typer

from onnxtrain.cli._declared import argument_key, flat, options_of
from onnxtrain.cli._settings import names_python, number_or_text
from onnxtrain.errors import InputError

RUN_FILE = "run.toml"
"""Name of the file with a run's options, in the run's directory."""

# Options that do not belong to the run itself: a repeated run writes to another directory, perhaps in another format.
_NOT_WRITTEN = ("output", "overwrite", "json", "config")


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--config`: uses the values in the file as the defaults of the command that is being parsed.

    Options on the command line override these defaults.

    Raises:
        InputError: the file is missing or is not TOML, a key is not an option of the command, or a value is invalid.
    """
    # Completion parses incomplete commands, where an error would hide the choices.
    if path is not None and not context.resilient_parsing:
        context.default_map = _read(context, path)
    return path


def _read(context: typer.Context, path: Path) -> dict[str, Any]:
    """Reads an options file. Returns a dict from the names of the command's parameters to the values."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problem = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise InputError(f"Reading the options '{path}': {problem}.") from error
    parameters = _parameters(context)
    command = f"`onnxtrain {context.info_name}`"
    values: dict[str, Any] = {}
    for key, value in content.items():
        where = f"Reading the options '{path}': {key}"
        if isinstance(value, dict):
            raise InputError(f"{where} is a section. Write options without [{key}] above them.")
        parameter = parameters.get(key)
        if parameter is None:
            raise InputError(f"{where} is not an option of {command}.{_nearest(key, list(parameters))}")
        if parameter.name in values:
            raise InputError(f"{where} is given twice, under two of its names.")
        values[parameter.name] = _checked(context, parameter, value, path, where)
    return values


def _parameters(context: typer.Context) -> dict[str, Any]:
    """Maps each key that an options file may contain to the command's parameter that the key sets."""
    parameters: dict[str, Any] = {}
    for parameter in context.command.params:
        if parameter.param_type_name == "argument":
            # Of MODEL|RUN, either name may be the key.
            for name in (parameter.metavar or parameter.name).split("|"):
                parameters[argument_key(name)] = parameter
            continue
        for spelling in parameter.opts:
            if spelling.startswith("--") and parameter.name != "config":
                parameters[spelling.removeprefix("--")] = parameter
    return parameters


def _nearest(key: str, keys: list[str]) -> str:
    """Returns the end of an error message about an unknown key, with the most similar valid key or all valid keys."""
    near = get_close_matches(key.replace("_", "-"), keys, 1)
    return f" The nearest one is {near[0]}." if near else f" Its options are {', '.join(sorted(keys))}."


def _checked(context: typer.Context, parameter: Any, value: Any, path: Path, where: str) -> Any:
    """Checks and converts a value from an options file as typer would do on the command line.

    Args:
        context: context of the command.
        parameter: the option or argument.
        value: the value from the file.
        path: path of the options file. Relative paths in this file are resolved against its directory.
        where: beginning of error messages.

    Raises:
        InputError: the option does not accept the value.
    """
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise InputError(f"{where} is {_shown(value)}; it must be true or false.")
        return value
    several = bool(getattr(parameter, "multiple", False))
    if isinstance(value, list) and not several:
        raise InputError(f"{where} is {_shown(value)}; it takes one value, not a list.")
    items = value if isinstance(value, list) else [value]
    converted = [_one(context, parameter, item, path, where, several=several) for item in items]
    return converted if several else converted[0]


def _one(context: typer.Context, parameter: Any, item: Any, path: Path, where: str, *, several: bool) -> Any:
    # String options accept numbers, too: `validation = 0.1` is a fraction, which is a string on the command line.
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise InputError(f"{where} is {_shown(item)}; it must be a number or a string.")
    # Whoever sends an options file must not have Python run by it.
    if parameter.name == "loss" and isinstance(item, str) and names_python(item):
        raise InputError(
            f"{where} is {_shown(item)}, which runs a Python file. Delete the line, and pass --loss {item} on the "
            "command line."
        )
    # On the command line every value is a string.
    text = item if isinstance(item, str) else repr(item)
    try:
        cast = parameter.process_value(context, [text] if several else text)
    except (typer.BadParameter, ValueError) as error:
        message = getattr(error, "message", str(error)).rstrip(".")
        raise InputError(f"{where} is {_shown(item)}: {message}.") from error
    result = cast[0] if several else cast
    wanted = {int: "a whole number", float: "a number"}.get(type(result))
    # The command line reads "3" as 3. In the file it is a string, and may be intended as one.
    if wanted is not None and isinstance(item, str):
        raise InputError(f'{where} is "{item}"; it must be {wanted}, without quotation marks.')
    is_file = names_file(parameter.metavar or "")
    # Paths are relative to the file, so that they do not depend on the working directory.
    return (
        str(path.parent / item)
        if is_file and isinstance(item, str) and isinstance(number_or_text(item), str)
        else result
    )


def names_file(metavar: str) -> bool:
    """True if a metavar, the name of a value in `--help`, stands for a value that is or may be a path.

    >>> [names_file(metavar) for metavar in ("MODEL|DIR", "FILE.csv", "FRACTION|FILE", "NAME")]
    [True, True, True, False]
    """
    # The type of the value does not tell, because versions of typer convert strings to paths at different times.
    return any(part.split(".")[0] in ("FILE", "DIR", "MODEL", "RUN") for part in metavar.split("|"))


def _shown(value: Any) -> str:
    """Formats a value in TOML syntax."""
    return str(tomlkit.item(value).as_string())


def write_config(options: object, path: Path, version: str) -> None:
    """Writes the options of a new run, with absolute paths, to a file that `--config` can read.

    Args:
        options: instance of an options dataclass, e.g. of `TrainOptions`.
        path: file to write, e.g. run/run.toml.
        version: version of the package, for the comment in the first line.
    """
    # Imported here, because --help and completion import this module and do not need ONNX Runtime.
    from onnxtrain.runtime.atomic import replace_file

    document = tomlkit.document()
    document.add(tomlkit.comment(f"Options of this run, written by onnxtrain {version}. To repeat it:"))
    values = flat(options)
    loss = values.get("loss")
    # `_one` refuses to read such a loss.
    python = f" --loss {loss}" if isinstance(loss, str) and names_python(loss) else ""
    document.add(tomlkit.comment(f"onnxtrain train --config run.toml{python} --output DIR"))
    panels: dict[str | None, list[tuple[str, Any]]] = {}
    for name, option in options_of(type(options)).items():
        value = _written(values[name], option.annotation.__metadata__[0].metavar or "")
        # TOML has no null, so options that are not given are left out, as are switches that are off by default.
        if (
            name not in _NOT_WRITTEN
            and not (name == "loss" and isinstance(value, str) and names_python(value))
            and value not in (None, [])
            and (value is not False or option.default is None)
        ):
            panels.setdefault(option.panel, []).append((option.key, value))
    for panel, entries in panels.items():
        document.add(tomlkit.nl())
        if panel is not None:
            document.add(tomlkit.comment(panel))
        for key, value in entries:
            document.add(key, tomlkit.item(value))
    # tomlkit escapes control characters, but neither C1 controls nor bidirectional marks.
    text = "".join(c if c.isprintable() or c == "\n" else f"\\U{ord(c):08x}" for c in tomlkit.dumps(document))
    with replace_file(path) as file:
        file.write(text.encode())


def _written(value: Any, metavar: str) -> Any:
    # `--validation FILE` is a string, because the option also accepts a fraction.
    is_file = isinstance(value, str) and names_file(metavar) and isinstance(number_or_text(value), str)
    if is_file or isinstance(value, Path):
        return str(Path(value).resolve())
    return number_or_text(value) if isinstance(value, str) and "FRACTION" in metavar else value
