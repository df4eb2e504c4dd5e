"""Writes test vectors for hosts: artifacts, feeds, losses and checkpoints, and feeds that a host must refuse.

    python examples/hosts/write_vectors.py vectors
    python examples/hosts/check_host.py vectors build/onnxtrain_host

`vectors.json` lists the cases (docs/devices/own-host.md, "Checklist"). The losses and checkpoints are those of
`onnxtrain.api` on stock ONNX Runtime. Needs onnxtrain; check_host.py does not.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

# Native kernels round in another order than the ops that other hosts run.
os.environ["ONNXTRAIN_KERNELS"] = "off"

import numpy as np
import onnx
from onnx import numpy_helper

from onnxtrain import api, generate_artifacts
from onnxtrain.optimizers import AdamW, ParameterGroup, SparseAdam

STEPS, BATCH, RATE, SEED = 10, 8, 0.01, 5

NETS = {
    # The smallest host trains this one: two layers, and targets of floats.
    "regression": (
        """agraph (float[batch, 4] features) => (float[batch, 2] prediction) {
        a = Gemm(features, w1, b1)  h = Relu(a)  prediction = Gemm(h, w2, b2) }""",
        {"w1": (4, 8), "b1": (8,), "w2": (8, 2), "b2": (2,)},
        {"loss": "mse", "optimizer": "adamw"},
    ),
    # A frozen layer with a name beyond ASCII, running statistics, masks of Dropout, labels.
    "classifier": (
        """agraph (float[batch, 6] pixels) => (float[batch, 5] logits) {
        a = Gemm(pixels, "größe", b1)
        n, m, v = BatchNormalization<training_mode=1>(a, scale, shift, mean, variance)
        r = Relu(n)  ratio = Constant<value_float=0.2>()  yes = Constant<value=bool {1}>()
        d = Dropout(r, ratio, yes)  logits = Gemm(d, w2, b2) }""",
        {"größe": (6, 12), "b1": (12,), "scale": (12,), "shift": (12,), "mean": (12,), "variance": (12,),
         "w2": (12, 5), "b2": (5,)},
        {"loss": "cross_entropy", "optimizer": "adamw", "requires_grad": ["w2", "b2"],
         "frozen_params": ["größe", "b1", "scale", "shift"]},
    ),
    # A table of which a step reads some rows: manifests of version 2.
    "tokens": (
        """agraph (int64[batch, 4] tokens) => (float[batch, 5] logits) {
        e = Gather(table, tokens)  axes = Constant<value_ints=[1]>()
        m = ReduceMean<keepdims=0>(e, axes)  logits = Gemm(m, w, b) }""",
        {"table": (30, 6), "w": (6, 5), "b": (5,)},
        {"loss": "cross_entropy", "sparse_gradients": ["table"],
         "optimizer": AdamW(groups=[ParameterGroup("table", optimizer=SparseAdam())])},
    ),
    # An additive mask: -inf in an input is no mistake.
    "masked": (
        """agraph (float[batch, 5, 3] features, float[batch, 5] mask) => (float[batch, 2] prediction) {
        s = MatMul(features, scale)  m = Add(s, mask)  p = Softmax(m)  prediction = Gemm(p, w, b) }""",
        {"scale": (3,), "w": (5, 2), "b": (2,)},
        {"loss": "mse", "optimizer": "adamw"},
    ),
    # A frozen layer above 64 KiB, which the models read from a file that they share.
    "shared": (
        """agraph (float[batch, 128] features) => (float[batch, 2] prediction) {
        a = MatMul(features, frozen)  h = Tanh(a)  prediction = Gemm(h, w, b) }""",
        {"frozen": (128, 160), "w": (160, 2), "b": (2,)},
        {"loss": "mse", "optimizer": "adamw", "requires_grad": ["w", "b"]},
    ),
}  # fmt: skip

# What JSON in JavaScript or C++ may lose.
PROPERTIES = {
    "best_loss": float("inf"), "worst": float("-inf"), "unknown": float("nan"), "zero": -0.0, "rate": 1e-7,
    "time_ns": 1795867000123456789, "id": 2**64 + 1, "note": 'é "quoted"\n\\ 😀', "epoch": 3,
}  # fmt: skip


def make_model(name):
    text, shapes, _ = NETS[name]
    rng = np.random.default_rng(3)
    # Names beyond ASCII are not in the grammar of ONNX's parser.
    graph = onnx.parser.parse_graph(text.replace('"größe"', "placeholder"))
    for node in graph.node:
        node.input[:] = ["größe" if x == "placeholder" else x for x in node.input]
    for key, shape in shapes.items():
        ones = key in ("scale", "variance")
        # Smaller where layers are wide, so that Tanh is not saturated.
        value = np.ones(shape) if ones else rng.normal(0, 0.03 if name == "shared" else 0.3, shape)
        graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), key))
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def make_batches(name):
    """Returns a list of batches: an array per input, then per target."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        if name == "tokens":
            x = rng.integers(0, 30, (BATCH, 4))
            batches.append([x, x[:, 0] % 5])
            continue
        if name == "masked":
            x = rng.normal(0, 1, (BATCH, 5, 3)).astype(np.float32)
            mask = np.where(np.arange(5) > rng.integers(0, 5, (BATCH, 1)), np.float32(-np.inf), np.float32(0))
            batches.append([x, mask, x[:, 0, :2].copy()])
            continue
        width = {"regression": 4, "classifier": 6, "shared": 128}[name]
        x = rng.normal(0, 1, (BATCH, width)).astype(np.float32)
        if name in ("regression", "shared"):
            batches.append([x, np.stack([x[:, 0] - x[:, 1], np.abs(x[:, 2])], 1)])
        else:
            labels = x[:, :5].argmax(1)
            labels[0] = -100
            batches.append([x, labels])
    return batches


