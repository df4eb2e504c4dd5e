/** What one sees: everything on one screen, readable in light, dark and forced colours, exact axes. */

import assert from "node:assert/strict";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import { build } from "esbuild";
import { contrasts } from "./contrasts.mjs";
import { Hand, message, ready, serve, startBrowser, train } from "./support.mjs";

const SIZES = [
  [390, 844],
  [844, 390],
  [768, 1024],
  [1366, 768],
  [1920, 1080],
];
const NAMES = [
  "cat",
  "a bird on a roof at dusk",
  "Donaudampfschifffahrtsge",
  "MMMMMMMMMMMMMMMMMMMMMMMM",
  "家",
  ...Array.from({ length: 7 }, (_, i) => `name ${i}`),
];
const SCHEMES = [
  { colorScheme: "light", forcedColors: "none" },
  { colorScheme: "dark", forcedColors: "none" },
  { colorScheme: "light", forcedColors: "active" },
  { colorScheme: "dark", forcedColors: "active" },
];
// With ONNXTRAIN_WEB_SCREENS=folder the tests write a picture of each size and scheme.
const screens = process.env.ONNXTRAIN_WEB_SCREENS;

let server;
let browser;
// The page of the digits, which most tests look at, and one with as many names as there may be.
let page;
let sketches;
before(async () => {
  server = await serve();
  browser = await startBrowser({ hasTouch: true });
  page = browser.context.pages()[0];
  await page.goto(server.url);
  await ready(page);
  const hand = new Hand(0.7);
  for (let round = 0; round < 2; round++) for (const digit of [1, 4, 7, 9]) await hand.add(page, digit);
  await train(page);
  await ready(page);
  await hand.draw(page, 4);
  await page.getByText(/^Before: \d/).waitFor();
  sketches = await browser.context.newPage();
  await sketches.goto(`${server.url}#/sketches`);
  await ready(sketches);
  const drawings = Array.from({ length: 3 * NAMES.length }, (_, i) => ({
    image: bars(i),
    label: i % NAMES.length,
    heldOut: i % 3 === 1,
  }));
  const file = {
    format: "onnxtrain-drawings",
    names: NAMES,
    images: drawings.map(({ image }) => [image]),
    labels: drawings.map(({ label }) => label),
    held_out: drawings.map(({ heldOut }) => heldOut),
  };
  const buffer = Buffer.from(JSON.stringify(file));
  await sketches.locator("#load").setInputFiles({ name: "all.json", mimeType: "application/json", buffer });
  await message(sketches, `Added ${drawings.length} drawings of all.json`);
  await train(sketches);
  await sketches.getByRole("radio", { name: NAMES[1], exact: true }).check();
  await hand.draw(sketches, 4);
  await sketches.getByText(/^Now: /).waitFor();
});

/** A picture with bars that differ from one to the next. */
function bars(number) {
  const row = (i) =>
    Array.from({ length: 16 }, (_, k) => Number((number % 12) + 2 === i || (k % 7) + 3 === number % 9));
  return Array.from({ length: 16 }, (_, i) => row(i));
}
after(async () => {
  await browser.close();
  await server.close();
});

