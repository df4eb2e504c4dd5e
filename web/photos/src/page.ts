/** The page: connects camera, files, cards, journal and model. */

import { drawCurve } from "../../demo/src/chart.js";
import { download } from "../../demo/src/files.js";
import { Model } from "../../demo/src/model.js";
import { keepOffline } from "../../demo/src/offline.js";
import { type Plan, Refusal, Store, alone } from "../../demo/src/store.js";
import { digestOf } from "../../src/sha256.js";
import { Camera } from "./camera.js";
import { blobOf, pictureOf, pixelsOf, pixelsOfVideo, snapshot } from "./pictures.js";
import {
  type Content,
  MAX_BYTES,
  MAX_NAME,
  MAX_PHOTOS,
  PHOTOS,
  type Photo,
  type Project,
  type Trained,
  decode,
  encode,
  isHeldOut,
  lessonOf,
  projectOf,
  taught,
} from "./project.js";
import type { Backbone, Methods, OwnBackbone, Range } from "./protocol.js";
import { Cards, type Read, bestOf } from "./views.js";

const MAX_CLASSES = 32;
const STEPS = 40;
// So many steps are made between two looks at what has changed.
const STRIDE = 5;
// Screen readers hear what the camera sees at most this often, in milliseconds.
const PAUSE = 2000;
const RETRY = 500;

const element = <T extends Element = HTMLElement>(id: string): T => document.getElementById(id) as unknown as T;
const page = element("page");
const status = element("status");
const notice = element("notice");
const guess = element("guess");
const spoken = element("spoken");
const curve = element<SVGSVGElement>("curve");
const video = element<HTMLVideoElement>("video");
const shown = element<HTMLImageElement>("shown");
const files = element("files");

const model = new Model<Methods>();
const journal = new Store(PHOTOS);
const camera = new Camera(video);
const cards = new Cards(element("list"), {
  rename: (id, name) => act(() => rename(id, name)),
  remove: (id) => act(() => remove(id)),
  snap: (id) => act(() => snap(id)),
  add: (id, list) => act(() => addFiles(id, list)),
  choose: (hash) => choose(hash),
  discard: (hash) => act(() => discard(hash)),
});

let project: Project = projectOf([]);
let backbone: Backbone;
/** Key of the entry whose backbone the worker has; 0 for the page's own. */
let used = 0;
/** Keys of backbones that do not open. */
const unusable = new Set<number>();
/** Key of the head that the worker has, and the ids of its classes. */
let present = 0;
let labels: readonly string[] = [];
let losses: readonly number[] = [];
/** What the head reads, by photo: of the head at that time. */
let readings = new Map<string, Read>();
let chosen: Photo | null = null;
let opened = false;
let jobs = 0;
/** What the last actions have removed, and what they have added in its place. */
const undoable: { removed: readonly Content[]; replaces: boolean; text: string }[] = [];

function say(text: string, failed = false): void {
  status.textContent = text;
  status.classList.toggle("failed", failed);
}

let last: Promise<void> = Promise.resolve();
/** Runs a job after those before it; an error becomes the status. */
function act(job: () => Promise<void>): Promise<void> {
  // The menu would cover the message.
  if (files.matches(":popover-open")) files.hidePopover();
  jobs++;
  refresh();
  last = last
    .then(job)
    .catch((error: unknown) => {
      if (!(error instanceof Refusal)) console.info(error);
      say(error instanceof Error ? error.message : String(error), true);
    })
    .then(() => {
      jobs--;
      refresh();
      void learn();
    });
  return last;
}

/** Enables and disables the buttons. */
function refresh(): void {
  page.setAttribute("aria-busy", String(!opened || jobs > 0 || learning !== null));
  const possible: Record<string, boolean> = {
    add: true,
    camera: true,
    load: true,
    own: true,
    undo: undoable.length > 0,
    save: journal.entries.length > 0,
    clear: journal.entries.length > 0,
    standard: !!project.own,
    "save-model": labels.length > 1,
  };
  for (const [id, enabled] of Object.entries(possible)) element<HTMLButtonElement>(id).disabled = !opened || !enabled;
}

