"""Reads the batches of a run, and refuses those that must not be trained on (docs/devices/own-host.md, "Checklist")."""

import json

import numpy as np
from checkpoint_file import require


def read_feeds(folder, manifest):
    """Returns the settings of a run, and the batches: an array per step whose fields are inputs and targets."""
    settings = json.loads((folder / "feeds.json").read_text("utf-8"))
    given = [(x["name"], x["dtype"]) for x in settings["feeds"]]
    wanted = [(x["name"], x["dtype"]) for x in specs_of(manifest)]
    require(given == wanted, f"{folder}/feeds.json lists {given}, the model takes {wanted}")
    check_shapes(manifest, {x["name"]: x["shape"] for x in settings["feeds"]})
    fields = [
        (x["name"], np.dtype(x["dtype"]).newbyteorder("<"), tuple(x["shape"])) for x in settings["feeds"]
    ]
    data, batch, steps = (folder / "feeds.bin").read_bytes(), np.dtype(fields), settings["steps"]
    size = steps * batch.itemsize
    require(len(data) == size, f"{folder}/feeds.bin has {len(data)} bytes, {steps} steps have {size}")
    return settings, np.frombuffer(data, batch)


def specs_of(manifest):
    return manifest["inputs"] + manifest["targets"]


def check_shapes(manifest, shapes):
    """Raises ValueError unless shapes by name are those of the manifest, and no batch is empty."""
    symbols = {}
    for x in specs_of(manifest):
        name, shape, wanted = x["name"], [*shapes[x["name"]]], x.get("shape")
        require(all(type(n) is int and n >= 0 for n in shape), f"input '{name}': {shape} is no shape")
        if wanted is not None:
            fits = len(shape) == len(wanted)
            # Strings are symbolic sizes: any number, but the same one in all inputs.
            for size, expected in zip(shape, wanted, strict=False):
                known = (
                    symbols.setdefault(expected, size) if isinstance(expected, str) and expected else expected
                )
                fits = fits and known in (None, "", size)
            require(fits, f"input '{name}': received shape {shape}, the model takes {wanted} {symbols or ''}")
        require(not shape or shape[0] > 0, f"input '{name}': the batch is empty; pass at least one sample")


def check_values(manifest, batch):
    """Raises ValueError if a batch, arrays by name, holds NaN, or labels that are no class."""
    for x in specs_of(manifest):
        name, array, labels = x["name"], batch[x["name"]], x.get("class_labels")
        if array.dtype.kind == "f":
            # Infinity is no mistake in itself: masks hold -inf.
            wrong = np.isnan(array)
            takes = "numbers; leave out or fill such samples"
        elif labels:
            count, ignored = labels.get("count"), labels.get("ignore_index")
            wrong = (array < 0) | (False if count is None else array >= count)
            wrong &= True if ignored is None else array != ignored
            takes = "labels of 0 or more" if count is None else f"labels from 0 to {count - 1}"
            takes += "" if ignored is None else f", or {ignored} to ignore an element"
        else:
            continue
        require(not wrong.any(), f"input '{name}': received {array[wrong][:1]}, the model takes {takes}")
