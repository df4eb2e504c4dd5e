"""Finds the manifest in a folder of artifacts, and keeps reads and writes inside the folder."""

from __future__ import annotations

import os
from pathlib import Path

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.atomic import remove_special_file
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.manifest import FORMAT

MANIFEST = "manifest.json"


def find_manifest(directory: Path) -> str | None:
    """Finds the manifest in a directory: `manifest.json`, or the only file named `<prefix>manifest.json`.

    Returns:
        The name of the file, e.g. "net_manifest.json"; None if there is no manifest.

    Raises:
        CheckpointError: there are several manifests with a prefix, or the manifest is not a file in the directory.
    """
    # `generate_artifacts(prefix="my_")` writes "my_manifest.json".
    names = sorted(path.name for path in directory.glob(f"*{MANIFEST}"))
    if MANIFEST in names:
        own_file(directory, MANIFEST)
        return MANIFEST
    if len(names) > 1:
        raise CheckpointError(
            f"Opening the training run in '{directory}': it contains several runs ({', '.join(names)}). "
            "Move each run with its files to its own directory."
        )
    if not names:
        return None
    own_file(directory, names[0])
    return names[0]


def is_manifest(path: Path) -> bool:
    """True if a file is a manifest that onnxtrain wrote, rather than, e.g., a web app's manifest."""
    try:
        content = parse_json(own_file(path.parent, path.name).read_bytes())
    except (OSError, ValueError, CheckpointError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def own_file(directory: Path, name: str) -> Path:
    """Returns `directory / name` after checking that this path does not lead outside the directory.

    The check is necessary because the directory may come from an untrusted source.

    Args:
        directory: directory of a training run. It may be a symbolic link itself.
        name: name of a file in the directory, e.g. "checkpoint". The file may be missing.

    Raises:
        CheckpointError: the file is a symbolic link that points outside the directory, or is a directory, a pipe or a
            device.
    """
    path = directory / name
    if path.is_symlink() and not path.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(
            f"Opening the training run in '{directory}': '{name}' is a symbolic link to "
            f"'{os.readlink(path)}', outside the run's directory; files outside are not read. Copy the "
            "file itself into the directory, e.g. with huggingface_hub.snapshot_download(..., "
            "local_dir=DIR) or cp -rL."
        )
    # Reading a pipe would block forever.
    if path.exists() and not path.is_file():
        raise CheckpointError(
            f"Opening the training run in '{directory}': '{name}' is a directory, a pipe or a device, not "
            "a regular file. Copy the run again."
        )
    return path


def require_inside(folder: str | os.PathLike[str], directory: Path) -> None:
    """Raises CheckpointError if a symbolic link makes `folder`, a path in a training run's directory, lead outside."""
    folder = Path(folder).absolute()
    below = folder.is_relative_to(directory.absolute())
    if below and not folder.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(
            f"Writing to '{folder}': it is, or is reached through, a symbolic link to "
            f"'{folder.resolve()}', outside the run's directory '{directory}'. Remove the link, or pass "
            "the folder that it points to."
        )


def keep_inside(path: str | os.PathLike[str], directory: Path) -> None:
    """Removes a symbolic link, pipe, socket or device at `path`, so that a write creates a new file.

    The directory of a training run may come from an untrusted source. A path outside of `directory` was chosen by the
    user, so nothing is removed there.

    Args:
        path: the file to write.
        directory: directory of the training run.

    Raises:
        CheckpointError: the folder of `path` is in `directory`, but a symbolic link makes it lead outside.
    """
    folder = Path(path).absolute().parent
    require_inside(folder, directory)
    if folder.resolve().is_relative_to(directory.resolve()):
        remove_special_file(path)
