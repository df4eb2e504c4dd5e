/** Checkpoints and deltas are exchanged with Python; damaged and foreign ones change nothing. */

import assert from "node:assert/strict";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { before, describe, it } from "node:test";
import { CheckpointError, InputError, TrainingSession } from "../dist/index.js";
import { decodeSafetensors, encodeSafetensors } from "../dist/safetensors.js";
import {
  NETS,
  artifactsOf,
  feedsOf,
  folderOf,
  loadRuntime,
  maxDifference,
  prepare,
  read,
  resultsOf,
  runPython,
  train,
} from "./support.mjs";

let ort;
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-web-"));

before(
  async () => {
    prepare();
    ort = await loadRuntime("node");
  },
  { timeout: 300_000 },
);

async function open(net) {
  const { learningRate, seed, batches } = feedsOf(ort, net);
  const session = await TrainingSession.create(ort, { artifacts: artifactsOf(net), seed });
  session.setLearningRate(learningRate);
  return { session, batches };
}

/** Saves a file for Python and returns its path. */
function store(name, bytes) {
  const path = join(scratch, name);
  writeFileSync(path, bytes);
  return path;
}

describe("exchange with Python", () => {
  for (const net of NETS) {
    it(`${net}: Python's checkpoint goes on here, ours goes on in Python`, async () => {
      const { session, batches } = await open(net);
      await session.loadCheckpoint(read(net, "trained"));
      assert.equal(session.step, 50);
      assert.equal(session.learningRate, 0.01);
      assert.equal(session.properties.epoch, 3);
      assert.equal(session.properties.note, "Größe 😀");
      const evaluation = await session.evalStep(batches[0]);
      assert.ok(Math.abs(evaluation.loss - resultsOf(net).eval_loss) <= 1e-6);
      assert.ok(maxDifference(evaluation.outputs.logits.data, resultsOf(net).logits) <= 1e-5);
      session.properties.epoch = 4;
      const saved = store(`${net}-full`, await session.saveCheckpoint({ optimizer: true }));
      const losses = await train(session, batches);
      const python = JSON.parse(runPython("checkpoint.py", folderOf(net), saved));
      assert.equal(python.step, 50);
      assert.equal(python.learning_rate, 0.01);
      const { "onnxtrain.lora": adapters, ...properties } = python.properties;
      assert.equal(adapters !== undefined, net.startsWith("adapter"));
      assert.deepEqual(properties, { epoch: 4, note: "Größe 😀" });
      assert.ok(maxDifference(losses, python.losses) <= 1e-5);
      session.release();
    });
  }

  it("deltas in both directions", async () => {
    const { session, batches } = await open("frozen");
    await session.loadCheckpoint(read("frozen", "delta"));
    assert.equal(session.step, 50);
    const evaluation = await session.evalStep(batches[0]);
    assert.ok(Math.abs(evaluation.loss - resultsOf("frozen").eval_loss) <= 1e-6);
    const delta = await session.saveCheckpoint({ delta: true, optimizer: true });
    assert.ok(delta.length < (await session.saveCheckpoint({ optimizer: true })).length);
    const losses = await train(session, batches);
    const base = join(folderOf("frozen"), "checkpoint");
    const python = JSON.parse(runPython("checkpoint.py", folderOf("frozen"), store("delta", delta), base));
    assert.equal(python.step, 50);
    assert.ok(maxDifference(losses, python.losses) <= 1e-5);
    session.release();
  });

  it("writes bytes that safetensors of Python reads, for each dtype of moments and parameters", async () => {
    const { session } = await open("cnn");
    const { metadata, tensors } = decodeSafetensors(await session.saveCheckpoint());
    assert.equal(metadata.optimizer, "null");
    const python = decodeSafetensors(read("cnn", "checkpoint"));
    assert.deepEqual(new Set(tensors.keys()), new Set(python.tensors.keys()));
    for (const [key, tensor] of tensors) assert.deepEqual(tensor, python.tensors.get(key), key);
    assert.equal(metadata.fingerprint, python.metadata.fingerprint);
    session.release();
  });
});

