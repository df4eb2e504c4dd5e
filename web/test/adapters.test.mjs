/** Adapters over a base: the weights of the base are loaded once, checked, and forgotten once they are not needed. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { statSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";
import { CheckpointError, InputError, ModelLoadError, TrainingSession } from "../dist/index.js";
import { decodeSafetensors } from "../dist/safetensors.js";
import { embed, integerField, textField } from "../dist/wire.js";
import {
  artifactsOf,
  feedsOf,
  folderOf,
  loadRuntime,
  maxDifference,
  prepare,
  read,
  resultsOf,
  train,
} from "./support.mjs";

const NETS = ["adapter", "adapter-int4"];
let ort, wasm, server, site;
const sent = [];

before(
  async () => {
    prepare();
    [ort, wasm] = [await loadRuntime("node"), await loadRuntime("wasm")];
    server = createServer((request, response) => {
      const [, net, name] = request.url.split("/");
      try {
        const bytes = read(net, name);
        sent.push({ name, bytes: bytes.length });
        response.end(bytes);
      } catch {
        response.writeHead(404).end();
      }
    });
    await new Promise((done) => server.listen(0, "127.0.0.1", done));
    site = `http://127.0.0.1:${server.address().port}`;
  },
  { timeout: 300_000 },
);
after(() => server?.close());

const manifestOf = (net) => JSON.parse(new TextDecoder().decode(read(net, "manifest.json")));
const dataFileOf = (net) => Object.keys(manifestOf(net).data_files)[0];
const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");
const requests = (name) => sent.filter((file) => file.name === name).length;

for (const net of NETS) {
  it(`${net}: create loads the base once, and hardly more`, async () => {
    sent.length = 0;
    const session = await TrainingSession.create(ort, { artifacts: `${site}/${net}/`, warmUp: false });
    const { files, external_data: external } = manifestOf(net);
    const listed = new Set(["manifest.json", ...Object.values(files), ...Object.values(external).flat()]);
    assert.equal(listed.size, 7);
    assert.deepEqual(sent.map(({ name }) => name).sort(), [...listed].sort());
    const total = sent.reduce((sum, { bytes }) => sum + bytes, 0);
    const sizes = [...listed].map((name) => statSync(join(folderOf(net), name)).size);
    assert.equal(
      total,
      sizes.reduce((sum, bytes) => sum + bytes, 0),
    );
    // The float base has its weights beside it.
    const base = ["net.onnx", ...(net === "adapter" ? ["net.onnx.data"] : [])]
      .map((name) => statSync(join(folderOf(net), name)).size)
      .reduce((a, b) => a + b);
    assert.ok(total <= 1.1 * base + 200_000, `${total} bytes for a base of ${base}`);
    session.release();
  });

  it(`${net}: the base is kept for the models that are opened later, and loaded again for an export`, async () => {
    const data = dataFileOf(net);
    sent.length = 0;
    const session = await TrainingSession.create(ort, { artifacts: `${site}/${net}/`, warmUp: false });
    const { batches } = feedsOf(ort, net);
    await train(session, batches.slice(0, 5));
    const evaluation = await session.evalStep(batches[0]);
    const { labels, ...inputs } = batches[0];
    const { logits } = await session.predict(inputs);
    assert.ok(maxDifference(logits.data, evaluation.outputs.logits.data) <= 1e-6);
    assert.equal(requests(data), 1);
    const model = await session.exportModel();
    assert.equal(requests(data), 2);
    const exported = await ort.InferenceSession.create(model);
    const results = await exported.run(inputs);
    assert.ok(maxDifference(results.logits.data, logits.data) <= 1e-6);
    session.release();
  });
}

describe("another base", () => {
  const open = (net, change) => TrainingSession.create(ort, { artifacts: { ...artifactsOf(net), ...change } });
  const refused = (promise, pattern) =>
    assert.rejects(promise, (error) => {
      assert.ok(error instanceof ModelLoadError, String(error.stack));
      assert.match(error.message, pattern);
      return true;
    });

  it("is refused", async () => {
    for (const net of NETS) {
      const name = dataFileOf(net);
      const other = read(net, name);
      other[other.length - 1] ^= 1;
      await refused(open(net, { [name]: other }), /is not the file with which they were written: its SHA-256 is/);
      await refused(open(net, { [name]: other.slice(1) }), /written: it has \d+ bytes instead of \d+/);
      await refused(open(net, { [name]: undefined }), /there is no such file/);
    }
  });

  it("is not noticed in artifacts of earlier versions, which have no digests", async () => {
    const { data_files: _, ...manifest } = manifestOf("adapter");
    const name = dataFileOf("adapter");
    const other = read("adapter", name);
    other[other.length - 1] ^= 1;
    const text = new TextEncoder().encode(JSON.stringify(manifest));
    (await open("adapter", { "manifest.json": text, [name]: other })).release();
  });

  it("is refused where the browser computes no digests", async () => {
    const { crypto } = globalThis;
    Object.defineProperty(globalThis, "crypto", { value: undefined, configurable: true });
    try {
      const name = dataFileOf("adapter-int4");
      const other = read("adapter-int4", name);
      (await open("adapter-int4", {})).release();
      other[7] ^= 1;
      await refused(open("adapter-int4", { [name]: other }), /its SHA-256 is/);
    } finally {
      Object.defineProperty(globalThis, "crypto", { value: crypto, configurable: true });
    }
  });

  it("places beyond its end are refused", async () => {
    const model = read("adapter", "training_model.onnx");
    const name = dataFileOf("adapter");
    const entry = (key, value) => embed(13, textField(1, key), textField(2, value));
    const place = (offset, length) => [entry("location", name), entry("offset", offset), entry("length", length)];
    for (const [offset, length] of [
      ["999999999", "4"],
      ["0", "999999999"],
      ["-4", "4"],
      ["0", "-4"],
      ["zero", "4"],
      ["1e9", "4"],
    ]) {
      const tensor = embed(5, integerField(1, 1), textField(8, "w"), ...place(offset, length));
      const bytes = Uint8Array.from([...model, ...embed(7, tensor)]);
      await refused(open("adapter", { "training_model.onnx": bytes }), /the data of 'w' should be in 'net.onnx.data'/);
    }
  });

  it("digests that are none are refused", async () => {
    for (const wrong of [{ bytes: "7" }, { sha256: "0" }, { sha256: null }, 7]) {
      const manifest = manifestOf("adapter");
      const files = manifest.data_files;
      for (const name of Object.keys(files))
        files[name] = typeof wrong === "number" ? wrong : { ...files[name], ...wrong };
      const text = new TextEncoder().encode(JSON.stringify(manifest));
      await refused(open("adapter", { "manifest.json": text }), /Loading 'manifest.json'/);
    }
  });

  it("of the same name is not mixed up with the first, if both are opened at once", async () => {
    const name = dataFileOf("adapter");
    const other = read("adapter", name);
    const floats = new Float32Array(other.buffer);
    for (let i = 0; i < floats.length; i++) floats[i] *= 2;
    const manifest = manifestOf("adapter");
    manifest.data_files[name].sha256 = sha256(other);
    const changed = {
      ...artifactsOf("adapter"),
      [name]: other,
      "manifest.json": new TextEncoder().encode(JSON.stringify(manifest)),
    };
    const { batches } = feedsOf(wasm, "adapter");
    // onnxruntime-web has one table of external data for all sessions that it is creating.
    let [active, most] = [0, 0];
    const create = async (model, options) => {
      if (options.externalData) most = Math.max(most, ++active);
      await new Promise((resolve) => setTimeout(resolve, 5));
      const session = await wasm.InferenceSession.create(model, options);
      if (options.externalData) active -= 1;
      return session;
    };
    const runtime = { InferenceSession: { create }, Tensor: wasm.Tensor };
    const lossOf = async (artifacts) => {
      const session = await TrainingSession.create(runtime, { artifacts, warmUp: false });
      const { loss } = await session.trainStep(batches[0]);
      const evaluation = await session.evalStep(batches[0]);
      session.release();
      return [loss, evaluation.loss];
    };
    const apart = [await lossOf(artifactsOf("adapter")), await lossOf(changed)];
    assert.ok(Math.abs(apart[0][0] - resultsOf("adapter").losses[0]) <= 1e-5);
    assert.ok(Math.abs(apart[0][0] - apart[1][0]) > 0.01);
    const both = [artifactsOf("adapter"), changed, artifactsOf("adapter"), changed];
    assert.deepEqual(await Promise.all(both.map(lossOf)), [...apart, ...apart]);
    assert.equal(most, 1);
  });
});

describe("the cache", () => {
  /** The part of the Cache API that is used, which Node lacks. */
  function fakeCaches() {
    const kept = new Map();
    const cache = {
      match: async (key) => kept.get(key)?.clone(),
      put: async (key, response) => void kept.set(key, response),
    };
    return { kept, open: async () => cache };
  }
  async function withCaches(value, job) {
    globalThis.caches = value;
    try {
      return await job();
    } finally {
      delete globalThis.caches;
    }
  }
  const create = async (net = "adapter") => {
    const artifacts = `${site}/${net}/`;
    (await TrainingSession.create(ort, { artifacts, warmUp: false, cache: "models" })).release();
  };

  it("keeps a base for later sessions, by its content", async () => {
    const data = dataFileOf("adapter");
    await withCaches(fakeCaches(), async () => {
      sent.length = 0;
      await create();
      await create();
      assert.equal(requests(data), 1);
      assert.equal(requests("training_model.onnx"), 2);
      assert.deepEqual([...caches.kept.keys()], [`https://onnxtrain.invalid/${sha256(read("adapter", data))}`]);
      // A damaged entry is replaced.
      for (const key of caches.kept.keys()) caches.kept.set(key, new Response(new Uint8Array(8)));
      await create();
      await create();
      assert.equal(requests(data), 2);
    });
  });

  it("that does not work is left out", async () => {
    const fails = async () => {
      throw new DOMException("full", "QuotaExceededError");
    };
    for (const broken of [
      { open: fails },
      { open: async () => ({ match: async () => undefined, put: fails }) },
      { open: async () => ({ match: fails, put: fails }) },
    ])
      await withCaches(broken, () => create());
    await create();
    await assert.rejects(TrainingSession.create(ort, { artifacts: "x", cache: 3 }), InputError);
  });
});

