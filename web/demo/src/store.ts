/**
 * Keeps what the user did as a journal in the browser's database.
 *
 * Each change is one transaction that reads the journal and writes entries. The database runs the transactions of all
 * tabs one after the other and completes each of them or none of it, so that tabs never overwrite each other and a crash
 * loses at most the change in flight.
 */

/** A change that cannot be made, with a message to the user. Nothing has changed. */
export class Refusal extends Error {}

/** Content with its place in the journal. */
export type Kept<C> = C & { readonly key: number };
/** What to do to the journal, given its entries. May run twice. */
export type Plan<C> = (entries: readonly Kept<C>[]) => {
  add?: C | readonly C[];
  remove?: readonly number[];
};

/** What the journals of pages differ in. */
export interface Design<C> {
  /** Name of the database, and of the channel on which tabs tell each other of changes. */
  readonly name: string;
  readonly version: number;
  /** Brings a database of an older version, 0 for a new one, to this one. */
  upgrade(request: IDBOpenDBRequest, from: number): void;
  /** True for content that this page has written: what other programs wrote is not trusted. */
  isContent(value: unknown): value is C;
  /** What the user loses that the browser does not keep, e.g. "your drawings". */
  readonly work: string;
}

const STORE = "journal";
// A tab with an old version of the page may block the upgrade of the database.
const PATIENCE = 5000;

/** Makes the store of the entries. */
export const createStore = (database: IDBDatabase): IDBObjectStore =>
  database.createObjectStore(STORE, { keyPath: "key", autoIncrement: true });

/** Opens the database. */
function open<C>({ name, version, upgrade }: Design<C>): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, version);
    let late = false;
    const timer = setTimeout(() => {
      late = true;
      reject(new DOMException("", "TimeoutError"));
    }, PATIENCE);
    request.onupgradeneeded = ({ oldVersion }) => upgrade(request, oldVersion);
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

/** Returns why the browser does not keep a change, and what the user can do. */
function explain(error: unknown, work: string): string {
  const save = `save ${work} as files before you leave.`;
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

/** A journal, as this tab knows it. */
export class Store<C extends object> {
  /** Called when another tab has changed the journal. */
  onChange: () => void = () => {};
  /** Why the last change is not kept, "" if everything is. */
  trouble = "";
  /** Number of entries that could not be read and have been removed. */
  damaged = 0;
  #stored: Kept<C>[] = [];
  // What the browser has not kept yet: entries to add, with keys below 0, and keys to remove. The next change tries again.
  #waiting: Kept<C>[] = [];
  #removed = new Set<number>();
  #keys = 0;
  #channel: BroadcastChannel | null = null;
  #running: IDBTransaction | null = null;

  constructor(private readonly design: Design<C>) {
    // WebKit may keep a page that is left with its transaction, for which those of other tabs then wait.
    addEventListener("pagehide", () => this.#running?.abort());
    try {
      this.#channel = new BroadcastChannel(design.name);
      this.#channel.addEventListener("message", () => this.onChange());
    } catch {
      // Old browsers, and those that refuse all storage: the other tabs learn of a change at their next one.
    }
  }

  get entries(): readonly Kept<C>[] {
    return [...this.#stored.filter(({ key }) => !this.#removed.has(key)), ...this.#waiting];
  }

  /**
   * Changes the journal; without a plan only reads what other tabs have written. Where the browser keeps nothing, the
   * change is made in memory, and `trouble` says why.
   */
  async change(plan: Plan<C> = () => ({})): Promise<void> {
    try {
      await this.#commit(plan);
      this.trouble = "";
    } catch (error) {
      if (error instanceof Refusal) throw error;
      console.info(error);
      [this.#waiting, this.#removed] = this.#applied(plan, this.#stored);
      this.trouble = explain(error, this.design.work);
    }
  }

  /** Returns entries to add and keys to remove, with those of earlier changes that the browser has not kept. */
  #applied(plan: Plan<C>, stored: readonly Kept<C>[]): [Kept<C>[], Set<number>] {
    const { add = [], remove = [] } = plan([...stored.filter(({ key }) => !this.#removed.has(key)), ...this.#waiting]);
    const waiting = this.#waiting.filter(({ key }) => !remove.includes(key));
    for (const content of [add].flat() as C[]) waiting.push({ ...content, key: --this.#keys });
    return [waiting, new Set([...this.#removed, ...remove.filter((key) => key > 0)])];
  }

  async #commit(plan: Plan<C>): Promise<void> {
    const database = await open(this.design);
    // Entries never change: one that is known stays the same object.
    const known = new Map(this.#stored.map((entry) => [entry.key, entry]));
    let [stored, added, changed, damaged, failure]: [Kept<C>[], Kept<C>[], boolean, number, unknown] = [
      [],
      [],
      false,
      0,
      null,
    ];
    try {
      await new Promise<void>((resolve, reject) => {
        const transaction = database.transaction(STORE, "readwrite", { durability: "strict" });
        this.#running = transaction;
        transaction.oncomplete = () => resolve();
        transaction.onabort = () => reject(failure ?? transaction.error);
        const store = transaction.objectStore(STORE);
        const reading = store.getAll() as IDBRequest<{ key: number }[]>;
        reading.onsuccess = () => {
          try {
            const all = reading.result.map((entry) => known.get(entry.key) ?? entry);
            stored = all.filter((entry): entry is Kept<C> => this.design.isContent(entry));
            const broken = all.filter((entry) => !this.design.isContent(entry)).map(({ key }) => key);
            const [waiting, removed] = this.#applied(plan, stored);
            stored = stored.filter(({ key }) => !removed.has(key));
            for (const key of [...broken, ...removed]) store.delete(key);
            for (const { key: _, ...content } of waiting) {
              const adding = store.add(content) as IDBRequest<number>;
              adding.onsuccess = () => added.push({ ...(content as unknown as C), key: adding.result });
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
      this.#running = null;
      database.close();
    }
    this.#stored = [...stored, ...added];
    [this.#waiting, this.#removed] = [[], new Set()];
    this.damaged += damaged;
    if (changed) this.#channel?.postMessage(null);
  }
}

/** Runs `job` unless another tab runs one; returns false if one does. `name` is the name of the page's journal. */
export async function alone(name: string, job: () => Promise<void>): Promise<boolean> {
  let begun = false;
  const run = async (lock: Lock | null): Promise<boolean> => {
    if (!lock) return false;
    begun = true;
    await job();
    return true;
  };
  try {
    return await navigator.locks.request(name, { ifAvailable: true }, run);
  } catch (error) {
    if (begun) throw error;
    // Without HTTPS and where the browser refuses all storage there are no locks.
    await job();
    return true;
  }
}