class Vectors:
    """The folder and its list of cases; all paths in the list are relative to the folder."""

    def __init__(self, folder):
        self.folder, self.cases = folder, []

    def add(self, name, net, feeds, **expected):
        start = expected.pop("start", [])
        self.cases.append(
            {"name": name, "artifacts": f"{net}/artifacts", "feeds": feeds, "from": start} | expected
        )

    def write_feeds(self, path, net, batches, names=None):
        """Writes a folder of feeds; names may differ from those of the manifest, for a case that is refused."""
        manifest = self.manifest(net)
        names = names or [x["name"] for x in manifest["inputs"] + manifest["targets"]]
        feeds = [
            {"name": name, "dtype": x.dtype.name, "shape": [*x.shape]}
            for name, x in zip(names, batches[0], strict=True)
        ]
        folder = self.folder / path
        folder.mkdir(parents=True)
        run = {"steps": len(batches), "learning_rate": RATE, "seed": SEED, "feeds": feeds}
        (folder / "feeds.json").write_text(json.dumps(run))
        (folder / "feeds.bin").write_bytes(b"".join(x.tobytes() for batch in batches for x in batch))
        return path

    def manifest(self, net):
        return json.loads((self.folder / net / "artifacts" / "manifest.json").read_text("utf-8"))

    def train(self, net, batches, start=(), properties=None):
        """Trains by `onnxtrain.api`; returns losses and state."""
        artifacts = self.folder / net / "artifacts"
        state = api.CheckpointState.load_checkpoint(
            self.folder / start[0] if start else artifacts / "checkpoint"
        )
        module = api.Module(artifacts / "training_model.onnx", state, seed=SEED)
        optimizer = api.Optimizer(artifacts / "optimizer_model.onnx", module)
        optimizer.set_learning_rate(RATE)
        for name, value in (properties or {}).items():
            state.properties[name] = value
        losses = []
        for batch in batches:
            module.lazy_reset_grad()
            results = module(*batch)
            losses.append(float(results[0] if isinstance(results, tuple) else results))
            optimizer.step()
        return losses, state

    def save(self, path, state, *, delta=False):
        api.CheckpointState.save_checkpoint(
            state, self.folder / path, include_optimizer_state=True, trainable_only=delta
        )
        return path


