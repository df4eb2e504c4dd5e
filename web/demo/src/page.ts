/** The page: connects the drawing area, the buttons, the journal and the model. */

import { keepOffline } from "./offline.js";
import { drawCurve } from "./chart.js";
import { type Assigned, assign, difference, namesIn } from "./classes.js";
import { MAX_BYTES, decodeDrawings, download, encodeDrawings } from "./files.js";
import {
  type Drawn,
  type Entry,
  HANDWRITING,
  Journal,
  type Modelled,
  type Plan,
  drawingsIn,
  isHeldOut,
  isModel,
  undoable,
} from "./journal.js";
import { Model } from "./model.js";
import { NameMenu } from "./naming.js";
import { Pad, type Stroke } from "./pad.js";
import { preprocess } from "./preprocess.js";
import type { Drawing } from "./protocol.js";
import { Refusal, alone } from "./store.js";
import { TASKS, type Task } from "./tasks.js";
import { Choice, type Classes, type Readings, sentence, showAccuracy, showDrawings } from "./views.js";

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
const choice = new Choice(element("digits"));

const model = new Model();
const journal = new Journal();
const pad = new Pad(element<HTMLCanvasElement>("pad"), (text) => (guess.textContent = text));
// The task that the user wants is in the address, so that it can be linked to, and the browser's Back works.
const wanted = (): Task => TASKS.find(({ id }) => location.hash === `#/${id}`) ?? TASKS[0]!;
let task = wanted();
// What was on the drawing area when the user left a task.
const inks = new Map<Task, Stroke[]>();
// Which model the worker has, as `signature` tells.
let present = "";
// Keys of models that do not fit this version of the page.
const unreadable = new Set<number>();
let losses: readonly number[] = [];
let steps = 0;
let busy = true;
let opened = false;
let changedElsewhere = false;
// What the models read, by drawing: of the model with the key `by`.
const read = new WeakMap<Drawing, Readings & { by: string }>();

const latestModel = (): (Entry & Modelled) | undefined =>
  journal.entries.filter(isModel).findLast(({ key }) => !unreadable.has(key));

/** Returns the classes of the task by their numbers, which drawings have as labels. */
const classesIn = (entries: readonly Entry[]): Map<number, string> =>
  task.names ? new Map(task.names.entries()) : namesIn(entries);
const classes = (): Map<number, string> => classesIn(journal.entries);
const drawn = (entries: readonly Entry[] = journal.entries): Drawing[] => drawingsIn(entries, classesIn(entries));

const signature = (model = latestModel()): string => `${task.id} ${model?.key ?? 0} ${[...classes().keys()].join()}`;

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
    await reporting(async () => {
      const other = wanted() !== task;
      if (other) enter(wanted());
      await update();
      if (other) greet();
    });
  }
  busy = false;
  refresh();
  // A button that is disabled while it works loses the focus, and the keyboard its place.
  if (document.activeElement === document.body && focused instanceof HTMLElement)
    (focused.isConnected ? focused : menu.field).focus({ preventScroll: true });
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
  const drawings = drawn();
  const some = classes().size > 0;
  const possible: Record<string, boolean> = {
    names: true,
    add: some,
    undo: pad.strokes.length > 0 || !!undoable(journal.entries),
    train: learnable(drawings),
    base: !!latestModel()?.checkpoint,
    "save-model": some,
    save: some,
    "save-drawings": drawings.length > 0,
    load: true,
  };
  for (const [id, enabled] of Object.entries(possible))
    element<HTMLButtonElement>(id).disabled = busy || !opened || !enabled;
  element<HTMLFieldSetElement>("naming").disabled = busy || !opened;
}

/** True if there are drawings to learn, of enough classes. */
function learnable(drawings: readonly Drawing[]): boolean {
  return new Set(drawings.filter(({ heldOut }) => !heldOut).map(({ label }) => label)).size >= task.least;
}

