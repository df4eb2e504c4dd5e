/** Calls that cannot work are errors that say what was done, what was received and what to do; they change nothing. */

import assert from "node:assert/strict";
import { before, describe, it } from "node:test";
import { CheckpointError, InputError, ModelLoadError, TrainingSession, TrainingStateError } from "../dist/index.js";
import { artifactsOf, feedsOf, loadRuntime, maxDifference, prepare, resultsOf, train } from "./support.mjs";

let ort;
before(
  async () => {
    prepare();
    ort = await loadRuntime("node");
  },
  { timeout: 300_000 },
);

const open = (net, change = {}) => TrainingSession.create(ort, { artifacts: { ...artifactsOf(net), ...change } });
const fails = (promise, kind, pattern) =>
  assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, String(error.stack));
    assert.match(error.message, pattern);
    assert.equal(error.name, kind.name);
    return true;
  });

describe("create", () => {
  it("wants ONNX Runtime and artifacts", async () => {
    await fails(
      TrainingSession.create(undefined, { artifacts: {} }),
      InputError,
      /first argument must be ONNX Runtime/,
    );
    await fails(TrainingSession.create(ort), InputError, /pass the artifacts/);
    await fails(
      TrainingSession.create(ort, { artifacts: artifactsOf("mlp"), seed: 1.5 }),
      InputError,
      /seed must be an integer, received 1\.5/,
    );
    await fails(
      TrainingSession.create(ort, { artifacts: artifactsOf("mlp"), warmUp: 3 }),
      InputError,
      /warmUp must be true or false, received 3/,
    );
    await fails(
      TrainingSession.create(ort, { artifacts: artifactsOf("mlp"), sed: 3 }),
      InputError,
      /there is no option sed\. Options: artifacts, executionProviders, warmUp, seed, cache/,
    );
    await fails(TrainingSession.create(ort, { artifacts: 3 }), ModelLoadError, /expected an object from file name/);
    await fails(
      TrainingSession.create(ort, { artifacts: { "a.onnx": new Uint8Array(1) } }),
      ModelLoadError,
      /expected one 'manifest.json'.*received a\.onnx/,
    );
    await fails(TrainingSession.create(ort, { artifacts: "no/such/folder" }), ModelLoadError, /is no URL/);
    await fails(
      TrainingSession.create(ort, { artifacts: "file:///no/such/folder" }),
      ModelLoadError,
      /file:\/\/\/no\/such\/folder\/manifest\.json failed/,
    );
    await fails(
      TrainingSession.create(ort, { artifacts: artifactsOf("mlp"), executionProviders: ["nonsense"] }),
      ModelLoadError,
      /refused it/,
    );
  });
  it("wants complete files of one run", async () => {
    const mlp = artifactsOf("mlp");
    const cnn = artifactsOf("cnn");
    const text = new TextEncoder();
    for (const name of ["training_model.onnx", "optimizer_model.onnx", "eval_model.onnx", "checkpoint"]) {
      const { [name]: _, ...others } = mlp;
      await fails(
        TrainingSession.create(ort, { artifacts: others }),
        ModelLoadError,
        new RegExp(`'${name}', which the manifest names`),
      );
    }
    await fails(
      open("mlp", { "training_model.onnx": cnn["training_model.onnx"] }),
      ModelLoadError,
      /belongs to another run/,
    );
    await fails(
      open("mlp", { "optimizer_model.onnx": cnn["optimizer_model.onnx"] }),
      ModelLoadError,
      /belongs to another run/,
    );
    await fails(open("mlp", { "training_model.onnx": mlp["net.onnx"] }), ModelLoadError, /no model of a training run/);
    await fails(open("mlp", { "training_model.onnx": mlp["eval_model.onnx"] }), ModelLoadError, /it lacks output/);
    await fails(
      open("mlp", { "training_model.onnx": mlp["training_model.onnx"].slice(0, 900) }),
      ModelLoadError,
      /training_model\.onnx/,
    );
    await fails(open("mlp", { "training_model.onnx": "text" }), ModelLoadError, /must be a Uint8Array; it is a String/);
    await fails(open("mlp", { "manifest.json": text.encode("{}") }), ModelLoadError, /no manifest of onnxtrain/);
    const newer = JSON.parse(new TextDecoder().decode(mlp["manifest.json"]));
    await fails(
      open("mlp", { "manifest.json": text.encode(JSON.stringify({ ...newer, version: 3 })) }),
      ModelLoadError,
      /version 3.*install a newer/,
    );
    await fails(open("mlp", { checkpoint: cnn.checkpoint }), CheckpointError, /belongs to another model/);
  });
});

