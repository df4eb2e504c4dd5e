/** What the page keeps: in two tabs, over crashes, in a full or refused storage, from an older version, damaged. */

import assert from "node:assert/strict";
import { after, before, describe, it } from "node:test";
import { Hand, labels, message, ready, serve, startBrowser, train } from "./support.mjs";

// A longer run: ONNXTRAIN_WEB_CRASHES=200 node --test web/demo/test/journal.test.mjs
const CRASHES = Number(process.env.ONNXTRAIN_WEB_CRASHES ?? 20);
const DATABASE = "onnxtrain-handwriting";

let server;
before(async () => {
  server = await serve();
});
after(() => server.close());

async function start(t, options) {
  const { context, close } = await startBrowser(options);
  t.after(close);
  const open = async (path = "") => {
    const page = await context.newPage();
    await page.goto(server.url + path);
    if (!path) await ready(page);
    return page;
  };
  return { context, open };
}

const text = (page, label) => page.getByLabel(label, { exact: true }).textContent();
const button = (page, name) => page.getByRole("button", { name, exact: true });
const notice = (page) => page.getByRole("alert").textContent();
const isOwn = (page) => page.locator("main").evaluate((main) => main.classList.contains("own"));

/** Waits until a tab shows so many drawings. */
const shows = (page, count) =>
  page.waitForFunction((n) => document.getElementById("drawings").textContent === String(n), count);

describe("two tabs", () => {
  it("keep what both add, train and undo, and show it without a reload", async (t) => {
    const { open } = await start(t);
    const [a, b] = [await open(), await open()];
    const hand = new Hand(0.7);
    await a.bringToFront();
    for (const digit of [7, 7, 7, 4, 4, 4]) await hand.add(a, digit);
    await train(a);
    await ready(a);
    await shows(b, 6);
    await b.locator("main.own").waitFor();
    assert.equal(await text(b, "Accuracy after"), await text(a, "Accuracy after"));
    await b.bringToFront();
    await hand.add(b, 1);
    await shows(a, 7);
    assert.deepEqual([await labels(a), await isOwn(a)], [[7, 7, 7, 4, 4, 4, 1], true]);
    // What B takes back is gone in A, too: the drawing, its stroke on the pad, and the training.
    for (let i = 0; i < 4; i++) {
      await button(b, "Undo").click();
      await ready(b);
    }
    await a.locator("main:not(.own)").waitFor();
    await a.reload();
    await ready(a);
    assert.deepEqual([await labels(a), await isOwn(a)], [[7, 7, 7, 4, 4, 4], false]);
  });

  it("add at the same time", async (t) => {
    const { open } = await start(t);
    const tabs = [await open(), await open()];
    // 15 drawings in each as fast as the page takes them.
    const added = tabs.map((page, tab) => page.evaluate(drive, Array(15).fill(`add ${tab}`)));
    await Promise.all(added);
    for (const page of tabs) {
      await shows(page, 30);
      const all = await labels(page);
      assert.deepEqual([all.filter((label) => label === 0).length, all.length], [15, 30]);
    }
    const heldOut = await tabs[0].getByRole("img", { name: /held out/ }).count();
    // Of each digit 5, the first of which may be the second drawing of all.
    assert.equal(heldOut, 10);
  });

  it("train one after the other, and never undo what they have not shown", async (t) => {
    const { context, open } = await start(t);
    // Tabs that hear nothing of each other.
    await context.addInitScript(() => delete globalThis.BroadcastChannel);
    const [a, b] = [await open(), await open()];
    const hand = new Hand();
    await a.bringToFront();
    for (const digit of [3, 5, 3, 5]) await hand.add(a, digit);
    await b.reload();
    await ready(b);
    await a.bringToFront();
    await b.evaluate((name) => {
      globalThis.training = navigator.locks.request(name, () => new Promise((done) => (globalThis.done = done)));
    }, DATABASE);
    await button(a, "Train").click();
    await message(a, "Another tab is training: wait until it has finished, then press Train again");
    assert.equal(await isOwn(a), false);
    await b.evaluate(() => globalThis.done());
    await train(a);
    await ready(a);
    await b.bringToFront();
    await button(b, "Undo").click();
    await message(b, "Another tab has just changed the drawings or the model");
    assert.deepEqual([await labels(b), await isOwn(b)], [[3, 5, 3, 5], true]);
  });
});

