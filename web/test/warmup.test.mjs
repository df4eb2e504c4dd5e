/** `create` and `warmUp` run steps that change nothing. */

import assert from "node:assert/strict";
import { before, describe, it } from "node:test";
import { TrainingSession } from "../dist/index.js";
import { warmOnZeros } from "../dist/warmup.js";
import { artifactsOf, feedsOf, loadRuntime, prepare, train } from "./support.mjs";

before(prepare, { timeout: 300_000 });

/** Opens a session, and counts the runs of its models in `runs`. */
async function counted(ort, net, options = {}) {
  const runs = [];
  const create = async (bytes, settings) => {
    const session = await ort.InferenceSession.create(bytes, settings);
    const run = session.run.bind(session);
    session.run = (feeds, ...others) => {
      runs.push(feeds);
      return run(feeds, ...others);
    };
    return session;
  };
  const module = { Tensor: ort.Tensor, env: ort.env, InferenceSession: { create } };
  const { seed } = feedsOf(ort, net);
  const session = await TrainingSession.create(module, { artifacts: artifactsOf(net), seed, ...options });
  return { session, runs };
}

describe("create", () => {
  for (const net of ["mlp", "dropout", "cnn", "transformer", "lstm", "embedding", "frozen"]) {
    it(`warms up ${net} in WebAssembly, and the losses stay`, async () => {
      const ort = await loadRuntime("wasm");
      const { batches } = feedsOf(ort, net);
      const results = [];
      for (const warmUp of [true, false]) {
        const { session, runs } = await counted(ort, net, { warmUp });
        // A training and an optimizer step at least, each to its end: a step on zeros that fails would end the warm-up.
        if (warmUp) assert.ok(runs.length >= 2 && runs.length % 2 === 0, `${runs.length} runs`);
        else assert.equal(runs.length, 0);
        assert.equal(session.step, 0);
        const start = await session.saveCheckpoint({ optimizer: true });
        const random = [session.random.uniform(), session.random.integer(1000)];
        results.push({ start, random, losses: await train(session, batches.slice(0, 5)) });
        results.at(-1).end = await session.saveCheckpoint({ optimizer: true });
        session.release();
      }
      assert.deepEqual(results[0], results[1]);
    });
  }

  it("does not where machine code computes", async () => {
    const { session, runs } = await counted(await loadRuntime("node"), "mlp");
    assert.equal(runs.length, 0);
    session.release();
  });

  it("does not on a GPU, nor where a step may be long", async () => {
    const ort = await loadRuntime("wasm");
    const calls = [];
    const engine = (size) => ({
      updates: false,
      trainable: [{ shape: [size, 1000] }],
      manifest: { inputs: [], targets: [] },
      train: async () => {
        calls.push(size);
        throw new Error("zeros do not suit this model");
      },
    });
    await warmOnZeros(ort, engine(1001), null, undefined);
    await warmOnZeros(ort, engine(1000), null, ["webgpu"]);
    await warmOnZeros(ort, engine(1000), null, ["wasm", { name: "webgpu" }]);
    assert.deepEqual(calls, []);
    // Where the zeros do not suit the model, the warm-up ends without an error.
    await warmOnZeros(ort, engine(1000), null, undefined);
    await warmOnZeros(ort, engine(999), null, ["wasm"]);
    assert.deepEqual(calls, [1000, 999]);
  });
});

describe("warmUp", () => {
  it("changes nothing and lets other calls in between", async () => {
    const ort = await loadRuntime("node");
    const session = await TrainingSession.create(ort, { artifacts: artifactsOf("cnn") });
    const { batches } = feedsOf(ort, "cnn");
    const before = await session.saveCheckpoint({ optimizer: true });
    const warming = session.warmUp(batches[0], { steps: 20, milliseconds: 600_000 });
    const { loss } = await session.evalStep(batches[0]);
    const times = await warming;
    assert.equal(times.length, 20);
    assert.ok(loss > 0);
    assert.deepEqual(await session.saveCheckpoint({ optimizer: true }), before);
    await assert.rejects(session.optimizerStep(), /no gradients yet/);
    const abort = new AbortController();
    abort.abort();
    assert.deepEqual(await session.warmUp(batches[0], { signal: abort.signal }), []);
    session.release();
  });
});
