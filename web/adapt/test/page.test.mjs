/** The page: a language model learns a text, in WebAssembly and on WebGPU, and the adapter is saved and loaded. */

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import { BROWSERS } from "../../demo/test/browsers.mjs";
import { serve, startBrowser } from "../../demo/test/support.mjs";
import { maxDifference } from "../../test/support.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
const dist = join(root, "web", "adapt", "dist");
const LIMIT = { timeout: 900_000 };
let server;
before(async () => {
  server = await serve(0, dist);
});
after(() => server.close());

async function open(t, options, query = "") {
  const { context, close } = await startBrowser(options);
  t.after(close);
  const page = await context.newPage();
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  await page.goto(server.url + query);
  await idle(page);
  return { context, page, problems };
}

const idle = (page) => page.locator('[aria-busy="false"]').waitFor();
const button = (page, name) => page.getByRole("button", { name, exact: true });
const value = async (page, label) => Number(await page.getByLabel(label, { exact: true }).textContent());
const status = (page) => page.getByRole("status").first().textContent();

/** Trains for a number of steps. */
async function train(page, steps) {
  const end = (await value(page, "Steps")) + steps;
  await button(page, "Train").click();
  await page.waitForFunction((count) => Number(document.getElementById("steps").textContent) >= count, end, {
    timeout: 600_000,
  });
  await button(page, "Stop").click();
  await idle(page);
}

it("the loss of a text falls, and the adapter is saved, forgotten and loaded again", LIMIT, async (t) => {
  const { page, problems } = await open(t);
  assert.match(await status(page), /^Ready: [\d,]+ numbers to train\.$/);
  const before = await page.getByLabel("Before", { exact: true }).textContent();
  assert.ok(before.startsWith("The ") && before.length > 50);

  await page
    .getByRole("textbox", { name: "Your text" })
    .fill("All work and no play makes Jack a dull boy.\n".repeat(20));
  await train(page, 40);
  const chart = await page.getByRole("img").getAttribute("aria-label");
  const [, first, last] = /from ([\d.]+) to ([\d.]+)/.exec(chart);
  t.diagnostic(`${chart}; ${await value(page, "Tokens per second")} tokens per second`);
  assert.ok(Number(last) < 0.6 * Number(first), chart);
  assert.ok((await value(page, "Tokens per second")) > 0);
  const steps = await value(page, "Steps");
  if (process.env.ONNXTRAIN_WEB_IMAGES)
    await page.screenshot({ path: join(process.env.ONNXTRAIN_WEB_IMAGES, "adapt.png") });

  const download = page.waitForEvent("download");
  await button(page, "Save adapter").click();
  const path = await (await download).path();
  await idle(page);
  const saved = readFileSync(path);
  // Adapters with their two moments, and none of the weights of the base.
  const adapters = statSync(join(dist, "model", "checkpoint")).size;
  assert.ok(saved.length > 2.8 * adapters && saved.length < 3.2 * adapters, `${saved.length} bytes`);

  await button(page, "Forget").click();
  await idle(page);
  assert.equal(await value(page, "Steps"), 0);
  await train(page, 1);
  assert.ok((await value(page, "Loss")) > Number(last) + 0.3);

  await page.getByLabel("Load adapter").setInputFiles(path);
  await idle(page);
  assert.match(await status(page), /^Loaded /);
  // Training goes on where it stopped.
  await button(page, "Train").click();
  await page.waitForFunction((count) => Number(document.getElementById("steps").textContent) > count, steps);
  await button(page, "Stop").click();
  await idle(page);
  assert.ok((await value(page, "Steps")) > steps);
  assert.deepEqual(problems, []);
});

it("says what is wrong with a text and with a file", LIMIT, async (t) => {
  const { page } = await open(t);
  await page.getByRole("textbox", { name: "Your text" }).fill("short");
  await button(page, "Train").click();
  await idle(page);
  assert.match(await status(page), /at least 64 letters/);
  assert.ok(await button(page, "Train").isEnabled());
  await page
    .getByLabel("Load adapter")
    .setInputFiles({ name: "adapter.delta", mimeType: "application/octet-stream", buffer: Buffer.from("nonsense") });
  await idle(page);
  assert.match(await status(page), /Loading the checkpoint/);
  await button(page, "Write").click();
  await idle(page);
  assert.equal(await status(page), "");
});

it("is in sight as a whole, on a laptop and on a phone", LIMIT, async (t) => {
  for (const [width, height] of [
    [1366, 768],
    [390, 844],
  ]) {
    const { page } = await open(t, { viewport: { width, height } });
    const sizes = await page.evaluate(() => ({
      wide: document.documentElement.scrollWidth,
      high: document.documentElement.scrollHeight,
    }));
    assert.ok(sizes.wide <= width, `${sizes.wide} pixels wide`);
    if (width > 1000) assert.ok(sizes.high <= height, `${sizes.high} pixels high`);
  }
});