/** In the page: does `steps`, e.g. "add 3", and reports each before it begins. */
async function drive(steps, first = 0) {
  const element = (id) => document.getElementById(id);
  const idle = async () => {
    while (element("page").ariaBusy === "true") await new Promise((resolve) => setTimeout(resolve, 1));
  };
  const press = async (id) => {
    element(id).click();
    await idle();
  };
  for (const [i, step] of steps.entries()) {
    await idle();
    await globalThis.beginning?.(first + i);
    const [action, digit] = step.split(" ");
    if (action === "add") {
      const { left, top, width } = element("pad").getBoundingClientRect();
      const at = (type, x, y) =>
        element("pad").dispatchEvent(
          new PointerEvent(type, { pointerId: 1, clientX: left + x * width, clientY: top + y * width }),
        );
      at("pointerdown", 0.3, 0.2);
      // No two drawings are the same.
      at("pointermove", 0.3 + 0.4 * Math.random(), 0.8);
      at("pointerup", 0.5, 0.8);
      document.querySelector(`input[value="${digit}"]`).checked = true;
      await press("add");
    } else if (!element(action).disabled) await press(action);
    // The stroke that is back on the drawing area.
    if (/^Took back/.test(element("status").textContent)) await press("undo");
    element("status").textContent = "";
  }
}

/** Returns the journal that `steps` make: a digit per drawing, and per model whether it is the user's own. */
function simulate(steps) {
  const journal = [];
  const isModel = (entry) => typeof entry === "boolean";
  let forgotten = false;
  for (const step of steps) {
    const [action, digit] = step.split(" ");
    if (action === "add") journal.push(Number(digit));
    else if (action === "undo") {
      // Once the ninth model has displaced the first, the oldest one stays.
      const last = journal.findLastIndex(
        (entry, i) => !isModel(entry) || !forgotten || journal.slice(0, i).some(isModel),
      );
      if (last >= 0) journal.splice(last, 1);
    } else if (action === "base" ? journal.findLast(isModel) : journal.some((entry) => !isModel(entry))) {
      journal.push(action === "train");
      if (journal.filter(isModel).length > 8) {
        journal.splice(journal.findIndex(isModel), 1);
        forgotten = true;
      }
    }
  }
  return journal;
}

/** Returns the journal in the browser's database in the same form. */
const kept = (page) =>
  page.evaluate(
    (name) =>
      new Promise((resolve, reject) => {
        const request = indexedDB.open(name);
        request.onerror = () => reject(request.error);
        request.onsuccess = () => {
          const reading = request.result.transaction("journal").objectStore("journal").getAll();
          reading.onsuccess = () => {
            request.result.close();
            resolve(
              reading.result.map((entry) => (entry.kind === "model" ? !!entry.checkpoint : entry.drawings[0].label)),
            );
          };
        };
      }),
    DATABASE,
  );

it(`loses nothing but the step in flight in ${CRASHES} crashes`, { timeout: 20_000 * CRASHES }, async (t) => {
  const { context, open } = await start(t);
  // The limit is that of the test: on a busy machine a crash takes as long as it takes.
  context.setDefaultTimeout(0);
  let state = 99;
  const random = () => (state = (Math.imul(state, 1103515245) + 12345) >>> 0) / 2 ** 32;
  const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
  let [begun, began, duration] = [0, 0, 100];
  await context.exposeFunction("beginning", (step) => {
    // Step by step, how long one takes: the crash comes at any moment of it.
    if (step > begun) duration = 0.8 * duration + 0.2 * Math.min(1000, performance.now() - began);
    [begun, began] = [step, performance.now()];
  });
  let done = [];
  const counts = { kept: 0, lost: 0 };
  let page = await open();
  for (let crash = 0; crash < CRASHES; crash++) {
    const steps = Array.from({ length: 200 }, () => {
      const die = random();
      if (die < 0.6) return `add ${Math.floor(10 * random())}`;
      return die < 0.9 ? "undo" : die < 0.95 ? "base" : "train";
    });
    const all = [...done, ...steps];
    begun = -1;
    const last = done.length + Math.floor(5 * random());
    const cdp = await context.newCDPSession(page);
    const crashed = page.waitForEvent("crash");
    page.evaluate(`(${drive})(${JSON.stringify(steps)}, ${done.length})`).catch(() => {});
    while (begun < last) await pause(1);
    await pause(1.2 * duration * random());
    cdp.send("Page.crash").catch(() => {});
    await crashed;
    await page.close();
    page = await open();
    assert.match(await page.getByRole("status").textContent(), /^Ready/);
    const found = await kept(page);
    const shown = [await labels(page), await isOwn(page)];
    const own = found.findLast((entry) => typeof entry === "boolean") ?? false;
    assert.deepEqual(shown, [found.filter((entry) => typeof entry === "number"), own]);
    const [present, without, with_] = [found, simulate(all.slice(0, begun)), simulate(all.slice(0, begun + 1))].map(
      (journal) => JSON.stringify(journal),
    );
    assert.ok(
      [without, with_].includes(present),
      `crash ${crash} in ${all[begun]}: ${present}, not ${without}, ${with_}`,
    );
    if (without !== with_) counts[present === with_ ? "kept" : "lost"]++;
    done = all.slice(0, present === with_ ? begun + 1 : begun);
  }
  t.diagnostic(`${done.length} steps; the step in flight was kept ${counts.kept} times and lost ${counts.lost} times`);
});

