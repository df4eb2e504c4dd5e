/** The page in headless Chromium: photos, camera, files, two tabs. */

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { it } from "node:test";
import {
  addClass,
  addFiles,
  button,
  download,
  fixture,
  message,
  open,
  openMenu,
  photosOf,
  ready,
  runPython,
  status,
  text,
} from "./support.mjs";

const LIMIT = { timeout: 600_000 };
const photosShown = (page, name) => page.getByRole("list", { name: `Photos of ${name}` }).getByRole("img");

/** In the page: the pictures that the database has, with their classes, and the pixels that a backbone takes of them. */
const keptPictures = (page, size) =>
  page.evaluate(async (side) => {
    const entries = await new Promise((resolve, reject) => {
      const request = indexedDB.open("onnxtrain-photos");
      request.onerror = reject;
      request.onsuccess = () => {
        const reading = request.result.transaction("journal").objectStore("journal").getAll();
        reading.onsuccess = () => (request.result.close(), resolve(reading.result));
      };
    });
    const names = new Map(entries.filter(({ kind }) => kind === "class").map(({ id, name }) => [id, name]));
    const pictures = [];
    for (const { kind, picture, label, heldOut } of entries) {
      if (kind !== "photo") continue;
      const bitmap = await createImageBitmap(new Blob([picture], { type: "image/jpeg" }));
      const canvas = new OffscreenCanvas(side, side);
      const context = canvas.getContext("2d", { willReadFrequently: true });
      context.imageSmoothingQuality = "high";
      context.drawImage(bitmap, 0, 0, side, side);
      const { data } = context.getImageData(0, 0, side, side);
      const pixels = [0, 1, 2].flatMap((c) => Array.from({ length: side * side }, (_, i) => data[4 * i + c] / 255));
      const jpeg = btoa(String.fromCharCode(...picture));
      pictures.push({ name: names.get(label), heldOut, pixels, jpeg });
    }
    return pictures;
  }, size);

/** Chooses a photo, and returns the bars of all classes by name. */
async function bars(page, photo) {
  await page.getByRole("button", { name: photo }).click();
  const shown = await page.evaluate(() =>
    [...document.querySelectorAll(".class")].map((card) => [
      card.querySelector(".name").value,
      Number(card.querySelector(".bar").style.getPropertyValue("--p")),
    ]),
  );
  await page.getByRole("button", { name: photo }).click();
  return Object.fromEntries(shown);
}

