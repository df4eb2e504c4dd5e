/** The page: connects the drawing area, the buttons and the model. */

import { drawCurve } from "./chart.js";
import { Model } from "./model.js";
import { Pad, type Stroke } from "./pad.js";
import { SIZE, preprocess } from "./preprocess.js";
import type { Drawing } from "./protocol.js";
import { keep, restore } from "./store.js";

const EPOCHS = 5;

const element = <T extends Element = HTMLElement>(id: string): T => document.getElementById(id) as unknown as T;
const page = element("page");
const status = element("status");
const guess = element("guess");
const progress = element<HTMLProgressElement>("progress");
const curve = element<SVGSVGElement>("curve");
const buttons = {
  add: element<HTMLButtonElement>("add"),
  undo: element<HTMLButtonElement>("undo"),
  train: element<HTMLButtonElement>("train"),
  save: element<HTMLButtonElement>("save"),
  saveDrawings: element<HTMLButtonElement>("save-drawings"),
  load: element<HTMLInputElement>("load"),
};
const radios = [...document.querySelectorAll<HTMLInputElement>('input[name="digit"]')];

/** What `Undo` takes back, beside the strokes on the pad. */
type Action = { kind: "add"; strokes: Stroke[] } | { kind: "weights"; checkpoint: Uint8Array | null; losses: number[] };

const model = new Model();
const pad = new Pad(element<HTMLCanvasElement>("pad"), (text) => (guess.textContent = text));
let drawings: Drawing[] = [];
let checkpoint: Uint8Array | null = null;
let losses: number[] = [];
let steps = 0;
let busy = true;
const actions: Action[] = [];

function say(text: string, failed = false): void {
  status.textContent = text;
  status.classList.toggle("failed", failed);
}

/** Runs `job` while the page is busy; an error becomes the status. */
async function working(job: () => Promise<void>): Promise<void> {
  const focused = document.activeElement;
  busy = true;
  refresh();
  await reporting(job);
  busy = false;
  refresh();
  // A button that is disabled while it works loses the focus, and the keyboard its place.
  if (document.activeElement === document.body && focused instanceof HTMLElement)
    focused.focus({ preventScroll: true });
}

/** Runs `job`; an error becomes the status. */
async function reporting(job: () => Promise<void>): Promise<void> {
  try {
    await job();
  } catch (error) {
    say(error instanceof Error ? error.message : String(error), true);
  }
}

/** Of each digit the second drawing is held out, and then every third. */
function isHeldOut(label: number): boolean {
  return drawings.filter((drawing) => drawing.label === label).length % 3 === 1;
}

function refresh(): void {
  page.setAttribute("aria-busy", String(busy));
  buttons.add.disabled = buttons.save.disabled = buttons.load.disabled = busy;
  buttons.train.disabled = busy || !drawings.some((drawing) => !drawing.heldOut);
  buttons.undo.disabled = busy || !(pad.strokes.length || actions.length || drawings.length);
  buttons.saveDrawings.disabled = busy || !drawings.length;
  element("drawings").textContent = String(drawings.length);
  const heldOut = drawings.filter((drawing) => drawing.heldOut).length;
  element("held-out").textContent = drawings.length ? `${drawings.length - heldOut} to learn, ${heldOut} held out` : "";
  drawCurve(curve, losses, Math.max(steps, losses.length));
}