it("a file of shared weights that is missing is named", async () => {
  const files = artifactsOf("shared");
  const name = Object.keys(files).find((file) => file.endsWith(".data"));
  const { [name]: _, ...others } = files;
  await fails(TrainingSession.create(ort, { artifacts: others }), ModelLoadError, new RegExp(`'${name}'`));
});

describe("feeds", () => {
  const cases = [
    [
      "no object",
      () => [1],
      /expected an object from input name to ort\.Tensor, received a Array\. The model takes x: float32 \[batch, 64\]; labels: int64 \[batch\]/,
    ],
    ["missing", ({ x }) => ({ x }), /the input 'labels' is missing/],
    ["unknown", (feeds) => ({ ...feeds, y: feeds.x }), /there is no input 'y'/],
    [
      "no tensor",
      (feeds) => ({ ...feeds, x: new Float32Array(64) }),
      /expected an ort\.Tensor .*received a Float32Array/,
    ],
    [
      "dtype",
      (feeds) => ({ ...feeds, x: new ort.Tensor("float64", new Float64Array(32 * 64), [32, 64]) }),
      /received a tensor of float64/,
    ],
    [
      "rank",
      (feeds) => ({ ...feeds, x: new ort.Tensor("float32", new Float32Array(64), [64]) }),
      /rank 1 instead of 2/,
    ],
    [
      "size",
      (feeds) => ({ ...feeds, x: new ort.Tensor("float32", new Float32Array(32 * 63), [32, 63]) }),
      /axis 1 must be 64/,
    ],
    [
      "batch",
      (feeds) => ({ ...feeds, x: new ort.Tensor("float32", new Float32Array(64), [1, 64]) }),
      /'batch' is 1 in input 'x' and must be the same here/,
    ],
    [
      "label",
      (feeds) => ({ ...feeds, labels: new ort.Tensor("int64", new BigInt64Array(32).fill(10n), [32]) }),
      /labels must be 0 to 9.*received 10 at position 0/,
    ],
  ];
  for (const [name, change, pattern] of cases) {
    it(name, async () => {
      const session = await open("mlp");
      const { batches } = feedsOf(ort, "mlp");
      await fails(session.trainStep(change(batches[0])), InputError, pattern);
      await fails(session.evalStep(change(batches[0])), InputError, pattern);
      // Nothing has happened: no gradients, and the first loss is that of Python.
      await fails(session.optimizerStep(), TrainingStateError, /no gradients yet/);
      assert.ok(Math.abs((await session.trainStep(batches[0])).loss - resultsOf("mlp").losses[0]) <= 1e-6);
      session.release();
    });
  }
  it("predict ignores targets and refuses unknown names", async () => {
    const session = await open("mlp");
    const { batches } = feedsOf(ort, "mlp");
    assert.deepEqual((await session.predict(batches[0])).logits.dims, [32, 10]);
    await fails(session.predict({ ...batches[0], y: batches[0].x }), InputError, /there is no input 'y'/);
    await fails(session.predict({}), InputError, /'x' is missing/);
    session.release();
  });
});

