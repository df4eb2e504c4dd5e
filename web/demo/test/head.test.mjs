/** A head of any number of classes: the models are those of Python, the numbers those of PyTorch. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, it } from "node:test";
import { build } from "esbuild";
import * as ort from "onnxruntime-node";
import { TrainingSession } from "../../dist/index.js";

const here = dirname(fileURLToPath(import.meta.url));
const python = process.env.PYTHON ?? join(here, "..", "..", "..", ".venv", "bin", "python");
const artifacts = join(here, "..", "dist", "model");
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-head-"));
const STEPS = 20;
const BATCH = 16;
const RATE = 0.003;

let head;
let files;
before(async () => {
  const { outputFiles } = await build({
    entryPoints: [join(here, "..", "src", "head.ts")],
    bundle: true,
    format: "esm",
    write: false,
  });
  head = await import(`data:text/javascript,${encodeURIComponent(outputFiles[0].text)}`);
  const names = readdirSync(artifacts).filter((name) => name !== "digits.bin");
  files = Object.fromEntries(names.map((name) => [name, new Uint8Array(readFileSync(join(artifacts, name)))]));
});
after(() => rmSync(scratch, { recursive: true, force: true }));

// The models that Python makes of the base network with another head, compared with those in the folders named by the
// number of classes. Of one class, Python writes other nodes: sizes of 1 simplify the graph.
const COMPARE = `
import json, sys, tempfile
from pathlib import Path
import numpy as np, onnx
from onnx import numpy_helper
from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module
from onnxtrain.optimizers import AdamW
artifacts, scratch = map(Path, sys.argv[1:])
state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
module = Module(artifacts / "training_model.onnx", state, artifacts / "eval_model.onnx")
module.export_model_for_inferencing(scratch / "base.onnx", ["logits"])
def read(path):
    model = onnx.load(path)
    (entry,) = [p for p in model.metadata_props if p.key == "onnxtrain.manifest"]
    manifest = json.loads(entry.value)
    model.metadata_props.remove(entry)
    for value in model.graph.input:
        # Of the labels, which hosts read in the manifest.
        value.ClearField("metadata_props")
    return model.SerializeToString(deterministic=True), manifest
for folder in sorted(scratch.glob("[0-9]*")):
    count = int(folder.name)
    model = onnx.load(scratch / "base.onnx")
    for tensor in model.graph.initializer:
        if tensor.name.startswith("head."):
            shape = (*tensor.dims[:-1], count)
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(shape, np.float32), tensor.name))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = count
    with tempfile.TemporaryDirectory() as own:
        generate_artifacts(model, loss="cross_entropy", optimizer=AdamW(weight_decay=0.0), artifact_directory=own,
                           additional_output_names=["logits"], profile="portable")
        for name in ("training_model", "eval_model", "inference_model", "optimizer_model"):
            assert read(folder / f"{name}.onnx") == read(Path(own, f"{name}.onnx")), (count, name)
        for name in ("manifest.json",):
            assert json.loads((folder / name).read_text()) == json.loads(Path(own, name).read_text()), (count, name)
        expected = CheckpointState.load_checkpoint(Path(own, "checkpoint"))
        found = CheckpointState.load_checkpoint(folder / "checkpoint")
        for key in expected.parameters:
            np.testing.assert_array_equal(found.parameters[key[0]].data, expected.parameters[key[0]].data)
    print(count)
`;

it("makes the files that Python makes of a network with that many classes", () => {
  const counts = [2, 3, 9, 12];
  for (const count of counts) {
    const folder = join(scratch, String(count));
    mkdirSync(folder);
    const run = { ...head.withClasses(files, count), checkpoint: head.withColumns(files.checkpoint, fresh(count)) };
    for (const [name, bytes] of Object.entries(run)) writeFileSync(join(folder, name), bytes);
  }
  const output = execFileSync(python, ["-c", COMPARE, artifacts, scratch], { encoding: "utf8" });
  assert.deepEqual(
    output
      .trim()
      .split("\n")
      .map(Number)
      .sort((a, b) => a - b),
    counts,
  );
});

const fresh = (count) => Array(count).fill(-1);

// PyTorch: the trunk of the base network, and per phase a head that keeps some columns of the one before, and a new
// optimizer where the classes change.
const TRAIN = `
import json, sys
import numpy as np, torch
from onnxtrain.api import CheckpointState
artifacts, scratch = sys.argv[1:]
state = CheckpointState.load_checkpoint(f"{artifacts}/checkpoint")
values = {name: torch.tensor(np.array(state.parameters[name].data)) for name in json.load(open(f"{scratch}/names.json"))}
trunk = [values[f"conv{i}.{kind}"].requires_grad_() for i in (1, 2, 3) for kind in ("weight", "bias")]
weight, bias = values["head.weight"], values["head.bias"]
result = []
for columns, images, labels in json.load(open(f"{scratch}/phases.json")):
    def pick(t):
        return torch.stack([torch.zeros_like(t[..., 0]) if c < 0 else t[..., c] for c in columns], -1).detach().requires_grad_()
    weight, bias = pick(weight), pick(bias)
    optimizer = torch.optim.AdamW([*trunk, weight, bias], lr=${RATE}, weight_decay=0.0)
    losses = []
    for image, label in zip(images, labels):
        x = torch.tensor(image, dtype=torch.float32).reshape(-1, 1, 16, 16)
        for i, stride in enumerate((1, 2, 2)):
            x = torch.relu(torch.nn.functional.conv2d(x, trunk[2 * i], trunk[2 * i + 1], stride, 1))
        loss = torch.nn.functional.cross_entropy(x.flatten(1) @ weight + bias, torch.tensor(label))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result.append([losses, weight.tolist(), bias.tolist()])
json.dump(result, sys.stdout)
`;

it(`trains ${STEPS} steps as PyTorch does, before and after classes come, go and move`, async () => {
  let state = 5;
  const random = () => (state = (Math.imul(state, 1103515245) + 12345) >>> 0) / 2 ** 32;
  // The first classes; one more; the second of them removed and two more; only one left, and another new one.
  const phases = [[-1, -1], [0, 1, -1], [0, 2, -1, -1], [2, -1], fresh(12)].map((columns) => [
    columns,
    Array.from({ length: STEPS }, () => Array.from({ length: BATCH * 256 }, () => Math.fround(random() ** 3))),
    Array.from({ length: STEPS }, () => Array.from({ length: BATCH }, () => Math.floor(random() * columns.length))),
  ]);
  const { parameters } = JSON.parse(new TextDecoder().decode(files["manifest.json"]));
  writeFileSync(join(scratch, "names.json"), JSON.stringify(parameters.map(({ name }) => name)));
  writeFileSync(join(scratch, "phases.json"), JSON.stringify(phases));
  const expected = JSON.parse(
    execFileSync(python, ["-c", TRAIN, artifacts, scratch], { encoding: "utf8", maxBuffer: 2 ** 28 }),
  );

  let checkpoint = files.checkpoint;
  for (const [phase, [columns, images, labels]] of phases.entries()) {
    const count = columns.length;
    const before = phase > 0 && logitsOf(checkpoint, head.classesOf(checkpoint), images[0]);
    checkpoint = head.withColumns(checkpoint, columns);
    const run = { ...head.withClasses(files, count), checkpoint };
    const session = await TrainingSession.create(ort, { artifacts: run, warmUp: false });
    if (before) {
      // What the network knows about the other classes stays as it is.
      const [then, now] = [await before, await logitsOf(checkpoint, count, images[0])];
      for (let sample = 0; sample < BATCH; sample++)
        for (const [column, old] of columns.entries()) {
          const value = old < 0 ? 0 : then[(sample * then.length) / BATCH + old];
          assert.ok(Math.abs(now[sample * count + column] - value) <= 1e-5, `phase ${phase}, column ${column}`);
        }
    }
    session.setLearningRate(RATE);
    const losses = [];
    for (let step = 0; step < STEPS; step++) {
      const feeds = {
        image: new ort.Tensor("float32", Float32Array.from(images[step]), [BATCH, 1, 16, 16]),
        labels: new ort.Tensor("int64", BigInt64Array.from(labels[step], BigInt), [BATCH]),
      };
      losses.push((await session.trainStep(feeds)).loss);
      await session.optimizerStep();
      await session.lazyResetGrad();
    }
    const [theirs, weight, bias] = expected[phase];
    const apart = (a, b) => Math.max(...a.map((value, i) => Math.abs(value - b[i])));
    assert.ok(apart(losses, theirs) <= 1e-5, `losses of phase ${phase} differ by ${apart(losses, theirs)}`);
    const flat = await session.exportParameters();
    const ours = [...flat.slice(-513 * count)];
    const difference = apart(ours, [...weight.flat(), ...bias]);
    assert.ok(difference <= 1e-5, `the head of phase ${phase} differs by ${difference}`);
    checkpoint = await session.saveCheckpoint({ optimizer: true });
    session.release();
    // Nothing has changed: the optimizer goes on.
    assert.equal(head.withColumns(checkpoint, [...Array(count).keys()]), checkpoint);
  }
});

async function logitsOf(checkpoint, count, images) {
  const session = await TrainingSession.create(ort, {
    artifacts: { ...head.withClasses(files, count), checkpoint },
    warmUp: false,
  });
  const image = new ort.Tensor("float32", Float32Array.from(images), [BATCH, 1, 16, 16]);
  const { logits } = await session.predict({ image });
  session.release();
  return logits.data;
}

it("refuses columns and checkpoints that do not exist", () => {
  assert.throws(() => head.withColumns(files.checkpoint, [10]), /its head is of another kind/);
  assert.throws(() => head.withColumns(new Uint8Array(100), [0]), Error);
  assert.throws(() => head.withColumns(files.checkpoint.subarray(0, 20_000), [0]), Error);
  assert.equal(head.classesOf(files.checkpoint), 10);
});
