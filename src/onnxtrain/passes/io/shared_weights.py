"""Stores the weights that several models of a run have in one file, which several runs can share.

The file is the base model's own file if that already contains the weights in a form that runtimes can read in place, or
else a data file whose name depends only on its content.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.io.load import ModelSource
from onnxtrain.passes.io.save import EXTERNAL_TENSOR_BYTES, storage_of, tensors_of, with_type_of
from onnxtrain.runtime import onnx_proto as proto
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.artifact_folder import MANIFEST
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.runtime.data_files import file_digest
from onnxtrain.runtime.external_data import locate, parse_reference, tensor_messages
from onnxtrain.runtime.manifest_entries import DataFile

MIN_SHARED_BYTES = 64 * 1024
"""Weights that models have in common are stored in a file of their own if they take more bytes than this."""

_NAME = "weights.{}.data"
_NAME_PATTERN = re.compile(r"weights\.[0-9a-f]{12}\.data")
# Enough for vector instructions. Pages, as for large models, would take 4 kB for each small tensor.
_ALIGNMENT = 64
# A base file is used in place if at most this part of it is not weights of the run, because hosts download all of it.
_MOST_UNUSED = 0.1
# Names that hosts of all platforms accept in a relative path: no separators of Windows, no escapes of URLs.
_SAFE_LOCATION = re.compile(r"[^\\:%\x00-\x1f\x7f]+")


class _Place(NamedTuple):
    """Position of a tensor's bytes in a file.

    Attributes:
        location: path of the file, relative to the directory of the models, e.g. "model.onnx".
        offset: position in the file, in bytes.
        length: number of bytes.
    """

    location: str
    offset: int
    length: int


@dataclass
class _Weights:
    """The large tensors of all models, grouped by content.

    Attributes:
        tensors: by content, the tensors that have it, by `id`.
        readers: by content, the number of initializers with it.
    """

    tensors: dict[str, dict[int, ir.TensorProtocol]] = field(default_factory=dict)
    readers: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, models: Iterable[ir.Model]) -> _Weights:
        """Groups the tensors of models; those of at most 1 kB and strings are left out."""
        weights, digests = cls(), dict[Hashable, str]()
        for tensor in (tensor for model in models for tensor in tensors_of(model)):
            if tensor.nbytes <= EXTERNAL_TENSOR_BYTES or tensor.dtype == ir.DataType.STRING:
                continue
            storage = storage_of(tensor)
            if storage not in digests:
                digests[storage] = _digest(tensor.tobytes())
            key = digests[storage]
            weights.tensors.setdefault(key, {})[id(tensor)] = tensor
            weights.readers[key] += 1
        return weights

    def example(self, key: str) -> ir.TensorProtocol:
        """Returns one of the tensors with a content."""
        return next(iter(self.tensors[key].values()))

    def size(self, keys: Iterable[str]) -> int:
        """Returns the total size of contents in bytes."""
        return sum(self.example(key).nbytes for key in keys)


@dataclass(frozen=True)
class SharedWeights:
    """Weights that are stored in files which several models refer to.

    Attributes:
        placed: maps the `id` of a tensor to the external tensor that replaces it.
        data_files: the files, for the manifest.
    """

    placed: Mapping[int, ir.ExternalTensor]
    data_files: Sequence[DataFile]


def share_weights(
    models: Iterable[ir.Model],
    files: FileSet,
    directory: Path,
    *,
    base: ModelSource | None,
    own_names: Collection[str],
) -> SharedWeights:
    """Stores the weights that several models have in common once.

    Args:
        models: the models.
        files: set of files to which a data file is added, unless the directory already has it.
        directory: directory of the models.
        base: the model that is trained, or None. If its files are in `directory` or below, and consist nearly only of
            weights of the models, the models refer to these files, which are not changed.
        own_names: names of the files that are written for this run; they aren't used as base.
    """
    weights = _Weights.of(models)
    found = _in_place(weights, base, directory, own_names)
    rest = [key for key, count in weights.readers.items() if count > 1 and key not in found]
    data_files = [
        DataFile(name, (directory / name).stat().st_size, file_digest(directory / name))
        for name in sorted({place.location for place in found.values()})
    ]
    if weights.size(rest) > MIN_SHARED_BYTES:
        written, places = _write([weights.example(key) for key in rest], files, directory)
        data_files.append(written)
        found |= dict(zip(rest, places, strict=True))
    placed = {
        id(tensor): with_type_of(ir.ExternalTensor(*place, tensor.dtype, shape=ir.Shape(()), name=""), tensor)
        for key, place in found.items()
        for tensor in weights.tensors[key].values()
    }
    return SharedWeights(placed, data_files)


def unused_data_files(directory: Path, manifest: str, kept: Iterable[str]) -> list[str]:
    """Returns the names of data files that no run in a directory needs after a run has been written again.

    Args:
        directory: directory of the artifacts.
        manifest: name of the manifest of the run that is written.
        kept: names of the data files that this run needs.
    """
    unused = {path.name for path in directory.iterdir() if _NAME_PATTERN.fullmatch(path.name)} - {*kept}
    if not unused:
        return []
    for path in directory.glob(f"*{MANIFEST}"):
        if path.name == manifest:
            continue
        try:
            content = json.loads(path.read_bytes())
            unused -= {name for names in content["external_data"].values() for name in names}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Perhaps a run that needs one of them.
            return []
    return sorted(unused)


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(
    tensors: Sequence[ir.TensorProtocol], files: FileSet, directory: Path
) -> tuple[DataFile, list[_Place]]:
    """Adds a data file with tensors to a set of files.

    Returns:
        The file, and the place of each tensor in it.
    """
    offsets, digest, end = [], hashlib.sha256(), 0
    for tensor in tensors:
        digest.update(bytes(-end % _ALIGNMENT))
        offsets.append(end + -end % _ALIGNMENT)
        digest.update(tensor.tobytes())
        end = offsets[-1] + tensor.nbytes
    written = DataFile(_NAME.format(digest.hexdigest()[:12]), end, digest.hexdigest())
    path = directory / written.name
    # A file that other runs have open stays as it is.
    if path.is_symlink() or not path.is_file() or file_digest(path) != written.sha256:
        with files.open(written.name) as file:
            for tensor, offset in zip(tensors, offsets, strict=True):
                file.write(bytes(offset - file.tell()))
                file.write(tensor.tobytes())
    places = [_Place(written.name, o, t.nbytes) for o, t in zip(offsets, tensors, strict=True)]
    return written, places


def _in_place(
    weights: _Weights, base: ModelSource | None, directory: Path, own_names: Collection[str]
) -> dict[str, _Place]:
    """Finds weights in the files of the base model.

    Returns:
        The places of the weights by content. Files outside the directory, and files with much else, are left out.
    """
    found: dict[str, _Place] = {}
    sizes = {weights.example(key).nbytes for key in weights.tensors}
    for place, data in _stored(base, directory, own_names):
        if place.length not in sizes or (key := _digest(data)) not in weights.tensors:
            continue
        # ONNX Runtime maps the file into memory, where numbers must be aligned. Weights inside of an .onnx file often
        # are not; those in a file of their own are.
        if all(place.offset % _item_bytes(tensor) == 0 for tensor in weights.tensors[key].values()):
            found.setdefault(key, place)
    used = Counter[str]()
    for place in found.values():
        used[place.location] += place.length
    sizes_of_files = {location: (directory / location).stat().st_size for location in used}
    return {
        key: place
        for key, place in found.items()
        if used[place.location] >= (1 - _MOST_UNUSED) * sizes_of_files[place.location]
    }


def _item_bytes(tensor: ir.TensorProtocol) -> int:
    """Returns the alignment that a tensor needs in memory, in bytes."""
    return max(1, int(tensor.dtype.itemsize))


def _stored(
    base: ModelSource | None, directory: Path, own_names: Collection[str]
) -> Iterator[tuple[_Place, memoryview]]:
    """Yields the places of a model's tensors in files of a directory or below, with the bytes of each tensor."""
    if isinstance(base, ir.Model):
        for tensor in tensors_of(base):
            if isinstance(tensor, ir.ExternalTensor) and tensor.length:
                location = _location(Path(tensor.path), directory, own_names)
                if location is not None:
                    data = np.memmap(tensor.path, np.uint8, "r", tensor.offset or 0, (tensor.length,)).data
                    yield _Place(location, tensor.offset or 0, tensor.length), data
        return
    if not isinstance(base, str | os.PathLike):
        return
    path = Path(base)
    own = _location(path, directory, own_names)
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
    for message in tensor_messages(content):
        reference = parse_reference(message)
        if reference is not None:
            source = locate(reference, path.parent)
            location = _location(source, directory, own_names)
            length = (
                source.stat().st_size - reference.offset if reference.length is None else reference.length
            )
            if location is not None and length:
                data = np.memmap(source, np.uint8, "r", reference.offset, (length,)).data
                yield _Place(location, reference.offset, length), data
        elif own is not None:
            for raw in wire.messages(message, proto.TENSOR_RAW)[-1:]:
                array = np.frombuffer(raw, np.uint8)
                offset = array.__array_interface__["data"][0] - start
                # A message that had to be joined from several fields is not a view of the file.
                if 0 <= offset <= len(content) - len(array) and len(array):
                    yield _Place(own, offset, len(array)), array.data


def _location(path: Path, directory: Path, own_names: Collection[str]) -> str | None:
    """Returns the path of a file relative to a directory, with slashes; None if models there must not refer to it."""
    try:
        location = path.resolve().relative_to(directory.resolve()).as_posix()
    except ValueError:
        return None
    # Files of this run, and their data files, are replaced.
    replaced = any(location == name or location.startswith(f"{name}.") for name in own_names)
    return location if _SAFE_LOCATION.fullmatch(location) and not replaced else None
