/** The page in headless Chromium: a language model learns a text, and the adapter is saved and loaded. */

import assert from "node:assert/strict";
import { readFileSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, it } from "node:test";
import { serve, startBrowser } from "../../demo/test/support.mjs";

const dist = join(dirname(fileURLToPath(import.meta.url)), "..", "dist");
const LIMIT = { timeout: 300_000 };
let server;
before(async () => {
  server = await serve(0, dist);
});
after(() => server.close());

async function open(t, options) {
  const { context, close } = await startBrowser(options);
  t.after(close);
  const page = await context.newPage();
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  await page.goto(server.url);
  await idle(page);
  return { context, page, problems };
}

const idle = (page) => page.locator('[aria-busy="false"]').waitFor({ timeout: 120_000 });
const button = (page, name) => page.getByRole("button", { name, exact: true });
const value = async (page, label) => Number(await page.getByLabel(label, { exact: true }).textContent());
const status = (page) => page.getByRole("status").first().textContent();

/** Trains for a number of steps. */
async function train(page, steps) {
  const end = (await value(page, "Steps")) + steps;
  await button(page, "Train").click();
  await page.waitForFunction((count) => Number(document.getElementById("steps").textContent) >= count, end, {
    timeout: 240_000,
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
