/**
 * Trains reference nets in WebAssembly or on WebGPU, for benchmarks/every_host.py.
 *
 *     node web/scripts/train_nets.mjs wasm|chromium|webgpu STEPS NET...
 *
 * "wasm" is onnxruntime-web in Node; "chromium" is the same in headless Chromium, "webgpu" its WebGPU in software, each net in
 * a new browser. Prints a line of JSON per net: {net, losses, times, saving, written, downloaded}, as `trainIn`, or {error}.
 */

import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { serve, startBrowser } from "../demo/test/support.mjs";
import { trainIn } from "../demo/test/train_in.mjs";
import { TrainingSession } from "../dist/index.js";
import { artifactsOf, feedsOf, loadRuntime } from "../test/support.mjs";

const [runtime, steps, ...nets] = process.argv.slice(2);

async function inNode(net) {
  const ort = await loadRuntime(runtime);
  const { learningRate, seed, batches } = feedsOf(ort, net);
  const session = await TrainingSession.create(ort, { artifacts: artifactsOf(net), seed });
  session.setLearningRate(learningRate);
  const [losses, times, saving, written] = [[], [], {}, {}];
  for (const feeds of batches.slice(0, Number(steps))) {
    const begin = performance.now();
    losses.push((await session.trainStep(feeds)).loss);
    await session.optimizerStep();
    await session.lazyResetGrad();
    times.push(performance.now() - begin);
  }
  for (const kind of ["delta", "checkpoint"]) {
    const begin = performance.now();
    const saved = await session.saveCheckpoint({ delta: kind === "delta", optimizer: true });
    saving[kind] = performance.now() - begin;
    written[kind] = `,${Buffer.from(saved).toString("base64")}`;
  }
  session.release();
  return { losses, times, saving, written };
}

const server = await serve(0, join(dirname(fileURLToPath(import.meta.url)), "..", ".."));

async function inChromium(net) {
  const provider = runtime === "chromium" ? "wasm" : runtime;
  const { context, close } = await startBrowser({ webgpu: runtime === "webgpu" });
  try {
    return await trainIn(await context.newPage(), server.url, net, `ort.${provider}.min.mjs`, {
      steps: Number(steps),
      files: true,
      executionProviders: [provider],
    });
  } finally {
    await close();
  }
}

for (const net of nets) {
  try {
    console.log(JSON.stringify({ net, ...(await (runtime === "wasm" ? inNode : inChromium)(net)) }));
  } catch (error) {
    console.log(JSON.stringify({ net, error: error.message }));
  }
}
await server.close();