/** In the page: adds, changes and removes names, and reports each step before it begins. */
async function driveNames(first) {
  const element = (id) => document.getElementById(id);
  for (let step = first; ; step++) {
    while (element("page").ariaBusy === "true") await new Promise((resolve) => setTimeout(resolve, 1));
    await globalThis.beginning(step);
    const [field, row] = [element("new-name").querySelector("input"), element("name-list").firstChild];
    if (step % 2 === 0) {
      field.value = `n${step}`;
      element("new-name").requestSubmit();
    } else if (step % 4 === 1) {
      row.querySelector("input").value = `r${step}`;
      row.querySelector("input").dispatchEvent(new Event("change"));
    } else row.querySelector("button").click();
  }
}

/** Returns the names after so many steps. */
function namesAfter(steps) {
  const list = [];
  for (let step = 0; step < steps; step++) {
    if (step % 2 === 0) list.push(`n${step}`);
    else if (step % 4 === 1) list[0] = `r${step}`;
    else list.shift();
  }
  return list;
}

const NAME_CRASHES = Math.ceil(CRASHES / 5);
it(`loses no name but the one in flight in ${NAME_CRASHES} crashes`, { timeout: 60_000 * NAME_CRASHES }, async (t) => {
  const { context, open } = await start(t);
  let begun = 0;
  await context.exposeFunction("beginning", (step) => (begun = step));
  // Twelve names are the most: none are left at the end of four steps but one.
  let [page, done] = [await open("#/sketches"), 0];
  for (let crash = 0; crash < NAME_CRASHES && done < 36; crash++) {
    await ready(page);
    const cdp = await context.newCDPSession(page);
    const crashed = page.waitForEvent("crash");
    const last = done + 1 + ((crash * 5) % 7);
    page.evaluate(`(${driveNames})(${done})`).catch(() => {});
    while (begun < last) await new Promise((resolve) => setTimeout(resolve, 1));
    await new Promise((resolve) => setTimeout(resolve, (crash * 37) % 60));
    cdp.send("Page.crash").catch(() => {});
    await crashed;
    await page.close();
    page = await open("#/sketches");
    await ready(page);
    const found = JSON.stringify(await page.locator("#digits bdi").allTextContents());
    const [without, with_] = [begun, begun + 1].map((steps) => JSON.stringify(namesAfter(steps)));
    assert.ok([without, with_].includes(found), `crash ${crash} in step ${begun}: ${found}, not ${without}, ${with_}`);
    done = found === with_ ? begun + 1 : begun;
  }
});

it("goes on when the storage is full, and keeps everything once there is room", async (t) => {
  const { context, open } = await start(t);
  // From the start: browsers remember for a while how much room there was.
  const cdp = await context.newCDPSession(await open("icon.svg"));
  const origin = new URL(server.url).origin;
  await cdp.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 1 });
  const page = await open();
  const hand = new Hand();
  for (const digit of [2, 2, 3]) await hand.add(page, digit);
  await train(page);
  assert.match(await notice(page), /^The browser's storage is full, so this is not kept: free some space, or save/);
  assert.deepEqual([await labels(page), await isOwn(page)], [[2, 2, 3], true]);
  await button(page, "Undo").click();
  await message(page, "Back to the base model");
  await cdp.send("Storage.overrideQuotaForOrigin", { origin });
  await hand.add(page, 5);
  assert.equal(await notice(page), "");
  await page.reload();
  await ready(page);
  assert.deepEqual([await labels(page), await isOwn(page)], [[2, 2, 3, 5], false]);
});