it("learns classes from files, grows by one, exports and keeps everything", LIMIT, async (t) => {
  const { page, tab, problems } = await open(t);
  assert.match(await status(page), /^Ready: type the name/);
  await addClass(page, "cup");
  await addClass(page, "pen");
  // The first two photos of two classes: two to learn, and two to measure.
  await addFiles(page, "cup", ...photosOf("cup", 2));
  assert.equal(await text(page, "Held-out accuracy"), "–");
  await addFiles(page, "pen", ...photosOf("pen", 2));
  assert.match(await text(page, "Held-out accuracy"), /^\d+%$/);
  assert.match(await page.locator("#count").textContent(), /^[012] of 2 held-out photos$/);
  assert.match(await page.locator("#curve-text").textContent(), /^The loss of 40 steps goes from 0\.69 to 0\.[0-4]/);
  await addFiles(page, "cup", ...photosOf("cup").slice(2));
  await addFiles(page, "pen", ...photosOf("pen").slice(2));
  const before = await bars(page, /^Photo 1 of cup/);
  assert.ok(before.cup > 0.8 && Math.abs(before.cup + before.pen - 1) < 0.002, JSON.stringify(before));

  // A class without photos changes nothing; with photos, the head grows by it and still knows the others.
  await addClass(page, "key");
  assert.deepEqual(await bars(page, /^Photo 1 of cup/), { ...before, key: 0 });
  await addFiles(page, "key", ...photosOf("key"));
  const photos = await page.getByRole("img", { name: /^Photo \d of/ }).evaluateAll((all) => all.map(({ alt }) => alt));
  assert.equal(photos.length, 15);
  for (const alt of photos.filter((item) => !item.includes("held out"))) {
    const [, name, read] = /of (\w+), read as (\w+)/.exec(alt);
    assert.equal(read, name, alt);
  }
  // Held out: the second of each class, and by hash more of them.
  const heldOut = photos.filter((alt) => alt.includes("held out"));
  for (const name of ["cup", "pen", "key"]) assert.match(heldOut.join(), new RegExp(`Photo 2 of ${name}`));
  const right = heldOut.filter((alt) => /of (\w+),.* read as \1$/.test(alt)).length;
  assert.equal(await page.locator("#count").textContent(), `${right} of ${heldOut.length} held-out photos`);
  assert.equal(await text(page, "Held-out accuracy"), `${Math.round((100 * right) / heldOut.length)}%`);

  // The exported model reads in ONNX Runtime in Python what the page reads.
  const model = await download(page, "Save .onnx");
  const pictures = await keptPictures(page, 64);
  const path = join(dirname(fixture("")), "pictures.json");
  writeFileSync(path, JSON.stringify(pictures));
  const exported = runPython("exported.py", model, path);
  assert.deepEqual([exported.classes, exported.output], [["cup", "pen", "key"], "scores"]);
  const numbers = { cup: 0, pen: 0, key: 0 };
  for (const [i, { name }] of pictures.entries()) {
    const shown = Object.values(await bars(page, new RegExp(`^Photo ${++numbers[name]} of ${name}`)));
    const { browser, pillow } = exported.results[i];
    // Browsers scale a bitmap and an image a little differently.
    browser.forEach((score, c) => assert.ok(Math.abs(score - shown[c]) < 0.01, `${name} ${browser} ${shown}`));
    pillow.forEach((score, c) => assert.ok(Math.abs(score - shown[c]) < 0.1, `${name} ${pillow} ${shown}`));
  }

  // A photo that is here already is refused, in any class.
  await addFiles(page, "pen", fixture("cup-0.png"));
  assert.equal(await status(page), "cup-0.png is a photo of cup already");

  // All of it is there after a reload, at once, without a training.
  const accuracy = await text(page, "Held-out accuracy");
  const bar = await bars(page, /^Photo 3 of key/);
  await page.reload();
  await ready(page);
  assert.equal(await status(page), "Ready: your things are here");
  assert.deepEqual(await bars(page, /^Photo 3 of key/), bar);
  assert.equal(await text(page, "Held-out accuracy"), accuracy);
  assert.equal(await page.evaluate(() => performance.getEntriesByName("trained").length), 0);

  // The project as a file: removed, brought back, removed, loaded.
  const project = await download(page, "Save project");
  await openMenu(page);
  await button(page, "Remove all").click();
  await message(page, /^Removed all/);
  await ready(page);
  assert.deepEqual([await photosShown(page, "cup").count(), await text(page, "Held-out accuracy")], [0, "–"]);
  await page.getByLabel("Load project").setInputFiles(project);
  await message(page, /^Loaded/);
  await ready(page);
  assert.deepEqual(await bars(page, /^Photo 3 of key/), bar);
  assert.equal(await text(page, "Held-out accuracy"), accuracy);

  // Another tab sees what this one does, and Undo brings back what was removed.
  const other = await tab();
  await page.bringToFront();
  await button(page, "Remove the class key").click();
  await message(page, "Removed key: Undo brings it back");
  await ready(page);
  await other.getByLabel("Name of the class key").waitFor({ state: "detached" });
  assert.deepEqual(Object.keys(await bars(page, /^Photo 1 of cup/)), ["cup", "pen"]);
  await button(page, "Undo").click();
  await message(page, "Brought back key");
  await ready(page);
  await other.getByLabel("Name of the class key").waitFor();
  await button(page, "Remove photo 1").first().click();
  await message(page, "Removed the photo: Undo brings it back");
  await ready(page);
  assert.equal(await photosShown(page, "cup").count(), 4);
  // The keyboard stays at the bins.
  assert.equal(await page.evaluate(() => document.activeElement.ariaLabel), "Remove photo 1");
  const name = page.getByLabel("Name of the class pen");
  await name.fill("pencil");
  await name.press("Enter");
  await other.getByLabel("Name of the class pencil").waitFor();
  await page.getByLabel("Name of the class pencil").fill("cup");
  await page.getByLabel("Name of the class pencil").press("Enter");
  await message(page, "There is a class named cup already");
  assert.equal(await page.getByLabel("Name of the class pencil").inputValue(), "pencil");
  assert.deepEqual(problems, []);
});

it("adds photos in two tabs at the same time", LIMIT, async (t) => {
  const { page, tab, problems } = await open(t);
  await addClass(page, "cup");
  await addClass(page, "pen");
  const other = await tab();
  await Promise.all([
    page.getByLabel("Add files to cup").setInputFiles(photosOf("cup")),
    other.getByLabel("Add files to pen").setInputFiles(photosOf("pen")),
  ]);
  for (const each of [page, other]) {
    await each.bringToFront();
    await each.getByRole("img", { name: /^Photo 5 of cup.*, read as/ }).waitFor();
    await each.getByRole("img", { name: /^Photo 5 of pen.*, read as/ }).waitFor();
    await ready(each);
  }
  assert.deepEqual(await bars(page, /^Photo 1 of cup/), await bars(other, /^Photo 1 of cup/));
  assert.equal(await text(page, "Held-out accuracy"), await text(other, "Held-out accuracy"));
  assert.deepEqual(problems, []);
});

