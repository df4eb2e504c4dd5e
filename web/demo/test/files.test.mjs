/** Ways back and files: the base model, the trained .onnx, checkpoints and drawings; Python reads the same in them. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, it } from "node:test";
import { Hand, labels, message, ready, serve, startBrowser, train } from "./support.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const python = process.env.PYTHON ?? join(here, "..", "..", "..", ".venv", "bin", "python");
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-files-"));
const at = (name) => join(scratch, name);
const DIGITS = [4, 4, 1, 7, 7, 1, 9, 9];
// What both models read on the drawings, by ONNX Runtime in Python; and variants of the model.
const SCRIPT = `
import json, sys
import numpy as np, onnx, onnxruntime as ort
from onnx import numpy_helper
from onnxtrain.api import CheckpointState, Module
artifacts, scratch = sys.argv[1:]
state = CheckpointState.load_checkpoint(f"{artifacts}/checkpoint")
base = Module(f"{artifacts}/training_model.onnx", state, f"{artifacts}/eval_model.onnx")
base.export_model_for_inferencing(f"{scratch}/base.onnx", ["logits"])
drawings = json.load(open(f"{scratch}/drawings.json"))
images = np.array(drawings["images"], np.float32)
model = onnx.load(f"{scratch}/handwriting.onnx")
onnx.checker.check_model(model, full_check=True)
result = {"labels": drawings["labels"], "held_out": drawings["held_out"]}
for name, path in (("before", f"{scratch}/base.onnx"), ("now", f"{scratch}/handwriting.onnx")):
    logits = ort.InferenceSession(path).run(["logits"], {"image": images})[0]
    powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    result[name] = (powers / powers.sum(1, keepdims=True)).tolist()
print(json.dumps(result))
tensors = {t.name: t for t in model.graph.initializer}
for t in tensors.values():
    array = numpy_helper.to_array(t)
    t.ClearField("raw_data")
    t.float_data.extend(array.ravel().tolist())
onnx.save(model, f"{scratch}/float_data.onnx")
tensors["head.bias"].float_data[3] = float("nan")
onnx.save(model, f"{scratch}/nan.onnx")
tensors["head.bias"].dims[0] = 9
onnx.save(model, f"{scratch}/shape.onnx")
tensors["head.bias"].name = "bias"
onnx.save(model, f"{scratch}/other.onnx")
`;

let server;
before(async () => {
  server = await serve();
});
after(async () => {
  await server.close();
  rmSync(scratch, { recursive: true, force: true });
});

async function start(t) {
  const { context, close } = await startBrowser();
  t.after(close);
  const page = context.pages()[0];
  await page.goto(server.url);
  await ready(page);
  return page;
}

const text = (page, label) => page.getByLabel(label, { exact: true }).textContent();
const button = (page, name) => page.getByRole("button", { name, exact: true });
const isOwn = (page) => page.locator("main").evaluate((main) => main.classList.contains("own"));
const load = (page, file) => page.getByLabel("Load", { exact: true }).setInputFiles(at(file));
const both = async (page) => [await text(page, "Accuracy before"), await text(page, "Accuracy after")];
const argmax = (row) => row.indexOf(Math.max(...row));

async function save(page, name, file) {
  const waiting = page.waitForEvent("download");
  await button(page, name).click();
  await (await waiting).saveAs(at(file));
  await message(page, file);
}

it("shows the accuracy from the second drawing on", async (t) => {
  const page = await start(t);
  const hand = new Hand();
  await hand.add(page, 3);
  assert.equal(await text(page, "Accuracy before"), "–");
  await hand.add(page, 8);
  assert.match(await text(page, "Accuracy before"), /^(0|100)%$/);
  assert.equal(await page.getByRole("img", { name: "Drawing of 8, held out" }).count(), 1);
});

it("goes back, saves and loads, and Python agrees", async (t) => {
  const page = await start(t);
  const hand = new Hand(0.7);
  for (const digit of DIGITS) await hand.add(page, digit);
  await train(page);
  await ready(page);
  const accuracies = await both(page);
  await save(page, "Save .onnx", "handwriting.onnx");
  await save(page, "Save checkpoint", "handwriting.safetensors");
  await save(page, "Save drawings", "drawings.json");
  await button(page, "Back to the base model").focus();
  await page.keyboard.press("Enter");
  await message(page, "Back to the base model: Undo brings yours back");
  assert.deepEqual([await isOwn(page), await text(page, "Accuracy after")], [false, "–"]);
  assert.ok(await button(page, "Back to the base model").isDisabled());
  const result = JSON.parse(
    execFileSync(python, ["-c", SCRIPT, join(here, "..", "dist", "model"), scratch], { encoding: "utf8" }),
  );

  // Ticks, crosses and accuracies are those of ONNX Runtime in Python.
  assert.deepEqual(result.labels, DIGITS);
  const measured = ["before", "now"].map((model) => {
    const heldOut = result[model].filter((_, i) => result.held_out[i]);
    const right = heldOut.filter((row, i) => argmax(row) === DIGITS.filter((_, k) => result.held_out[k])[i]).length;
    return `${Math.round((100 * right) / heldOut.length)}%`;
  });
  assert.deepEqual(measured, accuracies);

  // Undo brings the trained model back, also after a reload; then the training is taken back.
  await page.reload();
  await ready(page);
  assert.equal(await isOwn(page), false);
  await button(page, "Undo").click();
  await message(page, "Back to the model before");
  assert.deepEqual(await both(page), accuracies);
  const names = await page
    .getByRole("img", { name: /^Drawing of/ })
    .evaluateAll((items) => items.map((item) => [item.getAttribute("aria-label"), item.nextSibling.textContent]));
  const mark = (row, i) => (argmax(row) === DIGITS[i] ? "✓" : "✗");
  const expected = DIGITS.map((digit, i) => {
    const [first, second] = [result.before[i], result.now[i]];
    return [
      `Drawing of ${digit}${result.held_out[i] ? ", held out" : ""}, before training read as ${argmax(first)}, now read as ${argmax(second)}`,
      `${digit} ${mark(first, i)}${mark(second, i)}`,
    ];
  });
  assert.deepEqual(names, expected.reverse());
  await button(page, "Undo").click();
  await message(page, "Back to the base model");
  assert.equal(await isOwn(page), false);

  // Each of the files in another browser.
  const other = await start(t);
  await load(other, "drawings.json");
  await message(other, `Added ${DIGITS.length} drawings of drawings.json`);
  assert.deepEqual(await labels(other), DIGITS);
  for (const file of ["handwriting.onnx", "handwriting.safetensors", "float_data.onnx"]) {
    await load(other, file);
    await message(other, `Loaded ${file}`);
    assert.deepEqual(await both(other), accuracies, file);
  }

  // The bars are the probabilities of Python, of both models; the last drawing of this browser is drawn again.
  await load(page, "handwriting.onnx");
  await message(page, "Loaded");
  await button(page, "Undo").click();
  await message(page, "Back to the base model");
  await button(page, "Undo").click();
  await message(page, "Took back a 9");
  await load(page, "handwriting.onnx");
  await message(page, "Loaded");
  await page.getByText(/^Before: \d/).waitFor();
  for (const [model, rows] of [
    ["before", result.before],
    ["after", result.now],
  ]) {
    const bars = await page
      .locator(`#digits .${model}`)
      .evaluateAll((items) => items.map((item) => Number(item.style.getPropertyValue("--p"))));
    const difference = Math.max(...bars.map((value, i) => Math.abs(value - rows.at(-1)[i])));
    assert.ok(difference <= 0.0006, `${model}: ${bars} instead of ${rows.at(-1)}`);
  }

  await t.test("refuses files that do not fit, and nothing changes", async () => {
    const drawings = JSON.parse(readFileSync(at("drawings.json"), "utf8"));
    const json = (name, change) => writeFileSync(at(name), JSON.stringify({ ...drawings, ...change }));
    json("format.json", { format: "other" });
    json("short.json", { labels: drawings.labels.slice(1) });
    json("label.json", { labels: drawings.labels.map(() => 1.5) });
    json("rows.json", { images: drawings.images.map(([rows]) => [rows.slice(1)]) });
    json("bright.json", {
      images: drawings.images.map(([rows]) => [rows.map((row) => row.map((value) => value + 1))]),
    });
    json("many.json", {
      images: Array.from({ length: 1000 }, (_, i) => [rows16((i + 1) / 2048)]),
      labels: Array(1000).fill(1),
      held_out: Array(1000).fill(false),
    });
    writeFileSync(at("no.json"), '{"format": ');
    writeFileSync(at("empty.onnx"), "");
    writeFileSync(at("cut.onnx"), readFileSync(at("handwriting.onnx")).subarray(0, 20_000));
    writeFileSync(at("cut.safetensors"), readFileSync(at("handwriting.safetensors")).subarray(0, 20_000));
    writeFileSync(at("large.onnx"), "");
    truncateSync(at("large.onnx"), 33 * 2 ** 20);
    const noModel = "is no model of this page: yours is unchanged";
    const noDrawings = "holds no drawings of this page, as";
    for (const [file, problem] of [
      ["format.json", `${noDrawings} its format is not "onnxtrain-drawings": nothing has changed`],
      ["short.json", `${noDrawings} images, labels and held_out differ in length`],
      ["label.json", `${noDrawings} drawing 1 is not 16 x 16 pixels of 0 to 1 with a digit`],
      ["rows.json", `${noDrawings} drawing 1 is not`],
      ["bright.json", `${noDrawings} drawing 1 is not`],
      ["no.json", noDrawings],
      ["many.json", "has too many drawings: 1000 are the most. Nothing has changed"],
      ["drawings.json", "has no drawings that are not here already"],
      ["empty.onnx", noModel],
      ["cut.onnx", noModel],
      ["nan.onnx", noModel],
      ["shape.onnx", noModel],
      ["other.onnx", noModel],
      ["cut.safetensors", noModel],
      ["large.onnx", "is too large for drawings or a model of this page: nothing has changed"],
    ]) {
      await load(other, file);
      await message(other, `${file} ${problem}`);
      assert.ok(await other.locator("#status.failed").isVisible(), file);
      assert.deepEqual([await labels(other), await both(other)], [DIGITS, accuracies], file);
    }
    await train(other);
  });
});

function rows16(value) {
  return Array.from({ length: 16 }, () => Array(16).fill(value));
}