describe("state", () => {
  it("a checkpoint without optimizer state starts the optimizer afresh and keeps the rate", async () => {
    const { session, batches } = await open("mlp");
    const start = await session.saveCheckpoint();
    const first = await train(session, batches.slice(0, 5));
    await session.loadCheckpoint(start);
    assert.equal(session.step, 0);
    assert.equal(session.learningRate, 0.01);
    assert.deepEqual(await train(session, batches.slice(0, 5)), first);
    session.release();
  });

  it("exportParameters and loadParameters are inverse, all and trainable ones", async () => {
    const { session, batches } = await open("frozen");
    const all = await session.exportParameters();
    const head = await session.exportParameters(true);
    assert.ok(head.length < all.length);
    const sizes = session.manifest.parameters.map((p) => [p, p.shape.reduce((a, b) => a * b, 1)]);
    assert.equal(
      all.length,
      sizes.reduce((sum, [, size]) => sum + size, 0),
    );
    await train(session, batches.slice(0, 3));
    const trained = await session.exportParameters();
    assert.ok(maxDifference(all, trained) > 1e-4);
    await session.loadParameters(head, true);
    assert.deepEqual(await session.exportParameters(), all);
    await session.loadParameters(trained);
    assert.deepEqual(await session.exportParameters(), trained);
    for (const [buffer, flag] of [
      [head, false],
      [all, true],
      [[...all], false],
      [new Float64Array(all), false],
      [null, false],
    ]) {
      await assert.rejects(
        session.loadParameters(buffer, flag),
        (e) => e instanceof InputError && /expected a Float32Array of \d+ elements/.test(e.message),
      );
    }
    assert.deepEqual(await session.exportParameters(), trained);
    session.release();
  });

  it("Node's Buffers are copied, too", async () => {
    const files = Object.fromEntries(
      Object.entries(artifactsOf("mlp")).map(([name, bytes]) => [name, Buffer.from(bytes)]),
    );
    const session = await TrainingSession.create(ort, { artifacts: files });
    const file = Buffer.concat([Buffer.alloc(3), read("mlp", "trained")]).subarray(3);
    const loading = session.loadCheckpoint(file);
    file.fill(0);
    await loading;
    assert.equal(session.step, 50);
    const evaluation = await session.evalStep(feedsOf(ort, "mlp").batches[0]);
    assert.ok(Math.abs(evaluation.loss - resultsOf("mlp").eval_loss) <= 1e-6);
    session.release();
  });

  it("a nominal checkpoint wants parameters first", async () => {
    const { session, batches } = await open("mlp");
    const values = await session.exportParameters();
    const { tensors, metadata } = decodeSafetensors(read("mlp", "checkpoint"));
    const shapes = Object.fromEntries(session.manifest.parameters.map((p) => [p.name, [p.dtype.name, p.shape]]));
    const nominal = encodeSafetensors(new Map([...tensors].filter(([key]) => !key.startsWith("parameter/"))), {
      ...metadata,
      nominal: "true",
      shapes: JSON.stringify(shapes),
    });
    await session.loadCheckpoint(nominal);
    for (const call of [
      () => session.trainStep(batches[0]),
      () => session.saveCheckpoint(),
      () => session.predict({ x: batches[0].x }),
      () => session.exportParameters(),
    ]) {
      await assert.rejects(call(), (e) => e instanceof CheckpointError && /have no data yet/.test(e.message));
    }
    await session.loadParameters(values);
    assert.ok(Math.abs((await session.trainStep(batches[0])).loss - resultsOf("mlp").losses[0]) <= 1e-6);
    session.release();
  });
});

