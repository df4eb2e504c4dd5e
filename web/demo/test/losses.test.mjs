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
before(async () => {
  prepare();
  server = await serve(0, root);
}, { timeout: 300_000 });
after(() => server.close());

for (const threads of [1, 2]) {
  describe(`WebAssembly with ${threads} thread${threads > 1 ? "s" : ""}`, () => {
    for (const net of NETS) {
      it(net, async (t) => {
        const { context, close } = await startBrowser();
        t.after(close);
        const { losses, times, isolated, saved } = await trainIn(await context.newPage(), server.url, net, "ort.wasm.min.mjs", { threads });
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
  // The CNN is left out: a reduction in its BatchNormalization fails in WebGPU of onnxruntime-web 1.30.
  for (const net of NETS.filter((name) => name !== "cnn")) {
    it(net, async (t) => {
      const { context, close } = await startBrowser({ webgpu: true });
      t.after(close);
      const page = await context.newPage();
      const { losses } = await trainIn(page, server.url, net, "ort.webgpu.min.mjs", { steps: 5, executionProviders: ["webgpu"] });
      const difference = maxDifference(losses, resultsOf(net).losses.slice(0, 5));
      t.diagnostic(`largest difference from Python: ${difference.toExponential(1)}`);
      assert.ok(difference <= 1e-4, `losses differ by ${difference}`);
    });
  }
});
