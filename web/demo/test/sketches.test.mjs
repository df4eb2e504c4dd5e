/** Own sketches: names that the user types, a head that grows and shrinks with them, and what Python reads in the files. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, it } from "node:test";
import { Hand, message, percent, ready, serve, startBrowser, train } from "./support.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const python = process.env.PYTHON ?? join(here, "..", "..", "..", ".venv", "bin", "python");
// With ONNXTRAIN_WEB_IMAGES=docs/images/web the tests write the pictures of the documentation.
const images = process.env.ONNXTRAIN_WEB_IMAGES;
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-sketches-"));
const at = (name) => join(scratch, name);
// What a name's sketches look like.
const SHAPES = { cat: 8, kitten: 8, "Haus 家": 4, "<b>fish</b>": 3, boat: 2 };

let server;
before(async () => {
  server = await serve();
});
after(async () => {
  await server.close();
  rmSync(scratch, { recursive: true, force: true });
});

/** Opens the page in a new browser; an error in the console fails the test at its `end`. */
async function start(t, options = {}) {
  const { context, close } = await startBrowser(options);
  t.after(close);
  const errors = [];
  const open = async (hash = "#/sketches") => {
    const page = await context.newPage();
    page.on("pageerror", (error) => errors.push(String(error)));
    page.on("console", (text) => text.type() === "error" && errors.push(text.text()));
    await page.goto(server.url + hash);
    await ready(page);
    return page;
  };
  return { context, open, page: await open(), end: () => assert.deepEqual(errors, []) };
}

const button = (page, name) => page.getByRole("button", { name, exact: true });
const text = (page, label) => page.getByLabel(label, { exact: true }).textContent();
const isOwn = (page) => page.locator("main").evaluate((main) => main.classList.contains("own"));
const names = (page) => page.locator("#digits bdi").allTextContents();
const drawn = (page) =>
  page
    .locator("#list canvas")
    .evaluateAll((items) => items.map((item) => item.getAttribute("aria-label").match(/^Drawing of (.*?)(,|$)/)[1]));

async function menu(page, job) {
  await button(page, "Names").click();
  await job();
  await button(page, "Done").click();
}

async function name(page, ...all) {
  await menu(page, async () => {
    for (const one of all) {
      await page.getByLabel("New name", { exact: true }).fill(one);
      await page.keyboard.press("Enter");
      await message(page, `Added the name “${one.normalize().trim()}”`);
    }
  });
}

async function rename(page, old, now) {
  await menu(page, async () => {
    await page.getByLabel(`Rename ${old}`, { exact: true }).fill(now);
    await page.keyboard.press("Enter");
    await message(page, `“${old}” is called “${now}” now`);
  });
}

async function remove(page, old) {
  await menu(page, async () => {
    await button(page, `Remove ${old}`).click();
    await message(page, `Removed “${old}” and its drawings: Undo brings them back`);
  });
}

async function add(page, hand, one, count = 1) {
  for (let i = 0; i < count; i++) {
    await hand.draw(page, SHAPES[one]);
    await page.getByRole("radio", { name: one, exact: true }).check();
    const before = Number(await text(page, "Drawings"));
    await button(page, "Add").click();
    await page.waitForFunction((n) => document.getElementById("drawings").textContent === String(n), before + 1);
    await message(page, `Added a drawing of “${one}”`);
  }
}

async function undo(page, said) {
  await button(page, "Undo").click();
  await message(page, said);
}

async function save(page, label, file) {
  const waiting = page.waitForEvent("download");
  await button(page, label).click();
  assert.equal((await waiting).suggestedFilename(), file);
  await (await waiting).saveAs(at(file));
  await message(page, file);
}

const load = (page, file) => page.getByLabel("Load", { exact: true }).setInputFiles(at(file));