describe("calls", () => {
  it("that are not awaited run in order", async () => {
    const { learningRate, batches } = feedsOf(ort, "mlp");
    const waited = await open("mlp");
    waited.setLearningRate(learningRate);
    const expected = await train(waited, batches.slice(0, 10));
    const session = await open("mlp");
    const results = [];
    const x = new Float32Array(32 * 64);
    for (const feeds of batches.slice(0, 10)) {
      // One array for all batches: the feeds are copied when the call is made.
      x.set(feeds.x.data);
      results.push(session.trainStep({ x: new ort.Tensor("float32", x, [32, 64]), labels: feeds.labels }));
      session.setLearningRate(learningRate);
      session.optimizerStep();
      session.setLearningRate(123);
      session.lazyResetGrad();
    }
    const values = session.exportParameters();
    session.release();
    assert.deepEqual(
      (await Promise.all(results)).map((r) => r.loss),
      expected,
    );
    assert.deepEqual(await values, await waited.exportParameters());
  });
  it("that fail do not stop those behind them", async () => {
    const session = await open("mlp");
    const { batches } = feedsOf(ort, "mlp");
    const failing = session.optimizerStep();
    const working = session.trainStep(batches[0]);
    await fails(failing, TrainingStateError, /no gradients yet/);
    assert.ok(Math.abs((await working).loss - resultsOf("mlp").losses[0]) <= 1e-6);
    session.release();
  });
  it("after release are errors, before it are finished", async () => {
    const session = await open("mlp");
    const { batches } = feedsOf(ort, "mlp");
    const step = session.trainStep(batches[0]);
    session.release();
    session.release();
    assert.ok((await step).loss > 0);
    await fails(session.trainStep(batches[0]), TrainingStateError, /has been released/);
    await fails(session.saveCheckpoint(), TrainingStateError, /has been released/);
    assert.throws(() => session.setLearningRate(1), TrainingStateError);
  });
  it("have their arguments checked", async () => {
    const session = await open("mlp");
    for (const rate of [-1, NaN, Infinity, "0.1", undefined])
      assert.throws(() => session.setLearningRate(rate), /finite number of 0 or more/);
    session.setLearningRate(0.5);
    assert.equal(session.learningRate, 0.5);
    await fails(session.saveCheckpoint({ deltas: true }), InputError, /received the option deltas/);
    await fails(session.loadCheckpoint("path"), InputError, /expected the bytes of the file.*received String/);
    await fails(session.exportModel("logits"), InputError, /expected a list of names/);
    await fails(session.exportModel(["logit"]), InputError, /unknown names logit\. The eval model computes: /);
    session.properties.when = new Date();
    await fails(session.saveCheckpoint(), InputError, /property 'when' must be a number, a bigint or a text/);
    session.release();
  });
  it("of optimizerStep want an optimizer model", async () => {
    const manifest = JSON.parse(new TextDecoder().decode(artifactsOf("mlp")["manifest.json"]));
    delete manifest.files.optimizer_model;
    const session = await open("mlp", {
      "manifest.json": new TextEncoder().encode(JSON.stringify({ ...manifest, optimizer: null })),
    });
    await session.trainStep(feedsOf(ort, "mlp").batches[0]);
    await fails(session.optimizerStep(), TrainingStateError, /no optimizer model.*generate_artifacts/);
    await fails(session.saveCheckpoint({ optimizer: true }), TrainingStateError, /no optimizer state to save/);
    assert.ok((await session.saveCheckpoint()).length > 0);
    session.release();
  });
});

describe("gradients", () => {
  for (const net of ["mlp", "embedding"]) {
    it(`of ${net} add up until lazyResetGrad`, async () => {
      const { batches } = feedsOf(ort, net);
      // The sum of a gradient and itself is twice the gradient, of which Adam's steps do not depend: SGD would tell,
      // so parameters after a step on two batches are compared with those after a step on one.
      const run = async (...steps) => {
        const session = await open(net);
        session.setLearningRate(0.01);
        for (const step of steps) await step(session);
        await session.optimizerStep();
        const values = await session.exportParameters();
        session.release();
        return values;
      };
      const step = (i) => (session) => session.trainStep(batches[i]);
      const reset = (session) => session.lazyResetGrad();
      const second = await run(step(1));
      assert.ok(maxDifference(await run(step(0), step(1)), second) > 1e-3);
      assert.deepEqual(await run(step(0), reset, step(1)), second);
      assert.ok(maxDifference(await run(step(0), step(1)), await run(step(1), step(0))) <= 1e-5);
    });
  }
});

describe("exportModel", () => {
  for (const net of ["mlp", "cnn", "transformer", "lstm", "embedding", "shared"]) {
    it(net, async () => {
      const session = await open(net);
      const { batches } = feedsOf(ort, net);
      await train(session, batches.slice(0, 5));
      const model = await session.exportModel();
      const exported = await ort.InferenceSession.create(model);
      const { labels, ...inputs } = batches[0];
      assert.deepEqual([...exported.inputNames].sort(), Object.keys(inputs).sort());
      assert.deepEqual(exported.outputNames, ["logits"]);
      const { logits } = await exported.run(inputs);
      assert.ok(maxDifference(logits.data, (await session.predict(inputs)).logits.data) <= 1e-5);
      session.release();
    });
  }
});
