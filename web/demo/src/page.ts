/** The page: connects the drawing area, the buttons, the journal and the model. */

import { keepOffline } from "./offline.js";
import { drawCurve } from "./chart.js";
import { MAX_BYTES, decodeDrawings, download, encodeDrawings } from "./files.js";
import {
  type Content,
  type Drawn,
  type Entry,
  Journal,
  type Plan,
  Refusal,
  alone,
  drawingsIn,
  isHeldOut,
  isModel,
  undoable,
} from "./journal.js";
import { Model } from "./model.js";
import { Pad } from "./pad.js";
import { preprocess } from "./preprocess.js";
import type { Drawing } from "./protocol.js";
import { type Readings, digitChoice, sentence, showAccuracy, showDrawings } from "./views.js";

const EPOCHS = 5;
const MAX_DRAWINGS = 1000;
// So many models can be undone.
const MAX_MODELS = 8;

const element = <T extends Element = HTMLElement>(id: string): T => document.getElementById(id) as unknown as T;
const page = element("page");
const status = element("status");
const notice = element("notice");
const guess = element("guess");
const progress = element<HTMLProgressElement>("progress");
const curve = element<SVGSVGElement>("curve");
const files = element("files");
const loader = element<HTMLInputElement>("load");
const { radios, showBars } = digitChoice(element("digits"));

const model = new Model();
const journal = new Journal();
const pad = new Pad(element<HTMLCanvasElement>("pad"), (text) => (guess.textContent = text));
// Key of the journal's entry whose model the worker has; 0 for the base model.
let present = 0;
// Keys of models that do not fit this version of the page.
const unreadable = new Set<number>();
let losses: readonly number[] = [];
let steps = 0;
let busy = true;
let opened = false;
let changedElsewhere = false;
// What the models read, by drawing: of the model with the key `by`.
const read = new WeakMap<Drawing, Readings & { by: number }>();

const latestModel = (): (Entry & { kind: "model" }) | undefined =>
  journal.entries.filter(isModel).findLast(({ key }) => !unreadable.has(key));

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
  // What other tabs did meanwhile.
  while (changedElsewhere && opened) {
    changedElsewhere = false;
    await reporting(update);
  }
  busy = false;
  refresh();
  // A button that is disabled while it works loses the focus, and the keyboard its place.
  if (document.activeElement === document.body && focused instanceof HTMLElement)
    focused.focus({ preventScroll: true });
  void reporting(showGuess);
}

/** Runs `job`; an error becomes the status. */
async function reporting(job: () => Promise<void>): Promise<void> {
  try {
    await job();
  } catch (error) {
    if (!(error instanceof Refusal)) console.info(error);
    say(error instanceof Error ? error.message : String(error), true);
  }
}

/** Enables and disables the buttons. */
function refresh(): void {
  page.setAttribute("aria-busy", String(busy));
  const drawings = drawingsIn(journal.entries);
  const possible: Record<string, boolean> = {
    add: true,
    undo: pad.strokes.length > 0 || !!undoable(journal.entries),
    train: drawings.some((drawing) => !drawing.heldOut),
    base: !!latestModel()?.checkpoint,
    "save-model": true,
    save: true,
    "save-drawings": drawings.length > 0,
    load: true,
  };
  for (const [id, enabled] of Object.entries(possible))
    element<HTMLButtonElement>(id).disabled = busy || !opened || !enabled;
}

/** Changes the journal, and shows what it holds then. */
async function update(plan?: Plan): Promise<void> {
  await journal.change(plan);
  notice.textContent = journal.trouble;
  await follow();
}

/** Brings the worker and the page in line with the journal. */
async function follow(): Promise<void> {
  for (let entry = latestModel(); (entry?.key ?? 0) !== present; entry = latestModel()) {
    try {
      if (entry?.checkpoint) await model.call("load", entry.checkpoint);
      else await model.call("reset");
    } catch (error) {
      if ((error as Error).name !== "FileError") throw error;
      unreadable.add(entry!.key);
      continue;
    }
    present = entry?.key ?? 0;
    losses = entry?.losses ?? [];
    steps = losses.length;
    progress.value = 0;
  }
  await measure();
}

