/** Keeps drawings and weights in the browser's database, so that a reload loses nothing. */

import type { Drawing } from "./protocol.js";

/** What the page keeps. */
export interface Kept {
  readonly drawings: Drawing[];
  /** The personalised checkpoint; null for the base model. */
  readonly checkpoint: Uint8Array | null;
  /** Losses of the last training, for the curve. */
  readonly losses: number[];
}

const DATABASE = "onnxtrain-handwriting";
const STORE = "state";

function open(): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function run<T>(mode: IDBTransactionMode, use: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(STORE, mode);
      const request = use(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** Reads what an earlier visit kept; null if there is nothing, or the browser keeps nothing (private windows). */
export async function restore(): Promise<Kept | null> {
  try {
    return ((await run("readonly", (store) => store.get("kept"))) as Kept | undefined) ?? null;
  } catch {
    return null;
  }
}

/** Keeps the state; returns false if the browser refuses. */
export async function keep(state: Kept): Promise<boolean> {
  try {
    await run("readwrite", (store) => store.put(state, "kept"));
    return true;
  } catch {
    return false;
  }
}