/** Changes the journal, and shows what it holds then. */
async function update(plan?: Plan<Content>): Promise<void> {
  await journal.change(plan);
  await follow();
}

/** Brings the worker and the page in line with the journal. */
async function follow(): Promise<void> {
  notice.textContent = journal.trouble;
  project = projectOf(journal.entries);
  await followBackbone();
  await followFeatures();
  const gone = labels.some((label) => !project.classes.some(({ id }) => id === label));
  if (!learning && (gone || (project.head?.key ?? 0) !== present)) await takeHead();
  await measure();
}

async function followBackbone(): Promise<void> {
  const own = project.own && !unusable.has(project.own.key) ? project.own : undefined;
  if ((own?.key ?? 0) === used) return;
  await pauseLearning();
  try {
    backbone = await model.call("use", own ?? null);
  } catch (error) {
    unusable.add(own!.key);
    backbone = await model.call("use", null);
    say(
      `${own!.name} can't be used as a backbone, because ${(error as Error).message}. The page uses its own backbone`,
      true,
    );
  }
  used = own && !unusable.has(own.key) ? own.key : 0;
  [present, labels] = [0, []];
}

/** Computes the features of photos that another backbone has computed. */
async function followFeatures(): Promise<void> {
  const fits = (photo: Photo): boolean =>
    photo.backbone === backbone.digest && photo.features.length === backbone.features;
  const old = project.photos.filter((photo) => !fits(photo));
  if (!old.length) return;
  const done = new Map<string, Float32Array | null>();
  for (const photo of old) {
    say(`Looking at your photos again: ${done.size + 1} of ${old.length}`);
    const pixels = await pixelsOf(photo.picture, backbone.size).catch(() => null);
    try {
      done.set(photo.hash, pixels && (await model.call("features", pixels)));
    } catch (error) {
      if (!used) throw error;
      const { name, key } = project.own!;
      unusable.add(key);
      await followBackbone();
      await followFeatures();
      return say(`${name} fails on one of the photos: this page's own backbone is used`, true);
    }
  }
  const { digest } = backbone;
  await journal.change((entries) => {
    const stale = projectOf(entries).photos.filter((photo) => !fits(photo) && done.has(photo.hash));
    const add = stale.flatMap(({ key: _, ...photo }) => {
      const features = done.get(photo.hash);
      return features ? [{ ...photo, features, backbone: digest }] : [];
    });
    return { add, remove: stale.map(({ key }) => key) };
  });
  project = projectOf(journal.entries);
  const damaged = [...done.values()].filter((features) => !features).length;
  say(damaged ? `${damaged} damaged photos have been removed` : "All photos have been looked at", damaged > 0);
}

/** Returns the classes of the journal's head, none if it is for another backbone. */
function knownColumns(): Trained["columns"] {
  const { head } = project;
  if (head?.backbone !== backbone.digest) return [];
  return head.columns.filter(({ weights }) => weights.length === backbone.features);
}

/** Gives the worker the head of the journal, without the classes that are gone. */
async function takeHead(): Promise<void> {
  const columns = knownColumns().filter(({ label }) => project.classes.some(({ id }) => id === label));
  await model.call("setHead", columns);
  labels = columns.map(({ label }) => label);
  present = project.head?.key ?? 0;
  losses = columns.length ? project.head!.losses : [];
}

/** Lets the head read all photos, and shows the results. */
async function measure(): Promise<void> {
  const photos = project.photos.filter((photo) => photo.backbone === backbone.digest);
  const known = labels.filter((label) => project.classes.some(({ id }) => id === label));
  const by = labels;
  const results =
    known.length > 1
      ? await model.call(
          "read",
          photos.map(({ features }) => features),
        )
      : [];
  readings = new Map(results.map((reading, i) => [photos[i]!.hash, { labels: by, reading }]));
  const measured = photos.filter((photo) => photo.heldOut && readings.has(photo.hash) && by.includes(photo.label));
  const right = measured.filter((photo) => bestOf(readings.get(photo.hash)!) === photo.label).length;
  element("accuracy").textContent = measured.length ? `${Math.round((100 * right) / measured.length)}%` : "–";
  element("count").textContent = measured.length
    ? `${right} of ${measured.length} held-out photos`
    : "of the held-out photos";
  element("backbone").textContent = used ? project.own!.name : "this page's";
  cards.update(project.classes, project.photos, (photo) => readings.get(photo.hash));
  drawCurve(curve, losses, losses.length);
  if (chosen && !project.photos.some(({ hash }) => hash === chosen!.hash)) choose(null);
  showChosen();
  refresh();
}

