/** The page in every browser that is here: Chromium, Firefox and WebKit. */

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, it } from "node:test";
import { BROWSERS } from "../../demo/test/browsers.mjs";
import { fixture, photosOf, runPython, serve } from "./support.mjs";

// With ONNXTRAIN_WEB_SCREENS=folder the test writes the screens that it looks at.
const screens = process.env.ONNXTRAIN_WEB_SCREENS;
const text = (tab, id) => tab.evaluate((name) => document.getElementById(name).textContent, id);

async function addClass(tab, name) {
  await tab.evaluate((value) => void (document.getElementById("name").value = value), name);
  await tab.click("Add class");
  await tab.says(new RegExp(`^Added ${name}`));
}

/** Adds photos to a class, and waits until they are learned. */
async function addPhotos(tab, name, paths) {
  await tab.choose(`[aria-label="Add files to ${name}"]`, ...paths);
  await tab.says(new RegExp(`^Added ${paths.length} photos`));
}

/** Returns what lies outside of the window, or makes the page larger than it. */
const outside = (tab) =>
  tab.evaluate(() => {
    const { scrollWidth, scrollHeight } = document.documentElement;
    const ids = ["frame", "guess", "camera", "status", "name", "add", "list", "accuracy", "count", "curve", "undo"];
    const beyond = ids.filter((id) => {
      const box = document.getElementById(id).getBoundingClientRect();
      return box.left < 0 || box.top < 0 || box.right > innerWidth + 0.5 || box.bottom > innerHeight + 0.5;
    });
    return [...beyond, ...(scrollWidth > innerWidth || scrollHeight > innerHeight ? ["page"] : [])];
  });

describe("in every browser", () => {
  for (const [name, { start, missing }] of Object.entries(BROWSERS))
    it(`${name}: learns photos, saves and keeps them`, { skip: missing, timeout: 600_000 }, async (t) => {
      const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-photos-"));
      t.after(() => rmSync(scratch, { recursive: true, force: true }));
      const server = await serve();
      t.after(() => server.close());
      const { tab, close } = await start();
      t.after(close);
      await tab.goto(server.url);
      await tab.says(/^Ready: type the name/);
      for (const thing of ["cup", "pen"]) {
        await addClass(tab, thing);
        await addPhotos(tab, thing, photosOf(thing));
      }
      assert.match(await text(tab, "accuracy"), /^\d+%$/);
      assert.match(await text(tab, "curve-text"), /^The loss of 40 steps goes from 0\.\d+ to 0\.\d/);
      await tab.choose('[aria-label="Add files to pen"]', fixture("text.jpg"));
      await tab.says(/^text\.jpg isn't an image that this browser can read$/);

      const pictures = join(scratch, "pictures.json");
      writeFileSync(pictures, "[]");
      await tab.click("Files");
      const model = await tab.download("Save .onnx", scratch);
      await tab.says(/^Saved the model as things\.onnx/);
      const { classes, side, activation } = runPython("exported.py", model, pictures);
      assert.deepEqual([classes, side, activation], [["cup", "pen"], [64, 64], "softmax"]);

      const shown = [await text(tab, "accuracy"), await text(tab, "count")];
      await tab.reload();
      await tab.says(/^Ready: your things are here$/);
      assert.deepEqual([await text(tab, "accuracy"), await text(tab, "count")], shown);

      // The tools of WebKit's MiniBrowser make its window at least 447 pixels wide.
      for (const [width, height] of [
        [name === "WebKit" ? 450 : 390, 844],
        [1366, 768],
      ]) {
        await tab.resize(width, height);
        if (screens) {
          mkdirSync(screens, { recursive: true });
          writeFileSync(join(screens, `photos-${name}-${width}x${height}.png`), await tab.screenshot());
        }
        assert.deepEqual(await outside(tab), [], `outside of ${width} x ${height}`);
      }
    });
});
