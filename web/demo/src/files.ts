/** Files that the user saves and loads. */

import { isDrawing } from "./journal.js";
import { isName } from "./names.js";
import { SIZE } from "./preprocess.js";
import type { Drawing } from "./protocol.js";

const FORMAT = "onnxtrain-drawings";
const DIGITS = 10;
/** Size of the largest file that is read, in bytes. */
export const MAX_BYTES = 32 * 1024 * 1024;

/** Lets the user save a file. */
export function download(name: string, content: BlobPart): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/**
 * Returns the drawings as JSON: images [n][1][16][16], labels and which are held out. With `names` a label is the place
 * of a name; without, labels are digits.
 */
export function encodeDrawings(drawings: readonly Drawing[], names?: ReadonlyMap<number, string>): string {
  const rows = (image: Float32Array): number[][] =>
    Array.from({ length: SIZE }, (_, i) => [...image.slice(i * SIZE, (i + 1) * SIZE)]);
  return JSON.stringify({
    format: FORMAT,
    shape: [drawings.length, 1, SIZE, SIZE],
    images: drawings.map(({ image }) => [rows(image)]),
    labels: drawings.map(({ label }) => (names ? [...names.keys()].indexOf(label) : label)),
    held_out: drawings.map(({ heldOut }) => heldOut),
    ...(names && { names: [...names.values()] }),
  });
}

/** Reads what `encodeDrawings` wrote; throws an Error that says what is wrong. */
export function decodeDrawings(text: string): { drawings: Drawing[]; names: string[] | null } {
  const file = (JSON.parse(text) ?? {}) as Record<string, unknown>;
  if (file.format !== FORMAT) throw new Error(`its format is not "${FORMAT}"`);
  const [images, labels, heldOut] = ["images", "labels", "held_out"].map((name) => {
    const list = file[name];
    if (!Array.isArray(list)) throw new Error(`${name} is not a list`);
    return list as unknown[];
  }) as [unknown[], unknown[], unknown[]];
  if (labels.length !== images.length || heldOut.length !== images.length)
    throw new Error("images, labels and held_out differ in length");
  const names = (file.names ?? null) as string[] | null;
  if (names && !(Array.isArray(names) && names.every(isName) && new Set(names).size === names.length))
    throw new Error("names is not a list of different names");
  const last = (names?.length ?? DIGITS) - 1;
  const drawings = images.map((image, i) => {
    const rows = Array.isArray(image) && image.length === 1 ? (image[0] as unknown) : null;
    const shaped =
      Array.isArray(rows) &&
      rows.length === SIZE &&
      rows.every((row) => Array.isArray(row) && row.length === SIZE && row.every((value) => typeof value === "number"));
    const drawing = { image: Float32Array.from(shaped ? rows.flat() : []), label: labels[i], heldOut: heldOut[i] };
    if (!isDrawing(drawing, last))
      throw new Error(`drawing ${i + 1} is not 16 x 16 pixels of 0 to 1 with a ${names ? "name" : "digit"}`);
    return drawing;
  });
  return { drawings, names };
}