let learning: Promise<void> | null = null;
let pausing = false;

/** Trains until there is nothing new to learn, unless another tab does. */
async function learn(): Promise<void> {
  if (learning || !opened || pausing || !isBehind()) return;
  let ran = true;
  learning = alone(PHOTOS.name, async () => {
    while (!pausing && isBehind()) await learnLesson();
  })
    .then((done) => void (ran = done))
    .catch((error: unknown) => {
      console.info(error);
      say(`The training has failed: ${error instanceof Error ? error.message : String(error)}`, true);
      // Until something changes.
      failed = lessonOf(project, backbone.digest);
      present = -1;
    });
  refresh();
  await learning;
  // Another tab trains: its head will be in the journal.
  if (!ran) await new Promise((resolve) => setTimeout(resolve, RETRY));
  learning = null;
  await act(ran ? follow : () => update());
}

let failed = "";
function isBehind(): boolean {
  const lesson = lessonOf(project, backbone.digest);
  return taught(project).length > 0 && lesson !== project.head?.lesson && lesson !== failed;
}

async function pauseLearning(): Promise<void> {
  pausing = true;
  await learning;
  pausing = false;
}

/** Trains the head of the journal on all photos, with the classes that there are now; ends early if they change. */
async function learnLesson(): Promise<void> {
  const { digest } = backbone;
  const lesson = lessonOf(project, digest);
  const classes = taught(project).map(({ id }) => id);
  const photos = project.photos.filter(
    ({ label, heldOut, backbone: by }) => !heldOut && by === digest && classes.includes(label),
  );
  const known = knownColumns();
  const columns = classes.map((id) => known.find(({ label }) => label === id) ?? null);
  await model.call("setHead", columns);
  [labels, present] = [classes, -1];
  await model.call(
    "learn",
    photos.map(({ features }) => features),
    photos.map(({ label }) => classes.indexOf(label)),
  );
  const found: number[] = [];
  while (found.length < STEPS) {
    found.push(...(await model.call("train", STRIDE)));
    drawCurve(curve, found, STEPS);
    if (pausing || lessonOf(project, digest) !== lesson) return;
  }
  const trained = await model.call("head");
  await journal.change((entries) => ({
    add: {
      kind: "head",
      backbone: digest,
      columns: trained.map((column, i) => ({ ...column, label: classes[i]! })),
      losses: found,
      lesson,
    },
    remove: entries.filter(({ kind }) => kind === "head").map(({ key }) => key),
  }));
  notice.textContent = journal.trouble;
  project = projectOf(journal.entries);
  [present, losses] = [project.head!.key, found];
  performance.mark("trained", { detail: { steps: found.length } });
}

/** Shows a reading as bars and as a sentence; null for none. */
let heard = { text: "", at: 0 };
function show(read: Read | null): void {
  cards.show(read);
  if (!read) {
    guess.textContent = "";
    return;
  }
  const best = bestOf(read);
  const name = project.classes.find(({ id }) => id === best)?.name ?? "";
  guess.textContent = `${name} (${Math.round(100 * Math.max(...read.reading))}%)`;
  const now = performance.now();
  if (name === heard.text || now - heard.at < PAUSE) return;
  heard = { text: name, at: now };
  spoken.textContent = `It sees ${name}`;
}

/** Shows a photo in place of the camera; null for the camera. */
function choose(hash: string | null): void {
  const photo = project.photos.find((item) => item.hash === hash) ?? null;
  chosen = photo?.hash === chosen?.hash ? null : photo;
  if (shown.src) URL.revokeObjectURL(shown.src);
  if (chosen) shown.src = URL.createObjectURL(blobOf(chosen.picture));
  else shown.removeAttribute("src");
  heard = { text: "", at: 0 };
  showChosen();
}

