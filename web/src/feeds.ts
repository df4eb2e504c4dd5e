/** Checks the feeds of a step before ONNX Runtime sees them, and copies them. */

import type { Tensor } from "onnxruntime-common";
import { InputError } from "./errors.js";
import type { ClassLabels, InputSpec } from "./manifest.js";
import { type OrtModule, numberAt } from "./ort.js";

/** Tensors by the names of inputs and targets. */
export type Feeds = Readonly<Record<string, Tensor>>;

/** Describes an input for a message, e.g. "x: float32 [batch, 4]". */
function show(spec: InputSpec): string {
  return `${spec.name}: ${spec.dtype.name} ${spec.shape === null ? "of any shape" : `[${spec.shape.map((d) => (d === null || d === "" ? "?" : d)).join(", ")}]`}`;
}

/**
 * Checks names, dtypes, shapes and class labels, and returns copies.
 *
 * @param ort makes the copies.
 * @param specs the inputs that the model takes.
 * @param ignored names that may be among the feeds and are left out, e.g. the targets when predicting.
 * @param feeds tensors by name.
 * @param doing begins the message of an error, e.g. "trainStep".
 * @throws InputError if a feed does not fit.
 */
export function checkFeeds(
  ort: OrtModule,
  specs: readonly InputSpec[],
  ignored: readonly string[],
  feeds: Feeds,
  doing: string,
): Record<string, Tensor> {
  const takes = `The model takes ${specs.map(show).join("; ")}.`;
  if (typeof feeds !== "object" || feeds === null || Array.isArray(feeds) || feeds instanceof ort.Tensor) {
    throw new InputError(
      `${doing}: expected an object from input name to ort.Tensor, received ${describe(feeds)}. ${takes}`,
    );
  }
  const known = new Set([...specs.map((spec) => spec.name), ...ignored]);
  const unknown = Object.keys(feeds).filter((name) => !known.has(name));
  if (unknown.length)
    throw new InputError(`${doing}: there is no input ${unknown.map((n) => `'${n}'`).join(", ")}. ${takes}`);
  const symbols = new Map<string, { size: number; owner: string }>();
  const checked: Record<string, Tensor> = {};
  for (const spec of specs) {
    const value: unknown = Object.hasOwn(feeds, spec.name) ? feeds[spec.name] : undefined;
    if (value === undefined) throw new InputError(`${doing}: the input '${spec.name}' is missing. ${takes}`);
    if (!isTensor(value)) {
      throw new InputError(
        `${doing}: input '${spec.name}': expected an ort.Tensor (${show(spec)}), received ${describe(value)}. Make one: new ort.Tensor("${spec.dtype.name}", data, dims).`,
      );
    }
    if (value.type !== spec.dtype.name) {
      throw new InputError(
        `${doing}: input '${spec.name}': expected ${show(spec)}, received a tensor of ${value.type}. Make it of ${spec.dtype.name}.`,
      );
    }
    checkShape(spec, value.dims, symbols, doing);
    checked[spec.name] = copy(ort, spec, value, doing);
  }
  return checked;
}

/**
 * Throws an InputError if a batch is empty, or an input holds NaN: all parameters would become NaN. Infinity is allowed:
 * masks hold -Infinity.
 *
 * @param specs the inputs that the model takes.
 * @param feeds what `checkFeeds` returned. What lies on a GPU is not looked at.
 * @param doing begins the message of an error, e.g. "trainStep".
 * @returns whether an input holds infinity, which may make gradients NaN even if the loss is finite.
 */