it("takes strange photos, and says of each other file what is wrong with it", LIMIT, async (t) => {
  const { page, problems } = await open(t);
  await addClass(page, "odd");
  for (const [name, said] of [
    ["empty.jpg", "empty.jpg is empty"],
    ["text.jpg", "text.jpg isn't an image that this browser can read"],
    ["cut.jpg", /^cut\.jpg (is damaged|isn't an image that this browser can read)$/],
    ["huge.png", "huge.png has 10000 x 10000 pixels; the maximum is 64 million"],
  ]) {
    await addFiles(page, "odd", fixture(name));
    assert.match(await status(page), typeof said === "string" ? new RegExp(`^${said}$`) : said);
    assert.equal(await page.locator(".photos li").count(), 0);
  }
  const names = ["pixel.png", "animated.gif", "turned.jpg", "transparent.png"];
  await addFiles(page, "odd", ...names.map(fixture), fixture("text.jpg"));
  assert.match(await status(page), /^Added 4 photos.*\. text\.jpg isn't an image/);
  const pictures = await keptPictures(page, 2);
  // [red, green, blue] of the four quarters.
  const quarter = ({ pixels }, i) => [0, 1, 2].map((c) => Math.round(2 * pixels[4 * c + i]) / 2);
  const shown = pictures.map((picture) => [0, 1, 2, 3].map((i) => quarter(picture, i)));
  const [red, blue, white, green] = [
    [1, 0, 0],
    [0, 0, 1],
    [1, 1, 1],
    [0, 0.5, 0],
  ];
  assert.deepEqual(shown, [
    Array(4).fill(red),
    Array(4).fill(blue),
    [green, green, white, white],
    Array(4).fill(white),
  ]);

  // Pasted and dropped pictures go to the class that was used last, and to the one that they are dropped on.
  await addClass(page, "next");
  const give = (event, target, ...files) =>
    page.evaluate(
      ([type, selector, contents]) => {
        const data = new DataTransfer();
        for (const [name, base64] of contents) {
          const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
          data.items.add(new File([bytes], name, { type: "image/png" }));
        }
        const init = { bubbles: true, cancelable: true };
        document
          .querySelector(selector)
          .dispatchEvent(
            type === "paste"
              ? new ClipboardEvent(type, { ...init, clipboardData: data })
              : new DragEvent(type, { ...init, dataTransfer: data }),
          );
      },
      [event, target, files.map((file) => [file, readFileSync(fixture(file)).toString("base64")])],
    );
  await give("paste", "body", "cup-0.png");
  await photosShown(page, "next").first().waitFor();
  await give("drop", ".class", "cup-1.png", "cup-2.png");
  await page.getByRole("img", { name: /^Photo 6 of odd/ }).waitFor();
  await ready(page);
  assert.equal(await photosShown(page, "next").count(), 1);

  // Files that are no projects change nothing.
  const path = join(dirname(fixture("")), "broken.json");
  for (const [content, said] of [
    ["", "it is not the JSON that this page writes"],
    ["{}", 'its format is not "onnxtrain-photos"'],
    ['{"format":"onnxtrain-photos","version":2}', "a newer version of this page has written it"],
    [
      '{"format":"onnxtrain-photos","version":1,"content":[{"kind":"class","id":"a","name":""}]}',
      "its entry 1 is damaged",
    ],
    ['{"format":"onnxtrain-photos","version":1,"content":[{"Float32Array":"AAA="}]}', "it is not the JSON"],
  ]) {
    writeFileSync(path, content);
    await page.getByLabel("Load project").setInputFiles(path);
    await message(page, said);
    assert.match(await status(page), /^broken\.json can't be loaded as a project, because .*\. Nothing has changed$/);
  }
  assert.equal(await page.locator(".photos li").count(), 7);
  assert.deepEqual(problems, []);
});

it("reads what the camera sees, and takes photos of it", LIMIT, async (t) => {
  const { page, problems } = await open(t, { camera: fixture("camera.mjpeg") });
  await addClass(page, "cup");
  await addClass(page, "pen");
  await addFiles(page, "cup", ...photosOf("cup"));
  await addFiles(page, "pen", ...photosOf("pen"));
  await button(page, "Start camera").click();
  await page
    .locator("#guess")
    .filter({ hasText: /^cup \(\d+%\)$/ })
    .waitFor();
  await page.locator("#spoken").filter({ hasText: "It sees cup" }).waitFor();
  await button(page, "Take photo of cup").click();
  await message(page, /^(Took a photo|The camera's picture is a photo of cup already)/);
  await ready(page);
  await button(page, "Stop camera").click();
  await ready(page);
  assert.equal(await page.locator("#guess").textContent(), "");
  assert.ok(await page.locator("#hint").isVisible());
  assert.deepEqual(problems, []);
});

it("says why there is no camera", LIMIT, async (t) => {
  const none = await open(t);
  await button(none.page, "Start camera").click();
  await message(none.page, /^There is no camera: connect one, or add photos as files instead\.$/);
  assert.deepEqual(none.problems, []);
  const denied = await open(t, { camera: true, allowed: false });
  const cdp = await denied.context.newCDPSession(denied.page);
  const permission = { name: "camera" };
  await cdp.send("Browser.setPermission", { permission, setting: "denied", origin: new URL(denied.url).origin });
  await addClass(denied.page, "cup");
  await button(denied.page, "Take photo of cup").click();
  await message(denied.page, /^The camera is not allowed here: allow it .*, or add photos as files instead\.$/);
});

it("uses a backbone of the user's, and says what is wrong with other files", LIMIT, async (t) => {
  const { page, problems } = await open(t);
  await addClass(page, "cup");
  await addClass(page, "pen");
  await addFiles(page, "cup", ...photosOf("cup", 3));
  await addFiles(page, "pen", ...photosOf("pen", 3));
  const before = await bars(page, /^Photo 1 of cup/);
  await openMenu(page);
  await page.getByText("Backbone: this page's").click();
  const give = async (name) => {
    await page.getByLabel("Use your own backbone").setInputFiles(fixture(`${name}.onnx`));
    await ready(page);
    return status(page);
  };
  const takes = "not a single float32 image \\[1, 3, height, width\\]";
  for (const [name, said] of [
    ["wrong-file", "ONNX Runtime can't open it as an .onnx model"],
    ["wrong-order", `its input is float32 \\[1, 32, 32, 3\\], ${takes}`],
    ["wrong-dtype", `its input is uint8 \\[1, 3, 32, 32\\], ${takes}`],
    ["wrong-batch", `its input is float32 \\[8, 3, 32, 32\\], ${takes}`],
    ["wrong-side", "its images are 32 x 48, and this page only has square ones"],
    ["wrong-output", "its output is float32 \\[\\], not 2 to 1280 features as float32 \\[1, features\\]"],
    ["wrong-values", "its features for a gray image aren't finite"],
  ])
    assert.match(
      await give(name),
      new RegExp(`^${name}\\.onnx can't be used as a backbone, because ${said}\\. Nothing has changed$`),
    );
  assert.deepEqual(await bars(page, /^Photo 1 of cup/), before);
  await page.evaluate(() => (document.getElementById("size").value = "40"));
  assert.equal(await give("map"), "map.onnx is the backbone now: 6 features of 40 x 40 pixels");
  assert.equal(await give("fixed"), "fixed.onnx is the backbone now: 6 features of 32 x 32 pixels");
  await page.getByRole("img", { name: /^Photo 3 of pen.*, read as/ }).waitFor();
  const after = await bars(page, /^Photo 1 of cup/);
  assert.notDeepEqual(after, before);
  await page.reload();
  await ready(page);
  assert.equal(await page.locator("#backbone").textContent(), "fixed.onnx");
  assert.deepEqual(await bars(page, /^Photo 1 of cup/), after);
  // The exported model has the backbone inside, with the pixels that it takes.
  const model = await download(page, "Save .onnx");
  const path = join(dirname(fixture("")), "pictures.json");
  writeFileSync(path, JSON.stringify((await keptPictures(page, 32)).slice(0, 1)));
  const { results, input, side, activation } = runPython("exported.py", model, path);
  assert.deepEqual([input, side, activation], [[1, 3, 32, 32], [32, 32], "softmax"]);
  results[0].browser.forEach((score, c) => assert.ok(Math.abs(score - Object.values(after)[c]) < 0.002, `${score}`));
  await openMenu(page);
  await page.getByText("Backbone: fixed.onnx").click();
  await button(page, "Back to this page's backbone").click();
  await message(page, "Back to this page's backbone");
  await ready(page);
  assert.deepEqual(Object.keys(await bars(page, /^Photo 1 of cup/)), ["cup", "pen"]);
  assert.deepEqual(problems, []);
});
