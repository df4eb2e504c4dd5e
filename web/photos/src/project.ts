/** What the page keeps: classes, their photos, the head, and a backbone of the user's. */

import { type Design, type Kept, createStore } from "../../demo/src/store.js";
import type { Column, OwnBackbone } from "./protocol.js";

export const MAX_PHOTOS = 1000;
export const MAX_NAME = 40;
/** Size of the largest file that is read, in bytes. */
export const MAX_BYTES = 128 * 1024 * 1024;

/** A class of things. */
export interface Class {
  readonly kind: "class";
  readonly id: string;
  readonly name: string;
  /** Its place among the classes. */
  readonly order: number;
}

/** A photo. */
export interface Photo {
  readonly kind: "photo";
  /** The id of its class. */
  readonly label: string;
  /** A square picture of 224 x 224, as JPEG. */
  readonly picture: Uint8Array;
  /** SHA-256 of the picture: no picture is there twice. */
  readonly hash: string;
  /** True if the photo is kept out of training, to measure the accuracy. */
  readonly heldOut: boolean;
  readonly features: Float32Array;
  /** Digest of the backbone that computed the features. */
  readonly backbone: string;
}

/** A head. */
export interface Trained {
  readonly kind: "head";
  readonly backbone: string;
  readonly columns: readonly (Column & { readonly label: string })[];
  readonly losses: readonly number[];
  /** What it has learned, see `lessonOf`. */
  readonly lesson: string;
}

/** A backbone of the user's. */
export interface Own extends OwnBackbone {
  readonly kind: "backbone";
  readonly name: string;
}

export type Content = Class | Photo | Trained | Own;
export type Entry = Kept<Content>;

/** All that is there, sorted. */
export interface Project {
  readonly classes: readonly Kept<Class>[];
  readonly photos: readonly Kept<Photo>[];
  readonly head: Kept<Trained> | undefined;
  readonly own: Kept<Own> | undefined;
}

/** Sorts entries; photos of classes that are gone, and heads and backbones before the last ones, are left out. */
export function projectOf(entries: readonly Entry[]): Project {
  const of = <K extends Content["kind"]>(kind: K): Kept<Extract<Content, { kind: K }>>[] =>
    entries.filter((entry): entry is Kept<Extract<Content, { kind: K }>> => entry.kind === kind);
  const classes = of("class").sort((a, b) => a.order - b.order);
  const known = new Set(classes.map(({ id }) => id));
  return {
    classes,
    photos: of("photo").filter(({ label }) => known.has(label)),
    head: of("head").at(-1),
    own: of("backbone").at(-1),
  };
}

/**
 * True if the next photo of a class is held out: its second one, so that there is something to measure from then on, and
 * later those whose hash is a multiple of 4. What is decided stays, as the head has learned the others.
 */
export function isHeldOut(photos: readonly Photo[], label: string, hash: string): boolean {
  const same = photos.filter((photo) => photo.label === label);
  const heldOut = same.filter((photo) => photo.heldOut).length;
  return same.length > heldOut && (heldOut === 0 || parseInt(hash.slice(0, 8), 16) % 4 === 0);
}

/** Returns the classes that have a photo to learn, which are those of the head; none if they are fewer than two. */
export function taught({ classes, photos }: Project): readonly Kept<Class>[] {
  const learned = classes.filter(({ id }) => photos.some(({ label, heldOut }) => label === id && !heldOut));
  return learned.length < 2 ? [] : learned;
}

/** Returns a text that differs when there is something else to learn. */
export function lessonOf(project: Project, backbone: string): string {
  const labels = taught(project).map(({ id }) => id);
  const photos = project.photos.filter(({ label, heldOut }) => !heldOut && labels.includes(label));
  return [backbone, ...labels, ...photos.map(({ hash, label }) => `${hash.slice(0, 16)} ${label}`).sort()].join("\n");
}