/** Shows what there is to see: the photo that is chosen, else the camera, else a hint. */
function showChosen(): void {
  shown.hidden = !chosen;
  video.hidden = !!chosen || !camera.on;
  element("hint").hidden = !!chosen || camera.on;
  const label = project.classes.find(({ id }) => id === chosen?.label)?.name;
  shown.alt = label ? `The photo of ${label} that you chose` : "";
  if (chosen) show(readings.get(chosen.hash) ?? null);
  else if (!camera.on) show(null);
}

let watching = false;
/** Reads what the camera sees, again and again. */
async function watch(): Promise<void> {
  if (watching) return;
  watching = true;
  while (camera.on) {
    try {
      if (!chosen && labels.length > 1) {
        const by = labels;
        const features = await model.call("features", pixelsOfVideo(video, backbone.size));
        const [reading] = await model.call("read", [features]);
        if (by === labels && !chosen && camera.on && reading!.length === by.length)
          show({ labels: by, reading: reading! });
      } else if (!chosen) show(null);
    } catch (error) {
      // The backbone has been changed meanwhile, or fails.
      console.info(error);
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
    await new Promise(requestAnimationFrame);
  }
  watching = false;
}

async function toggleCamera(other = false): Promise<void> {
  if (camera.on && !other) camera.stop();
  else await camera.start(other).finally(showCamera);
  showCamera();
  if (!camera.on) return;
  if (chosen) choose(null);
  element("other").hidden = !(await camera.hasOther());
  void watch();
}

function showCamera(): void {
  element("camera").textContent = camera.on ? "Stop camera" : "Start camera";
  if (!camera.on) element("other").hidden = true;
  showChosen();
}

async function addClass(): Promise<void> {
  const input = element<HTMLInputElement>("name");
  const name = input.value.trim();
  const id = crypto.getRandomValues(new BigUint64Array(1))[0]!.toString(36);
  await update((entries) => {
    const { classes } = projectOf(entries);
    if (!name) throw new Refusal("Type the name of the class first, e.g. cup");
    checkName(classes, name);
    if (classes.length >= MAX_CLASSES) throw new Refusal(`There are already ${MAX_CLASSES} classes, the maximum`);
    return { add: { kind: "class", id, name, order: 1 + (classes.at(-1)?.order ?? 0) } };
  });
  input.value = "";
  cards.reveal(id);
  say(`Added ${name}: now take or add photos of it`);
}

function checkName(classes: readonly { readonly name: string }[], name: string): void {
  if (classes.some((item) => item.name === name)) throw new Refusal(`There is a class named ${name} already`);
}

async function rename(id: string, name: string): Promise<void> {
  await update((entries) => {
    const { classes } = projectOf(entries);
    const old = classes.find((item) => item.id === id);
    if (!old || old.name === name) return {};
    if (!name) throw new Refusal("A class needs a name");
    checkName(classes, name);
    const { key, ...content } = old;
    return { add: { ...content, name: name.slice(0, MAX_NAME) }, remove: [key] };
  });
}

/** Removes entries that `choice` selects, so that Undo brings them back. */
async function removeEntries(text: string, choice: (entry: Content) => boolean): Promise<void> {
  let removed: Content[] = [];
  await update((entries) => {
    const selected = entries.filter(choice);
    removed = selected.map(({ key: _, ...content }) => content as Content);
    return { remove: selected.map(({ key }) => key) };
  });
  if (removed.length) undoable.push({ removed, replaces: false, text });
  say(`Removed ${text}: Undo brings ${text === "all" ? "everything" : "it"} back`);
}

const remove = (id: string): Promise<void> =>
  removeEntries(project.classes.find((item) => item.id === id)?.name ?? "it", (entry) =>
    entry.kind === "class" ? entry.id === id : entry.kind === "photo" && entry.label === id,
  );

const discard = (hash: string): Promise<void> =>
  removeEntries("the photo", (entry) => entry.kind === "photo" && entry.hash === hash);

async function undo(): Promise<void> {
  const action = undoable.pop();
  if (!action) return;
  await update((entries) => {
    const { classes, photos, own } = projectOf(action.replaces ? [] : entries);
    const add = action.removed.filter((content) => {
      if (content.kind === "class") return !classes.some(({ id }) => id === content.id);
      if (content.kind === "photo") return !photos.some(({ hash }) => hash === content.hash);
      return content.kind === "head" ? action.replaces : !own;
    });
    return { add, remove: action.replaces ? entries.map(({ key }) => key) : [] };
  });
  say(`Brought back ${action.text}`);
}

/** Adds a picture to a class; returns whether it is held out. */
async function addPicture(label: string, picture: Uint8Array): Promise<boolean> {
  const hash = await digestOf(picture);
  const features = await model.call("features", await pixelsOf(picture, backbone.size));
  let heldOut = false;
  await update((entries) => {
    const { classes, photos } = projectOf(entries);
    const known = photos.find((photo) => photo.hash === hash);
    const name = classes.find(({ id }) => id === known?.label)?.name;
    if (known) throw new Refusal(`is a photo of ${name} already`);
    if (!classes.some(({ id }) => id === label)) throw new Refusal("belongs to a class that is gone");
    if (photos.length >= MAX_PHOTOS) throw new Refusal(`exceeds the maximum of ${MAX_PHOTOS} photos`);
    heldOut = isHeldOut(photos, label, hash);
    const { digest } = backbone;
    return { add: { kind: "photo", label, picture, hash, heldOut, features, backbone: digest } };
  });
  return heldOut;
}

async function addFiles(label: string, list: readonly File[]): Promise<void> {
  const problems: string[] = [];
  let [added, heldOut] = [0, 0];
  for (const [i, file] of list.entries()) {
    if (list.length > 1) say(`Adding photo ${i + 1} of ${list.length}`);
    try {
      heldOut += Number(await addPicture(label, await pictureOf(file)));
      added++;
    } catch (error) {
      problems.push(`${file.name || "The image"} ${(error as Error).message}`);
    }
  }
  const count = `${added} photo${added === 1 ? "" : "s"}`;
  const summary = added ? `Added ${count}${heldOut ? `, ${heldOut} held out to measure the accuracy` : ""}` : "";
  const more = problems.length > 1 ? `, and ${problems.length - 1} more are not added` : "";
  if (problems.length) say(`${summary && `${summary}. `}${problems[0]}${more}`, true);
  else if (summary) say(summary);
}

async function snap(label: string): Promise<void> {
  if (!camera.on) await toggleCamera();
  if (chosen) choose(null);
  const heldOut = await addPicture(label, await snapshot(video)).catch((error: Error) => {
    throw new Refusal(`The camera's picture ${error.message}`);
  });
  say(`Took a photo${heldOut ? ", held out to measure the accuracy" : ""}`);
}

async function saveModel(): Promise<void> {
  await learning;
  if (present !== (project.head?.key ?? 0)) await takeHead();
  const names = labels.map((label) => project.classes.find(({ id }) => id === label)!.name);
  download("things.onnx", (await model.call("export", names)) as Uint8Array<ArrayBuffer>);
  say("Saved the model as things.onnx: photo to scores, with the names in its metadata");
}

async function save(): Promise<void> {
  download("things.json", encode(journal.entries));
  say("Saved photos, names and model as things.json");
}

/** Runs `job` on the file that was chosen. */
async function withFile(input: HTMLInputElement, job: (file: File) => Promise<void>): Promise<void> {
  const file = input.files?.[0];
  if (!file) return;
  try {
    if (file.size > MAX_BYTES)
      throw new Refusal(`${file.name} is larger than ${MAX_BYTES / 2 ** 20} MB: nothing has changed`);
    await job(file);
  } finally {
    // So that the same file can be chosen again.
    input.value = "";
  }
}

async function load(file: File): Promise<void> {
  let content: readonly Content[];
  say(`Loading ${file.name}`);
  try {
    content = decode(await file.text());
  } catch (error) {
    throw new Refusal(
      `${file.name} can't be loaded as a project, because ${(error as Error).message}. Nothing has changed`,
    );
  }
  const { classes, photos } = projectOf(content.map((item, key) => ({ ...item, key })));
  if (classes.length > MAX_CLASSES || photos.length > MAX_PHOTOS)
    throw new Refusal(`${file.name} has more than ${MAX_CLASSES} classes or ${MAX_PHOTOS} photos: nothing has changed`);
  let removed: Content[] = [];
  await update((entries) => {
    removed = entries.map(({ key: _, ...entry }) => entry as Content);
    return { add: content, remove: entries.map(({ key }) => key) };
  });
  undoable.push({ removed, replaces: true, text: "what was here before" });
  if (!status.classList.contains("failed")) say(`Loaded ${file.name}`);
}

async function useOwn(file: File): Promise<void> {
  const range = element<HTMLSelectElement>("range").value as Range;
  const size = element<HTMLInputElement>("size").valueAsNumber;
  if (!(Number.isInteger(size) && size >= 8 && size <= 512))
    throw new Refusal("The size of the images must be a whole number from 8 to 512");
  const own: OwnBackbone = { bytes: new Uint8Array(await file.arrayBuffer()), size, range };
  await pauseLearning();
  try {
    backbone = await model.call("use", own);
  } catch (error) {
    if ((error as Error).name !== "FileError") throw error;
    throw new Refusal(
      `${file.name} can't be used as a backbone, because ${(error as Error).message}. Nothing has changed`,
    );
  }
  [used, present, labels] = [NaN, 0, []];
  await update((entries) => ({
    add: { kind: "backbone", name: file.name.slice(0, 200) || "your own", ...own },
    remove: entries.filter(({ kind }) => kind === "backbone").map(({ key }) => key),
  }));
  say(`${file.name} is the backbone now: ${backbone.features} features of ${backbone.size} x ${backbone.size} pixels`);
}

async function useStandard(): Promise<void> {
  await update((entries) => ({ remove: entries.filter(({ kind }) => kind === "backbone").map(({ key }) => key) }));
  say("Back to this page's backbone");
}

const on = (id: string, job: () => Promise<void>): void => element(id).addEventListener("click", () => void act(job));
on("camera", toggleCamera);
on("other", () => toggleCamera(true));
on("undo", undo);
on("save-model", saveModel);
on("save", save);
on("standard", useStandard);
on("clear", () => removeEntries("all", () => true));
for (const [id, job] of Object.entries({ load, own: useOwn })) {
  const input = element<HTMLInputElement>(id);
  input.addEventListener("change", () => void act(() => withFile(input, job)));
}
element("new").addEventListener("submit", (event) => {
  event.preventDefault();
  void act(addClass);
});

/** Adds the pictures that were pasted or dropped. */
function take(label: string, data: DataTransfer | null): void {
  const list = [...(data?.files ?? [])];
  if (!list.length) return;
  if (!label) say("Add a class first: then its photos", true);
  else void act(() => addFiles(label, list));
}
addEventListener("paste", (event) => opened && take(cards.current, event.clipboardData));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  // The browser would open the file in place of the page.
  event.preventDefault();
  const card = event.target instanceof Element ? event.target.closest<HTMLElement>(".class") : null;
  if (opened) take(card?.dataset.id ?? cards.current, event.dataTransfer);
});
camera.onEnd = () => {
  showCamera();
  say("The camera has stopped", true);
};
new ResizeObserver(() => drawCurve(curve, losses, losses.length)).observe(curve);

/** Shows what other tabs did. */
const catchUp = (): void => {
  if (opened) void act(() => update());
};
journal.onChange = catchUp;
// A tab that comes back from the history has heard nothing.
addEventListener("pageshow", (event) => event.persisted && catchUp());

void act(async () => {
  const opening = model.call("open");
  // An error of the journal's is shown after the wait.
  await journal.change();
  try {
    backbone = await opening;
    opened = true;
  } catch (error) {
    throw new Error(
      `The model could not be started: reload the page when you are online (${(error as Error).message})`,
    );
  }
  await follow();
  if (journal.damaged)
    say(`${journal.damaged} of the entries kept here were damaged and have been removed: the others are here`, true);
  else if (project.classes.length) say("Ready: your things are here");
  else say("Ready: type the name of a thing, and add its class");
});

keepOffline(element("update"));
