/** What a device or a browser refuses is one sentence that says what happened and what to do. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { before, describe, it } from "node:test";
import { fileURLToPath } from "node:url";
import {
  CheckpointError,
  DivergenceError,
  InputError,
  ModelLoadError,
  OutOfMemoryError,
  TrainingSession,
} from "../dist/index.js";
import { artifactsOf, feedsOf, loadRuntime, prepare, read } from "./support.mjs";

let ort;
before(
  async () => {
    prepare();
    ort = await loadRuntime("node");
  },
  { timeout: 300_000 },
);

const fails = (promise, kind, pattern) =>
  assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, String(error.stack));
    assert.match(error.message, pattern);
    assert.doesNotMatch(error.message, /\n/);
    return true;
  });

/** ONNX Runtime of a page, but its sessions throw `error` when they are created, or run for the `count`th time. */
function failing({ create, run, count = 1 }) {
  let runs = 0;
  return {
    Tensor: ort.Tensor,
    env: {},
    InferenceSession: {
      async create(...args) {
        if (create) throw create;
        const session = await ort.InferenceSession.create(...args);
        return new Proxy(session, {
          get(target, name) {
            const value = target[name];
            if (name !== "run") return typeof value === "function" ? value.bind(target) : value;
            return (...feeds) => {
              runs += 1;
              if (runs === count) throw run;
              return target.run(...feeds);
            };
          },
        });
      },
    },
  };
}

// Texts of V8, SpiderMonkey, JavaScriptCore, Emscripten and ONNX Runtime.
const MEMORY = [
  new RangeError("Array buffer allocation failed"),
  new RangeError("WebAssembly.Memory(): could not allocate memory"),
  new RangeError("Out of memory"),
  new Error("allocation size overflow"),
  new RangeError("Invalid typed array length: 4000000000"),
  new Error("Aborted(OOM). Build with -sASSERTIONS for more info."),
  new Error("std::bad_alloc"),
  new Error("Can't create a session. failed to allocate a buffer of size 300000000."),
  new Error("Failed to allocate memory for requested buffer of size 4294967296"),
  "out of memory",
];
const BLOCKED = [
  new Error(
    "no available backend found. ERR: [wasm] RuntimeError: Aborted(CompileError: WebAssembly.instantiate(): Refused to compile or instantiate WebAssembly module because neither 'wasm-unsafe-eval' nor 'unsafe-eval' is an allowed source of script in the following Content Security Policy directive: \"script-src 'self'\")",
  ),
  new Error(
    "no available backend found. ERR: [wasm] RuntimeError: Aborted(both async and sync fetching of the wasm failed)",
  ),
  new ReferenceError("WebAssembly is not defined"),
  new ReferenceError("Can't find variable: WebAssembly"),
  new Error("previous call to 'initWasm()' failed."),
  new Error("WebAssembly backend initializing failed due to timeout: 10ms"),
];

describe("memory", () => {
  it("runs out when a model is opened", async () => {
    for (const create of MEMORY) {
      await fails(
        TrainingSession.create(failing({ create }), { artifacts: artifactsOf("mlp") }),
        OutOfMemoryError,
        /Loading the training model.*: there is not enough memory \(.+\)\. Use a smaller batch or model, or close other tabs; a page has to be reloaded/,
      );
    }
  });
  it("runs out in a step, which changes nothing", async () => {
    for (const count of [1, 2]) {
      const session = await TrainingSession.create(failing({ run: new RangeError("Out of memory"), count }), {
        artifacts: artifactsOf("cnn"),
        warmUp: false,
      });
      const { batches } = feedsOf(ort, "cnn");
      const before = await session.saveCheckpoint();
      if (count === 1) await fails(session.trainStep(batches[0]), OutOfMemoryError, /^trainStep: there is not enough/);
      else {
        await session.trainStep(batches[0]);
        const trained = await session.saveCheckpoint();
        await fails(session.optimizerStep(), OutOfMemoryError, /^optimizerStep: there is not enough memory/);
        assert.deepEqual(await session.saveCheckpoint(), trained);
        assert.equal(session.step, 0);
        await session.optimizerStep();
        continue;
      }
      assert.deepEqual(await session.saveCheckpoint(), before);
      await session.trainStep(batches[0]);
    }
  });
  it("runs out outside of ONNX Runtime", async () => {
    const session = await TrainingSession.create(ort, { artifacts: artifactsOf("mlp") });
    const { slice } = Uint8Array.prototype;
    Uint8Array.prototype.slice = () => {
      throw new RangeError("Array buffer allocation failed");
    };
    try {
      await fails(session.saveCheckpoint(), OutOfMemoryError, /^saveCheckpoint: there is not enough memory/);
    } finally {
      Uint8Array.prototype.slice = slice;
    }
    assert.ok((await session.saveCheckpoint()).length > 0);
  });
});

