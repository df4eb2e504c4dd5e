/** What the tests of the page share: a browser, the server, and somebody who draws digits in a style of their own. */

import { existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";
import { serve } from "../serve.mjs";

export const CHROMIUM =
  process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);

/**
 * Starts a browser with an empty profile, or one with these `preferences`, and with a software WebGPU if asked; `options`
 * are those of Playwright's contexts.
 */
export async function startBrowser({ webgpu = false, preferences, ...options } = {}) {
  if (!CHROMIUM)
    throw new Error(
      "There is no Chromium. On Debian: apt-get install chromium. Elsewhere: CHROMIUM=path make test-web",
    );
  const profile = mkdtempSync(join(tmpdir(), "onnxtrain-chromium-"));
  if (preferences) {
    mkdirSync(join(profile, "Default"));
    writeFileSync(join(profile, "Default", "Preferences"), JSON.stringify(preferences));
  }
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: CHROMIUM,
    headless: true,
    args: [
      "--no-sandbox",
      "--disable-gpu",
      "--disable-quic",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
      ...(webgpu ? ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"] : []),
    ],
    viewport: { width: 1000, height: 900 },
    acceptDownloads: true,
    ...options,
  });
  // Nothing waits so long unless it fails, or the machine is busy.
  context.setDefaultTimeout(300_000);
  const close = async () => {
    await context.close();
    rmSync(profile, { recursive: true, force: true });
  };
  return { context, close };
}

export { serve };

// Points of each digit in a unit square; several lists are several strokes. An unusual hand: an open 4, a barred 7, a 1
// with a long flag and a foot, a 9 like a g, a 0 with a slash, all of them leaning.
const SHAPES = {
  0: [
    arc(0.5, 0.5, 0.3, 0.45, 0, 360),
    [
      [0.25, 0.85],
      [0.75, 0.15],
    ],
  ],
  1: [
    [
      [0.2, 0.5],
      [0.55, 0.05],
      [0.55, 0.95],
    ],
    [
      [0.3, 0.95],
      [0.8, 0.95],
    ],
  ],
  2: [[...arc(0.5, 0.28, 0.28, 0.25, 190, 400), [0.2, 0.9], [0.32, 0.78], [0.45, 0.95], [0.85, 0.9]]],
  3: [[[0.2, 0.08], [0.75, 0.08], [0.45, 0.42], ...arc(0.48, 0.68, 0.28, 0.27, 280, 500)]],
  4: [
    [
      [0.3, 0.1],
      [0.2, 0.55],
      [0.8, 0.55],
    ],
    [
      [0.7, 0.1],
      [0.6, 0.95],
    ],
  ],
  5: [[[0.75, 0.08], [0.3, 0.08], [0.27, 0.45], ...arc(0.48, 0.68, 0.28, 0.26, 250, 500)]],
  6: [[[0.65, 0.05], [0.35, 0.4], ...arc(0.5, 0.7, 0.24, 0.24, 200, 560)]],
  7: [
    [
      [0.2, 0.25],
      [0.2, 0.08],
      [0.8, 0.08],
      [0.45, 0.95],
    ],
    [
      [0.3, 0.52],
      [0.8, 0.52],
    ],
  ],
  8: [[...arc(0.5, 0.27, 0.2, 0.2, 90, 450), ...arc(0.5, 0.72, 0.25, 0.24, 270, 630)]],
  9: [[...arc(0.5, 0.3, 0.24, 0.24, 0, 360), [0.72, 0.75], ...arc(0.48, 0.75, 0.24, 0.2, 0, 150)]],
};

function arc(x, y, rx, ry, from, to) {
  const points = [];
  for (let a = from; a <= to; a += 20)
    points.push([x + rx * Math.cos((a * Math.PI) / 180), y + ry * Math.sin((a * Math.PI) / 180)]);
  return points;
}

/** A hand: draws digits with a lean of `lean` and a jitter that differs from drawing to drawing. */
export class Hand {
  #state = 12345;

  constructor(lean = 0.55) {
    this.lean = lean;
  }

  #random() {
    this.#state = (Math.imul(this.#state, 1103515245) + 12345) >>> 0;
    return (this.#state >>> 8) / 2 ** 24 - 0.5;
  }

  /** Returns the strokes of a digit as points in the unit square. */
  strokes(digit) {
    const lean = this.lean + 0.15 * this.#random();
    const [scale, dx, dy] = [0.62 + 0.1 * this.#random(), 0.1 * this.#random(), 0.1 * this.#random()];
    return SHAPES[digit].map((stroke) =>
      stroke.map(([x, y]) => {
        const [u, v] = [x - 0.5 + 0.05 * this.#random(), y - 0.5 + 0.05 * this.#random()];
        return [0.5 + scale * (u - lean * v) + dx, 0.5 + scale * (v + 0.35 * lean * u) + dy];
      }),
    );
  }

  /** Draws a digit on the page's drawing area by mouse. */
  async draw(page, digit) {
    const area = page.getByLabel(/^Drawing area/);
    await area.scrollIntoViewIfNeeded();
    const box = await area.boundingBox();
    for (const stroke of this.strokes(digit)) {
      for (const [i, [x, y]] of stroke.entries()) {
        await page.mouse.move(box.x + x * box.width, box.y + y * box.height);
        if (i === 0) await page.mouse.down();
      }
      await page.mouse.up();
    }
  }

  /** Draws a digit, labels it and adds it. */
  async add(page, digit) {
    await this.draw(page, digit);
    await page.getByRole("radio", { name: String(digit), exact: true }).check();
    const drawings = Number(await page.getByLabel("Drawings", { exact: true }).textContent());
    await page.getByRole("button", { name: "Add", exact: true }).click();
    await page.waitForFunction(
      (count) => document.getElementById("drawings").textContent === String(count),
      drawings + 1,
    );
    await ready(page);
  }
}

/** Waits until the page is not busy. */
export async function ready(page) {
  await page.locator('[aria-busy="false"]').waitFor();
}

/** Reads a percentage such as "80%". */
export async function percent(page, label) {
  return Number.parseFloat(await page.getByLabel(label, { exact: true }).textContent());
}

/** Presses Train, calls `meanwhile`, and waits until it is done; returns the time in milliseconds that the page took. */
export async function train(page, meanwhile = async () => {}) {
  const begin = Date.now();
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await meanwhile();
  await page
    .getByRole("status")
    .filter({ hasText: /Trained$/ })
    .waitFor({ timeout: 120_000 });
  return Date.now() - begin;
}

/** Returns the digits in the list of drawings, in the order in which they were added. */
export async function labels(page) {
  const names = await page
    .getByRole("img", { name: /^Drawing of/ })
    .evaluateAll((items) => items.map((item) => item.getAttribute("aria-label")));
  return names.map((name) => Number(name.match(/\d/)[0])).reverse();
}

/** Waits for a message of the page, and until the page is not busy. */
export async function message(page, text) {
  await page.getByRole("status").filter({ hasText: text }).waitFor();
  await ready(page);
}
