"""Trains artifacts of onnxtrain with numpy and onnxruntime alone, as their manifest says (docs/devices/own-host.md).

Prints one loss per step. FEEDS is a folder with `feeds.json`, {"steps", "learning_rate", "feeds": [{"name", "dtype",
"shape"}]} and perhaps "seed", and `feeds.bin`: for each step the inputs and targets in the manifest's order, raw
little-endian.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
from batches import check_values, read_feeds
from checkpoint_file import Checkpoint, require


def check_data_files(artifacts, manifest):
    """Checks that the weights that models share are those that the artifacts were written with."""
    for name, expected in manifest.get("data_files", {}).items():
        path = artifacts / name
        require(path.is_file(), f"{path}, which holds weights of the models, is missing")
        with path.open("rb") as file:
            found = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        require(
            found == expected,
            f"{path} is not the file with which these artifacts were written. Put the original file there, "
            "or generate the artifacts again from the new one",
        )


def run(model, values):
    results = model.run(None, {x.name: np.asarray(values[x.name]) for x in model.get_inputs()})
    return dict(zip((x.name for x in model.get_outputs()), results, strict=True))


def train(artifacts, feeds, checkpoint_out=None, start=(), delta=False):
    manifest = json.loads((artifacts / "manifest.json").read_text("utf-8"))
    require(
        manifest["version"] <= 2 and manifest["optimizer"], f"{artifacts} is too new, or has no optimizer"
    )
    files, optimizer = manifest["files"], manifest["optimizer"]
    check_data_files(artifacts, manifest)
    settings, batches = read_feeds(feeds, manifest)
    checkpoint, rate = Checkpoint(manifest), settings["learning_rate"]
    for path in (artifacts / files["checkpoint"], *start):
        checkpoint.load(path)
    values = checkpoint.values  # tensors by the names of the models' inputs
    training = ort.InferenceSession(artifacts / files["training_model"])
    update = ort.InferenceSession(artifacts / files["optimizer_model"])
    for batch in batches:
        check_values(manifest, batch)
        values |= {name: np.array(batch[name]) for name in batch.dtype.names}
        numbers = {"seed": settings.get("seed", 0), "step": checkpoint.step, "run": 0}
        for x in manifest.get("host_inputs", []):
            require(numbers.keys() >= {*x["holds"]}, f"the model wants {x['holds']}, known are {[*numbers]}")
            values[x["name"]] = np.array([numbers[name] for name in x["holds"]])
        results = run(training, values)
        loss = results[manifest["loss"]]
        require(np.isfinite(loss), f"the loss is {loss}: lower the learning rate, or leave this batch out")
        for x in (x for x in manifest["parameters"] if x["trainable"]):
            # A finite loss may have gradients of NaN, above all where inputs are infinite.
            require(
                np.isfinite(results[x["gradient"]]).all(),
                f"the gradient of '{x['name']}' is NaN or infinite: lower the learning rate, or leave this batch out",
            )
            values[f"{x['name']}_grad"] = results[x["gradient"]]
            values[f"{x['name']}_grad_indices"] = results.get(x.get("gradient_indices"))
        print(f"{loss:.9g}", flush=True)
        values |= {x["name"]: results[x["output"]] for x in manifest["statistics"]}
        checkpoint.step += 1
        values |= {optimizer["learning_rate"]: np.float32(rate), optimizer["step"]: np.int64(checkpoint.step)}
        values |= {name.removesuffix("_updated"): x for name, x in run(update, values).items()}
    if checkpoint_out is not None:
        checkpoint.save(checkpoint_out, rate, delta)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("artifacts", type=Path, help="folder that generate_artifacts wrote")
    parser.add_argument("feeds", type=Path, help="folder with feeds.json and feeds.bin")
    parser.add_argument("checkpoint_out", type=Path, nargs="?", help="file to write after the last step")
    parser.add_argument(
        "--from", type=Path, action="append", default=[], dest="start", metavar="FILE",
        help="start from this checkpoint, or from this delta on top of what was loaded before; may be repeated",
    )  # fmt: skip
    parser.add_argument("--delta", action="store_true", help="write a delta: the trained parameters only")
    arguments = parser.parse_intermixed_args()
    out = arguments.checkpoint_out
    if arguments.delta and out is None:
        parser.error("--delta needs CHECKPOINT_OUT, e.g. device.py artifacts feeds trained.delta --delta")
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        parser.error(f"{out} is a folder, or in a folder that does not exist: give the path of a file")
    # onnxruntime's exceptions share no base class but Exception.
    try:
        train(**vars(arguments))
    except Exception as error:
        sys.exit(f"device.py: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