/** Shows the drawings as small pictures. */
function showDrawings(): void {
  const list = element("list");
  list.replaceChildren(
    ...drawings.map((drawing) => {
      const item = document.createElement("li");
      const canvas = document.createElement("canvas");
      canvas.width = canvas.height = SIZE;
      const context = canvas.getContext("2d")!;
      const pixels = context.createImageData(SIZE, SIZE);
      // Ink as opacity: the colour comes from the style sheet, so that both colour schemes work.
      drawing.image.forEach((value, i) => (pixels.data[4 * i + 3] = Math.round(255 * value)));
      context.putImageData(pixels, 0, 0);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Drawing of ${drawing.label}${drawing.heldOut ? ", held out" : ""}`);
      item.classList.toggle("held-out", drawing.heldOut);
      item.append(canvas, String(drawing.label));
      return item;
    }),
  );
}

async function accuracyOf(base: boolean): Promise<string> {
  const heldOut = drawings.filter((drawing) => drawing.heldOut);
  if (!heldOut.length) return "–";
  const { digits } = await model.call(
    "read",
    heldOut.map((drawing) => drawing.image),
    base,
  );
  const right = heldOut.filter((drawing, i) => drawing.label === digits[i]).length;
  return `${Math.round((100 * right) / heldOut.length)}%`;
}

/** Measures both accuracies again; the second only if there is a personalised model. */
async function measure(): Promise<void> {
  const before = await accuracyOf(true);
  const after = checkpoint ? await accuracyOf(false) : "–";
  element("before").textContent = before;
  element("after").textContent = after;
}

async function remember(): Promise<void> {
  if (!(await keep({ drawings, checkpoint, losses }))) say("This browser keeps nothing: save before you leave", true);
}

let reading = 0;
/** Shows what the model reads on the pad. */
async function showGuess(): Promise<void> {
  const turn = ++reading;
  const image = prepared();
  if (!image || busy) {
    if (!busy) guess.textContent = "";
    return;
  }
  const { digits, scores } = await model.call("read", [image], false);
  // A later stroke asks again.
  if (turn === reading) guess.textContent = `The model reads ${digits[0]} (${Math.round(100 * scores[0]!)}%)`;
}

function prepared(): Float32Array | null {
  if (!pad.strokes.length) return null;
  const { ink, size } = pad.ink();
  return preprocess(ink, size, size);
}

function add(): void {
  const image = prepared();
  const chosen = radios.find((radio) => radio.checked);
  if (!image) return say("Draw a digit first, then choose which one it is", true);
  if (!chosen) return say("Choose which digit this is, then press Add", true);
  const label = Number(chosen.value);
  drawings.push({ image, label, heldOut: isHeldOut(label) });
  actions.push({ kind: "add", strokes: pad.strokes });
  say(`Added a ${label}`);
  pad.set([]);
  showDrawings();
  refresh();
  void reporting(async () => {
    await measure();
    await remember();
  });
}

async function undo(): Promise<void> {
  if (pad.strokes.length) return pad.set(pad.strokes.slice(0, -1));
  // After a reload the drawings are there, but not their strokes.
  const action: Action = actions.pop() ?? { kind: "add", strokes: [] };
  if (action.kind === "add") {
    const { label } = drawings.pop()!;
    say(`Took back a ${label}`);
    showDrawings();
    pad.set(action.strokes);
  } else {
    await setWeights(action.checkpoint);
    ({ losses } = action);
    steps = losses.length;
    progress.value = 0;
    say(action.checkpoint ? "Back to the model before" : "Back to the base model");
  }
  await measure();
  await remember();
}

async function setWeights(bytes: Uint8Array | null): Promise<void> {
  if (bytes) await model.call("load", bytes);
  else await model.call("reset");
  checkpoint = bytes;
}

async function train(): Promise<void> {
  say("Training");
  const before: Action = { kind: "weights", checkpoint, losses };
  losses = [];
  model.onProgress = ({ step, steps: all, epoch, loss }) => {
    losses.push(loss);
    steps = all;
    progress.max = all;
    progress.value = step;
    say(`Training: epoch ${epoch} of ${EPOCHS}`);
    drawCurve(curve, losses, steps);
  };
  const begin = performance.now();
  try {
    const { times } = await model.call("train", drawings, EPOCHS);
    performance.measure("personalisation", { start: begin, detail: { times } });
  } catch (error) {
    ({ losses } = before);
    throw error;
  }
  checkpoint = await model.call("save");
  actions.push(before);
  await measure();
  await remember();
  say("Trained");
}

/** Lets the user save a file. */
function download(name: string, type: string, content: BlobPart): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function saveDrawings(): void {
  const rows = (image: Float32Array): number[][] =>
    Array.from({ length: SIZE }, (_, i) => [...image.slice(i * SIZE, (i + 1) * SIZE)]);
  const file = {
    format: "onnxtrain-drawings",
    shape: [drawings.length, 1, SIZE, SIZE],
    images: drawings.map((drawing) => [rows(drawing.image)]),
    labels: drawings.map((drawing) => drawing.label),
    held_out: drawings.map((drawing) => drawing.heldOut),
  };
  download("drawings.json", "application/json", JSON.stringify(file));
  say("Saved the drawings");
}

async function load(): Promise<void> {
  const file = buttons.load.files?.[0];
  if (!file) return;
  try {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const before: Action = { kind: "weights", checkpoint, losses };
    try {
      await setWeights(bytes);
    } catch (error) {
      console.info(error);
      return say(`${file.name} is no checkpoint of this page's model: yours is unchanged`, true);
    }
    losses = [];
    steps = 0;
    actions.push(before);
    await measure();
    await remember();
    say(`Loaded ${file.name}`);
  } finally {
    // So that the same file can be chosen again.
    buttons.load.value = "";
  }
}

buttons.add.addEventListener("click", add);
buttons.undo.addEventListener("click", () => void working(undo).then(() => reporting(showGuess)));
buttons.train.addEventListener("click", () => void working(train).then(() => reporting(showGuess)));
buttons.save.addEventListener(
  "click",
  () =>
    void working(async () => {
      download(
        "handwriting.safetensors",
        "application/octet-stream",
        (await model.call("save")) as Uint8Array<ArrayBuffer>,
      );
      say("Saved the model");
    }),
);
buttons.saveDrawings.addEventListener("click", saveDrawings);
buttons.load.addEventListener("change", () => void working(load).then(() => reporting(showGuess)));
pad.onChange = () => {
  refresh();
  void reporting(showGuess);
};
element("pad").addEventListener("keydown", (event) => {
  // On the drawing area the digits choose the label, and Enter adds the drawing: no hand leaves the keys.
  const radio = radios.find(({ value }) => value === event.key);
  if (radio) radio.checked = true;
  else if (event.key === "Enter" && !buttons.add.disabled) add();
});

void working(async () => {
  // The number of threads can be chosen for comparison: ?threads=2. Small nets are fastest with one.
  const threads = Number(new URLSearchParams(location.search).get("threads") ?? 1) || 1;
  const kept = await restore();
  const opening = model.call("open", kept?.checkpoint ?? null, threads);
  if (kept) ({ drawings, checkpoint, losses } = kept);
  showDrawings();
  refresh();
  const { restored, milliseconds } = await opening;
  performance.measure("opening", { start: 0, detail: { milliseconds } });
  if (!restored) checkpoint = null;
  await measure();
  if (!restored) say("The model of your last visit could not be read: this is the base model", true);
  else say(checkpoint ? "Ready: your own model" : "Ready: draw a digit, choose which one it is, and press Add");
});

// Not on file: URLs, nor over plain HTTP from another machine.
if ("serviceWorker" in navigator) {
  navigator.serviceWorker
    .register("sw.js", { type: "module" })
    .catch((error: unknown) => console.warn("This page will not work offline:", error));
}
