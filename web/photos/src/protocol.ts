/** Messages between the page and the worker that computes features and trains the head. */

/** What a backbone takes and gives. */
export interface Backbone {
  /** SHA-256 of its file and its settings: features of another one do not fit. */
  readonly digest: string;
  /** Width and height of its pictures. */
  readonly size: number;
  /** Number of features of a picture. */
  readonly features: number;
}

/** Values of pixels that a backbone was trained on. */
export type Range = "0..1" | "-1..1" | "0..255" | "imagenet";

/** A backbone of the user's: an ONNX file, the size for one that takes several, and its pixels. */
export interface OwnBackbone {
  readonly bytes: Uint8Array;
  readonly size: number;
  readonly range: Range;
}

/** A class's part of the head. */
export interface Column {
  readonly weights: Float32Array;
  readonly bias: number;
}

/** Probability of each class of the head. */
export type Reading = readonly number[];

/** Per method of the worker, its arguments and its result. */
export interface Methods {
  /** Opens the head's artifacts and the page's own backbone. */
  open(): Backbone;
  /** Takes a backbone, null for the page's own; FileError if the file is none. */
  use(own: OwnBackbone | null): Backbone;
  /** Computes the features of a picture from its pixels, [3, size, size]. */
  features(pixels: Float32Array): Float32Array;
  /** Takes over a head; a null stands for a class that is new. The optimizer starts afresh. */
  setHead(columns: readonly (Column | null)[]): void;
  /** Takes what the head learns next: features of pictures, and the class of each. */
  learn(features: readonly Float32Array[], labels: readonly number[]): void;
  /** Trains for a number of steps; returns their losses. */
  train(steps: number): number[];
  /** Returns the head. */
  head(): Column[];
  /** Returns what the head reads in pictures with these features. */
  read(features: readonly Float32Array[]): Reading[];
  /** Returns the model as an ONNX file, from `photo` to `scores`; the names of its classes are in its metadata. */
  export(names: readonly string[]): Uint8Array;
}

export type Name = keyof Methods;