describe("WebGPU", () => {
  const used = (page) => page.locator("#used").textContent();

  it("is left alone where there is none, or none in hardware", LIMIT, async (t) => {
    const { page } = await open(t, {}, "?device=auto");
    assert.match(
      await used(page),
      /^WebAssembly computes, as (this browser has no WebGPU|WebGPU finds no graphics card here)\.$/,
    );
    const { page: software } = await open(t, { webgpu: true }, "?device=auto");
    assert.equal(
      await used(software),
      "WebAssembly computes, as WebGPU has no graphics card here and would be slower.",
    );
  });

  it("computes if one chooses it, and takes the adapter over", LIMIT, async (t) => {
    const { page, problems } = await open(t, { webgpu: true });
    assert.equal(await used(page), "WebAssembly computes.");
    await train(page, 3);
    const steps = await value(page, "Steps");
    await page.getByLabel("Computes on").selectOption("webgpu");
    await idle(page);
    assert.equal(await used(page), "WebGPU computes.");
    assert.equal(await status(page), "Ready. The adapter is as it was.");
    await train(page, 1);
    assert.ok((await value(page, "Steps")) > steps);
    assert.deepEqual(problems, []);
  });

  it("is given up with one sentence if it does not run the model", LIMIT, async (t) => {
    const { context, close } = await startBrowser({ webgpu: true, serviceWorkers: "block" });
    t.after(close);
    const page = await context.newPage();
    await context.route("**/*.asyncify.wasm", (route) => route.abort());
    await page.goto(`${server.url}?device=webgpu`);
    await idle(page);
    assert.match(await used(page), /^WebAssembly computes, as WebGPU does not run this model \(.*\)\.$/);
    assert.match(await status(page), /^Ready: /);
  });

  it("has the losses of WebAssembly over 20 steps", LIMIT, async (t) => {
    const whole = await serve(0, root);
    t.after(() => whole.close());
    const { context, close } = await startBrowser({ webgpu: true });
    t.after(close);
    const page = await context.newPage();
    await page.goto(`${whole.url}web/demo/test/blank.html`);
    const [wasm, webgpu] = await page.evaluate(async () => {
      const { TrainingSession } = await import("/web/dist/index.js");
      const results = [];
      for (const provider of ["wasm", "webgpu"]) {
        const ort = await import(`/web/node_modules/onnxruntime-web/dist/ort.${provider}.min.mjs`);
        ort.env.wasm.numThreads = 1;
        const artifacts = "/web/adapt/dist/model/";
        const session = await TrainingSession.create(ort, {
          artifacts,
          seed: 3,
          executionProviders: [provider],
          warmUp: false,
        });
        session.setLearningRate(0.004);
        const losses = [];
        for (let step = 0; step < 20; step++) {
          const bytes = BigInt64Array.from({ length: 2 * 64 }, () =>
            BigInt(32 + Math.floor(90 * session.random.uniform())),
          );
          const tokens = new ort.Tensor("int64", bytes, [2, 64]);
          losses.push((await session.trainStep({ tokens, labels: tokens })).loss);
          await session.optimizerStep();
          await session.lazyResetGrad();
        }
        session.release();
        results.push(losses);
      }
      return results;
    });
    const difference = maxDifference(wasm, webgpu);
    t.diagnostic(`the loss went from ${wasm[0]} to ${wasm.at(-1)}; largest difference: ${difference.toExponential(1)}`);
    assert.ok(wasm.at(-1) < wasm[0] - 0.1);
    assert.ok(difference <= 1e-4, `losses differ by ${difference}`);
  });
});

describe("in every browser", () => {
  for (const [name, { start, missing }] of Object.entries(BROWSERS))
    it(`${name}: learns a text, and saves and loads the adapter`, { skip: missing, ...LIMIT }, async (t) => {
      const { tab, close } = await start();
      t.after(close);
      const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-adapt-"));
      t.after(() => rmSync(scratch, { recursive: true, force: true }));
      await tab.goto(`${server.url}?device=wasm`);
      await tab.says(/^Ready: [\d,]+ numbers to train\.$/);
      const number = (id) => tab.evaluate((each) => Number(document.getElementById(each).textContent), id);
      const train = async (count) => {
        const last = (await number("steps")) + count;
        await tab.click("Train");
        await tab.waitFor((steps) => Number(document.getElementById("steps").textContent) >= steps, last);
        await tab.click("Stop");
        await tab.says(/^Trained\.$/);
      };
      await train(1);
      const first = await number("loss");
      await train(15);
      const [last, steps] = [await number("loss"), await number("steps")];
      assert.ok(last < first - 0.2, `the loss went from ${first} to ${last}`);
      const path = await tab.download("Save adapter", scratch);
      await tab.says(/^Saved \d+ KB\.$/);
      await tab.click("Forget");
      await tab.says(/^The model is as it was\.$/);
      assert.equal(await number("steps"), 0);
      await tab.choose("#load", path);
      await tab.says(/^Loaded adapter\.delta\.$/);
      await train(1);
      assert.ok((await number("steps")) > steps);
    });
});
