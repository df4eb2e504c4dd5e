/**
 * Describes a model for programs that read its file: names of classes and preprocessing, as onnxtrain's own models of
 * images carry them.
 */

import { embed, join, messages, textField, textOf } from "../../src/wire.js";
import { isName } from "./names.js";
import { SIZE } from "./preprocess.js";

/** Key in the metadata of a model, and in the properties of a checkpoint. */
export const DESCRIPTION = "onnxtrain.images";
const METADATA = 14;

/** Returns the description as JSON. The input of the model is a gray picture of light ink on dark paper. */
export function describe(names: readonly string[]): string {
  return JSON.stringify({
    version: 1,
    preprocessing: {
      size: [SIZE, SIZE],
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

/** Returns an ONNX model with a description in its metadata. */
export const described = (model: Uint8Array, names: readonly string[]): Uint8Array =>
  join([model, embed(METADATA, textField(1, DESCRIPTION), textField(2, describe(names)))]);

/** Returns the description in a model's metadata, undefined if there is none. */
export function descriptionOf(model: Uint8Array): string | undefined {
  const entry = messages(model, METADATA).findLast((payload) => textOf(payload, 1) === DESCRIPTION);
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