it("works where the browser refuses all storage", async (t) => {
  // As "Block all cookies" does in the settings.
  const { open } = await start(t, { preferences: { profile: { default_content_setting_values: { cookies: 2 } } } });
  const page = await open();
  assert.match(await notice(page), /^This browser keeps nothing here, for example because the window is private: save/);
  assert.match(await page.getByRole("status").textContent(), /^Ready/);
  const hand = new Hand();
  for (const digit of [2, 2, 3]) await hand.add(page, digit);
  await train(page);
  assert.deepEqual([await labels(page), await isOwn(page)], [[2, 2, 3], true]);
  await button(page, "Back to the base model").click();
  await message(page, "Back to the base model: Undo brings yours back");
  assert.equal(await isOwn(page), false);
  await button(page, "Undo").click();
  await message(page, "Back to the model before");
  assert.equal(await isOwn(page), true);
});

/** In the page: opens the database at a version, with `upgrade` as the body of a function of (database, transaction). */
const inDatabase = (page, version, upgrade, hold = false) =>
  page.evaluate(
    ([name, at, body, keepOpen]) =>
      new Promise((resolve, reject) => {
        const request = indexedDB.open(name, at);
        request.onupgradeneeded = () => new Function("database", body)(request.result);
        request.onerror = () => reject(request.error);
        request.onsuccess = () => {
          if (keepOpen) globalThis.held = request.result;
          else request.result.close();
          resolve();
        };
      }),
    [DATABASE, version, upgrade, hold],
  );
const VERSION_1 = `
  const image = new Float32Array(256).fill(0.5);
  const drawings = [{ image, label: 6, heldOut: false }, { image, label: 8, heldOut: true }];
  database.createObjectStore("state").put({ drawings, checkpoint: null, losses: [0.5] }, "kept");`;

it("takes over what version 1 of the storage held", async (t) => {
  const { open } = await start(t);
  const old = await open("icon.svg");
  await inDatabase(old, 1, VERSION_1);
  const page = await open();
  assert.deepEqual([await labels(page), await notice(page)], [[6, 8], ""]);
  assert.equal(await page.getByRole("img", { name: "Drawing of 8, held out" }).count(), 1);
  await button(page, "Undo").click();
  await message(page, "Took back a 8");
});

it("takes over the journal of version 2, and its way back", async (t) => {
  const { open } = await start(t);
  const page = await open();
  const hand = new Hand(0.7);
  for (const digit of [7, 7, 4]) await hand.add(page, digit);
  await train(page);
  await ready(page);
  const accuracy = await text(page, "Accuracy after");
  await page.goto(`${server.url}icon.svg`);
  // As version 2 wrote the same entries: without tasks, and models without classes.
  await page.evaluate(
    (name) =>
      new Promise((resolve, reject) => {
        const reading = indexedDB.open(name);
        reading.onsuccess = () => {
          const all = reading.result.transaction("journal").objectStore("journal").getAll();
          all.onsuccess = () => {
            reading.result.close();
            indexedDB.deleteDatabase(name);
            const writing = indexedDB.open(name, 2);
            writing.onupgradeneeded = () => {
              const store = writing.result.createObjectStore("journal", { keyPath: "key", autoIncrement: true });
              for (const { task: _, classes: __, ...entry } of all.result) store.add(entry);
              store.add({ kind: "model", by: "reset", checkpoint: null, losses: [], first: false });
            };
            writing.onsuccess = () => (writing.result.close(), resolve());
            writing.onerror = () => reject(writing.error);
          };
        };
      }),
    DATABASE,
  );
  await page.goto(server.url);
  await ready(page);
  assert.deepEqual([await labels(page), await isOwn(page), await notice(page)], [[7, 7, 4], false, ""]);
  await button(page, "Undo").click();
  await message(page, "Back to the model before");
  assert.deepEqual([await isOwn(page), await text(page, "Accuracy after")], [true, accuracy]);
  await button(page, "Undo").click();
  await message(page, "Back to the base model");
  await button(page, "Undo").click();
  await message(page, "Took back a 4");
  // The sketches have a history of their own.
  await page.getByRole("link", { name: "My sketches", exact: true }).click();
  await message(page, "Ready: press Names");
  assert.deepEqual([await labels(page), await button(page, "Undo").isDisabled()], [[], true]);
});