// What ONNX Runtime reads with the saved model, what onnxtrain reads with the checkpoint, and what its command line
// reads in pictures of the drawings.
const SCRIPT = `
import csv, json, subprocess, sys
from pathlib import Path
import numpy as np, onnx, onnxruntime as ort
from PIL import Image
from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module
from onnxtrain.optimizers import AdamW
scratch = Path(sys.argv[1])
model = onnx.load(scratch / "sketches.onnx")
onnx.checker.check_model(model, full_check=True)
drawings = json.loads((scratch / "sketches.json").read_text())
images = np.array(drawings["images"], np.float32)
session = ort.InferenceSession(scratch / "sketches.onnx")
(logits,) = session.run(None, {"image": images})
known = json.loads(session.get_modelmeta().custom_metadata_map["onnxtrain.images"])
own = scratch / "artifacts"
generate_artifacts(scratch / "sketches.onnx", loss="cross_entropy", optimizer=AdamW(weight_decay=0.0),
                   artifact_directory=own, additional_output_names=["logits"])
state = CheckpointState.load_checkpoint(scratch / "sketches.safetensors")
module = Module(own / "training_model.onnx", state, own / "eval_model.onnx").eval()
_, again = module(images, np.array(drawings["labels"], np.int64))
pictures = scratch / "pictures"
pictures.mkdir()
for i, image in enumerate(images):
    Image.fromarray(np.minimum(np.round(image[0] * 255), 255).astype(np.uint8)).save(pictures / f"{i:03}.png")
subprocess.run([sys.executable, "-m", "onnxtrain", "predict", scratch / "sketches.onnx", "--data", pictures,
                "-o", scratch / "read.csv"], check=True, stdout=sys.stderr)
with open(scratch / "read.csv", newline="", encoding="utf-8") as file:
    read = [row["class"] for row in csv.DictReader(file)]
print(json.dumps({
    "outputs": [[d.dim_param or d.dim_value for d in o.type.tensor_type.shape.dim] for o in model.graph.output],
    "classes": known["classes"], "properties": json.loads(state.properties["onnxtrain.images"])["classes"],
    "read": logits.argmax(1).tolist(), "difference": float(np.abs(logits - again).max() / np.abs(logits).max()), "pictures": read,
    **{key: drawings[key] for key in ("names", "labels", "held_out")},
}))
`;