def write_net(vectors, name):
    """Writes artifacts, a run of 10 steps, and the same run in two halves."""
    generate_artifacts(
        make_model(name),
        artifact_directory=vectors.folder / name / "artifacts",
        profile="portable",
        **NETS[name][2],
    )
    batches, half = make_batches(name), STEPS // 2
    losses, state = vectors.train(name, batches)
    feeds = vectors.write_feeds(f"{name}/feeds", name, batches)
    checkpoint = vectors.save(f"{name}/trained.checkpoint", state)
    delta = vectors.save(f"{name}/trained.delta", state, delta=True)
    vectors.add(f"{name}: trains", name, feeds, losses=losses, checkpoint=checkpoint)
    vectors.add(f"{name}: writes a delta", name, feeds, losses=losses, delta=delta)
    second = vectors.write_feeds(f"{name}/second_half", name, batches[half:])
    _, state = vectors.train(name, batches[:half], properties=PROPERTIES)
    for kind in ("checkpoint", "delta"):
        start = [vectors.save(f"{name}/half.{kind}", state, delta=kind == "delta")]
        rest, final = vectors.train(name, batches[half:], [f"{name}/half.checkpoint"])
        final = vectors.save(f"{name}/resumed.{kind}", final, delta=kind == "delta")
        vectors.add(f"{name}: resumes from a {kind}", name, second, start=start, losses=rest, **{kind: final})


def write_bad_feeds(vectors):
    """Writes feeds whose second batch must be refused, or whose names, dtypes or shapes do."""

    def refuse(net, name, change, says, rule, good=1, **options):
        batches = [[x.copy() for x in batch] for batch in make_batches(net)[:2]]
        losses, _ = vectors.train(net, batches[:good])
        for index in range(good, 2):
            batches[index] = change(*batches[index])
        path = f"{net}/refused/{name.replace(' ', '_')}"
        vectors.write_feeds(path, net, batches, **options)
        vectors.add(f"{net}: refuses {name}", net, path, losses=losses, refused=rule, says=says)
        return vectors.folder / path

    def with_number(number):
        def change(x, y):
            x[3, 1] = number
            return [x, y]

        return change

    def with_nan_mask(x, mask, y):
        mask[0, 2] = np.nan
        return [x, mask, y]

    def minus_infinity(x, mask, y):
        x[:, -1] = -np.inf
        return [x, np.zeros_like(mask), y]

    def with_label(label):
        def change(x, labels):
            labels[-1] = label
            return [x, labels]

        return change

    for name, label in [
        ("label -1", -1),
        ("label 5 of 5", 5),
        ("label 100000", 100_000),
        ("the least label", -(2**63)),
    ]:
        refuse("classifier", name, with_label(label), ["labels"], "labels")
    refuse("tokens", "label -1", with_label(-1), ["labels"], "labels")
    refuse("classifier", "NaN", with_number(np.nan), ["pixels"], "no NaN")
    refuse("regression", "a target of NaN", lambda x, y: [x, y * np.nan], ["target"], "no NaN")
    refuse("masked", "NaN in a mask", with_nan_mask, ["mask"], "no NaN")
    # Infinity in an input spoils the loss, or only a gradient: the last positions get no attention.
    for name, number in [("infinity", np.inf), ("negative infinity", -np.inf)]:
        refuse("classifier", name, with_number(number), ["loss"], "finite loss")
    refuse(
        "masked", "a mask without a gap", lambda x, mask, y: [x, mask - np.inf, y], ["loss"], "finite loss"
    )
    refuse("masked", "a gradient of NaN", minus_infinity, ["gradient"], "finite gradients")
    refuse("regression", "an infinite loss", lambda x, y: [x, y + np.float32(3e38)], ["loss"], "finite loss")
    refuse(
        "classifier", "labels that are all ignored", lambda x, y: [x, 0 * y - 100], ["loss"], "finite loss"
    )
    # These are the same for all steps of a folder, so that nothing is trained.
    for name, change, says, rule in [
        ("an empty batch", lambda x, y: [x[:0], y[:0]], ["pixels"], "no empty batch"),
        ("another width", lambda x, y: [x[:, :5].copy(), y], ["pixels"], "shapes"),
        ("another rank", lambda x, y: [x[:, 0].copy(), y], ["pixels"], "shapes"),
        ("fewer labels than samples", lambda x, y: [x, y[:-1]], ["labels"], "shapes"),
        ("another dtype", lambda x, y: [x.astype(np.float64), y], ["pixels"], "dtypes"),
        ("labels of another dtype", lambda x, y: [x, y.astype(np.int32)], ["labels"], "dtypes"),
    ]:
        refuse("classifier", name, change, says, rule, good=0)
    refuse(
        "classifier",
        "another name",
        lambda *b: [*b],
        ["labels"],
        "names",
        good=0,
        names=["pixels", "answers"],
    )
    short = refuse("classifier", "a truncated feeds.bin", lambda *b: [*b], [], "names", good=0)
    (short / "feeds.bin").write_bytes((short / "feeds.bin").read_bytes()[:-8])