const isText = (value: unknown, most: number): value is string =>
  typeof value === "string" && value.length > 0 && value.length <= most;
const isVector = (value: unknown): value is Float32Array =>
  value instanceof Float32Array && value.length > 0 && value.every(Number.isFinite);

/** True if a value is a project's content: what other programs wrote is not trusted. */
export function isContent(value: unknown): value is Content {
  const item = (value ?? {}) as Record<string, unknown>;
  switch (item.kind) {
    case "class":
      return isText(item.id, 64) && isText(item.name, MAX_NAME) && Number.isFinite(item.order);
    case "photo":
      return (
        isText(item.label, 64) &&
        item.picture instanceof Uint8Array &&
        item.picture.length > 0 &&
        /^[0-9a-f]{64}$/.test(String(item.hash)) &&
        typeof item.heldOut === "boolean" &&
        isVector(item.features) &&
        isText(item.backbone, 128)
      );
    case "head":
      return (
        isText(item.backbone, 128) &&
        typeof item.lesson === "string" &&
        Array.isArray(item.losses) &&
        item.losses.every(Number.isFinite) &&
        Array.isArray(item.columns) &&
        item.columns.every(
          (column) => isText(column?.label, 64) && isVector(column.weights) && Number.isFinite(column.bias),
        )
      );
    case "backbone":
      return (
        isText(item.name, 200) &&
        item.bytes instanceof Uint8Array &&
        Number.isInteger(item.size) &&
        ["0..1", "-1..1", "0..255", "imagenet"].includes(String(item.range))
      );
    default:
      return false;
  }
}

/** The journal of this page. */
export const PHOTOS: Design<Content> = {
  name: "onnxtrain-photos",
  version: 1,
  work: "your project",
  isContent,
  upgrade: (request) => void createStore(request.result),
};

const FORMAT = "onnxtrain-photos";
// Arrays in JSON: base64 of their bytes, which are little-endian.
const TYPES = { Uint8Array, Float32Array };

function toBase64(bytes: Uint8Array): string {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}

/** Returns the whole project as JSON. */
export function encode(entries: readonly Entry[]): string {
  const content = entries.map(({ key: _, ...rest }) => rest);
  return JSON.stringify({ format: FORMAT, version: 1, content }, (_, value: unknown) => {
    for (const [name, type] of Object.entries(TYPES))
      if (value instanceof type)
        return { [name]: toBase64(new Uint8Array(value.buffer, value.byteOffset, value.byteLength)) };
    return value;
  });
}

/** Reads what `encode` wrote; throws an Error that says what is wrong. */
export function decode(text: string): Content[] {
  let file: { format?: unknown; version?: unknown; content?: unknown };
  try {
    file = (JSON.parse(text, (_, value: unknown) => {
      if (!value || typeof value !== "object") return value;
      const [name, ...more] = Object.keys(value);
      const type = more.length || !name ? undefined : TYPES[name as keyof typeof TYPES];
      if (!type) return value;
      const bytes = Uint8Array.from(atob(String(Object.values(value)[0])), (letter) => letter.charCodeAt(0));
      return new type(bytes.buffer);
    }) ?? {}) as typeof file;
  } catch {
    throw new Error("it is not the JSON that this page writes");
  }
  if (file.format !== FORMAT) throw new Error(`its format is not "${FORMAT}"`);
  if (file.version !== 1) throw new Error("a newer version of this page has written it");
  const content: unknown[] = Array.isArray(file.content) ? file.content : [];
  const broken = content.findIndex((item) => !isContent(item));
  if (broken >= 0) throw new Error(`its entry ${broken + 1} is damaged`);
  const ids = (content as Content[]).flatMap((item) =>
    item.kind === "class" ? [item.id, item.name] : item.kind === "photo" ? [item.hash] : [],
  );
  if (new Set(ids).size < ids.length) throw new Error("it contains a class or a photo twice");
  return content as Content[];
}
