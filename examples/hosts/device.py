"""Trains artifacts of onnxtrain with numpy and onnxruntime alone, as their manifest says (docs/own-host.md).

python device.py ARTIFACTS FEEDS [CHECKPOINT_OUT] prints one loss per step. FEEDS holds `feeds.json`,
{"steps", "learning_rate", "feeds": [{"name", "dtype", "shape"}]} and perhaps "seed", and `feeds.bin`: for each step
the inputs and targets in the manifest's order, raw little-endian.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

CODES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8"}
DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()}


def require(condition, message):
    if not condition:
        raise ValueError(message)


def load(path):
    """Reads a safetensors file: the length of the header, the header as JSON, then the tensors."""
    data = path.read_bytes()
    start = end = 8 + int.from_bytes(data[:8], "little")
    require(8 < start <= len(data), "it is truncated, or no checkpoint")
    header, tensors = json.loads(data[8:start]), {}
    metadata = header.pop("__metadata__")
    for name, x in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = end, start + x["data_offsets"][1]
        require(begin == start + x["data_offsets"][0], "its tensors overlap or leave gaps")
        tensors[name] = np.frombuffer(data[begin:end], DTYPES[x["dtype"]]).reshape(x["shape"])
    require(end == len(data), "it is too short or too long")
    return metadata, tensors


def save(path, metadata, tensors):
    header, end = {"__metadata__": metadata}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": CODES[x.dtype.name], "shape": x.shape, "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text, data = json.dumps(header).encode(), b"".join(x.tobytes() for x in tensors.values())
    # Renamed when it is complete: a process that is killed leaves the old file.
    Path(f"{path}.tmp").write_bytes(len(text).to_bytes(8, "little") + text + data)
    Path(f"{path}.tmp").replace(path)


def run(model, values):
    results = model.run(None, {x.name: np.asarray(values[x.name]) for x in model.get_inputs()})
    return dict(zip((x.name for x in model.get_outputs()), results, strict=True))


def train(artifacts, feeds, checkpoint_out=None):
    manifest = json.loads((artifacts / "manifest.json").read_text())
    require(
        manifest["version"] <= 2 and manifest["optimizer"], f"{artifacts} is too new, or has no optimizer"
    )
    files, optimizer = manifest["files"], manifest["optimizer"]
    settings, data = json.loads((feeds / "feeds.json").read_text()), (feeds / "feeds.bin").read_bytes()
    rate, given = settings["learning_rate"], [(x["name"], x["dtype"]) for x in settings["feeds"]]
    wanted = [(x["name"], x["dtype"]) for x in manifest["inputs"] + manifest["targets"]]
    require(given == wanted, f"{feeds}/feeds.json lists {given}, the model takes {wanted}")
    batch = np.dtype([(x["name"], DTYPES[CODES[x["dtype"]]], tuple(x["shape"])) for x in settings["feeds"]])
    size = settings["steps"] * batch.itemsize
    require(
        len(data) == size, f"{feeds}/feeds.bin has {len(data)} bytes, {settings['steps']} steps have {size}"
    )
    # Inputs of the models by the keys of the checkpoint, e.g. "momentum0/fc.weight": "fc.weight_momentum0".
    names = {f"{k}/{x['name']}": x["name"] for k in ("parameter", "statistic") for x in manifest[f"{k}s"]}
    names |= {
        f"{x['moment']}/{x['parameter']}": f"{x['parameter']}_{x['moment']}" for x in optimizer["states"]
    }
    try:
        metadata, tensors = load(artifacts / files["checkpoint"])
        require(metadata["fingerprint"] == manifest["fingerprint"], "it belongs to another model")
        progress = json.loads(metadata["optimizer"])
        if progress is None:
            initial = dict(zip(optimizer["moments"], optimizer["initial_values"], strict=True))
            progress = {"step": 0, "initial_learning_rate": rate}
            for x in optimizer["states"]:
                full = np.full(x["shape"], initial[x["moment"]], x["dtype"])
                tensors[f"{x['moment']}/{x['parameter']}"] = full
        values = {name: tensors[key] for key, name in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the checkpoint of {artifacts} cannot be used: {error}") from error
    training, update = (
        ort.InferenceSession(artifacts / files[f"{x}_model"]) for x in ("training", "optimizer")
    )
    for arrays in np.frombuffer(data, batch):
        values |= {name: np.array(arrays[name]) for name in batch.names}
        numbers = {"seed": settings.get("seed", 0), "step": progress["step"], "run": 0}
        for x in manifest.get("host_inputs", []):
            require(
                numbers.keys() >= {*x["holds"]}, f"the model wants {x['holds']}; known are {list(numbers)}"
            )
            values[x["name"]] = np.array([numbers[n] for n in x["holds"]])
        results = run(training, values)
        print(f"{results[manifest['loss']]:.9g}", flush=True)
        for x in (x for x in manifest["parameters"] if x["trainable"]):
            values[f"{x['name']}_grad"] = results[x["gradient"]]
            values[f"{x['name']}_grad_indices"] = results.get(x.get("gradient_indices"))
        values |= {x["name"]: results[x["output"]] for x in manifest["statistics"]}
        progress["step"] += 1
        values |= {
            optimizer["learning_rate"]: np.array(rate, "f4"),
            optimizer["step"]: np.array(progress["step"]),
        }
        values |= {name.removesuffix("_updated"): x for name, x in run(update, values).items()}
    if checkpoint_out is not None:
        metadata["optimizer"] = json.dumps(progress | {"learning_rate": rate})
        save(checkpoint_out, metadata, {key: values[name] for key, name in names.items()})


if __name__ == "__main__":
    # onnxruntime's exceptions share no base class but Exception.
    try:
        train(*map(Path, sys.argv[1:]))
    except Exception as error:
        sys.exit(f"device.py ARTIFACTS FEEDS [CHECKPOINT_OUT]: {type(error).__name__}: {error}")