def write_bad_files(vectors):
    """Writes checkpoints and artifacts that must be refused before anything is trained."""
    source, refused = (
        vectors.folder / "classifier" / "half.checkpoint",
        vectors.folder / "classifier" / "refused",
    )

    def refuse(name, start):
        vectors.add(
            f"classifier: refuses {name}", "classifier", "classifier/feeds",
            start=[start], losses=[], refused="checkpoints", says=["checkpoint"],
        )  # fmt: skip

    for name, data in [
        ("a truncated checkpoint", source.read_bytes()[:-3]),
        ("a checkpoint with bytes behind it", source.read_bytes() + bytes(4)),
        ("a checkpoint without header", b"\xff" * 200),
    ]:
        path = refused / f"{name.replace(' ', '_')}.checkpoint"
        path.write_bytes(data)
        refuse(name, path.relative_to(vectors.folder).as_posix())
    refuse("a checkpoint of another model", "regression/half.checkpoint")
    # A delta of a base whose frozen weights differ.
    state = api.CheckpointState.load_checkpoint(source)
    state.parameters["größe"].data = state.parameters["größe"].data + np.float32(1e-3)
    other = vectors.save("classifier/refused/of_another_base.delta", state, delta=True)
    refuse("a delta of another base", other)
    # The file of the weights that the models share: with another byte, and with another size.
    for name, change in [
        ("another byte", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("a byte too many", lambda data: data + bytes(1)),
    ]:
        net = f"shared/refused/{name.replace(' ', '_')}"
        copy = shutil.copytree(vectors.folder / "shared" / "artifacts", vectors.folder / net / "artifacts")
        (path,) = (copy / file for file in vectors.manifest("shared")["data_files"])
        path.write_bytes(change(path.read_bytes()))
        vectors.add(
            f"shared: refuses weights with {name}", net, "shared/feeds",
            losses=[], refused="shared weights", says=[path.name],
        )  # fmt: skip
    # Newer artifacts: the version is in the manifest, and in the models' copies of it.
    newer = shutil.copytree(
        vectors.folder / "regression" / "artifacts", vectors.folder / "newer" / "artifacts"
    )
    for path in newer.glob("*.onnx"):
        model = onnx.load(path)
        for entry in model.metadata_props:
            if entry.key == "onnxtrain.manifest":
                entry.value = json.dumps(json.loads(entry.value) | {"version": 99})
        onnx.save(model, path)
    manifest = json.loads((newer / "manifest.json").read_text("utf-8"))
    (newer / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    vectors.add(
        "newer artifacts: refused", "newer", "regression/feeds", losses=[], refused="versions", says=[]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} exists: give the path of a new folder")
    vectors = Vectors(folder)
    for name in NETS:
        write_net(vectors, name)
    write_bad_feeds(vectors)
    write_bad_files(vectors)
    text = json.dumps({"format": "onnxtrain-host-vectors", "version": 1, "cases": vectors.cases}, indent=1)
    (folder / "vectors.json").write_text(text)
    print(f"{len(vectors.cases)} cases in {folder}")


if __name__ == "__main__":
    main()
