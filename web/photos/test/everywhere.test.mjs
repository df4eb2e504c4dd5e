/** The page in every browser that is here: Chromium, Firefox and WebKit. */

import assert from "node:assert/strict";
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { describe, it } from "node:test";
import { BROWSERS } from "../../demo/test/browsers.mjs";
import { fixture, photosOf, runOnnxtrain, runPython, serve } from "./support.mjs";

const SHOWN = ["frame", "guess", "camera", "status", "name", "add", "list", "accuracy", "count", "curve", "undo"];

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
      assert.match(await tab.text("accuracy"), /^\d+%$/);
      assert.match(await tab.text("curve-text"), /^The loss of 40 steps goes from 0\.\d+ to 0\.\d/);
      await tab.choose('[aria-label="Add files to pen"]', fixture("text.jpg"));
      await tab.says(/^text\.jpg isn't an image that this browser can read$/);

      const pictures = join(scratch, "pictures.json");
      writeFileSync(pictures, "[]");
      await tab.click("Files");
      const model = await tab.download("Save .onnx", scratch);
      await tab.says(/^Saved the model as things\.onnx/);
      const { classes, side, activation } = runPython("exported.py", model, pictures);
      assert.deepEqual([classes, side, activation], [["cup", "pen"], [64, 64], "softmax"]);

      // onnxtrain needs nothing but the file.
      const [folder, table] = [join(scratch, "photos"), join(scratch, "predictions.csv")];
      mkdirSync(folder);
      photosOf("cup", 2).forEach((path) => copyFileSync(path, join(folder, basename(path))));
      runOnnxtrain("predict", model, "--data", folder, "--output", table);
      const [head, ...rows] = readFileSync(table, "utf8").trim().split(/\r?\n/);
      assert.equal(head, "path,class,probability_cup,probability_pen");
      assert.equal(rows.length, 2);
      for (const row of rows) {
        const [path, read, cup, pen] = row.split(",");
        assert.match(path, /cup-[01]\.png$/);
        assert.equal(read, Number(cup) > Number(pen) ? "cup" : "pen");
        assert.ok(Math.abs(Number(cup) + Number(pen) - 1) < 1e-5, row);
      }

      const shown = [await tab.text("accuracy"), await tab.text("count")];
      await tab.reload();
      await tab.says(/^Ready: your things are here$/);
      assert.deepEqual([await tab.text("accuracy"), await tab.text("count")], shown);

      await tab.assertFits(SHOWN, `photos-${name}`);
    });
});
