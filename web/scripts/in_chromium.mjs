/**
 * Trains reference nets in headless Chromium, each in a new browser, for benchmarks/every_host.py.
 *
 *     node web/scripts/in_chromium.mjs wasm|webgpu STEPS NET...
 *
 * Prints a line of JSON per net: what `trainIn` returns, with checkpoint and delta as data URLs, or {"error"}.
 */

import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { serve, startBrowser } from "../demo/test/support.mjs";
import { trainIn } from "../demo/test/train_in.mjs";

const [provider, steps, ...nets] = process.argv.slice(2);
const server = await serve(0, join(dirname(fileURLToPath(import.meta.url)), "..", ".."));
for (const net of nets) {
  const { context, close } = await startBrowser({ webgpu: provider === "webgpu" });
  try {
    const result = await trainIn(await context.newPage(), server.url, net, `ort.${provider}.min.mjs`, {
      steps: Number(steps),
      files: true,
      executionProviders: [provider],
    });
    console.log(JSON.stringify({ net, ...result }));
  } catch (error) {
    console.log(JSON.stringify({ net, error: error.message }));
  } finally {
    await close();
  }
}
await server.close();
