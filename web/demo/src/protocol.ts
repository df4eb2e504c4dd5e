/** Messages between the page and the worker that trains. */

/** A drawing that the user has added. */
export interface Drawing {
  /** 256 preprocessed pixels. */
  readonly image: Float32Array;
  /** Its class: a digit, or the number of a name. */
  readonly label: number;
  /** True if the drawing is kept out of training, to measure the accuracy. */
  readonly heldOut: boolean;
}

/** Probabilities of the classes. */
export type Reading = readonly number[];

/** Per method of the worker, its arguments and its result. */
export interface Methods {
  /** Opens the base model. */
  open(threads: number): { milliseconds: number };
  /** Returns per image what the base model and the present model read. */
  read(images: Float32Array[]): { before: Reading[]; after: Reading[] };
  /** Trains on the drawings that are not held out, labelled 0, 1, ...; `progress` messages tell how far it is. */
  train(drawings: Drawing[], epochs: number): { losses: number[]; times: number[] };
  /** Returns the checkpoint with optimizer state. */
  save(names: readonly string[]): Uint8Array;
  /** Returns the model as an ONNX file. */
  export(names: readonly string[]): Uint8Array;
  /**
   * Takes over a checkpoint, the base model for null. Class i is the class `columns[i]` of the checkpoint, a new one for
   * -1. The base model knows the ten digits, or none of the classes. FileError if the checkpoint does not fit.
   */
  load(checkpoint: Uint8Array | null, columns: readonly number[], digits: boolean): void;
  /** Reads a checkpoint or an ONNX file, without taking it over; FileError if it is no model of this page. */
  parse(file: Uint8Array): { checkpoint: Uint8Array; count: number; names: string[] | null };
}

export type Name = keyof Methods;

/** An answer of the worker, or a message on the progress of a training. */
export type Answer =
  | { readonly kind: "result"; readonly id: number; readonly value: unknown }
  | { readonly kind: "error"; readonly id: number; readonly message: string; readonly name: string }
  | {
      readonly kind: "progress";
      readonly step: number;
      readonly steps: number;
      readonly epoch: number;
      readonly loss: number;
    };
