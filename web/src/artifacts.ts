/** Loads the files of a run from memory, from a folder of a server, or from a folder of the disk. */

import { DataFiles, type Model, type Read } from "./datafiles.js";
import { ModelLoadError, explained, messageOf } from "./errors.js";
import { type Reference, embeddedManifest, externalReferences } from "./export.js";
import { readInside, segments, urlInside } from "./folder.js";
import { asObject, parseJson } from "./json.js";
import { type Manifest, parseManifest } from "./manifest.js";

/** The files by name, `manifest.json` among them, or the URL of their folder. */
export type Artifacts = Readonly<Record<string, Uint8Array>> | URL | string;

/** The files of a run, read and checked against each other. */
export interface Run {
  readonly manifest: Manifest;
  readonly training: Model;
  readonly evaluation: Model | null;
  readonly inference: Model | null;
  readonly optimizer: Model | null;
  /** The files in which the models keep their weights. */
  readonly data: DataFiles;
  /** Bytes of the checkpoint from which training starts. */
  readonly checkpoint: Uint8Array | null;
}

const PAGE = /^\s*<(!doctype|html)/i;

/**
 * Loads the files of a run.
 *
 * @param cache name of the cache in which data files are kept; see `CreateOptions`.
 * @throws ModelLoadError if a file is missing, damaged, or of another run.
 */
export async function loadArtifacts(artifacts: Artifacts, cache?: string): Promise<Run> {
  const { read, manifestName } =
    typeof artifacts === "string" || artifacts instanceof URL ? fromUrl(artifacts) : memory(artifacts);
  const text = new TextDecoder().decode(await read(manifestName));
  const manifest = parseManifest(text, `'${manifestName}'`);
  const { files } = manifest;
  const data = new DataFiles(read, manifest.dataFiles, cache);
  const model = async (name: string | null, what: string): Promise<Model | null> => {
    if (name === null) return null;
    const bytes = await read(name);
    const source = `the ${what} '${name}'`;
    const loaded = { source, bytes, references: checkModel(bytes, source, manifest) };
    data.await(loaded);
    await data.of(loaded);
    return loaded;
  };
  const [training, evaluation, inference, optimizer, checkpoint] = await Promise.all([
    model(files.trainingModel, "training model"),
    model(files.evalModel, "eval model"),
    model(files.inferenceModel, "inference model"),
    model(files.optimizerModel, "optimizer model"),
    files.checkpoint === null ? null : read(files.checkpoint),
  ]);
  return { manifest, training: training!, evaluation, inference, optimizer, data, checkpoint };
}

/** Checks that a model belongs to the run, and returns the places of the tensors that it keeps in other files. */
function checkModel(bytes: Uint8Array, source: string, manifest: Manifest): Reference[] {
  try {
    // A model in ORT format is no protobuf message, and has neither metadata that can be read here nor external data.
    if (new TextDecoder("latin1").decode(bytes.subarray(4, 8)) === "ORTM") return [];
    const text = embeddedManifest(bytes);
    if (text === null) throw new Error("it is no model of a training run");
    if (asObject(parseJson(text), "its manifest")["fingerprint"] !== manifest.fingerprint) {
      throw new Error("it belongs to another run than the manifest");
    }
    const references = externalReferences(bytes);
    for (const path of new Set(references.map((reference) => reference.path))) segments(path);
    return references;
  } catch (error) {
    throw new ModelLoadError(
      `Loading ${source}: ${messageOf(error)}. Pass all files of one run as generate_artifacts wrote them.`,
      { cause: error },
    );
  }
}

/** Reads from an object of files. */
function memory(files: Readonly<Record<string, Uint8Array>>): { read: Read; manifestName: string } {
  if (typeof files !== "object" || files === null) {
    throw new ModelLoadError(
      `Loading the artifacts: expected an object from file name to Uint8Array, or the URL of a folder, received ${files === null ? "null" : typeof files}.`,
    );
  }
  // With `generate_artifacts(prefix=...)` the name begins with the prefix.
  const names = Object.keys(files).filter((name) => name.endsWith("manifest.json"));
  if (names.length !== 1) {
    throw new ModelLoadError(
      `Loading the artifacts: expected one 'manifest.json' among the files, received ${Object.keys(files).join(", ") || "no files"}.`,
    );
  }
  const read = async (name: string): Promise<Uint8Array> => {
    const file: unknown = Object.hasOwn(files, name) ? files[name] : undefined;
    if (file instanceof ArrayBuffer) return new Uint8Array(file);
    if (file instanceof Uint8Array) return file;
    const received =
      file === undefined ? "there is no such file" : `it is a ${(file as object).constructor?.name ?? typeof file}`;
    throw new ModelLoadError(
      `Loading the artifacts: '${name}', which the manifest names, must be a Uint8Array; ${received}. Files: ${Object.keys(files).join(", ")}.`,
    );
  };
  return { read, manifestName: names[0]! };
}

/** Reads from a folder by its URL, or by the URL of the manifest in it. */
function fromUrl(artifacts: URL | string): { read: Read; manifestName: string } {
  // In a page relative URLs are those of the document, or of the worker's script.
  const page: string | undefined =
    (globalThis as { document?: { baseURI: string } }).document?.baseURI ?? globalThis.location?.href;
  let base: URL;
  try {
    base = new URL(artifacts, page);
  } catch (error) {
    throw new ModelLoadError(
      `Loading the artifacts: '${artifacts}' is no URL. Pass a complete one; in Node, of a path: pathToFileURL(path).`,
      { cause: error },
    );
  }
  let manifestName = "manifest.json";
  const folder = new URL(base);
  if (base.pathname.endsWith(manifestName)) {
    const slash = base.pathname.lastIndexOf("/") + 1;
    manifestName = base.pathname.slice(slash);
    folder.pathname = base.pathname.slice(0, slash);
  } else {
    if (!folder.pathname.endsWith("/")) folder.pathname += "/";
    base = urlInside(folder, manifestName);
  }
  const read = async (name: string): Promise<Uint8Array> => {
    let place = `'${name}'`;
    try {
      // The manifest is where the caller says; every other name is a stranger's.
      const url = name === manifestName ? base : urlInside(folder, name);
      place = url.href;
      // Node's fetch reads no files.
      if (url.protocol === "file:") return await readInside(folder, url);
      const response = await fetch(url);
      if (!response.ok) throw new Error(`the server answered ${response.status} ${response.statusText}`);
      const bytes = new Uint8Array(await response.arrayBuffer());
      // Servers of pages with routes answer what they do not have with the page.
      if (PAGE.test(new TextDecoder("latin1").decode(bytes.subarray(0, 64))))
        throw new Error("the server answered with a page of HTML instead of the file");
      return bytes;
    } catch (error) {
      throw explained(
        `Loading the artifacts: reading ${place}`,
        error,
        () =>
          new ModelLoadError(
            `Loading the artifacts: reading ${place} failed: ${messageOf(error)}. Check that all files of the run are in this folder.`,
            { cause: error },
          ),
      );
    }
  };
  return { read, manifestName };
}