it("learns names, and others later; keeps what it knows; Python agrees; offline", async (t) => {
  const { context, page, end } = await start(t);
  assert.match(await page.getByRole("status").textContent(), /^Ready: press Names/);
  assert.ok(await button(page, "Add").isDisabled());
  const hand = new Hand(0.3);
  await name(page, "cat", "  Haus 家 ");
  await add(page, hand, "cat");
  assert.ok(await button(page, "Train").isDisabled());
  await message(page, "Train needs drawings of two names to learn");
  await add(page, hand, "Haus 家", 3);
  await add(page, hand, "cat", 2);
  await hand.draw(page, 8);
  await page.getByText("The model reads nothing", { exact: true }).waitFor();
  assert.equal(await percent(page, "Accuracy before"), 0);
  await train(page);
  await page.getByText(/^Now: cat \(\d+%\)$/).waitFor();
  const first = await text(page, "Accuracy after");
  assert.equal(first, "100%");
  await button(page, "Undo").click();
  await button(page, "Undo").click();
  await message(page, "Back to the base model");
  await page.reload();
  await ready(page);
  assert.deepEqual([await names(page), await isOwn(page)], [["cat", "Haus 家"], false]);
  await train(page);

  // A third name: the others are read as before, and then all three.
  await name(page, "<b>fish</b>");
  assert.equal(await text(page, "Accuracy after"), first);
  await add(page, hand, "<b>fish</b>", 3);
  assert.equal(await page.locator("#digits label, #list li").locator("b:not([class])").count(), 0);
  await train(page);
  assert.equal(await text(page, "Accuracy after"), "100%");
  await rename(page, "cat", "kitten");
  assert.deepEqual(await names(page), ["kitten", "Haus 家", "<b>fish</b>"]);
  assert.equal(await text(page, "Accuracy after"), "100%");

  await remove(page, "Haus 家");
  assert.deepEqual([await names(page), await text(page, "Drawings")], [["kitten", "<b>fish</b>"], "6"]);
  assert.equal(await text(page, "Accuracy after"), "100%");
  await undo(page, "“Haus 家” is back, with its drawings");
  assert.deepEqual([(await names(page))[1], await text(page, "Drawings")], ["Haus 家", "9"]);

  await save(page, "Save .onnx", "sketches.onnx");
  await save(page, "Save checkpoint", "sketches.safetensors");
  await save(page, "Save drawings", "sketches.json");
  const result = JSON.parse(
    execFileSync(python, ["-c", SCRIPT, scratch], { encoding: "utf8" }).trim().split("\n").at(-1),
  );
  const all = ["kitten", "Haus 家", "<b>fish</b>"];
  assert.deepEqual(result.outputs, [["batch", 3]]);
  for (const key of ["classes", "properties", "names"]) assert.deepEqual(result[key], all, key);
  assert.ok(result.difference <= 1e-5, `${result.difference}`);
  assert.deepEqual(
    result.pictures,
    result.read.map((label) => all[label]),
  );
  const shown = await page
    .locator("#list canvas")
    .evaluateAll((items) => items.map((item) => item.getAttribute("aria-label")).reverse());
  assert.deepEqual(
    shown,
    result.labels.map(
      (label, i) =>
        `Drawing of ${all[label]}${result.held_out[i] ? ", held out" : ""}, before training read as nothing, now read as ${all[result.read[i]]}`,
    ),
  );

  await page.evaluate(() => navigator.serviceWorker.ready);
  await context.setOffline(true);
  await page.reload();
  await ready(page);
  assert.deepEqual([await names(page), await text(page, "Accuracy after")], [all, "100%"]);
  await undo(page, "“kitten” is called “cat” again");
  await undo(page, "Back to the model before");
  await context.setOffline(false);

  // Each of the files in another browser, where one of the names is known already.
  const other = await start(t);
  await name(other.page, "<b>fish</b>", "boat");
  await load(other.page, "sketches.json");
  await message(other.page, "Added 9 drawings of sketches.json");
  assert.deepEqual(await names(other.page), ["<b>fish</b>", "boat", "kitten", "Haus 家"]);
  assert.deepEqual(
    (await drawn(other.page)).reverse(),
    result.labels.map((label) => all[label]),
  );
  for (const file of ["sketches.onnx", "sketches.safetensors"]) {
    await load(other.page, file);
    await message(other.page, `Loaded ${file}`);
    assert.deepEqual([await text(other.page, "Accuracy after"), (await names(other.page)).length], ["100%", 4], file);
  }
  await undo(other.page, "Back to the model before");
  await undo(other.page, "Back to the base model");
  await undo(other.page, "Took back 9 drawings");
  await undo(other.page, "Took back the names “kitten”, “Haus 家”");
  assert.deepEqual(await names(other.page), ["<b>fish</b>", "boat"]);
  await load(other.page, "sketches.onnx");
  await message(other.page, "Loaded sketches.onnx");
  assert.deepEqual(await names(other.page), ["<b>fish</b>", "boat", "kitten", "Haus 家"]);

  await t.test("refuses files that do not fit, and nothing changes", async () => {
    const file = JSON.parse(readFileSync(at("sketches.json"), "utf8"));
    const json = (to, change) => writeFileSync(at(to), JSON.stringify({ ...file, ...change }));
    json("digits.json", { names: undefined, labels: file.labels });
    json("label.json", { labels: file.labels.map(() => 3) });
    for (const [to, list] of [
      ["twice.json", ["a", "a", "b"]],
      ["blank.json", ["a", "", "b"]],
      ["long.json", ["a", "b", "c".repeat(25)]],
      ["number.json", ["a", "b", 3]],
      ["object.json", { length: 3 }],
    ])
      json(to, { names: list });
    json("many.json", { names: Array.from({ length: 9 }, (_, i) => `more ${i}`) });
    const changed = (to, from, by) =>
      writeFileSync(at(to), Buffer.from(readFileSync(at("sketches.onnx"), "latin1").replace(from, by), "latin1"));
    // Of the same length; without its names, the file is a model of nobody knows what.
    changed("nameless.onnx", "onnxtrain.images", "onnxtrain.imagez");
    changed("double.onnx", "<b>fish</b>", "kitten\\n\\n ".slice(0, 11));
    const noDrawings = "holds no drawings of this page, as";
    const noModel = "is no model of this page: yours is unchanged";
    for (const [bad, problem] of [
      ["digits.json", "holds digits: choose Digits, then load it. Nothing has changed"],
      ["label.json", `${noDrawings} drawing 1 is not 16 x 16 pixels of 0 to 1 with a name`],
      ["twice.json", `${noDrawings} names is not a list of different names`],
      ["blank.json", `${noDrawings} names is not`],
      ["long.json", `${noDrawings} names is not`],
      ["number.json", `${noDrawings} names is not`],
      ["object.json", `${noDrawings} names is not`],
      ["many.json", "would make more than 12 names: nothing has changed"],
      ["nameless.onnx", noModel],
      ["double.onnx", noModel],
    ]) {
      await load(other.page, bad);
      await message(other.page, `${bad} ${problem}`);
      assert.deepEqual(
        [await names(other.page), await text(other.page, "Drawings")],
        [["<b>fish</b>", "boat", "kitten", "Haus 家"], "0"],
      );
    }
    await other.page.getByRole("link", { name: "Digits" }).click();
    await message(other.page, "Ready: draw a digit");
    for (const bad of ["sketches.json", "sketches.onnx", "sketches.safetensors"]) {
      await load(other.page, bad);
      await message(
        other.page,
        `${bad} holds sketches with names: choose My sketches, then load it. Nothing has changed`,
      );
    }
    assert.equal(await isOwn(other.page), false);
  });
  other.end();
  end();
});