/** Lets the models read the drawings that they have not read yet, and shows the results. */
async function measure(): Promise<void> {
  const drawings = drawingsIn(journal.entries);
  const own = !!latestModel()?.checkpoint;
  const unknown = drawings.filter((drawing) => read.get(drawing)?.by !== present);
  const { before, after } = await model.call(
    "read",
    unknown.map((drawing) => drawing.image),
  );
  unknown.forEach((drawing, i) =>
    read.set(drawing, { before: before[i]!, after: own ? after[i]! : null, by: present }),
  );
  const heldOut = drawings.filter((drawing) => drawing.heldOut);
  element("drawings").textContent = String(drawings.length);
  element("held-out").textContent = drawings.length
    ? `${drawings.length - heldOut.length} to learn, ${heldOut.length} held out`
    : "";
  showDrawings(element("list"), drawings, (drawing) => read.get(drawing));
  showAccuracy(element("before"), element("before-count"), heldOut, (drawing) => read.get(drawing)?.before);
  showAccuracy(element("after"), element("after-count"), heldOut, (drawing) => read.get(drawing)?.after);
  page.classList.toggle("own", own);
  drawCurve(curve, losses, Math.max(steps, losses.length));
}

let asking = false;
let asked = false;
/** Shows what the models read on the drawing area, again after each change. */
async function showGuess(): Promise<void> {
  asked = true;
  if (asking) return;
  asking = true;
  try {
    while (asked && !busy && opened) {
      asked = false;
      const image = prepared();
      if (!image) {
        showBars(null);
        if (!pad.drawing) guess.textContent = "";
        continue;
      }
      const own = !!latestModel()?.checkpoint;
      const { before, after } = await model.call("read", [image]);
      const readings = { before: before[0]!, after: own ? after[0]! : null };
      showBars(readings);
      // Screen readers hear the result of a stroke only.
      if (!pad.drawing) guess.textContent = sentence(readings);
    }
  } finally {
    asking = false;
  }
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
  const strokes = pad.strokes;
  pad.set([]);
  void working(async () => {
    let heldOut = false;
    try {
      await update((entries) => {
        const drawings = drawingsIn(entries);
        if (drawings.length >= MAX_DRAWINGS)
          throw new Refusal(`There are ${MAX_DRAWINGS} drawings, which is the most: undo some first`);
        heldOut = isHeldOut(drawings, label);
        return { add: { kind: "drawings", drawings: [{ image, label, heldOut }], strokes } };
      });
    } catch (error) {
      if (error instanceof Refusal) pad.set(strokes);
      throw error;
    }
    say(`Added a ${label}${heldOut ? ", held out to measure the accuracy" : ""}`);
  });
}

async function undo(): Promise<void> {
  if (pad.strokes.length) return pad.set(pad.strokes.slice(0, -1));
  const shown = undoable(journal.entries)!;
  let changed = false;
  await update((entries) => {
    changed = undoable(entries)?.key !== shown.key;
    return changed ? {} : { remove: [shown.key] };
  });
  if (changed)
    throw new Refusal("Another tab has just changed the drawings or the model: look at them, then press Undo again");
  if (shown.kind === "model") say(latestModel()?.checkpoint ? "Back to the model before" : "Back to the base model");
  else takeBack(shown);
}

function takeBack({ drawings, strokes }: Drawn): void {
  say(drawings.length > 1 ? `Took back ${drawings.length} drawings` : `Took back a ${drawings[0]!.label}`);
  pad.set([...strokes]);
}

/** Adds a model that the worker already has, unless it is the base model. */
async function addModel(content: Omit<Content & { kind: "model" }, "kind" | "first">): Promise<void> {
  await journal.change((entries) => {
    const models = entries.filter(isModel);
    return {
      add: { kind: "model", ...content, first: !models.length },
      remove: models.slice(0, Math.max(0, models.length + 1 - MAX_MODELS)).map(({ key }) => key),
    };
  });
  notice.textContent = journal.trouble;
  present = content.checkpoint ? latestModel()!.key : present;
  ({ losses } = content);
  steps = losses.length;
  await follow();
}

async function train(): Promise<void> {
  const ran = await alone(async () => {
    // The other tabs' drawings are learned, too, on top of the last model.
    await update();
    say("Training");
    const learned: number[] = [];
    model.onProgress = ({ step, steps: all, epoch, loss }) => {
      learned.push(loss);
      progress.max = all;
      progress.value = step;
      say(`Training: epoch ${epoch} of ${EPOCHS}`);
      drawCurve(curve, learned, all);
    };
    const begin = performance.now();
    try {
      const { times } = await model.call("train", drawingsIn(journal.entries), EPOCHS);
      performance.measure("personalisation", { start: begin, detail: { times } });
    } catch (error) {
      // The worker's model has learned a part of it.
      present = -Infinity;
      await follow();
      throw error;
    }
    await addModel({ by: "training", checkpoint: await model.call("save"), losses: learned });
    say("Trained");
  });
  if (!ran) say("Another tab is training: wait until it has finished, then press Train again", true);
}

async function backToBase(): Promise<void> {
  await addModel({ by: "reset", checkpoint: null, losses: [] });
  say("Back to the base model: Undo brings yours back");
}

async function save(name: string, call: "save" | "export"): Promise<void> {
  download(name, (await model.call(call)) as Uint8Array<ArrayBuffer>);
  say(`Saved the model as ${name}`);
}

