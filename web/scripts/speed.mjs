/**
 * Measures training steps natively in Node, in WebAssembly in Node, and in headless Chromium: with 1 and 2 threads, and
 * after `warmUp`.
 *
 *     node web/scripts/speed.mjs [mlp cnn ...]
 *
 * Prints per net and runtime, in milliseconds: `TrainingSession.create` with what it loads, the first step, the median of
 * steps 2 to 50, and the median of 25 steps after the 300th; and the last two as multiples of Node's native ones. A step
 * is trainStep, optimizerStep and lazyResetGrad. Take the figures on a machine that does nothing else.
 */

import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { serve, startBrowser } from "../demo/test/support.mjs";
import { trainIn } from "../demo/test/train_in.mjs";
import { TrainingSession } from "../dist/index.js";
import { NETS, artifactsOf, feedsOf, loadRuntime, prepare } from "../test/support.mjs";

const STEPS = 325;
const nets = process.argv.length > 2 ? process.argv.slice(2) : NETS;

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

async function inNode(runtime, net) {
  const ort = await loadRuntime(runtime);
  const start = performance.now();
  const session = await TrainingSession.create(ort, { artifacts: artifactsOf(net) });
  const created = performance.now() - start;
  const { batches } = feedsOf(ort, net);
  const times = [];
  for (let step = 0; step < STEPS; step++) {
    const begin = performance.now();
    await session.trainStep(batches[step % batches.length]);
    await session.optimizerStep();
    await session.lazyResetGrad();
    times.push(performance.now() - begin);
  }
  session.release();
  return { created, times };
}

prepare();
const server = await serve(0, join(dirname(fileURLToPath(import.meta.url)), "..", ".."));
console.log(
  "| net | runtime | create | first step | steps 2-50 | after 300 | x native, 2-50 | x native, after 300 |\n|---|---|---|---|---|---|---|---|",
);
for (const net of nets) {
  let native;
  for (const runtime of [
    "node",
    "wasm",
    "Chromium, 1 thread",
    "Chromium, 2 threads",
    "Chromium, 1 thread, warmUp: false",
    "Chromium, 1 thread, after session.warmUp",
  ]) {
    let created, times;
    if (runtime.startsWith("Chromium")) {
      // A new browser each time: it caches compiled code.
      const { context, close } = await startBrowser();
      ({ created, times } = await trainIn(await context.newPage(), server.url, net, "ort.wasm.min.mjs", {
        threads: Number(runtime.at(10)),
        steps: STEPS,
        warmUp: !runtime.endsWith("false"),
        warm: runtime.endsWith("session.warmUp"),
      }));
      await close();
    } else ({ created, times } = await inNode(runtime, net));
    const [cold, warm] = [median(times.slice(1, 50)), median(times.slice(300))];
    native ??= { cold, warm };
    const name = { node: "Node, native", wasm: "Node, WebAssembly" }[runtime] ?? runtime;
    console.log(
      `| ${net} | ${name} | ${created.toFixed(0)} | ${times[0].toFixed(0)} | ${cold.toFixed(1)} | ${warm.toFixed(1)} | ${(cold / native.cold).toFixed(1)} | ${(warm / native.warm).toFixed(1)} |`,
    );
  }
}
await server.close();