it("keeps each task's drawings, model, ink and way back to itself", async (t) => {
  const { page, end } = await start(t);
  const hand = new Hand(0.3);
  await name(page, "cat", "boat");
  await add(page, hand, "cat");
  await add(page, hand, "boat", 2);
  await train(page);
  await hand.draw(page, 2);
  await page.getByText(/^Now: boat/).waitFor();
  if (images) await page.screenshot({ path: join(images, "sketches.png"), fullPage: true });
  const link = (one) => page.getByRole("link", { name: one, exact: true });
  await link("Digits").click();
  await message(page, "Ready: draw a digit");
  assert.equal(await page.title(), "Teach it your handwriting");
  assert.deepEqual(
    [await text(page, "Drawings"), await isOwn(page), (await names(page)).join("")],
    ["0", false, "0123456789"],
  );
  assert.ok(await button(page, "Undo").isDisabled());
  assert.equal(await button(page, "Names").isVisible(), false);
  assert.equal(await link("Digits").getAttribute("aria-current"), "page");
  for (const digit of [3, 5]) await hand.add(page, digit);
  await page.goBack();
  await message(page, "Ready: your own model");
  assert.deepEqual([await text(page, "Drawings"), await isOwn(page)], ["3", true]);
  // The ink that was left here, then the training, a drawing.
  await page.getByText(/^Now: boat/).waitFor();
  await button(page, "Undo").click();
  await undo(page, "Back to the base model");
  await undo(page, "Took back a drawing of “boat”");
  await link("Digits").click();
  await message(page, "Ready: draw a digit");
  await page.reload();
  await ready(page);
  assert.equal(await text(page, "Drawings"), "2");
  await undo(page, "Took back a 5");
  end();
});

it("takes names of 1 to 24 characters, each once, and says what is wrong with others", async (t) => {
  const { page, end } = await start(t);
  await button(page, "Names").click();
  const field = page.getByLabel("New name", { exact: true });
  const problem = () => field.evaluate((input) => input.validationMessage);
  const family = "👨‍👩‍👧";
  for (const good of ["é", "e\u0301e", family, "שלום", "x".repeat(24), "nothing", "a  b"]) {
    await field.fill(good);
    await page.keyboard.press("Enter");
    await message(page, `Added the name “${good.normalize().replace("  ", " ")}”`);
  }
  const kept = ["é", "ée", family, "שלום", "x".repeat(24), "nothing", "a b"];
  assert.deepEqual(await names(page), kept);
  for (const [bad, said] of [
    ["", "Type a name of at least one character"],
    [" \t ", "Type a name of at least one character"],
    ["\u200d", "Type a name of at least one character"],
    ["x".repeat(25), "A name has at most 24 characters"],
    ["a\u0007", "A name has no control characters"],
    ["a\ud800", "A name has no control characters"],
    [" e\u0301 ", "There is a name “é” already"],
  ]) {
    await field.evaluate((input, value) => (input.value = value), bad);
    await field.press("Enter");
    assert.equal(await problem(), said, JSON.stringify(bad));
  }
  await field.fill("fine");
  assert.equal(await problem(), "");
  const other = page.getByLabel("Rename a b", { exact: true });
  await other.fill("é");
  await page.keyboard.press("Enter");
  assert.equal(await other.evaluate((input) => input.validationMessage), "There is a name “é” already");
  assert.deepEqual(await names(page), kept);
  for (let i = 0; i < 5; i++) {
    await field.fill(`more ${i}`);
    await page.keyboard.press("Enter");
    await message(page, `Added the name “more ${i}”`);
  }
  assert.ok(await field.isDisabled());
  assert.equal(await field.getAttribute("placeholder"), "At most 12 names");
  await button(page, "Remove é").focus();
  await page.keyboard.press("Enter");
  await message(page, "Removed “é”");
  // The button is gone, and the keyboard goes on at the next place.
  assert.equal(await page.evaluate(() => document.activeElement.ariaLabel), "New name");
  assert.equal(await field.isDisabled(), false);
  end();
});