describe("damaged and foreign files", () => {
  /** Rewrites the metadata or the tensors of a checkpoint. */
  const edited = (bytes, change) => {
    const { metadata, tensors } = decodeSafetensors(bytes);
    change(metadata, tensors);
    return encodeSafetensors(tensors, metadata);
  };
  const cases = {
    "empty file": () => new Uint8Array(0),
    "text file": () => new TextEncoder().encode("this is no checkpoint, it is a text of some length"),
    "truncated file": () => read("cnn", "trained").slice(0, -100),
    "file with bytes behind its end": () => Uint8Array.from([...read("cnn", "trained"), 1, 2, 3]),
    "checkpoint of another net": () => read("mlp", "trained"),
    "delta of another net": () => read("frozen", "delta").map((b) => b),
    "ONNX model": () => read("cnn", "training_model.onnx"),
    "checkpoint of onnxruntime-training": () => Uint8Array.from([8, 0, 0, 0, 0x4f, 0x44, 0x54, 0x43, 1, 2, 3, 4]),
    "newer version": () => edited(read("cnn", "trained"), (m) => (m.version = "2")),
    "other format": () => edited(read("cnn", "trained"), (m) => (m.format = "pt")),
    "no list of parameters": () => edited(read("cnn", "trained"), (m) => delete m.order),
    "wrong fingerprint": () => edited(read("cnn", "trained"), (m) => (m.fingerprint = "0".repeat(64))),
    "negative step": () =>
      edited(
        read("cnn", "trained"),
        (m) => (m.optimizer = '{"step": -1, "learning_rate": 0.1, "initial_learning_rate": 0.1}'),
      ),
    "rate that is no number": () =>
      edited(
        read("cnn", "trained"),
        (m) => (m.optimizer = '{"step": 1, "learning_rate": NaN, "initial_learning_rate": 0.1}'),
      ),
    "key twice": () => edited(read("cnn", "trained"), (m) => (m.properties = '{"a": 1, "a": 2}')),
    "missing moment": () =>
      edited(read("cnn", "trained"), (m, t) => t.delete([...t.keys()].find((k) => k.startsWith("momentum1/")))),
    "missing statistic": () =>
      edited(read("cnn", "trained"), (m, t) => t.delete([...t.keys()].find((k) => k.startsWith("statistic/")))),
  };
  for (const [name, make] of Object.entries(cases)) {
    it(name, async () => {
      const { session, batches } = await open("cnn");
      await train(session, batches.slice(0, 2));
      session.properties.mine = 7;
      const before = await session.saveCheckpoint({ optimizer: true });
      await assert.rejects(session.loadCheckpoint(make()), (error) => {
        assert.ok(error instanceof CheckpointError, String(error));
        assert.match(error.message, /^Loading the checkpoint: .*The session is unchanged\.$/);
        return true;
      });
      assert.deepEqual(await session.saveCheckpoint({ optimizer: true }), before);
      session.release();
    });
  }

  it("every truncation and every flipped byte of the header is an error or a checkpoint of this net", async () => {
    const { session } = await open("mlp");
    const good = read("mlp", "checkpoint");
    const header = 8 + Number(new DataView(good.buffer).getBigUint64(0, true));
    for (let i = 0; i < header; i += 7) {
      const flipped = good.slice();
      flipped[i] ^= 1 << (i % 8);
      for (const bytes of [good.slice(0, i), flipped]) {
        await session.loadCheckpoint(bytes).then(
          () => assert.notEqual(bytes.length, i),
          (error) => assert.ok(error instanceof CheckpointError, `byte ${i}: ${error.stack}`),
        );
      }
    }
    session.release();
  });

  it("a delta does not go on top of other frozen values", async () => {
    const { session } = await open("frozen");
    const all = await session.exportParameters();
    await session.loadParameters(all.map((value) => value + 1));
    const before = await session.exportParameters();
    await assert.rejects(
      session.loadCheckpoint(read("frozen", "delta")),
      (e) => e instanceof CheckpointError && /other values of the parameters/.test(e.message),
    );
    assert.deepEqual(await session.exportParameters(), before);
    session.release();
  });
});