/** Shows a task, without what the journal holds. */
function enter(next: Task): void {
  inks.set(task, pad.strokes);
  task = next;
  journal.task = task.id;
  for (const { id } of TASKS) {
    const link = element(`task-${id}`);
    if (id === task.id) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = task.title;
  const texts: Record<string, string> = {
    title: task.title,
    intro: task.intro,
    legend: task.legend,
    keys: task.keys,
    measured: task.measured,
  };
  for (const [id, text] of Object.entries(texts)) element(id).textContent = text;
  element("pad").setAttribute("aria-label", task.area);
  element("list").dataset.empty = task.empty;
  page.classList.toggle("named", !task.names);
  element("names").hidden = !!task.names;
  pad.hint = task.hint;
  pad.set(inks.get(task) ?? []);
}

/** Says what to do first. */
function greet(): void {
  say(latestModel()?.checkpoint ? "Ready: your own model" : task.ready);
}

/** Changes the journal, and shows what it holds then. */
async function update(plan?: Plan): Promise<void> {
  await journal.change(plan);
  notice.textContent = journal.trouble;
  await follow();
}

/** Brings the worker and the page in line with the journal. */
async function follow(): Promise<void> {
  for (let entry = latestModel(); signature(entry) !== present; entry = latestModel()) {
    const ids = [...classes().keys()];
    try {
      // Without names there is nothing to read.
      if (ids.length)
        await model.call(
          "load",
          entry?.checkpoint ?? null,
          ids.map((id) => entry?.classes.indexOf(id) ?? -1),
          !!task.names,
        );
    } catch (error) {
      if ((error as Error).name !== "FileError" || !entry) throw error;
      unreadable.add(entry.key);
      continue;
    }
    present = signature(entry);
    losses = entry?.losses ?? [];
    steps = losses.length;
    progress.value = 0;
  }
  choice.show(classes());
  menu.show(classes());
  await measure();
}

/** Lets the models read the drawings that they have not read yet, and shows the results. */
async function measure(): Promise<void> {
  const drawings = drawn();
  const known = classes();
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
  showDrawings(element("list"), drawings, known, (drawing) => read.get(drawing));
  showAccuracy(element("before"), element("before-count"), heldOut, known, (drawing) => read.get(drawing)?.before);
  showAccuracy(element("after"), element("after-count"), heldOut, known, (drawing) => read.get(drawing)?.after);
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
      if (!image || !classes().size) {
        choice.showBars(null);
        if (!pad.drawing) guess.textContent = "";
        continue;
      }
      const own = !!latestModel()?.checkpoint;
      const { before, after } = await model.call("read", [image]);
      const readings = { before: before[0]!, after: own ? after[0]! : null };
      choice.showBars(readings);
      // Screen readers hear the result of a stroke only.
      if (!pad.drawing) guess.textContent = sentence(readings, classes());
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
  const label = choice.chosen;
  if (!image) return say(task.draw, true);
  if (label === null) return say(task.choose, true);
  const strokes = pad.strokes;
  pad.set([]);
  void working(async () => {
    let heldOut = false;
    try {
      await update((entries) => {
        const drawings = drawn(entries);
        if (!classesIn(entries).has(label)) throw new Refusal("Another tab has removed this name: choose another one");
        if (drawings.length >= MAX_DRAWINGS)
          throw new Refusal(`There are ${MAX_DRAWINGS} drawings, which is the most: undo some first`);
        heldOut = isHeldOut(drawings, label);
        return { add: [{ kind: "drawings", drawings: [{ image, label, heldOut }], strokes }] };
      });
    } catch (error) {
      if (error instanceof Refusal) pad.set(strokes);
      throw error;
    }
    const more = learnable(drawn()) || task.least < 2 ? "" : "; Train needs drawings of two names to learn";
    say(`Added ${task.one(classes().get(label)!)}${heldOut ? ", held out to measure the accuracy" : ""}${more}`);
  });
}

async function undo(): Promise<void> {
  if (pad.strokes.length) return pad.set(pad.strokes.slice(0, -1));
  const shown = undoable(journal.entries)!;
  const before = classes();
  let changed = false;
  await update((entries) => {
    changed = undoable(entries)?.key !== shown.key;
    return changed ? {} : { remove: [shown.key] };
  });
  if (changed)
    throw new Refusal("Another tab has just changed the drawings or the model: look at them, then press Undo again");
  if (shown.kind === "model") say(latestModel()?.checkpoint ? "Back to the model before" : "Back to the base model");
  else if (shown.kind === "names") say(difference(before, classes()));
  else takeBack(shown, before);
}

function takeBack({ drawings, strokes }: Drawn, known: Classes): void {
  say(
    drawings.length > 1
      ? `Took back ${drawings.length} drawings`
      : `Took back ${task.one(known.get(drawings[0]!.label) ?? "")}`,
  );
  pad.set([...strokes]);
}

/** Adds a model, of the classes that the task has unless it says others. */
async function addModel(
  content: Pick<Modelled, "by" | "checkpoint" | "losses">,
  classesFor?: (entries: readonly Entry[]) => Assigned,
): Promise<void> {
  await journal.change((entries) => {
    const models = entries.filter(isModel);
    const { ids, added } = classesFor?.(entries) ?? { ids: [...classesIn(entries).keys()], added: [] };
    return {
      add: [...added, { kind: "model", ...content, classes: ids, first: !models.length }],
      remove: models.slice(0, Math.max(0, models.length + 1 - MAX_MODELS)).map(({ key }) => key),
    };
  });
  notice.textContent = journal.trouble;
}

const menu = new NameMenu(element<HTMLFormElement>("new-name"), element("name-list"), {
  add: (name) =>
    void working(async () => {
      await update((entries) => {
        const { added } = assign(entries, [name], `“${name}”`);
        if (!added.length) throw new Refusal(`There is a name “${name}” already`);
        return { add: added };
      });
      say(`Added the name “${name}”: draw it`);
      choice.choose(classes().size - 1);
    }),
  rename: (id, name) =>
    void working(async () => {
      const old = classes().get(id);
      await update((entries) => {
        const known = classesIn(entries);
        if (!known.has(id)) throw new Refusal("Another tab has removed this name");
        if (known.get(id) === name) return {};
        if ([...known].some(([other, taken]) => other !== id && taken === name))
          throw new Refusal(`There is a name “${name}” already`);
        return { add: [{ kind: "names", names: [[id, name]] }] };
      });
      say(`“${old}” is called “${name}” now`);
    }),
  remove: (id) =>
    void working(async () => {
      const old = classes().get(id);
      await update((entries) => (classesIn(entries).has(id) ? { add: [{ kind: "names", names: [[id, null]] }] } : {}));
      say(`Removed “${old}” and its drawings: Undo brings them back`);
    }),
});

async function train(): Promise<void> {
  const ran = await alone(HANDWRITING.name, async () => {
    // The other tabs' drawings are learned, too, on top of the last model.
    await update();
    say("Training");
    const learned: number[] = [];
    model.onProgress = ({ step, steps: all, epoch, loss }) => {
      learned.push(loss);
      progress.max = all;
      progress.value = step;
      say(`Training: epoch ${epoch} of ${task.epochs}`);
      drawCurve(curve, learned, all);
    };
    const begin = performance.now();
    try {
      const ids = [...classes().keys()];
      const labelled = drawn().map((drawing) => ({ ...drawing, label: ids.indexOf(drawing.label) }));
      const { times } = await model.call("train", labelled, task.epochs);
      performance.measure("personalisation", { start: begin, detail: { times } });
    } catch (error) {
      // The worker's model has learned a part of it.
      present = "";
      await follow();
      throw error;
    }
    // The worker has this model already, unless another tab has changed the names meanwhile.
    const ids = [...classes().keys()];
    const checkpoint = await model.call("save", [...classes().values()]);
    await addModel({ by: "training", checkpoint, losses: learned }, () => ({ ids, added: [] }));
    if ([...classes().keys()].join() === ids.join()) present = signature();
    [losses, steps] = [learned, learned.length];
    await follow();
    say("Trained");
  });
  if (!ran) say("Another tab is training: wait until it has finished, then press Train again", true);
}

async function backToBase(): Promise<void> {
  await addModel({ by: "reset", checkpoint: null, losses: [] });
  await follow();
  say("Back to the base model: Undo brings yours back");
}

async function save(ending: string, call: "save" | "export"): Promise<void> {
  const name = `${task.file}.${ending}`;
  download(name, (await model.call(call, [...classes().values()])) as Uint8Array<ArrayBuffer>);
  say(`Saved the model as ${name}`);
}

async function saveDrawings(): Promise<void> {
  download(task.drawings, encodeDrawings(drawn(), task.names ? undefined : classes()));
  say(`Saved the drawings as ${task.drawings}`);
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

/** Throws a Refusal if a file is one of the other task. */
function requireTask(name: string, names: readonly string[] | null): void {
  if (!!names === !task.names) return;
  const right = names ? "sketches with names: choose My sketches" : "digits: choose Digits";
  throw new Refusal(`${name} holds ${right}, then load it. Nothing has changed`);
}

async function loadDrawings(name: string, bytes: Uint8Array): Promise<void> {
  let file: ReturnType<typeof decodeDrawings>;
  try {
    file = decodeDrawings(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new Refusal(`${name} holds no drawings of this page, as ${(error as Error).message}: nothing has changed`);
  }
  requireTask(name, file.names);
  let count = 0;
  await update((entries) => {
    const { ids, added } = file.names ? assign(entries, file.names, name) : { ids: [...classes().keys()], added: [] };
    const loaded = file.drawings.map((drawing) => ({ ...drawing, label: ids[drawing.label]! }));
    const drawings = drawn(entries);
    const text = ({ image, label }: Drawing): string => `${label} ${image.join()}`;
    // A drawing that is here already may be held out here and not there.
    const known = new Set(drawings.map(text));
    const fresh = loaded.filter((drawing) => known.size < known.add(text(drawing)).size);
    count = fresh.length;
    if (!count) throw new Refusal(`${name} has no drawings that are not here already`);
    if (drawings.length + count > MAX_DRAWINGS)
      throw new Refusal(`${name} has too many drawings: ${MAX_DRAWINGS} are the most. Nothing has changed`);
    return { add: [...added, { kind: "drawings", drawings: fresh, strokes: [] }] };
  });
  say(`Added ${count} drawing${count > 1 ? "s" : ""} of ${name}`);
}

async function loadModel(name: string, bytes: Uint8Array): Promise<void> {
  const noModel = new Refusal(`${name} is no model of this page: yours is unchanged`);
  const file = await model.call("parse", bytes).catch((error: Error) => {
    if (error.name !== "FileError") throw error;
    console.info(error);
    throw noModel;
  });
  // Of the ten digits, as files of earlier versions of the page are, which name no classes.
  const digits = file.count === 10 && (!file.names || file.names.join("") === "0123456789");
  if (!file.names && !digits) throw noModel;
  requireTask(name, digits ? null : file.names);
  await addModel({ by: "file", checkpoint: file.checkpoint, losses: [] }, (entries) =>
    digits ? { ids: [...classes().keys()], added: [] } : assign(entries, file.names!, name),
  );
  await follow();
  say(`Loaded ${name}`);
}

const actions: Record<string, () => Promise<void>> = {
  undo,
  train,
  base: backToBase,
  save: () => save("safetensors", "save"),
  "save-model": () => save("onnx", "export"),
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
  // On the drawing area the digits choose the class, and Enter adds the drawing: no hand leaves the keys.
  if (event.key.length === 1 && task.choosing.includes(event.key)) choice.choose(task.choosing.indexOf(event.key));
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
addEventListener("hashchange", catchUp);
enter(task);

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
  else greet();
});

keepOffline(element("update"));