describe("the .wasm file", () => {
  const sentence =
    /^TrainingSession\.create: ONNX Runtime did not start: .+\. (Serve the \.wasm and \.mjs files of the same version of onnxruntime-web, and set ort\.env\.wasm\.wasmPaths to where they are: |Let the Content-Security-Policy allow script-src 'wasm-unsafe-eval', and reload the page\.)/;
  it("is blocked", async () => {
    for (const create of BLOCKED) {
      await fails(
        TrainingSession.create(failing({ create }), { artifacts: artifactsOf("mlp") }),
        ModelLoadError,
        sentence,
      );
    }
  });
  it("is not where it should be, in onnxruntime-web itself", () => {
    // In a process of its own: onnxruntime-web does not start again after a failure.
    const code = `
      import * as ort from "onnxruntime-web/wasm";
      import { TrainingSession } from "../dist/index.js";
      import { artifactsOf } from "./support.mjs";
      ort.env.wasm.numThreads = 1;
      ort.env.wasm.wasmPaths = { wasm: new URL("./no-such-file.wasm", import.meta.url).href };
      for (const _ of [1, 2]) {
        try { await TrainingSession.create(ort, { artifacts: artifactsOf("mlp") }); }
        catch (error) { console.log(error.name + ": " + error.message); }
      }`;
    const printed = execFileSync(process.execPath, ["--input-type=module", "-e", code], {
      encoding: "utf8",
      cwd: fileURLToPath(new URL(".", import.meta.url)),
      stdio: ["ignore", "pipe", "ignore"],
    });
    const lines = printed.trim().split("\n");
    assert.equal(lines.length, 2, printed);
    for (const line of lines) {
      assert.match(line, /^ModelLoadError: /);
      assert.match(line.slice("ModelLoadError: ".length), sentence);
    }
  });
});

describe("a stored state", () => {
  it("that is no checkpoint is refused, and the session is as it was", async () => {
    const session = await TrainingSession.create(ort, { artifacts: artifactsOf("mlp") });
    const before = await session.saveCheckpoint({ optimizer: true });
    const good = read("mlp", "checkpoint");
    for (const value of [undefined, null, "{}", { 0: 8 }, [1, 2], new Blob([good]), 7]) {
      await fails(
        session.loadCheckpoint(value),
        InputError,
        /expected the bytes.*Store what saveCheckpoint returns as it is/,
      );
    }
    const flipped = good.slice();
    flipped[20] ^= 0x10;
    for (const bytes of [
      new Uint8Array(0),
      good.slice(0, 100),
      good.slice(0, -1),
      flipped,
      new Uint8Array(good.length),
    ]) {
      await fails(
        session.loadCheckpoint(bytes),
        CheckpointError,
        /restore it from another one\. The session is unchanged/,
      );
    }
    assert.deepEqual(await session.saveCheckpoint({ optimizer: true }), before);
    await session.loadCheckpoint(good);
    await session.loadCheckpoint(good.buffer.slice(good.byteOffset, good.byteOffset + good.byteLength));
  });
});

describe("numbers that would destroy the parameters", () => {
  it("are refused before the step", async () => {
    const session = await TrainingSession.create(ort, { artifacts: artifactsOf("cnn") });
    const { batches } = feedsOf(ort, "cnn");
    await session.trainStep(batches[0]);
    const before = await session.saveCheckpoint();
    const [x, labels] = [session.manifest.inputs[0].name, session.manifest.targets[0].name];
    const { dims } = batches[0][x];
    for (const [number, kind, pattern] of [
      [
        NaN,
        InputError,
        /^trainStep: input '.+': NaN is not allowed in a training step; the first is at position 5\. Leave out/,
      ],
      [-Infinity, DivergenceError, /^trainStep: the loss is NaN, so the step is not counted/],
    ]) {
      const data = batches[0][x].data.slice();
      data[5] = number;
      await fails(session.trainStep({ ...batches[0], [x]: new ort.Tensor("float32", data, dims) }), kind, pattern);
    }
    const none = new ort.Tensor("float32", new Float32Array(0), [0, ...dims.slice(1)]);
    const noLabels = new ort.Tensor("int64", new BigInt64Array(0), [0]);
    await fails(session.trainStep({ [x]: none, [labels]: noLabels }), InputError, /is empty\. Pass a sample/);
    const ignored = new ort.Tensor("int64", new BigInt64Array(dims[0]).fill(-100n), [dims[0]]);
    await fails(
      session.trainStep({ ...batches[0], [labels]: ignored }),
      DivergenceError,
      /^trainStep: the loss is NaN, so the step is not counted; the session is unchanged\. Lower the learning rate.*leave the batch out/,
    );
    // Statistics of BatchNorm, too, are those of the only step that counted.
    assert.deepEqual(await session.saveCheckpoint(), before);
    await session.optimizerStep();
    assert.equal(session.step, 1);
  });
});