for (const [width, height, task] of SIZES.flatMap((size) => ["digits", "sketches"].map((task) => [...size, task]))) {
  it(`has everything on a screen of ${width} x ${height}: ${task}`, async () => {
    const named = task === "sketches";
    const shown = named ? sketches : page;
    await shown.bringToFront();
    await shown.setViewportSize({ width, height });
    for (const scheme of SCHEMES) {
      await shown.emulateMedia(scheme);
      await shown.waitForTimeout(50);
      if (screens) {
        const { colorScheme, forcedColors } = scheme;
        const name = `${task}-${width}x${height}-${colorScheme}${forcedColors === "active" ? "-forced" : ""}.png`;
        await shown.screenshot({ path: join(screens, name) });
      }
    }
    const size = await shown.evaluate(() => {
      const { scrollWidth, scrollHeight } = document.documentElement;
      return [scrollWidth, scrollHeight];
    });
    assert.ok(size[0] <= width && size[1] <= height, `the page takes ${size}`);
    const ids = ["pad", "guess", "digits", "status", "add", "undo", "train", "before", "after", "curve", "list"];
    ids.push(...(named ? ["names"] : []));
    const boxes = new Map();
    for (const id of ids) boxes.set(id, await shown.locator(`#${id}`).boundingBox());
    for (const [id, box] of boxes) {
      assert.ok(box.x >= 0 && box.y >= 0 && box.x + box.width <= width && box.y + box.height <= height + 0.5, id);
      assert.ok(box.width >= 20 && box.height >= 16, `${id}: ${JSON.stringify(box)}`);
      for (const [other, its] of boxes) {
        const apart =
          box.x + box.width <= its.x + 0.5 ||
          its.x + its.width <= box.x + 0.5 ||
          box.y + box.height <= its.y + 0.5 ||
          its.y + its.height <= box.y + 0.5;
        assert.ok(id === other || apart, `${id} and ${other} overlap`);
      }
    }
    const pad = boxes.get("pad");
    assert.ok(Math.abs(pad.width - pad.height) < 1 && pad.width >= 250, JSON.stringify(pad));
    // The files: on the screen, or in a menu that fits on it.
    const more = shown.getByRole("button", { name: "Files", exact: true });
    if (await more.isVisible()) await more.click();
    for (const id of ["base", "save-model", "save", "save-drawings", "load"]) {
      const box = await shown.locator(`#${id}`).boundingBox();
      assert.ok(box.y >= 0 && box.y + box.height <= height && box.height >= 24 && box.width >= 24, id);
    }
    await shown.keyboard.press("Escape");
    if (named) {
      await shown.getByRole("button", { name: "Names", exact: true }).click();
      if (screens) await shown.screenshot({ path: join(screens, `names-${width}x${height}.png`) });
      const box = await shown.locator("#name-menu").boundingBox();
      assert.ok(box.x >= 0 && box.y >= 0 && box.x + box.width <= width && box.y + box.height <= height, "names");
      await shown.getByRole("button", { name: "Done", exact: true }).click();
      await shown.locator("#name-menu").waitFor({ state: "hidden" });
    }
    // Texts do not leave their boxes.
    const cut = await shown.evaluate(() =>
      [...document.querySelectorAll("button, dt, dd, output, #guess, #status, #digits span, h1, .hint")]
        .filter((item) => getComputedStyle(item).clipPath === "none" && item.scrollWidth > item.clientWidth + 1)
        .filter((item) => getComputedStyle(item).display !== "inline")
        .map((item) => item.textContent),
    );
    assert.deepEqual(cut, []);
  });
}

it("opens its menu by the keyboard, and closes it for the message", async () => {
  await page.bringToFront();
  await page.setViewportSize({ width: 390, height: 844 });
  await page.getByRole("button", { name: "Files", exact: true }).focus();
  const focused = () => page.evaluate(() => document.activeElement.textContent);
  await page.keyboard.press("Enter");
  await page.keyboard.press("Tab");
  assert.equal(await focused(), "Back to the base model");
  await page.keyboard.press("Tab");
  const saving = page.waitForEvent("download");
  await page.keyboard.press("Enter");
  assert.equal((await saving).suggestedFilename(), "handwriting.onnx");
  await message(page, "Saved the model as handwriting.onnx");
  assert.equal(await page.locator("#files").isVisible(), false);
  assert.equal(await focused(), "Files");
});

it("shows messages where one looks", async () => {
  for (const [width, height] of SIZES) {
    await page.setViewportSize({ width, height });
    await page.evaluate(() => {
      for (const input of document.querySelectorAll('input[name="digit"]')) input.checked = false;
    });
    await page.getByRole("button", { name: "Add", exact: true }).click();
    await message(page, "Choose which digit this is, then press Add");
    const distance = await page.evaluate(() => {
      const status = document.getElementById("status");
      const { left, right, top, bottom } = status.getBoundingClientRect();
      const seen = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
      return status.contains(seen) ? document.getElementById("add").getBoundingClientRect().top - bottom : NaN;
    });
    assert.ok(Math.abs(distance) < 80, `${width} x ${height}: ${distance} pixels from the button`);
  }
});