async function saveDrawings(): Promise<void> {
  download("drawings.json", encodeDrawings(drawingsIn(journal.entries)));
  say("Saved the drawings as drawings.json");
}

async function load(): Promise<void> {
  const file = loader.files?.[0];
  if (!file) return;
  try {
    if (file.size > MAX_BYTES)
      throw new Refusal(`${file.name} is too large for drawings or a model of this page: nothing has changed`);
    const bytes = new Uint8Array(await file.arrayBuffer());
    // JSON is text; the second four bytes of a checkpoint are zero.
    if (bytes[0] === 0x7b && bytes[4] !== 0) await loadDrawings(file.name, bytes);
    else await loadModel(file.name, bytes);
  } finally {
    // So that the same file can be chosen again.
    loader.value = "";
  }
}

async function loadDrawings(name: string, bytes: Uint8Array): Promise<void> {
  let loaded: Drawing[];
  try {
    loaded = decodeDrawings(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new Refusal(`${name} holds no drawings of this page, as ${(error as Error).message}: nothing has changed`);
  }
  let added: Drawing[] = [];
  await update((entries) => {
    const drawings = drawingsIn(entries);
    const text = ({ image, label }: Drawing): string => `${label} ${image.join()}`;
    // A drawing that is here already may be held out here and not there.
    const known = new Set(drawings.map(text));
    added = loaded.filter((drawing) => known.size < known.add(text(drawing)).size);
    if (!added.length) throw new Refusal(`${name} has no drawings that are not here already`);
    if (drawings.length + added.length > MAX_DRAWINGS)
      throw new Refusal(`${name} has too many drawings: ${MAX_DRAWINGS} are the most. Nothing has changed`);
    return { add: { kind: "drawings", drawings: added, strokes: [] } };
  });
  say(`Added ${added.length} drawing${added.length > 1 ? "s" : ""} of ${name}`);
}

async function loadModel(name: string, bytes: Uint8Array): Promise<void> {
  try {
    await model.call("load", bytes);
  } catch (error) {
    if ((error as Error).name !== "FileError") throw error;
    console.info(error);
    throw new Refusal(`${name} is no model of this page: yours is unchanged`);
  }
  await addModel({ by: "file", checkpoint: await model.call("save"), losses: [] });
  say(`Loaded ${name}`);
}

const actions: Record<string, () => Promise<void>> = {
  undo,
  train,
  base: backToBase,
  save: () => save("handwriting.safetensors", "save"),
  "save-model": () => save("handwriting.onnx", "export"),
  "save-drawings": saveDrawings,
};
const act = (job: () => Promise<void>): void => {
  // The menu would cover the message.
  files.hidePopover?.();
  void working(job);
};
for (const [id, action] of Object.entries(actions)) element(id).addEventListener("click", () => act(action));
loader.addEventListener("change", () => act(load));
element("add").addEventListener("click", add);
pad.onChange = () => {
  if (!busy) refresh();
  void reporting(showGuess);
};
element("pad").addEventListener("keydown", (event) => {
  // On the drawing area the digits choose the label, and Enter adds the drawing: no hand leaves the keys.
  const radio = radios.find(({ value }) => value === event.key);
  if (radio) radio.checked = true;
  else if (event.key === "Enter" && !element<HTMLButtonElement>("add").disabled) add();
});
new ResizeObserver(() => drawCurve(curve, losses, Math.max(steps, losses.length))).observe(curve);

/** Shows what other tabs did, now or when this one has time. */
const catchUp = (): void => {
  changedElsewhere = true;
  if (!busy && opened) void working(async () => {});
};
journal.onChange = catchUp;
// A tab that comes back from the history has heard nothing.
addEventListener("pageshow", (event) => event.persisted && catchUp());

void working(async () => {
  // The number of threads can be chosen for comparison: ?threads=2. Small nets are fastest with one.
  const threads = Number(new URLSearchParams(location.search).get("threads") ?? 1) || 1;
  const opening = model.call("open", threads);
  // An error of the journal's is shown after the wait.
  await journal.change();
  try {
    const { milliseconds } = await opening;
    performance.measure("opening", { start: 0, detail: { milliseconds } });
    opened = true;
  } catch (error) {
    throw new Error(
      `The model could not be started: reload the page when you are online (${(error as Error).message})`,
    );
  }
  await update();
  if (journal.damaged)
    say(`${journal.damaged} of the entries kept here were damaged and have been removed: the others are here`, true);
  else if (unreadable.size)
    say("Your last model does not fit this version of the page: press Train to make a new one", true);
  else if (latestModel()?.checkpoint) say("Ready: your own model");
  else say("Ready: draw a digit, choose which one it is, and press Add");
});

keepOffline(element("update"));
