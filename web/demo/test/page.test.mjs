/** The page in headless Chromium: draws, trains, gains accuracy, reloads offline; Python computes the same. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import { Hand, percent, ready, serve, startBrowser, train } from "./support.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const root = join(here, "..", "..", "..");
const python = process.env.PYTHON ?? join(root, ".venv", "bin", "python");
// With ONNXTRAIN_WEB_IMAGES=docs/images/web the tests write the pictures of the documentation.
const images = process.env.ONNXTRAIN_WEB_IMAGES;
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-page-"));

let server;
before(async () => {
  server = await serve();
});
after(async () => {
  await server.close();
  rmSync(scratch, { recursive: true, force: true });
});

async function picture(page, name) {
  if (!images) return;
  mkdirSync(images, { recursive: true });
  await page.screenshot({ path: join(images, `${name}.png`), fullPage: true });
}

/** Opens the page in a new browser, which is closed when the test ends; any error in the console fails the test. */
async function open(t, options = {}, query = "") {
  const { context, close } = await startBrowser(options);
  t.after(close);
  const page = context.pages()[0] ?? (await context.newPage());
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.goto(server.url + query);
  if (query === "?threads=1") await picture(page, "loading");
  await ready(page);
  const end = () => assert.deepEqual(errors, []);
  return { context, page, end };
}

const button = (page, name) => page.getByRole("button", { name, exact: true });
const text = (page, label) => page.getByLabel(label, { exact: true }).textContent();

async function download(page, name) {
  const waiting = page.waitForEvent("download");
  await button(page, name).click();
  const path = join(scratch, `${Date.now()}-${name}`);
  await (await waiting).saveAs(path);
  return path;
}

for (const threads of [1, 2]) {
  describe(`with ${threads} thread${threads > 1 ? "s" : ""}`, () => {
    it("learns a handwriting, keeps it offline, and Python agrees", async (t) => {
      const { context, page, end } = await open(t, {}, `?threads=${threads}`);
      assert.equal(await page.evaluate(() => crossOriginIsolated), true);
      assert.match(await page.getByRole("status").textContent(), /^Ready/);
      if (threads === 1) await picture(page, "ready");
      const hand = new Hand(0.7);
      for (let round = 0; round < 2; round++) for (let digit = 0; digit < 10; digit++) await hand.add(page, digit);
      assert.equal(await text(page, "Drawings"), "20");
      assert.equal(await text(page, "Accuracy after"), "–");
      await hand.draw(page, 4);
      await page.getByText(/^The model reads \d \(\d+%\)$/).waitFor();
      if (threads === 1) await picture(page, "drawn");
      const milliseconds = await train(page, async () => {
        if (threads > 1 || !images) return;
        await page.getByText(/^Training: epoch [2-5]/).waitFor({ timeout: 5000 });
        await picture(page, "training");
      });
      const times = await page.evaluate(() => performance.getEntriesByName("personalisation")[0].detail.times);
      t.diagnostic(
        `20 drawings, 5 epochs: ${milliseconds} ms from the click; steps: ${times.map((time) => time.toFixed(0)).join(" ")} ms`,
      );
      assert.ok(milliseconds < 10_000);
      const [beforeTraining, afterTraining] = [
        await percent(page, "Accuracy before"),
        await percent(page, "Accuracy after"),
      ];
      t.diagnostic(`accuracy on 10 held-out drawings: ${beforeTraining}% before, ${afterTraining}% after`);
      assert.ok(afterTraining >= beforeTraining + 10, `${beforeTraining}% before, ${afterTraining}% after`);
      const progress = page.getByRole("progressbar");
      assert.equal(await progress.evaluate((element) => element.value / element.max), 1);
      assert.match(
        await page.getByRole("img", { name: "Loss curve" }).locator("desc").textContent(),
        /^The loss of 35 steps goes from/,
      );
      if (threads === 1) await picture(page, "trained");

      const checkpoint = await download(page, "Save checkpoint");
      const drawings = await download(page, "Save drawings");
      const script = join(here, "..", "model", "accuracy.py");
      const result = JSON.parse(
        execFileSync(python, [script, join(here, "..", "dist", "model"), checkpoint, drawings], { encoding: "utf8" }),
      );
      assert.deepEqual(
        { before: Math.round(100 * result.before), after: Math.round(100 * result.after) },
        { before: beforeTraining, after: afterTraining },
      );

      // The service worker has cached everything once it controls the page.
      await page.evaluate(() => navigator.serviceWorker.ready);
      await context.setOffline(true);
      await page.reload();
      await ready(page);
      assert.equal(await page.getByRole("status").textContent(), "Ready: your own model");
      assert.equal(await page.evaluate(() => crossOriginIsolated), true);
      assert.deepEqual(
        [await text(page, "Drawings"), await percent(page, "Accuracy before"), await percent(page, "Accuracy after")],
        ["20", beforeTraining, afterTraining],
      );
      await hand.add(page, 3);
      await train(page);
      if (threads === 1) await picture(page, "offline");
      // Back over the training and the drawing, over its strokes, and over the drawings of the earlier visit.
      const undo = async () => {
        await button(page, "Undo").click();
        await ready(page);
        return text(page, "Drawings");
      };
      assert.deepEqual([await undo(), await undo()], ["21", "20"]);
      let left = "20";
      for (let i = 0; i < 3 && left === "20"; i++) left = await undo();
      assert.equal(left, "19");
      end();
    });
  });
}

