/** Trains a reference net in a page. */

import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { folderOf } from "../../test/support.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");

/**
 * Trains a reference net in an empty page, and returns losses, the bytes that `create` downloaded, and in milliseconds the
 * time of `create`, of each step, and of saving a checkpoint and a delta; both files as data URLs if `files` is true.
 *
 * `url` is that of a server of the repository; `runtime` is a file of onnxruntime-web, e.g. "ort.wasm.min.mjs"; `warmUp`
 * is the option of `create`; `warm` calls `session.warmUp` before the first step.
 */
export async function trainIn(
  page,
  url,
  net,
  runtime,
  { threads = 1, steps = 50, warmUp = true, warm = false, files = false, executionProviders } = {},
) {
  await page.goto(`${url}web/demo/test/blank.html`);
  return page.evaluate(
    async ({ folder, runtime, threads, steps, warmUp, warm, files, executionProviders }) => {
      const ort = await import(`/web/node_modules/onnxruntime-web/dist/${runtime}`);
      const { TrainingSession } = await import("/web/dist/index.js");
      ort.env.wasm.numThreads = threads;
      const { learning_rate: rate, seed, feeds } = await (await fetch(`${folder}/feeds.json`)).json();
      // Notes where the parameters lie when a training step begins.
      const locations = new Set();
      const watched = async (...args) => {
        const created = await ort.InferenceSession.create(...args);
        const run = created.run.bind(created);
        created.run = (feeds, ...rest) => {
          for (const { name, trainable } of session?.manifest.parameters ?? [])
            if (trainable && name in feeds && session.step) locations.add(feeds[name].location);
          return run(feeds, ...rest);
        };
        return created;
      };
      let session;
      performance.clearResourceTimings();
      const start = performance.now();
      session = await TrainingSession.create(
        { Tensor: ort.Tensor, env: ort.env, InferenceSession: { create: watched } },
        { artifacts: folder, seed, warmUp, ...(executionProviders && { executionProviders }) },
      );
      const created = performance.now() - start;
      const downloaded = performance
        .getEntriesByType("resource")
        .filter(({ name }) => new URL(name).pathname.startsWith(`${folder}/`))
        .reduce((sum, { decodedBodySize }) => sum + decodedBodySize, 0);
      const bytes = await (await fetch(`${folder}/feeds.bin`)).arrayBuffer();
      session.setLearningRate(rate);
      const [losses, times] = [[], []];
      let position = 0;
      for (let step = 0; step < steps; step++) {
        if (position === bytes.byteLength) position = 0;
        const batch = {};
        for (const { name, dtype, shape } of feeds) {
          const array = { float32: Float32Array, int64: BigInt64Array }[dtype];
          const size = shape.reduce((a, b) => a * b, array.BYTES_PER_ELEMENT);
          batch[name] = new ort.Tensor(dtype, new array(bytes.slice(position, position + size)), shape);
          position += size;
        }
        if (warm && step === 0) await session.warmUp(batch, { steps: 300, milliseconds: 5000 });
        const begin = performance.now();
        losses.push((await session.trainStep(batch)).loss);
        await session.optimizerStep();
        await session.lazyResetGrad();
        times.push(performance.now() - begin);
      }
      const [saving, written] = [{}, {}];
      let saved;
      for (const kind of ["delta", "checkpoint"]) {
        const begin = performance.now();
        saved = await session.saveCheckpoint({ delta: kind === "delta", optimizer: true });
        saving[kind] = performance.now() - begin;
        if (!files) continue;
        const reader = new FileReader();
        const read = new Promise((resolve) => (reader.onload = resolve));
        reader.readAsDataURL(new Blob([saved]));
        await read;
        written[kind] = reader.result;
      }
      await session.loadCheckpoint(saved);
      session.release();
      return {
        ...{ losses, created, downloaded, times, saving, written, isolated: crossOriginIsolated },
        ...{ saved: saved.length, locations: [...locations] },
      };
    },
    { folder: `/${relative(root, folderOf(net))}`, runtime, threads, steps, warmUp, warm, files, executionProviders },
  );
}
