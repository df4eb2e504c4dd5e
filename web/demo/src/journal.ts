/**
 * What the page keeps, in a journal: an entry adds drawings, changes names or replaces the model, and an undo removes the
 * last one. Each task has a history of its own.
 */

import { isName } from "./names.js";
import type { Stroke } from "./pad.js";
import { SIZE } from "./preprocess.js";
import type { Drawing } from "./protocol.js";
import { type Design, type Kept, Store, createStore } from "./store.js";
import type { TaskId } from "./tasks.js";

/** Drawings that were added together. */
export interface Drawn {
  readonly kind: "drawings";
  readonly drawings: readonly Drawing[];
  /** What `Undo` puts back on the drawing area. */
  readonly strokes: Stroke[];
}

/** A model that was trained, loaded or reset. */
export interface Modelled {
  readonly kind: "model";
  readonly by: "training" | "file" | "reset";
  /** Parameters and optimizer state; null for the base model. */
  readonly checkpoint: Uint8Array | null;
  /** Its classes in the order of its outputs: digits, or numbers of names. */
  readonly classes: readonly number[];
  /** Losses of the training, for the curve. */
  readonly losses: readonly number[];
  /** True if no model came before. */
  readonly first: boolean;
}

/** The number of a class, which it keeps when it is renamed, and its name; null removes it. */
export type Naming = readonly [id: number, name: string | null];

/** Names that were added, changed or removed together. */
export interface Named {
  readonly kind: "names";
  readonly names: readonly Naming[];
}

export type Content = Drawn | Modelled | Named;
type OfTask = Content & { readonly task: TaskId };
export type Entry = Kept<OfTask>;
/** What to do to the journal, given the entries of the task. May run twice. */
export type Plan = (entries: readonly Entry[]) => { add?: Content | readonly Content[]; remove?: readonly number[] };

/** True if an entry is a model. */
export const isModel = (entry: Entry): entry is Modelled & Entry => entry.kind === "model";

/** Returns the drawings of the classes, in the order in which they were added. */
export const drawingsIn = (entries: readonly Entry[], classes: ReadonlyMap<number, string>): Drawing[] =>
  entries.flatMap((entry) =>
    entry.kind === "drawings" ? entry.drawings.filter(({ label }) => classes.has(label)) : [],
  );

/**
 * True if the next drawing of a class is held out: the second drawing of all, so that there is something to measure
 * from then on, the second of each class, and then every third of it.
 */
export function isHeldOut(drawings: readonly Drawing[], label: number): boolean {
  const same = drawings.filter((drawing) => drawing.label === label);
  const heldOut = same.filter((drawing) => drawing.heldOut).length;
  return same.length > 3 * heldOut || (drawings.length > 0 && !drawings.some((drawing) => drawing.heldOut));
}

/** Returns the entry that `Undo` removes. Of old models the ones before are forgotten, and so they stay. */
export function undoable(entries: readonly Entry[]): Entry | undefined {
  return entries.findLast((entry, i) => !isModel(entry) || entry.first || entries.slice(0, i).some(isModel));
}

/** True if a value is a drawing of a class from 0 to `last`: what other programs wrote is not trusted. */
export function isDrawing(value: unknown, last: number): value is Drawing {
  const { image, label, heldOut } = (value ?? {}) as Partial<Drawing>;
  return (
    image instanceof Float32Array &&
    image.length === SIZE * SIZE &&
    image.every((pixel) => pixel >= 0 && pixel <= 1) &&
    isClass(label, last) &&
    typeof heldOut === "boolean"
  );
}

const isClass = (value: unknown, last: number): boolean =>
  Number.isInteger(value) && (value as number) >= 0 && (value as number) <= last;

function isEntry(value: unknown): value is OfTask {
  const entry = (value ?? {}) as Record<string, unknown>;
  const isList = (list: unknown, test: (item: unknown) => boolean): boolean => Array.isArray(list) && list.every(test);
  if (entry.task !== "digits" && entry.task !== "sketches") return false;
  const last = entry.task === "digits" ? 9 : 2 ** 31;
  if (entry.kind === "model")
    return (
      (entry.checkpoint === null || entry.checkpoint instanceof Uint8Array) &&
      isList(entry.losses, Number.isFinite) &&
      isList(entry.classes, (id) => isClass(id, last))
    );
  if (entry.kind === "names")
    return isList(entry.names, (naming) => {
      const [id, name] = Array.isArray(naming) ? (naming as unknown[]) : [];
      return isClass(id, last) && (name === null || isName(name));
    });
  const isPoint = (point: unknown): boolean => {
    const { x, y } = (point ?? {}) as Record<string, unknown>;
    return Number.isFinite(x) && Number.isFinite(y);
  };
  const isStroke = (stroke: unknown): boolean => isList(stroke, isPoint) && (stroke as unknown[]).length > 0;
  const { drawings } = entry as Partial<Drawn>;
  return (
    entry.kind === "drawings" &&
    isList(drawings, (drawing) => isDrawing(drawing, last)) &&
    drawings!.length > 0 &&
    isList(entry.strokes, isStroke)
  );
}

const DIGITS = [...Array(10).keys()];

/**
 * The journal of the page. Version 1 of its database held one record with all drawings and the model, version 2 a journal of
 * the digits alone.
 */
export const HANDWRITING: Design<OfTask> = {
  name: "onnxtrain-handwriting",
  version: 3,
  work: "your drawings and your model",
  isContent: isEntry,
  upgrade(request, from) {
    const database = request.result;
    if (from === 2) {
      const journal = request.transaction!.objectStore("journal");
      const reading = journal.getAll() as IDBRequest<Record<string, unknown>[]>;
      reading.onsuccess = () => {
        for (const entry of reading.result) journal.put({ ...entry, task: "digits", classes: DIGITS });
      };
      return;
    }
    const journal = createStore(database);
    if (!database.objectStoreNames.contains("state")) return;
    const reading = request.transaction!.objectStore("state").get("kept") as IDBRequest<Record<string, unknown>>;
    reading.onsuccess = () => {
      const { drawings, checkpoint, losses } = reading.result ?? {};
      const add = (content: object): unknown => journal.add({ ...content, task: "digits", classes: DIGITS });
      if (Array.isArray(drawings))
        for (const drawing of drawings) add({ kind: "drawings", drawings: [drawing], strokes: [] });
      if (checkpoint) add({ kind: "model", by: "training", checkpoint, losses, first: true });
      database.deleteObjectStore("state");
    };
  },
};

/** The journal, as this tab knows it. */
export class Journal extends Store<OfTask> {
  /** The task whose entries are read and changed. */
  task: TaskId = "digits";

  constructor() {
    super(HANDWRITING);
  }

  /** The entries of the task. */
  override get entries(): readonly Entry[] {
    return this.#ofTask(super.entries);
  }

  override change(plan: Plan = () => ({})): Promise<void> {
    return super.change((entries) => {
      const { add = [], remove = [] } = plan(this.#ofTask(entries));
      return { add: [add].flat().map((content) => ({ ...(content as Content), task: this.task })), remove };
    });
  }

  #ofTask(entries: readonly Entry[]): Entry[] {
    return entries.filter(({ task }) => task === this.task);
  }
}
