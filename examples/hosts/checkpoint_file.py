"""Reads and writes checkpoints and deltas with numpy alone (docs/reference/file-formats.md, "The checkpoint")."""

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np

FORMAT = "onnxtrain-checkpoint"
DELTA_FORMAT = "onnxtrain-checkpoint-delta"
# Names of dtypes in manifests, and in safetensors files.
CODES = {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
CODES |= {"float16": "F16", "float32": "F32", "float64": "F64", "bool": "BOOL"}
DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()}


def require(condition, message):
    if not condition:
        raise ValueError(message)


def read(path):
    """Reads a safetensors file: the length of the header, the header as JSON, then the tensors.

    Returns the metadata and the tensors by key, e.g. {"parameter/fc.weight": array}.
    """
    data = Path(path).read_bytes()
    start = end = 8 + int.from_bytes(data[:8], "little")
    require(8 < start <= len(data), "it is truncated, or no safetensors file")
    try:
        header, tensors = json.loads(data[8:start]), {}
        metadata = header.pop("__metadata__", {})
        require(all(isinstance(text, str) for text in metadata.values()), "its metadata are no texts")
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = end, start + entry["data_offsets"][1]
            # A damaged offset would give numbers of another tensor.
            require(begin == start + entry["data_offsets"][0], "its tensors overlap or leave gaps")
            tensors[key] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError, ValueError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__}: {error})") from error
    require(end == len(data), "it is too short or too long")
    return metadata, tensors


def write(path, metadata, tensors):
    """Writes a safetensors file beside its place and renames it: a process that is killed leaves the old file."""
    header, end = {"__metadata__": metadata}, 0
    for key, array in tensors.items():
        offsets = [end, end + array.nbytes]
        header[key] = {"dtype": CODES[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = Path(f"{path}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(np.ascontiguousarray(array).tobytes() for array in tensors.values())
            file.flush()
            # On the disk before the rename: otherwise a loss of power may leave the new name without its content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Windows cannot open folders, and writes renames to the disk itself.
    if os.name != "nt":
        folder = os.open(temporary.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Checkpoint:
    """The state of a run, which checkpoints hold.

    `values` has parameters, statistics and moments by the names of the models' inputs, e.g. "fc.weight_momentum0".
    `step` is the number of optimizer steps that were taken.
    """

    def __init__(self, manifest):
        self.manifest, self.values, self.metadata, self.progress, self.step = manifest, {}, {}, None, 0
        # Per key of the file the input of the models, the dtype and the shape.
        self.specs, self.moments, self.frozen = {}, {}, {}
        for kind in ("parameter", "statistic"):
            for x in manifest[f"{kind}s"]:
                self.specs[f"{kind}/{x['name']}"] = (x["name"], x["dtype"], x["shape"])
        for x in manifest["optimizer"]["states"]:
            name = f"{x['parameter']}_{x['moment']}"
            self.moments[f"{x['moment']}/{x['parameter']}"] = (name, x["dtype"], x["shape"])
        for x in manifest["parameters"]:
            if not x["trainable"]:
                self.frozen[f"parameter/{x['name']}"] = self.specs[f"parameter/{x['name']}"]

    def load(self, path):
        """Takes over a checkpoint, or a delta on top of the present values; ValueError if it does not fit the model."""
        try:
            metadata, tensors = read(path)
            delta = metadata.get("format") == DELTA_FORMAT
            require(delta or metadata.get("format") == FORMAT, "it is no checkpoint of onnxtrain")
            require(metadata.get("version") == "1", f"it has version {metadata.get('version')}, not 1")
            mine = self.manifest["fingerprint"]
            require(metadata.get("fingerprint") == mine, "it belongs to another model")
            require(not delta or self.values, "it is a delta, which goes on top of a checkpoint")
            progress = read_progress(metadata.get("optimizer", "null"))
            self._check(tensors, delta, progress)
            require(
                not delta or metadata.get("frozen") == self.frozen_digest(),
                "it was trained on top of other values of the frozen parameters",
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"the checkpoint '{path}' cannot be used: {error}") from error
        # Nothing has changed up to here.
        for key, (name, dtype, shape) in (self.specs | self.moments).items():
            if key in tensors:
                self.values[name] = tensors[key]
            elif key in self.moments:
                self.values[name] = np.full(shape, self._initial(key), dtype)
        self.metadata |= {key: text for key, text in metadata.items() if key not in ("format", "frozen")}
        self.progress, self.step = progress, progress["step"] if progress else 0

    def save(self, path, learning_rate, delta=False):
        """Writes a checkpoint, or a delta: the trained parameters, the statistics and the moments only."""
        specs, metadata = self.specs | self.moments, dict(self.metadata)
        progress = {"initial_learning_rate": learning_rate} | (self.progress or {})
        progress |= {"step": self.step, "learning_rate": learning_rate}
        parameters = self.manifest["parameters"]
        metadata |= {
            "format": FORMAT,
            "optimizer": json.dumps(progress),
            "order": json.dumps([x["name"] for x in parameters]),
            "trainable": json.dumps([x["name"] for x in parameters if x["trainable"]]),
            "nominal": "false",
        }
        if delta:
            specs = {key: spec for key, spec in specs.items() if key not in self.frozen}
            metadata = {key: text for key, text in metadata.items() if key not in ("order", "nominal")}
            metadata |= {"format": DELTA_FORMAT, "frozen": self.frozen_digest()}
        write(path, metadata, {key: self.values[name] for key, (name, *_) in specs.items()})

    def frozen_digest(self):
        """Computes the digest of the frozen parameters by which a delta recognises its base."""
        digest = hashlib.sha256()
        for name, dtype, shape in sorted(self.frozen.values()):
            signature = json.dumps([name, dtype, shape], separators=(",", ":"), ensure_ascii=False)
            digest.update(signature.encode() + self.values[name].tobytes())
        return digest.hexdigest()

    def _check(self, tensors, delta, progress):
        expected = {key: spec for key, spec in self.specs.items() if not (delta and key in self.frozen)}
        # Without optimizer state the moments start afresh.
        expected |= self.moments if progress else {}
        for key, (_, dtype, shape) in expected.items():
            require(key in tensors, f"it lacks '{key}'")
            received, wanted = (tensors[key].dtype.name, [*tensors[key].shape]), (dtype, shape)
            require(received == wanted, f"'{key}' is {received} in the file and {wanted} in the model")
        extra = sorted(tensors.keys() - expected.keys())
        require(not extra, f"the model has no {extra}; perhaps it had another optimizer")

    def _initial(self, key):
        optimizer = self.manifest["optimizer"]
        return optimizer["initial_values"][optimizer["moments"].index(key.split("/")[0])]


def read_progress(text):
    """Reads step and learning rates of an optimizer from a JSON text; None if the file has no optimizer state."""
    progress = json.loads(text)
    try:
        steps = progress is None or (type(progress["step"]) is int and 0 <= progress["step"] < 2**62)
        rates = progress and [progress["learning_rate"], progress["initial_learning_rate"]]
        require(steps and all(0 <= rate < math.inf for rate in rates or []), f"it is at {text}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"its optimizer is at {text}") from error
    return progress
