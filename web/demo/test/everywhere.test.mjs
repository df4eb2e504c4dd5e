/** The page in every browser that is here: Chromium, Firefox and WebKit. */

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, it } from "node:test";
import { NETS, maxDifference, prepare, resultsOf } from "../../test/support.mjs";
import { BROWSERS } from "./browsers.mjs";
import { Hand, serve } from "./support.mjs";
import { trainIn } from "./train_in.mjs";

const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "..");
const CRASHES = 3;
/** How each browser is told to refuse all storage. */
const REFUSED = {
  Chromium: { preferences: { profile: { default_content_setting_values: { cookies: 2 } } } },
  Firefox: { "network.cookie.cookieBehavior": 2 },
  WebKit: { features: "-IndexedDBAPI" },
};

const drawings = (tab) =>
  tab.evaluate(() =>
    [...document.querySelectorAll("#list [aria-label]")]
      .map((item) => Number(/\d/.exec(item.getAttribute("aria-label"))[0]))
      .reverse(),
  );
const isOwn = (tab) => tab.evaluate(() => document.getElementById("page").classList.contains("own"));
const shows = (tab, count) =>
  tab.waitFor((wanted) => document.getElementById("drawings").textContent === String(wanted), count);

async function add(tab, hand, digit) {
  await tab.draw("pad", hand.strokes(digit));
  await tab.click(String(digit));
  await tab.click("Add");
  await tab.says(new RegExp(`^Added a ${digit}`));
  // The next drawing says the same.
  await tab.evaluate(() => void (document.getElementById("status").textContent = ""));
}

async function train(tab) {
  await tab.click("Train");
  await tab.says(/^Trained$/);
}

/** In the page: adds drawings of 0, 1, 2, ... as fast as it takes them. */
async function addForever() {
  const element = (id) => document.getElementById(id);
  for (let i = 0; ; i++) {
    while (element("page").getAttribute("aria-busy") === "true") await new Promise((resolve) => setTimeout(resolve, 1));
    const { left, top, width } = element("pad").getBoundingClientRect();
    const at = (type, x, y) =>
      element("pad").dispatchEvent(
        new PointerEvent(type, { pointerId: 1, clientX: left + x * width, clientY: top + y * width }),
      );
    at("pointerdown", 0.3, 0.2);
    at("pointermove", 0.3 + 0.4 * Math.random(), 0.8);
    at("pointerup", 0.5, 0.8);
    document.querySelector(`input[value="${i % 10}"]`).checked = true;
    element("add").click();
  }
}

