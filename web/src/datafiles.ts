/** Reads the files in which the models of a run keep their weights. */

import { ModelLoadError } from "./errors.js";
import type { ExternalFile, Reference } from "./export.js";
import type { DataFileSpec } from "./manifest.js";
import { digestOf } from "./sha256.js";

/** A model of a run. */
export interface Model {
  /** Name of the model in messages, e.g. "the training model 'training_model.onnx'". */
  readonly source: string;
  readonly bytes: Uint8Array;
  /** Places of the tensors that the model keeps in other files. */
  readonly references: readonly Reference[];
}

export type Read = (name: string) => Promise<Uint8Array>;

/**
 * The data files of a run. A file is read once for all models, and forgotten once every model that needs it has been
 * opened: ONNX Runtime has copied its weights by then.
 */
export class DataFiles {
  readonly #read: Read;
  readonly #expected: ReadonlyMap<string, DataFileSpec>;
  readonly #cache: string | undefined;
  readonly #files = new Map<string, Promise<Uint8Array>>();
  /** By file, the models that have not been opened yet. */
  readonly #waiting = new Map<string, Set<Model>>();

  /**
   * @param read reads a file of the run by its name.
   * @param expected files whose content is checked, by name.
   * @param cache name of a cache of the Cache API for these files.
   */
  constructor(read: Read, expected: ReadonlyMap<string, DataFileSpec>, cache?: string) {
    this.#read = read;
    this.#expected = expected;
    this.#cache = cache;
  }

  /** Keeps the files of a model, once they are read, until the model has been opened. */
  await(model: Model): void {
    for (const path of pathsOf(model)) {
      if (!this.#waiting.has(path)) this.#waiting.set(path, new Set());
      this.#waiting.get(path)!.add(model);
    }
  }

  /**
   * Returns the files that a model refers to.
   *
   * @throws ModelLoadError if a file is missing, too short, or another one than the artifacts were written with.
   */
  async of(model: Model): Promise<ExternalFile[]> {
    const files = await Promise.all(pathsOf(model).map(async (path) => ({ path, data: await this.#file(path) })));
    const sizes = new Map(files.map(({ path, data }) => [path, data.length]));
    for (const { name, path, begin, end } of model.references) {
      const size = sizes.get(path)!;
      // ONNX Runtime's builds differ in what they do beyond the end.
      if (!(begin >= 0 && begin <= (end ?? size) && (end ?? size) <= size)) {
        throw new ModelLoadError(
          `Loading ${model.source}: the data of '${name}' should be in '${path}' at bytes ${begin} to ${end ?? size}, but the file has ${size} bytes. Pass all files of one run as generate_artifacts wrote them.`,
        );
      }
    }
    return files;
  }

  /** Forgets the files that no other model waits for. */
  opened(model: Model): void {
    for (const path of pathsOf(model)) {
      this.#waiting.get(path)?.delete(model);
      if (!this.#waiting.get(path)?.size) this.#files.delete(path);
    }
  }

  #file(path: string): Promise<Uint8Array> {
    const known = this.#files.get(path);
    if (known) return known;
    const file = this.#checked(path);
    if (this.#waiting.get(path)?.size) {
      this.#files.set(path, file);
      // The next call tries again.
      file.catch(() => this.#files.delete(path));
    }
    return file;
  }

  /** Returns the checked content of a file, from the cache if that has it. */
  async #checked(path: string): Promise<Uint8Array> {
    const expected = this.#expected.get(path);
    if (!expected) return this.#read(path);
    const cache = await openCache(this.#cache);
    // No server answers for this address: the file is the same in all folders.
    const key = `https://onnxtrain.invalid/${expected.sha256}`;
    const kept = await cache?.match(key).catch(() => undefined);
    if (kept) {
      const data = new Uint8Array(await kept.arrayBuffer());
      if (!(await difference(data, expected))) return data;
    }
    const data = await this.#read(path);
    const problem = await difference(data, expected);
    if (problem) {
      throw new ModelLoadError(
        `Loading the artifacts: '${path}' is not the file with which they were written: ${problem}. Put the original file there, or generate the artifacts again from the new one.`,
      );
    }
    // Without the cache, e.g. where the disk is full, the file is loaded again next time.
    await cache?.put(key, new Response(data as Uint8Array<ArrayBuffer>)).catch(() => undefined);
    return data;
  }
}

/** Opens a cache, null where the Cache API is missing (Node, pages without HTTPS) or refuses (private windows). */
async function openCache(name: string | undefined): Promise<Cache | null> {
  if (!name || typeof caches === "undefined") return null;
  return caches.open(name).catch(() => null);
}

/** Tells how a file differs from what the manifest says, "" if it does not. */
async function difference(data: Uint8Array, expected: DataFileSpec): Promise<string> {
  if (data.length !== expected.bytes) return `it has ${data.length} bytes instead of ${expected.bytes}`;
  const digest = await digestOf(data);
  if (digest === expected.sha256) return "";
  return `its SHA-256 is ${digest.slice(0, 12)}... instead of ${expected.sha256.slice(0, 12)}...`;
}

function pathsOf(model: Model): string[] {
  return [...new Set(model.references.map(({ path }) => path))];
}
