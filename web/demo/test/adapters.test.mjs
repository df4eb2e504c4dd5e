/** Adapters in headless Chromium: the weights of a base are kept in the browser's cache under their content. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, it } from "node:test";
import { folderOf, prepare, resultsOf } from "../../test/support.mjs";
import { serve, startBrowser } from "./support.mjs";

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

it("a base is loaded once by all pages, until the cache is deleted", async (t) => {
  const { context, close } = await startBrowser();
  t.after(close);
  const { data_files: files } = JSON.parse(readFileSync(join(folderOf("adapter"), "manifest.json"), "utf8"));
  const [[name, { bytes, sha256 }]] = Object.entries(files);
  const requested = [];
  context.on("request", (request) => requested.push(request.url().split("/").at(-1)));

  /** Opens the artifacts in a new page; returns the loss of zeros, and the cache's entries with their sizes. */
  async function visit() {
    const page = await context.newPage();
    await page.goto(`${server.url}web/demo/test/blank.html`);
    const result = await page.evaluate(
      async (folder) => {
        const ort = await import("/web/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
        const { TrainingSession } = await import("/web/dist/index.js");
        ort.env.wasm.numThreads = 1;
        const session = await TrainingSession.create(ort, { artifacts: folder, warmUp: false, cache: "models" });
        const { feeds } = await (await fetch(`${folder}/feeds.json`)).json();
        const data = await (await fetch(`${folder}/feeds.bin`)).arrayBuffer();
        let position = 0;
        const batch = {};
        for (const { name, dtype, shape } of feeds) {
          const array = { float32: Float32Array, int64: BigInt64Array }[dtype];
          const size = shape.reduce((a, b) => a * b, array.BYTES_PER_ELEMENT);
          batch[name] = new ort.Tensor(dtype, new array(data.slice(position, position + size)), shape);
          position += size;
        }
        const { loss } = await session.trainStep(batch);
        const evaluation = await session.evalStep(batch);
        const model = await session.exportModel();
        session.release();
        const cache = await caches.open("models");
        const entries = [];
        for (const { url } of await cache.keys())
          entries.push([url, (await (await cache.match(url)).arrayBuffer()).byteLength]);
        return { losses: [loss, evaluation.loss], entries, exported: model.length };
      },
      `/${relative(root, folderOf("adapter"))}`,
    );
    await page.close();
    return result;
  }

  for (let count = 0; count < 2; count++) {
    const { losses, entries, exported } = await visit();
    // Adapters begin as no change, and the network has no Dropout.
    for (const loss of losses) assert.ok(Math.abs(loss - resultsOf("adapter").losses[0]) <= 1e-5);
    assert.deepEqual(entries, [[`https://onnxtrain.invalid/${sha256}`, bytes]]);
    assert.ok(exported > bytes);
  }
  const loads = () => requested.filter((file) => file === name).length;
  assert.equal(loads(), 1);
  assert.equal(requested.filter((file) => file === "training_model.onnx").length, 2);
  const page = await context.newPage();
  await page.goto(`${server.url}web/demo/test/blank.html`);
  await page.evaluate(() => caches.delete("models"));
  await visit();
  assert.equal(loads(), 2);
});
