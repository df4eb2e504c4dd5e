/** What the tests share: the reference nets that Python has trained, and the runtimes that train them again. */

import { execFileSync } from "node:child_process";
import { existsSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const root = join(here, "..", "..");
// The environment of `make test-web-node`; any Python with onnxtrain, torch and scikit-learn will do.
const python = process.env.PYTHON ?? join(root, ".venv", "bin", "python");
const reference = process.env.ONNXTRAIN_WEB_REFERENCE ?? join(root, "build", "web-reference");

export const NETS = [
  "mlp",
  "dropout",
  "cnn",
  "transformer",
  "lstm",
  "embedding",
  "shared",
  "frozen",
  "adapter",
  "adapter-int4",
];

/** Runs a Python script of this folder and returns what it prints. */
export function runPython(script, ...args) {
  return execFileSync(python, [join(here, script), ...args], {
    encoding: "utf8",
    stdio: ["ignore", "pipe", "inherit"],
  });
}

/** Writes the reference nets, once. */
export function prepare() {
  // The last file that the script writes: without it the script was killed half way.
  if (existsSync(join(reference, "adapter-int4", "exported.onnx"))) return;
  rmSync(reference, { recursive: true, force: true });
  runPython("reference.py", reference);
}

export function folderOf(net) {
  return join(reference, net);
}

export function read(net, name) {
  return new Uint8Array(readFileSync(join(folderOf(net), name)));
}

/** Reads the artifacts of a net as an object from file name to bytes. */
export function artifactsOf(net) {
  return Object.fromEntries(readdirSync(folderOf(net)).map((name) => [name, read(net, name)]));
}

/** The results of a net in Python: {losses, eval_loss, logits}. */
export function resultsOf(net) {
  return JSON.parse(readFileSync(join(folderOf(net), "losses.json"), "utf8"));
}

/** Loads a runtime: "node" (native) or "wasm" (one thread). */
export async function loadRuntime(name) {
  if (name === "node") return import("onnxruntime-node");
  const ort = await import("onnxruntime-web/wasm");
  // In Node, onnxruntime-web's threads do not start.
  ort.env.wasm.numThreads = 1;
  return ort;
}

/** Reads the feeds of each step of a reference net as tensors, the learning rate and the seed. */
export function feedsOf(ort, net) {
  return trainingFeeds(ort, folderOf(net));
}

/** Reads the feeds of a folder, see docs/devices/own-host.md. */
export function trainingFeeds(ort, folder) {
  const {
    steps,
    learning_rate: learningRate,
    seed = 0,
    feeds,
  } = JSON.parse(readFileSync(join(folder, "feeds.json"), "utf8"));
  const { buffer } = new Uint8Array(readFileSync(join(folder, "feeds.bin")));
  const classes = { float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array };
  const sizes = feeds.map(({ dtype, shape }) => shape.reduce((a, b) => a * b, classes[dtype].BYTES_PER_ELEMENT));
  const expected = steps * sizes.reduce((a, b) => a + b, 0);
  if (buffer.byteLength !== expected) throw new Error(`feeds.bin has ${buffer.byteLength} bytes, not ${expected}`);
  let position = 0;
  const batches = Array.from({ length: steps }, () =>
    Object.fromEntries(
      feeds.map(({ name, dtype, shape }) => {
        const size = shape.reduce((a, b) => a * b, 1);
        const array = classes[dtype];
        const bytes = buffer.slice(position, position + size * array.BYTES_PER_ELEMENT);
        position += bytes.byteLength;
        return [name, new ort.Tensor(dtype, new array(bytes), shape)];
      }),
    ),
  );
  return { learningRate, seed, batches };
}

/** Trains on batches and returns the losses. */
export async function train(session, batches) {
  const losses = [];
  for (const feeds of batches) {
    losses.push((await session.trainStep(feeds)).loss);
    await session.optimizerStep();
    await session.lazyResetGrad();
  }
  return losses;
}

/** Returns the largest absolute difference of two lists of numbers of the same length. */
export function maxDifference(a, b) {
  if (a.length !== b.length) throw new Error(`${a.length} and ${b.length} numbers`);
  return Math.max(0, ...Array.from(a, (value, i) => (Number.isNaN(value - b[i]) ? Infinity : Math.abs(value - b[i]))));
}
