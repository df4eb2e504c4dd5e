/** The package in headless Chromium: the losses of 50 steps are those of Python, with 1 and 2 threads. */

import assert from "node:assert/strict";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import { NETS, maxDifference, prepare, resultsOf } from "../../test/support.mjs";
import { serve, startBrowser } from "./support.mjs";
import { trainIn } from "./train_in.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
let server;
before(
  async () => {
    prepare();
    server = await serve(0, root);
  },
  { timeout: 300_000 },
);
after(() => server.close());

for (const threads of [1, 2]) {
  describe(`WebAssembly with ${threads} thread${threads > 1 ? "s" : ""}`, () => {
    for (const net of NETS) {
      it(net, async (t) => {
        const { context, close } = await startBrowser();
        t.after(close);
        const { losses, times, isolated, saved } = await trainIn(
          await context.newPage(),
          server.url,
          net,
          "ort.wasm.min.mjs",
          { threads },
        );
        const difference = maxDifference(losses, resultsOf(net).losses);
        t.diagnostic(
          `largest difference from Python: ${difference.toExponential(1)}; first step ${times[0].toFixed(0)} ms, median of the others ${times
            .slice(1)
            .sort((a, b) => a - b)[24]
            .toFixed(1)} ms`,
        );
        assert.ok(isolated);
        assert.ok(difference <= 1e-5, `losses differ by ${difference}`);
        assert.ok(saved > 1000);
      });
    }
  });
}

describe("software WebGPU", () => {
  for (const net of NETS) {
    it(net, async (t) => {
      const { context, close } = await startBrowser({ webgpu: true });
      t.after(close);
      const page = await context.newPage();
      const { losses, locations } = await trainIn(page, server.url, net, "ort.webgpu.min.mjs", {
        steps: 5,
        executionProviders: ["webgpu"],
      });
      const difference = maxDifference(losses, resultsOf(net).losses.slice(0, 5));
      t.diagnostic(`largest difference from Python: ${difference.toExponential(1)}`);
      // From the second step on: the first uploads those of the checkpoint.
      assert.deepEqual(locations, ["gpu-buffer"]);
      assert.ok(difference <= 1e-4, `losses differ by ${difference}`);
    });
  }

  it("the default bundle (JSEP), which computes wrong gradients there, is refused", async (t) => {
    const { context, close } = await startBrowser({ webgpu: true });
    t.after(close);
    const training = trainIn(await context.newPage(), server.url, "cnn", "ort.min.mjs", {
      steps: 1,
      executionProviders: ["webgpu"],
    });
    await assert.rejects(training, /wrong results on WebGPU: CumSum gave .* Import 'onnxruntime-web\/webgpu'/);
  });

  it("the net of the page trains as in WebAssembly", async (t) => {
    const { context, close } = await startBrowser({ webgpu: true });
    t.after(close);
    const page = await context.newPage();
    await page.goto(`${server.url}web/demo/test/blank.html`);
    const [wasm, webgpu] = await page.evaluate(async () => {
      const { Random, TrainingSession } = await import("/web/dist/index.js");
      const results = [];
      for (const provider of ["wasm", "webgpu"]) {
        const ort = await import(`/web/node_modules/onnxruntime-web/dist/ort.${provider}.min.mjs`);
        ort.env.wasm.numThreads = 1;
        const session = await TrainingSession.create(ort, {
          artifacts: "/web/demo/dist/model/",
          executionProviders: [provider],
        });
        const random = new Random(1);
        const losses = [];
        const batch = () => {
          const image = Float32Array.from({ length: 16 * 256 }, () => random.uniform());
          const labels = BigInt64Array.from({ length: 16 }, (_, i) => BigInt(i % 10));
          return {
            image: new ort.Tensor("float32", image, [16, 1, 16, 16]),
            labels: new ort.Tensor("int64", labels, [16]),
          };
        };
        for (let step = 0; step < 5; step++) {
          losses.push((await session.trainStep(batch())).loss);
          await session.optimizerStep();
          await session.lazyResetGrad();
        }
        // Gradients of two batches add up, also after a checkpoint has been read from the device.
        await session.saveCheckpoint({ optimizer: true });
        await session.trainStep(batch());
        await session.trainStep(batch());
        await session.optimizerStep();
        losses.push((await session.evalStep(batch())).loss);
        session.release();
        results.push(losses);
      }
      return results;
    });
    const difference = maxDifference(wasm, webgpu);
    t.diagnostic(`largest difference from WebAssembly: ${difference.toExponential(1)}`);
    assert.ok(difference <= 1e-4, `losses differ by ${difference}`);
    assert.equal(webgpu.length, 6);
  });
});
