/** Copies parameters into one array, and back. */

import { elements } from "./dtypes.js";
import { InputError } from "./errors.js";
import type { Manifest, ParameterSpec } from "./manifest.js";
import { type OrtModule, dispose } from "./ort.js";
import type { State } from "./state.js";

/** Returns the parameters of a flat array; InputError if they are not all float32. */
export function flatParameters(manifest: Manifest, trainableOnly: boolean, doing: string): readonly ParameterSpec[] {
  const selected = trainableOnly ? manifest.parameters.filter((spec) => spec.trainable) : manifest.parameters;
  const other = selected.find((spec) => spec.dtype.name !== "float32");
  if (other)
    throw new InputError(
      `${doing}: the parameter '${other.name}' is ${other.dtype.name}, and a Float32Array holds float32 only. Use saveCheckpoint and loadCheckpoint.`,
    );
  return selected;
}

/** Copies the parameters into one array, in the order of `selected`. */
export async function flatten(state: State, selected: readonly ParameterSpec[], doing: string): Promise<Float32Array> {
  const raw = await state.read(new Map(selected.map(({ name }) => [name, state.parameters.get(name)!])), doing);
  const flat = new Float32Array(count(selected));
  const bytes = new Uint8Array(flat.buffer);
  let position = 0;
  for (const tensor of raw.values()) {
    bytes.set(tensor.bytes, position);
    position += tensor.bytes.length;
  }
  return flat;
}

/** Throws an InputError unless `buffer` holds as many elements as the selected parameters. */
export function checkFlat(buffer: unknown, selected: readonly ParameterSpec[], trainableOnly: boolean): void {
  const size = count(selected);
  if (buffer instanceof Float32Array && buffer.length === size) return;
  const received =
    buffer instanceof Float32Array
      ? `${buffer.length} elements`
      : `a ${(buffer as object | null)?.constructor?.name ?? String(buffer)}`;
  const which = trainableOnly ? "the trainable parameters" : "all parameters";
  throw new InputError(
    `loadParameters: expected a Float32Array of ${size} elements for ${which}, received ${received}. Is trainableOnly = ${trainableOnly} meant?`,
  );
}

/** Puts the elements of an array in the place of the selected parameters. */
export function unflatten(
  ort: OrtModule,
  state: State,
  selected: readonly ParameterSpec[],
  flat: Float32Array<ArrayBuffer>,
): void {
  let position = 0;
  for (const { name, shape } of selected) {
    const end = position + elements(shape);
    dispose([state.parameters.get(name)]);
    state.parameters.set(name, new ort.Tensor("float32", flat.slice(position, end), shape));
    position = end;
  }
}

function count(selected: readonly ParameterSpec[]): number {
  return selected.reduce((sum, { shape }) => sum + elements(shape), 0);
}