export function requireTrainable(specs: readonly InputSpec[], feeds: Feeds, doing: string): boolean {
  let infinite = false;
  for (const { name, dtype } of specs) {
    const tensor = feeds[name]!;
    const { dims, location } = tensor;
    if (dims[0] === 0)
      throw new InputError(
        `${doing}: input '${name}': the batch of shape [${dims.join(", ")}] is empty. Pass a sample.`,
      );
    if (!dtype.name.startsWith("float") || (location !== "cpu" && location !== "cpu-pinned")) continue;
    const { data } = tensor;
    for (let i = 0; i < data.length; i++) {
      const number = numberAt(data, i);
      if (Number.isFinite(number)) continue;
      infinite = true;
      if (!Number.isNaN(number)) continue;
      throw new InputError(
        `${doing}: input '${name}': NaN is not allowed in a training step; the first is at position ${i}. Leave out or fill such samples.`,
      );
    }
  }
  return infinite;
}

/** Tells tensors by what they have: pages may hold two copies of onnxruntime-common, whose classes differ. */
function isTensor(value: unknown): value is Tensor {
  return typeof value === "object" && value !== null && "dims" in value && "type" in value && "location" in value;
}

function describe(value: unknown): string {
  if (value === null || value === undefined) return String(value);
  return typeof value === "object" ? `a ${value.constructor?.name ?? "object"}` : `a ${typeof value}`;
}

function checkShape(
  spec: InputSpec,
  dims: readonly number[],
  symbols: Map<string, { size: number; owner: string }>,
  doing: string,
): void {
  if (spec.shape === null) return;
  const mismatch = `${doing}: input '${spec.name}': expected ${show(spec)}, received shape [${dims.join(", ")}]`;
  if (dims.length !== spec.shape.length)
    throw new InputError(`${mismatch}, which has rank ${dims.length} instead of ${spec.shape.length}.`);
  for (const [axis, expected] of spec.shape.entries()) {
    const size = dims[axis]!;
    if (typeof expected === "number") {
      if (size === expected) continue;
      // A model that was exported with one batch size is the usual reason of a wrong first axis.
      const remedy = axis === 0 ? " If this is the batch, export the model with a dynamic batch axis." : "";
      throw new InputError(`${mismatch}; axis ${axis} must be ${expected}.${remedy}`);
    }
    if (!expected) continue;
    // A size that occurs in several inputs, e.g. "batch", must be the same in all of them.
    const seen = symbols.get(expected);
    if (seen === undefined) symbols.set(expected, { size, owner: spec.name });
    else if (seen.size !== size) {
      throw new InputError(
        `${mismatch}; '${expected}' is ${seen.size} in input '${seen.owner}' and must be the same here.`,
      );
    }
  }
}

/** Copies a tensor: the step may run after the caller has filled the array with the next batch. */
function copy(ort: OrtModule, spec: InputSpec, tensor: Tensor, doing: string): Tensor {
  // What lies on a GPU is given as it is: its labels cannot be checked without a download.
  if (tensor.location !== "cpu" && tensor.location !== "cpu-pinned") return tensor;
  const { data: original } = tensor;
  // Node's Buffer is a Uint8Array whose `slice` copies nothing.
  const data = original instanceof Uint8Array ? new Uint8Array(original) : (original as unknown as Uint8Array).slice();
  if (spec.classLabels) checkLabels(spec.name, data as unknown as ArrayLike<number | bigint>, spec.classLabels, doing);
  return new ort.Tensor(spec.dtype.name as "uint8", data, tensor.dims);
}

/** Throws an InputError for labels that are no class: the graph would index out of range, or compute a wrong loss. */
function checkLabels(name: string, labels: ArrayLike<number | bigint>, allowed: ClassLabels, doing: string): void {
  const { count, ignoreIndex } = allowed;
  for (let i = 0; i < labels.length; i++) {
    const label = Number(labels[i]!);
    if ((label >= 0 && (count === null || label < count)) || label === ignoreIndex) continue;
    const ignored = ignoreIndex === null ? "" : `, or ${ignoreIndex} to ignore an element`;
    throw new InputError(
      `${doing}: input '${name}': class labels must be ${count === null ? "0 or more" : `0 to ${count - 1}`}${ignored}; received ${labels[i]} at position ${i}.`,
    );
  }
}