it("says what to do if another version of the page holds the storage", async (t) => {
  const { open } = await start(t);
  const old = await open("icon.svg");
  await inDatabase(old, 1, VERSION_1, true);
  const page = await open();
  assert.match(
    await notice(page),
    /^Another tab with an old version of this page blocks the storage: close it and reload/,
  );
  await new Hand().add(page, 1);
  await old.close();
  await page.reload();
  await ready(page);
  assert.deepEqual([await labels(page), await notice(page)], [[6, 8], ""]);
  await inDatabase(page, 4, "");
  await page.reload();
  await ready(page);
  assert.match(await notice(page), /^A newer version of this page has been here: reload this tab/);
});

it("leaves out what is damaged, and keeps the rest", async (t) => {
  const { open } = await start(t);
  const page = await open();
  const hand = new Hand();
  for (const digit of [2, 2]) await hand.add(page, digit);
  await page.evaluate(
    (name) =>
      new Promise((resolve, reject) => {
        const request = indexedDB.open(name);
        request.onsuccess = () => {
          const transaction = request.result.transaction("journal", "readwrite");
          const store = transaction.objectStore("journal");
          const image = new Float32Array(256).fill(0.5);
          const drawings = (drawing) => ({ task: "digits", kind: "drawings", drawings: [drawing], strokes: [] });
          const model = { task: "digits", kind: "model", by: "training", losses: [1], classes: [1], first: true };
          for (const entry of [
            {},
            { kind: "drawings" },
            { kind: "drawings", drawings: [], strokes: [] },
            { ...drawings({ image, label: 1, heldOut: false }), task: "other" },
            drawings(null),
            drawings({ image: new Float32Array(255), label: 1, heldOut: false }),
            drawings({ image: new Float32Array(256).fill(NaN), label: 1, heldOut: false }),
            drawings({ image, label: 10, heldOut: false }),
            { ...drawings({ image, label: 1, heldOut: false }), strokes: [[]] },
            { ...model, checkpoint: "no bytes" },
            { ...model, checkpoint: null, classes: [10] },
            { task: "sketches", kind: "names", names: [[0, " spaces "]] },
            { task: "sketches", kind: "names", names: [["0", "cat"]] },
            { task: "sketches", kind: "names", names: null },
          ])
            store.add(entry);
          // Of this form, but no checkpoint: perhaps one of a later version.
          store.add({ ...model, checkpoint: new Uint8Array(100) });
          transaction.oncomplete = () => (request.result.close(), resolve());
          transaction.onabort = () => reject(transaction.error);
        };
      }),
    DATABASE,
  );
  await page.reload();
  await message(page, "14 of the entries kept here were damaged and have been removed: the others are here");
  assert.deepEqual([await labels(page), await isOwn(page)], [[2, 2], false]);
  await page.reload();
  await message(page, "Your last model does not fit this version of the page: press Train to make a new one");
  await train(page);
  await page.reload();
  await message(page, "Ready: your own model");
});

it("keeps eight models to go back to", async (t) => {
  const { open } = await start(t);
  const page = await open();
  const hand = new Hand();
  for (const digit of [6, 6]) await hand.add(page, digit);
  await page.evaluate(drive, Array(10).fill("train"));
  const undo = async () => {
    await button(page, "Undo").click();
    await message(page, /^(Back|Took)/);
    const said = await page.getByRole("status").textContent();
    await page.evaluate(() => (document.getElementById("status").textContent = ""));
    return said;
  };
  const said = [];
  for (let i = 0; i < 8; i++) said.push(await undo());
  // The model before the oldest one is forgotten: that one stays.
  assert.deepEqual(said, [...Array(7).fill("Back to the model before"), "Took back a 6"]);
  assert.equal(await isOwn(page), true);
});

it("says what to do if the model cannot be started", async (t) => {
  const { context, close } = await startBrowser({ serviceWorkers: "block" });
  t.after(close);
  const page = context.pages()[0];
  // Requests of service workers, whose cache may be complete before the model is read, would not be seen here.
  await page.route("**/*.wasm", (route) => route.abort());
  await page.goto(server.url);
  await message(page, /^The model could not be started: reload the page when you are online \(/);
  assert.ok(await button(page, "Add").isDisabled());
  assert.deepEqual(await page.getByRole("button", { disabled: false }).allTextContents(), []);
});