for (const [name, { start, missing }] of Object.entries(BROWSERS)) {
  describe(name, { skip: missing }, () => {
    const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-everywhere-"));
    const hand = new Hand(0.7);
    let [server, browser, tab] = [];
    before(async () => {
      server = await serve();
      browser = await start();
      ({ tab } = browser);
      await tab.goto(server.url);
    });
    after(async () => {
      await browser?.close();
      await server?.close();
      rmSync(scratch, { recursive: true, force: true });
    });

    it("opens the page, with threads allowed", async () => {
      assert.match(await tab.says(/^Ready/), /^Ready: draw a digit/);
      // WebKitGTK 2.50 isolates the page, but gives it no shared memory.
      const shared = name === "WebKit" ? "undefined" : "function";
      assert.deepEqual(await tab.evaluate(() => [crossOriginIsolated, typeof SharedArrayBuffer]), [true, shared]);
      assert.equal(await tab.text("notice"), "");
    });

    it("learns drawings, and takes back", async () => {
      for (const digit of [7, 7, 7, 4, 4, 4]) await add(tab, hand, digit);
      assert.deepEqual(await drawings(tab), [7, 7, 7, 4, 4, 4]);
      await train(tab);
      assert.equal(await isOwn(tab), true);
      assert.match(await tab.text("after"), /^\d+%$/);
      assert.match(await tab.text("curve-text"), /^The loss of \d+ steps goes from/);
      await tab.click("Undo");
      await tab.says(/^Back to the base model$/);
      assert.deepEqual([await isOwn(tab), await tab.text("after")], [false, "–"]);
      await tab.click("Undo");
      await tab.says(/^Took back a 4$/);
      assert.deepEqual(await drawings(tab), [7, 7, 7, 4, 4]);
      // Its strokes are on the pad again.
      await tab.click("Add");
      await tab.says(/^Added a 4/);
      await train(tab);
    });

    it("saves its three files and loads them", async () => {
      const trained = await tab.text("after");
      const files = {};
      for (const button of ["Save checkpoint", "Save .onnx", "Save drawings"])
        files[button] = await tab.download(button, scratch);
      assert.deepEqual(
        Object.values(files).map((path) => path.slice(scratch.length + 1)),
        ["handwriting.safetensors", "handwriting.onnx", "drawings.json"],
      );
      assert.deepEqual(JSON.parse(readFileSync(files["Save drawings"], "utf8")).labels, [7, 7, 7, 4, 4, 4]);
      for (const button of ["Save checkpoint", "Save .onnx"]) {
        await tab.click("Back to the base model");
        await tab.says(/^Back to the base model/);
        assert.equal(await isOwn(tab), false);
        await tab.choose("#load", files[button]);
        await tab.says(/^Loaded handwriting/);
        assert.deepEqual([await isOwn(tab), await tab.text("after")], [true, trained]);
      }
      await tab.choose("#load", files["Save drawings"]);
      await tab.says(/drawings.json has no drawings that are not here already/);
    });

    it("keeps everything over a reload", async () => {
      const kept = [await drawings(tab), await tab.text("before"), await tab.text("after")];
      await tab.reload();
      await tab.says(/^Ready: your own model$/);
      assert.deepEqual([await drawings(tab), await tab.text("before"), await tab.text("after")], kept);
    });

    it("tells two tabs of each other", async () => {
      const other = await browser.newTab();
      await other.goto(server.url);
      await other.says(/^Ready: your own model$/);
      assert.deepEqual(await drawings(other), await drawings(tab));
      await add(other, hand, 1);
      await shows(tab, 7);
      assert.deepEqual(await drawings(tab), [7, 7, 7, 4, 4, 4, 1]);
      await tab.click("Undo");
      await tab.says(/^Took back a 1$/);
      await shows(other, 6);
      await other.goto(`${server.url}icon.svg`);
    });

    it("fits on the screens of a phone and of a laptop", async () => {
      const ids = ["pad", "guess", "digits", "status", "add", "undo", "train", "before", "after", "curve", "list"];
      await tab.assertFits(ids, name);
    });

    it(`loses nothing but the step in flight in ${CRASHES} crashes of the tab`, async (t) => {
      const lost = [];
      let before = await drawings(tab);
      for (let crash = 0; crash < CRASHES; crash++) {
        await tab.evaluate((code) => void window.eval(code)(), `(${addForever})`);
        let seen = before.length;
        while (seen < before.length + 2 + crash) seen = (await drawings(tab)).length;
        tab = await tab.crash();
        await tab.goto(server.url);
        await tab.says(/^Ready: your own model$/);
        const kept = await drawings(tab);
        assert.ok(kept.length >= seen, `${kept.length} drawings, and the page had shown ${seen}`);
        const added = kept.slice(before.length);
        assert.deepEqual(kept.slice(0, before.length), before);
        assert.deepEqual(
          added,
          added.map((_, i) => i % 10),
        );
        lost.push(kept.length - seen);
        before = kept;
      }
      t.diagnostic(`kept beyond what the page had shown: ${lost.join(", ")} drawings`);
    });

    it("works without its server", async () => {
      await tab.evaluate(() => navigator.serviceWorker.ready.then(() => null));
      const kept = await drawings(tab);
      await server.close();
      server = null;
      await tab.reload();
      await tab.says(/^Ready: your own model$/);
      assert.deepEqual(await drawings(tab), kept);
      await add(tab, hand, 3);
    });
  });

  describe(`${name}, whose storage is refused`, { skip: missing }, () => {
    it("works, and says that it keeps nothing", async (t) => {
      const server = await serve();
      t.after(() => server.close());
      const { tab, close } = await start(REFUSED[name]);
      t.after(close);
      await tab.goto(server.url);
      await tab.says(/^Ready/);
      assert.match(await tab.text("notice"), /^This browser keeps nothing here, for example because the window is/);
      const hand = new Hand();
      for (const digit of [2, 2, 3]) await add(tab, hand, digit);
      await train(tab);
      assert.deepEqual([await drawings(tab), await isOwn(tab)], [[2, 2, 3], true]);
    });
  });

  describe(`the package in ${name}`, { skip: missing }, () => {
    it("has the losses of Python", async (t) => {
      prepare();
      const server = await serve(0, root);
      t.after(() => server.close());
      const { tab, close } = await start();
      t.after(close);
      const differences = {};
      for (const net of NETS) {
        const { losses, isolated } = await trainIn(tab, server.url, net, "ort.wasm.min.mjs");
        differences[net] = maxDifference(losses, resultsOf(net).losses);
        assert.ok(isolated);
        assert.equal(losses.length, 50);
      }
      t.diagnostic(`largest differences of 50 losses: ${JSON.stringify(differences)}`);
      for (const [net, difference] of Object.entries(differences))
        assert.ok(difference <= 1e-5, `${net}: losses differ by ${difference}`);
    });
  });
}

describe(
  "Firefox on a profile that it had before",
  { skip: BROWSERS.Firefox?.missing ?? "another browser was chosen" },
  () => {
    for (const [what, preferences, kept] of [
      ["keeps everything when all of the browser is killed", {}, [5, 5]],
      ["keeps nothing of a private window", { "browser.privatebrowsing.autostart": true }, []],
    ])
      it(what, async (t) => {
        const server = await serve();
        t.after(() => server.close());
        const browser = await BROWSERS.Firefox.start(preferences);
        t.after(browser.close);
        await browser.tab.goto(server.url);
        await browser.tab.says(/^Ready/);
        const hand = new Hand();
        for (const digit of [5, 5]) await add(browser.tab, hand, digit);
        assert.deepEqual([await drawings(browser.tab), await browser.tab.text("notice")], [[5, 5], ""]);
        const tab = await browser.restart();
        await tab.goto(server.url);
        await tab.says(/^Ready/);
        assert.deepEqual(await drawings(tab), kept);
      });
  },
);