it("works by the keyboard alone, and in two tabs", async (t) => {
  const { page, open, end } = await start(t);
  const press = async (...keys) => {
    for (const key of keys) await page.keyboard.press(key);
  };
  await press("Tab", "Tab", "Tab");
  assert.match(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), /^Drawing area/);
  // Nothing to choose yet: the next is Names.
  await press("Tab", "Enter");
  for (const one of ["up", "side"]) {
    await page.keyboard.type(one);
    await press("Enter");
    await message(page, `Added the name “${one}”`);
  }
  await press("Escape");
  assert.equal(await page.evaluate(() => document.activeElement.id), "names");
  await page.getByLabel(/^Drawing area/).focus();
  for (const [key, arrow, back] of [
    ["1", "ArrowDown", "ArrowUp"],
    ["2", "ArrowRight", "ArrowLeft"],
    ["2", "ArrowRight", "ArrowLeft"],
  ]) {
    const before = Number(await text(page, "Drawings"));
    await press("Space", ...Array(5).fill(`Shift+${arrow}`), "Space", ...Array(5).fill(`Shift+${back}`), key, "Enter");
    await page.waitForFunction((n) => document.getElementById("drawings").textContent === String(n), before + 1);
    await ready(page);
  }
  assert.deepEqual(await drawn(page), ["side", "side", "up"]);
  await train(page);
  for (const role of ["button", "radio", "img", "progressbar", "textbox", "list", "application", "group", "link"]) {
    for (const element of await page.getByRole(role).all()) {
      const named = await element.evaluate(
        (node) => node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent.trim(),
      );
      assert.ok(named, `${role} without a name: ${await element.evaluate((node) => node.outerHTML)}`);
    }
  }
  assert.equal(await page.locator('[role="status"]').count(), 1);

  // Another tab: it hears of new names, and both add some at the same time.
  const other = await open();
  assert.deepEqual([await names(other), await isOwn(other)], [["up", "side"], true]);
  const added = (tab, list) =>
    tab.evaluate(async (all) => {
      for (const one of all) {
        const form = document.getElementById("new-name");
        form.querySelector("input").value = one;
        form.requestSubmit();
        while (document.getElementById("page").ariaBusy === "true") await new Promise((done) => setTimeout(done, 1));
      }
    }, list);
  await Promise.all([added(page, ["a", "same", "b"]), added(other, ["c", "same", "d"])]);
  for (const tab of [page, other]) {
    await tab.waitForFunction(() => document.querySelectorAll("#digits bdi").length === 7);
    await ready(tab);
  }
  assert.deepEqual(await names(page), await names(other));
  assert.deepEqual((await names(page)).toSorted(), ["a", "b", "c", "d", "same", "side", "up"]);
  // What one removes, the other cannot add to.
  await new Hand().draw(other, 1);
  await other.getByRole("radio", { name: "a", exact: true }).check();
  await remove(page, "a");
  await other.waitForFunction(() => document.querySelectorAll("#digits bdi").length === 6);
  await ready(other);
  await button(other, "Add").click();
  await message(other, "Choose the name of this drawing, then press Add");
  assert.deepEqual([await text(other, "Drawings"), await isOwn(other)], ["3", true]);
  end();
});