describe("colours", () => {
  for (const { colorScheme, forcedColors } of SCHEMES) {
    it(`of texts differ enough: ${colorScheme}, forced colours ${forcedColors}`, async (t) => {
      await page.setViewportSize({ width: 1366, height: 768 });
      await page.emulateMedia({ colorScheme, forcedColors });
      const found = await page.evaluate(contrasts);
      t.diagnostic(`${found.length} texts, the lowest contrast is ${found[0][0].toFixed(2)} of "${found[0][1]}"`);
      assert.ok(found.length > 30 && found[0][0] >= 4.5, JSON.stringify(found.slice(0, 3)));
    });

    it(`show the chosen digit and the ink: ${colorScheme}, forced colours ${forcedColors}`, async () => {
      await page.emulateMedia({ colorScheme, forcedColors });
      /** Returns the share of the most frequent colour, and of the pixels that differ from `other`. */
      const pixels = async (locator) => (await locator.screenshot({ animations: "disabled" })).toString("base64");
      const differing = (first, second) =>
        page.evaluate(
          async (images) => {
            const [a, b] = await Promise.all(
              images.map(async (image) => {
                const bitmap = await createImageBitmap(await (await fetch(`data:image/png;base64,${image}`)).blob());
                const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
                context.drawImage(bitmap, 0, 0);
                return context.getImageData(0, 0, bitmap.width, bitmap.height).data;
              }),
            );
            let count = 0;
            for (let i = 0; i < a.length; i += 4)
              if (Math.abs(a[i] - b[i]) + Math.abs(a[i + 1] - b[i + 1]) + Math.abs(a[i + 2] - b[i + 2]) > 90) count++;
            return count / (a.length / 4);
          },
          [first, second],
        );
      const four = page.locator('#digits label:has([value="4"]) span');
      const choose = (checked) =>
        page.evaluate((on) => {
          document.activeElement.blur();
          document.querySelector('#digits [value="4"]').checked = on;
        }, checked);
      await choose(false);
      const before = await pixels(four);
      await choose(true);
      assert.ok((await differing(before, await pixels(four))) > 0.5);
      // The drawing on the pad, and in the list, is not of the colour of its paper.
      const pad = page.locator("#pad");
      const drawn = await pixels(pad);
      await page.getByRole("button", { name: "Undo", exact: true }).click();
      await page.getByRole("button", { name: "Undo", exact: true }).click();
      const ink = await differing(drawn, await pixels(pad));
      assert.ok(ink > 0.05, `ink on ${ink} of the pad`);
      await new Hand(0.7).draw(page, 4);
      const item = page.locator("#list canvas").first();
      const shown = await pixels(item);
      await item.evaluate((canvas) => (canvas.style.opacity = "0"));
      const small = await differing(shown, await pixels(item));
      await item.evaluate((canvas) => (canvas.style.opacity = ""));
      assert.ok(small > 0.05, `ink on ${small} of the picture`);
    });
  }
});

describe("the axis of the loss curve", () => {
  it("has texts that are where their values are", async () => {
    await page.setViewportSize({ width: 1366, height: 768 });
    const marks = await page.evaluate(() => {
      const lines = [...document.querySelectorAll("#curve line")].map((line) => Number(line.getAttribute("y1")));
      const texts = [...document.querySelectorAll("#curve text")].slice(0, lines.length);
      return texts.map((text, i) => ({
        value: Number(text.textContent),
        line: lines[i],
        text: text.getAttribute("y"),
      }));
    });
    const [zero, ...others] = marks;
    assert.equal(zero.value, 0);
    const top = others.at(-1);
    for (const { value, line, text } of others) {
      assert.ok(Math.abs((zero.line - line) / (zero.line - top.line) - value / top.value) < 1e-6, `${value}`);
      assert.equal(Number(text), line + 4);
    }
  });

  it("has two to four steps of 1, 2 or 5, none of them rounded", async () => {
    const { outputFiles } = await build({
      entryPoints: [join(dirname(fileURLToPath(import.meta.url)), "..", "src", "chart.ts")],
      bundle: true,
      format: "esm",
      write: false,
    });
    const { ticks } = await import(`data:text/javascript,${encodeURIComponent(outputFiles[0].text)}`);
    for (let highest = 0.0011; highest < 1e6; highest *= 1.013) {
      const texts = ticks(highest);
      const step = Number(texts[1]);
      assert.match(step.toExponential(), /^[125]e/, `${highest}: ${texts}`);
      texts.forEach((text, i) => assert.ok(Math.abs(Number(text) - i * step) < 1e-9 * step * i + 1e-15, `${texts}`));
      const top = Number(texts.at(-1));
      assert.ok(
        top >= highest && top - step < highest && texts.length >= 3 && texts.length <= 5,
        `${highest}: ${texts}`,
      );
    }
    assert.deepEqual(ticks(0.5), ["0.0", "0.2", "0.4", "0.6"]);
  });
});
