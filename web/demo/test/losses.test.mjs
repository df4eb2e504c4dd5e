/** The package in headless Chromium: the losses of 50 steps are those of Python, with 1 and 2 threads. */

import assert from "node:assert/strict";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import { NETS, folderOf, maxDifference, prepare, resultsOf } from "../../test/support.mjs";
import { serve, startBrowser } from "./support.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
let server;
before(async () => {
  prepare();
  server = await serve(0, root);
}, { timeout: 300_000 });
after(() => server.close());

/** Trains a net in the page, and returns losses and times of the steps in milliseconds. */
async function trainIn(page, net, runtime, { threads = 1, steps = 50, executionProviders } = {}) {
  await page.goto(`${server.url}web/demo/test/blank.html`);
  return page.evaluate(
    async ({ folder, runtime, threads, steps, executionProviders }) => {
      const ort = await import(`/web/node_modules/onnxruntime-web/dist/${runtime}`);
      const { TrainingSession } = await import("/web/dist/index.js");
      ort.env.wasm.numThreads = threads;
      const session = await TrainingSession.create(ort, { artifacts: folder, ...(executionProviders && { executionProviders }) });
      const { learning_rate: rate, feeds } = await (await fetch(`${folder}/feeds.json`)).json();
      const bytes = await (await fetch(`${folder}/feeds.bin`)).arrayBuffer();
      session.setLearningRate(rate);
      const [losses, times] = [[], []];
      let position = 0;
      for (let step = 0; step < steps; step++) {
        const batch = {};
        for (const { name, dtype, shape } of feeds) {
          const array = { float32: Float32Array, int64: BigInt64Array }[dtype];
          const size = shape.reduce((a, b) => a * b, array.BYTES_PER_ELEMENT);
          batch[name] = new ort.Tensor(dtype, new array(bytes.slice(position, position + size)), shape);
          position += size;
        }
        const begin = performance.now();
        losses.push((await session.trainStep(batch)).loss);
        await session.optimizerStep();
        await session.lazyResetGrad();
        times.push(performance.now() - begin);
      }
      const saved = await session.saveCheckpoint({ optimizer: true });
      await session.loadCheckpoint(saved);
      session.release();
      return { losses, times, isolated: crossOriginIsolated, saved: saved.length };
    },
    { folder: `/${relative(root, folderOf(net))}`, runtime, threads, steps, executionProviders },
  );
}

for (const threads of [1, 2]) {
  describe(`WebAssembly with ${threads} thread${threads > 1 ? "s" : ""}`, () => {
    for (const net of NETS) {
      it(net, async (t) => {
        const { context, close } = await startBrowser();
        const { losses, times, isolated, saved } = await trainIn(await context.newPage(), net, "ort.wasm.min.mjs", { threads });
        await close();
        const difference = maxDifference(losses, resultsOf(net).losses);
        t.diagnostic(`largest difference from Python: ${difference.toExponential(1)}; first step ${times[0].toFixed(0)} ms, median of the others ${times.slice(1).sort((a, b) => a - b)[24].toFixed(1)} ms`);
        assert.ok(isolated);
        assert.ok(difference <= 1e-5, `losses differ by ${difference}`);
        assert.ok(saved > 1000);
      });
    }
  });
}

describe("software WebGPU", () => {
  // The CNN is left out: WebGPU of onnxruntime-web 1.30 fails on BatchNormalization in training mode.
  for (const net of ["mlp", "transformer", "lstm", "embedding"]) {
    it(net, async (t) => {
      const { context, close } = await startBrowser({ webgpu: true });
      const page = await context.newPage();
      const { losses } = await trainIn(page, net, "ort.webgpu.min.mjs", { steps: 5, executionProviders: ["webgpu"] });
      await close();
      const difference = maxDifference(losses, resultsOf(net).losses.slice(0, 5));
      t.diagnostic(`largest difference from Python: ${difference.toExponential(1)}`);
      assert.ok(difference <= 1e-4, `losses differ by ${difference}`);
    });
  }
});