it("takes back strokes, drawings and trainings, and loads what was saved", async (t) => {
  const { page, end } = await open(t);
  const hand = new Hand(0.7);
  assert.ok(await button(page, "Undo").isDisabled());
  await hand.draw(page, 4);
  await button(page, "Undo").click();
  await button(page, "Undo").click();
  assert.ok(await button(page, "Undo").isDisabled());
  for (const digit of [4, 4, 7, 7, 7]) await hand.add(page, digit);
  assert.equal(await page.getByRole("img", { name: "Drawing of 7, held out" }).count(), 1);
  await button(page, "Undo").click();
  await page.getByRole("status").filter({ hasText: "Took back a 7" }).waitFor();
  assert.equal(await text(page, "Drawings"), "4");
  // The strokes are back on the pad: added again it is the drawing that it was.
  await button(page, "Add").click();
  await page.getByRole("status").filter({ hasText: "Added a 7" }).waitFor();
  assert.equal(await text(page, "Drawings"), "5");
  await train(page);
  const trained = await text(page, "Accuracy after");
  assert.match(trained, /^\d+%$/);
  const checkpoint = await download(page, "Save checkpoint");
  await button(page, "Undo").click();
  await page.getByRole("status").filter({ hasText: "Back to the base model" }).waitFor();
  assert.equal(await text(page, "Accuracy after"), "–");
  await page.getByLabel("Load", { exact: true }).setInputFiles(checkpoint);
  await page
    .getByRole("status")
    .filter({ hasText: /^Loaded/ })
    .waitFor();
  assert.equal(await text(page, "Accuracy after"), trained);
  const damaged = join(scratch, "damaged");
  writeFileSync(damaged, "no checkpoint at all");
  await page.getByLabel("Load", { exact: true }).setInputFiles(damaged);
  await page.getByRole("status").filter({ hasText: "damaged is no model of this page: yours is unchanged" }).waitFor();
  await picture(page, "damaged-file");
  assert.equal(await text(page, "Accuracy after"), trained);
  end();
});

it("says what is missing", async (t) => {
  const { page, end } = await open(t);
  assert.ok(await button(page, "Train").isDisabled());
  await button(page, "Add").click();
  await page.getByRole("status").filter({ hasText: "Draw a digit first" }).waitFor();
  await new Hand().draw(page, 2);
  await button(page, "Add").click();
  await page.getByRole("status").filter({ hasText: "Choose which digit this is" }).waitFor();
  assert.equal(await text(page, "Drawings"), "0");
  end();
});

it("works by the keyboard alone", async (t) => {
  const { page, end } = await open(t);
  const press = async (...keys) => {
    for (const key of keys) await page.keyboard.press(key);
  };
  // Both tasks come first.
  await press("Tab", "Tab", "Tab");
  assert.match(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), /^Drawing area/);
  // Two ones, from the pen's place straight down.
  for (let i = 0; i < 2; i++) {
    await press("Space", ...Array(7).fill("Shift+ArrowDown"));
    if (i === 0) await picture(page, "keyboard");
    await press("Space", ...Array(7).fill("Shift+ArrowUp"), "1", "Enter");
    await page.waitForFunction((count) => document.getElementById("drawings").textContent === count, String(i + 1));
  }
  // From the drawing area the order is: digits, Add, Undo, Train.
  await press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.value), "1");
  await press("Tab", "Tab", "Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Train");
  await press("Enter");
  await page
    .getByRole("status")
    .filter({ hasText: /Trained$/ })
    .waitFor();
  // The focus is where it was.
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Train");
  assert.equal(await text(page, "Accuracy after"), "100%");
  end();
});

it("works by touch on a phone", async (t) => {
  const { context, page, end } = await open(t, {
    viewport: { width: 390, height: 844 },
    hasTouch: true,
    isMobile: true,
    deviceScaleFactor: 2,
  });
  const cdp = await context.newCDPSession(page);
  const box = await page.getByLabel(/^Drawing area/).boundingBox();
  for (let i = 0; i < 2; i++) {
    const touch = (type, x, y) =>
      cdp.send("Input.dispatchTouchEvent", {
        type,
        touchPoints: type === "touchEnd" ? [] : [{ x: box.x + x * box.width, y: box.y + y * box.height }],
      });
    await touch("touchStart", 0.5, 0.2);
    for (let y = 0.25; y < 0.85; y += 0.1) await touch("touchMove", 0.5, y);
    await touch("touchEnd");
    // A finger on the drawing area draws and does not scroll.
    assert.equal(await page.evaluate(() => scrollY), 0);
    await page.getByRole("radio", { name: "1", exact: true }).check();
    await button(page, "Add").click();
    await page.waitForFunction((count) => document.getElementById("drawings").textContent === count, String(i + 1));
    await page.evaluate(() => scrollTo(0, 0));
  }
  await train(page);
  assert.equal(await text(page, "Accuracy after"), "100%");
  assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
  await picture(page, "phone");
  // Targets of fingers: at least 44 pixels high.
  await button(page, "Files").click();
  for (const name of ["Add", "Undo", "Train", "Files", "Save .onnx", "Save checkpoint", "Save drawings"])
    assert.ok((await button(page, name).boundingBox()).height >= 44, name);
  end();
});

it("has names for everything that a screen reader meets, in both colour schemes", async (t) => {
  const { page, end } = await open(t, { colorScheme: "dark" });
  const hand = new Hand();
  await hand.add(page, 5);
  await hand.add(page, 5);
  await train(page);
  await picture(page, "dark");
  for (const role of ["button", "radio", "img", "progressbar", "textbox", "list", "application", "group"]) {
    for (const element of await page.getByRole(role).all()) {
      const name = await element.evaluate(
        (node) => node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent.trim(),
      );
      assert.ok(name, `${role} without a name: ${await element.evaluate((node) => node.outerHTML)}`);
    }
  }
  assert.equal(await page.locator('[role="status"]').count(), 1);
  end();
});
