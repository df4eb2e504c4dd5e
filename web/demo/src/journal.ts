/**
 * Keeps what the user did as a journal in the browser's database: an entry adds drawings, changes names or replaces the
 * model, and an undo removes the last one. Each task has a history of its own.
 *
 * Each change is one transaction that reads the journal and writes one entry. The database runs the transactions of all
 * tabs one after the other and completes each of them or none of it, so that tabs never overwrite each other and a crash
 * loses at most the change in flight.
 */

import { isName } from "./names.js";
import type { Stroke } from "./pad.js";
import { SIZE } from "./preprocess.js";
import type { Drawing } from "./protocol.js";
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
export type Entry = Content & { readonly key: number; readonly task: TaskId };
/** What to do to the journal, given the entries of the task. May run twice. */
export type Plan = (entries: readonly Entry[]) => { add?: readonly Content[]; remove?: readonly number[] };

/** A change that cannot be made, with a message to the user. Nothing has changed. */
export class Refusal extends Error {}

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

const NAME = "onnxtrain-handwriting";
const STORE = "journal";
const VERSION = 3;
const DIGITS = [...Array(10).keys()];
// A tab with an old version of the page may block the upgrade of the database.
const PATIENCE = 5000;

/**
 * Opens the database. Version 1 held one record with all drawings and the model, version 2 a journal of the digits
 * alone.
 */
function open(): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    let late = false;
    const timer = setTimeout(() => {
      late = true;
      reject(new DOMException("", "TimeoutError"));
    }, PATIENCE);
    request.onupgradeneeded = ({ oldVersion }) => {
      const database = request.result;
      if (oldVersion === 2) {
        const journal = request.transaction!.objectStore(STORE);
        const reading = journal.getAll() as IDBRequest<Record<string, unknown>[]>;
        reading.onsuccess = () => {
          for (const entry of reading.result) journal.put({ ...entry, task: "digits", classes: DIGITS });
        };
        return;
      }
      const journal = database.createObjectStore(STORE, { keyPath: "key", autoIncrement: true });
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
    };
    request.onsuccess = () => {
      clearTimeout(timer);
      if (late) request.result.close();
      else resolve(request.result);
    };
    request.onerror = () => {
      clearTimeout(timer);
      reject(request.error);
    };
  });
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

function isEntry(value: unknown): value is Entry {
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

/** Returns why the browser does not keep a change, and what the user can do. */
function explain(error: unknown): string {
  const save = "save your drawings and your model as files before you leave.";
  switch ((error as Error | null)?.name) {
    case "QuotaExceededError":
      return `The browser's storage is full, so this is not kept: free some space, or ${save}`;
    case "VersionError":
      return "A newer version of this page has been here: reload this tab. Until then nothing is kept.";
    case "TimeoutError":
      return "Another tab with an old version of this page blocks the storage: close it and reload this one.";
    default:
      return `This browser keeps nothing here, for example because the window is private: ${save}`;
  }
}

/** The journal, as this tab knows it. */
export class Journal {
  /** Called when another tab has changed the journal. */
  onChange: () => void = () => {};
  /** Why the last change is not kept, "" if everything is. */
  trouble = "";
  /** Number of entries that could not be read and have been removed. */
  damaged = 0;
  /** The task whose entries are read and changed. */
  task: TaskId = "digits";
  #stored: Entry[] = [];
  // What the browser has not kept yet: entries to add, with keys below 0, and keys to remove. The next change tries again.
  #waiting: Entry[] = [];
  #removed = new Set<number>();
  #keys = 0;
  #channel: BroadcastChannel | null = null;

  constructor() {
    try {
      this.#channel = new BroadcastChannel(NAME);
      this.#channel.addEventListener("message", () => this.onChange());
    } catch {
      // Old browsers, and those that refuse all storage: the other tabs learn of a change at their next one.
    }
  }

  /** The entries of the task. */
  get entries(): readonly Entry[] {
    return this.#present(this.#stored);
  }

  #present(stored: readonly Entry[]): Entry[] {
    const entries = [...stored.filter(({ key }) => !this.#removed.has(key)), ...this.#waiting];
    return entries.filter(({ task }) => task === this.task);
  }

  /**
   * Changes the journal; without a plan only reads what other tabs have written. Where the browser keeps nothing, the
   * change is made in memory, and `trouble` says why.
   */
  async change(plan: Plan = () => ({})): Promise<void> {
    try {
      await this.#commit(plan);
      this.trouble = "";
    } catch (error) {
      if (error instanceof Refusal) throw error;
      console.info(error);
      [this.#waiting, this.#removed] = this.#applied(plan, this.#stored);
      this.trouble = explain(error);
    }
  }

  /** Returns entries to add and keys to remove, with those of earlier changes that the browser has not kept. */
  #applied(plan: Plan, stored: readonly Entry[]): [Entry[], Set<number>] {
    const { add = [], remove = [] } = plan(this.#present(stored));
    const waiting = this.#waiting.filter(({ key }) => !remove.includes(key));
    for (const content of add) waiting.push({ ...content, task: this.task, key: --this.#keys });
    return [waiting, new Set([...this.#removed, ...remove.filter((key) => key > 0)])];
  }

  async #commit(plan: Plan): Promise<void> {
    const database = await open();
    // Entries never change: one that is known stays the same object.
    const known = new Map(this.#stored.map((entry) => [entry.key, entry]));
    let [stored, added, changed, damaged, failure]: [Entry[], Entry[], boolean, number, unknown] = [
      [],
      [],
      false,
      0,
      null,
    ];
    try {
      await new Promise<void>((resolve, reject) => {
        const transaction = database.transaction(STORE, "readwrite", { durability: "strict" });
        transaction.oncomplete = () => resolve();
        transaction.onabort = () => reject(failure ?? transaction.error);
        const store = transaction.objectStore(STORE);
        const reading = store.getAll() as IDBRequest<{ key: number }[]>;
        reading.onsuccess = () => {
          try {
            const all = reading.result.map((entry) => known.get(entry.key) ?? entry);
            stored = all.filter(isEntry);
            const broken = all.filter((entry) => !isEntry(entry)).map(({ key }) => key);
            const [waiting, removed] = this.#applied(plan, stored);
            stored = stored.filter(({ key }) => !removed.has(key));
            for (const key of [...broken, ...removed]) store.delete(key);
            for (const { key: _, ...content } of waiting) {
              const adding = store.add(content) as IDBRequest<number>;
              adding.onsuccess = () => added.push({ ...content, key: adding.result } as Entry);
            }
            damaged = broken.length;
            changed = damaged + waiting.length + removed.size > 0;
          } catch (error) {
            failure = error;
            transaction.abort();
          }
        };
      });
    } finally {
      database.close();
    }
    this.#stored = [...stored, ...added];
    [this.#waiting, this.#removed] = [[], new Set()];
    this.damaged += damaged;
    if (changed) this.#channel?.postMessage(null);
  }
}

/** Runs `job` unless another tab runs one; returns false if one does. */
export async function alone(job: () => Promise<void>): Promise<boolean> {
  let begun = false;
  const run = async (lock: Lock | null): Promise<boolean> => {
    if (!lock) return false;
    begun = true;
    await job();
    return true;
  };
  try {
    return await navigator.locks.request(NAME, { ifAvailable: true }, run);
  } catch (error) {
    if (begun) throw error;
    // Without HTTPS and where the browser refuses all storage there are no locks.
    await job();
    return true;
  }
}