describe("deltas", () => {
  const open = () => TrainingSession.create(ort, { artifacts: artifactsOf("frozen"), warmUp: false });
  const frozenOf = async (session) => decodeSafetensors(await session.saveCheckpoint({ delta: true })).metadata.frozen;

  it("hash the frozen parameters once, and again once they have changed", async () => {
    const { subtle } = globalThis.crypto;
    const original = Object.getPrototypeOf(subtle).digest;
    let count = 0;
    Object.getPrototypeOf(subtle).digest = function (...args) {
      count += 1;
      return original.apply(this, args);
    };
    try {
      const session = await open();
      const { batches } = feedsOf(ort, "frozen");
      const expected = decodeSafetensors(read("frozen", "delta")).metadata.frozen;
      assert.equal(await frozenOf(session), expected);
      await train(session, batches.slice(0, 2));
      assert.equal(await frozenOf(session), expected);
      await session.loadCheckpoint(await session.saveCheckpoint({ delta: true, optimizer: true }));
      assert.equal(await frozenOf(session), expected);
      assert.equal(count, 1);
      const head = await session.exportParameters(true);
      await session.loadParameters(head, true);
      assert.equal(await frozenOf(session), expected);
      assert.equal(count, 1);
      const all = await session.exportParameters();
      await session.loadParameters(all.map((value) => value + 1));
      assert.notEqual(await frozenOf(session), expected);
      assert.equal(count, 2);
      await assert.rejects(session.loadCheckpoint(read("frozen", "delta")), CheckpointError);
      await session.loadCheckpoint(read("frozen", "trained"));
      assert.equal(await frozenOf(session), expected);
      assert.equal(count, 3);
      session.release();
    } finally {
      Object.getPrototypeOf(subtle).digest = original;
    }
  });

  it("are the same where the browser computes no digests", async () => {
    const { crypto } = globalThis;
    Object.defineProperty(globalThis, "crypto", { value: undefined, configurable: true });
    try {
      const session = await open();
      assert.equal(await frozenOf(session), decodeSafetensors(read("frozen", "delta")).metadata.frozen);
      session.release();
    } finally {
      Object.defineProperty(globalThis, "crypto", { value: crypto, configurable: true });
    }
  });
});
