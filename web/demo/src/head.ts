/**
 * Gives the digits' network a head of any number of classes.
 *
 * The parameters of a training model are inputs of its graph, and no op of it knows the number of classes: it is only
 * in the shapes that the graph declares, and in the manifest. A class is a column of the head's weight and an element of
 * its bias.
 */

import { dtypeOf } from "../../src/dtypes.js";
import { METADATA_KEY, fingerprint } from "../../src/manifest.js";
import { type RawTensor, decodeSafetensors, encodeSafetensors } from "../../src/safetensors.js";
import { embed, integerField, join, parseMessage, textField, textOf } from "../../src/wire.js";

/** The files of a run by name. */
export type Files = Readonly<Record<string, Uint8Array>>;

interface Sized {
  readonly name?: string;
  readonly parameter?: string;
  readonly dtype: string;
  readonly shape: number[];
}
/** What is read and changed in a manifest. */
interface Manifest {
  fingerprint: string;
  readonly parameters: (Sized & { readonly name: string })[];
  readonly targets: { readonly class_labels: { count: number } }[];
  readonly optimizer: { readonly states: Sized[] } | null;
}

export const MANIFEST = "manifest.json";
const HEAD = "head.";
// Field numbers of onnx.proto: a model's graph, its inputs, outputs and other values, the shape of each, and its sizes.
const GRAPH = 7;
const VALUES = [11, 12, 13];
const SHAPE = [2, 1, 2];
const SIZE = 1;
const METADATA = 14;

const decode = (bytes: Uint8Array): string => new TextDecoder().decode(bytes);
const encode = (text: string): Uint8Array => new TextEncoder().encode(text);

/** Returns a message in which the messages at `path`, a list of field numbers, are changed. */
function changed(data: Uint8Array, path: readonly number[], change: (payload: Uint8Array) => Uint8Array): Uint8Array {
  const [number, ...rest] = path;
  const fields = parseMessage(data).map((field) =>
    field.number === number
      ? embed(number, rest.length ? changed(field.payload, rest, change) : change(field.payload))
      : field.raw,
  );
  return join(fields);
}

/** Returns the run of a network that differs from that of `files` in its number of classes, but for the checkpoint. */
export function withClasses(files: Files, count: number): Files {
  const before = (JSON.parse(decode(files[MANIFEST]!)) as Manifest).targets[0]!.class_labels.count;
  const manifest = (text: string): string => {
    const content = JSON.parse(text) as Manifest;
    for (const { name, parameter = name!, shape } of [...content.parameters, ...(content.optimizer?.states ?? [])])
      if (parameter.startsWith(HEAD)) shape[shape.length - 1] = count;
    content.targets[0]!.class_labels.count = count;
    content.fingerprint = fingerprint(
      content.parameters.map((spec) => ({ ...spec, dtype: dtypeOf(spec.dtype) })),
      [],
    );
    return JSON.stringify(content);
  };
  const size = (dim: Uint8Array): Uint8Array =>
    parseMessage(dim).some(({ number, integer }) => number === 1 && integer === before) ? integerField(1, count) : dim;
  // Pictures have four axes, and their padded sizes may be as large as the number of classes.
  const shape = (sizes: Uint8Array): Uint8Array =>
    parseMessage(sizes).length <= 2 ? changed(sizes, [SIZE], size) : sizes;
  const entry = (payload: Uint8Array): Uint8Array => {
    const key = textOf(payload, 1);
    return key === METADATA_KEY ? join([textField(1, key), textField(2, manifest(textOf(payload, 2)))]) : payload;
  };
  const model = (bytes: Uint8Array): Uint8Array =>
    VALUES.reduce(
      (result, value) => changed(result, [GRAPH, value, ...SHAPE], shape),
      changed(bytes, [METADATA], entry),
    );
  return Object.fromEntries(
    Object.entries(files).map(([name, bytes]) => {
      if (name === MANIFEST) return [name, encode(manifest(decode(bytes)))];
      return [name, name.endsWith(".onnx") ? model(bytes) : bytes];
    }),
  );
}

/** Returns the number of classes of a checkpoint's head; throws an Error if it has none. */
export function classesOf(checkpoint: Uint8Array): number {
  const count = decodeSafetensors(checkpoint).tensors.get(`parameter/${HEAD}bias`)?.shape[0];
  if (!count) throw new Error("it has no head");
  return count;
}

/**
 * Returns a checkpoint whose class i is the class `columns[i]` of another one, or a new one of zeros for -1. Its
 * optimizer starts afresh if anything has changed.
 *
 * @throws Error if the file is damaged, or has no such classes.
 */
export function withColumns(checkpoint: Uint8Array, columns: readonly number[]): Uint8Array {
  const { metadata, tensors } = decodeSafetensors(checkpoint);
  const count = classesOf(checkpoint);
  if (columns.length === count && columns.every((column, i) => column === i)) return checkpoint;
  const parameters = new Map<string, RawTensor>();
  for (const [key, tensor] of tensors) {
    const [kind, name] = key.split("/");
    if (kind !== "parameter") continue;
    parameters.set(key, name!.startsWith(HEAD) ? selected(tensor, count, columns) : tensor);
  }
  const specs = [...parameters].map(([key, tensor]) => ({ name: key.slice(key.indexOf("/") + 1), ...tensor }));
  return encodeSafetensors(parameters, { ...metadata, fingerprint: fingerprint(specs, []), optimizer: "null" });
}

/** Selects along the last axis. */
function selected({ dtype, shape, bytes }: RawTensor, count: number, columns: readonly number[]): RawTensor {
  if (dtype.name !== "float32" || shape.at(-1) !== count || Math.max(...columns) >= count)
    throw new Error("its head is of another kind");
  const from = new Float32Array(bytes.buffer as ArrayBuffer, bytes.byteOffset, bytes.length / 4);
  const rows = from.length / count;
  const to = Float32Array.from({ length: rows * columns.length }, (_, i) => {
    const column = columns[i % columns.length]!;
    return column < 0 ? 0 : from[Math.floor(i / columns.length) * count + column]!;
  });
  return { dtype, shape: [...shape.slice(0, -1), columns.length], bytes: new Uint8Array(to.buffer) };
}
