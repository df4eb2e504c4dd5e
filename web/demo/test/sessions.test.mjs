/** Several training sessions in one page, whose calls come in between each other. */

import assert from "node:assert/strict";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, it } from "node:test";
import { folderOf, maxDifference, prepare, resultsOf } from "../../test/support.mjs";
import { serve, startBrowser } from "./support.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
const NETS = ["mlp", "lstm", "mlp"];
const STEPS = 5;

let server;
before(
  async () => {
    prepare();
    server = await serve(0, root);
  },
  { timeout: 300_000 },
);
after(() => server.close());

for (const provider of ["wasm", "webgpu"]) {
  it(`${NETS.length} sessions on ${provider}`, async (t) => {
    const { context, close } = await startBrowser({ webgpu: provider === "webgpu" });
    t.after(close);
    const page = await context.newPage();
    await page.goto(`${server.url}web/demo/test/blank.html`);
    const results = await page.evaluate(
      async ({ folders, provider, steps }) => {
        const ort = await import(`/web/node_modules/onnxruntime-web/dist/ort.${provider}.min.mjs`);
        const { TrainingSession } = await import("/web/dist/index.js");
        ort.env.wasm.numThreads = 1;
        const train = async (folder) => {
          const { learning_rate: rate, feeds } = await (await fetch(`${folder}/feeds.json`)).json();
          const bytes = await (await fetch(`${folder}/feeds.bin`)).arrayBuffer();
          const session = await TrainingSession.create(ort, { artifacts: folder, executionProviders: [provider] });
          session.setLearningRate(rate);
          const losses = [];
          let position = 0;
          for (let step = 0; step < steps; step++) {
            const batch = {};
            for (const { name, dtype, shape } of feeds) {
              const array = { float32: Float32Array, int64: BigInt64Array }[dtype];
              const size = shape.reduce((a, b) => a * b, array.BYTES_PER_ELEMENT);
              batch[name] = new ort.Tensor(dtype, new array(bytes.slice(position, position + size)), shape);
              position += size;
            }
            losses.push(session.trainStep(batch));
            void session.optimizerStep();
            void session.lazyResetGrad();
          }
          // Before its steps are done.
          session.release();
          return (await Promise.all(losses)).map(({ loss }) => loss);
        };
        return Promise.all(folders.map(train));
      },
      { folders: NETS.map((net) => `/${relative(root, folderOf(net))}`), provider, steps: STEPS },
    );
    for (const [i, losses] of results.entries()) {
      const difference = maxDifference(losses, resultsOf(NETS[i]).losses.slice(0, STEPS));
      assert.ok(difference <= 1e-5, `losses of session ${i} differ by ${difference}`);
    }
  });
}
