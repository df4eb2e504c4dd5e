"""Checks that the files with the shared weights of a run are the ones that its artifacts were written with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from onnxtrain.runtime.external_data import external_files
from onnxtrain.runtime.manifest_entries import DataFile

# Hashing 100 MB takes a tenth of a second, and the models of a run share the file. Maps the identity of a file (device,
# inode, size and time of its last change) to its SHA-256.
_digests: dict[tuple[int, ...], str] = {}


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal. A file that has not changed since the last call is not read."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if key not in _digests:
            _digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _digests[key]


def check_data_files(model: str | os.PathLike[str], expected: Iterable[DataFile]) -> None:
    """Checks the content of the data files that a model refers to.

    Args:
        model: path of the model.
        expected: the files that the manifest lists. Files of the model that it doesn't list are not checked.

    Raises:
        ValueError: a file has another content. The message says what to do.
        OSError: a file cannot be read.
    """
    directory = Path(os.fspath(model)).parent.resolve()
    specs = {(directory / spec.name).resolve(): spec for spec in expected}
    for path in external_files(model):
        spec = specs.get(path)
        if spec is None:
            continue
        size = path.stat().st_size
        if size != spec.size:
            problem = f"it has {size} bytes instead of {spec.size}"
        elif (digest := file_digest(path)) != spec.sha256:
            problem = f"its SHA-256 is {digest[:12]}... instead of {spec.sha256[:12]}..."
        else:
            continue
        raise ValueError(
            f"'{path}' is not the file with which these artifacts were written: {problem}. Put the original "
            "file there, or generate the artifacts again from the new one."
        )
