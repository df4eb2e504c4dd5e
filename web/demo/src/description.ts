/**
 * Describes a model for programs that read its file: names of classes and preprocessing, as onnxtrain's own models of
 * images carry them.
 */

import { embed, join, messages, parseMessage, textField, textOf } from "../../src/wire.js";
import { isName } from "./names.js";

/** Key in the metadata of a model, and in the properties of a checkpoint. */
export const DESCRIPTION = "onnxtrain.images";
const METADATA = 14;

/**
 * Returns the description as JSON, of a model whose outputs are the logits of the classes.
 *
 * @param size height and width of its images, whose pixels become numbers from 0 to 1.
 */
export function describe(names: readonly string[], size: number): string {
  return JSON.stringify({
    version: 1,
    preprocessing: {
      size: [size, size],
      mean: [0],
      std: [1],
      scale: 1 / 255,
      resize: null,
      interpolation: "bilinear",
      bgr: false,
    },
    classes: names,
    activation: "softmax",
  });
}

const isDescription = (entry: Uint8Array): boolean => textOf(entry, 1) === DESCRIPTION;

/** Returns an ONNX model with a description in its metadata, in place of the one it may have. */
export function described(model: Uint8Array, names: readonly string[], size: number): Uint8Array {
  const kept = parseMessage(model).filter(({ number, payload }) => number !== METADATA || !isDescription(payload));
  const entry = embed(METADATA, textField(1, DESCRIPTION), textField(2, describe(names, size)));
  return join([...kept.map(({ raw }) => raw), entry]);
}

/** Returns the description in a model's metadata, undefined if there is none. */
export function descriptionOf(model: Uint8Array): string | undefined {
  const entry = messages(model, METADATA).findLast(isDescription);
  return entry && textOf(entry, 2);
}

/** Returns the names in a description; null if there is none, or its names are not `count` different ones. */
export function namesIn(description: unknown, count: number): string[] | null {
  if (typeof description !== "string") return null;
  try {
    const names = (JSON.parse(description) as { classes?: unknown } | null)?.classes;
    const valid = Array.isArray(names) && names.length === count && new Set(names).size === count;
    return valid && names.every(isName) ? names : null;
  } catch {
    return null;
  }
}
