/** Messages between the page and the worker that trains. */

/** A drawing that the user has added. */
export interface Drawing {
  /** 256 preprocessed pixels. */
  readonly image: Float32Array;
  /** The digit, 0 to 9. */
  readonly label: number;
  /** True if the drawing is kept out of training, to measure the accuracy. */
  readonly heldOut: boolean;
}

/** Per method of the worker, its arguments and its result. */
export interface Methods {
  /** Opens the model and takes over a saved checkpoint; `restored` is false if the checkpoint does not fit. */
  open(checkpoint: Uint8Array | null, threads: number): { restored: boolean; milliseconds: number };
  /** Returns per image the digit that the present model, or the base model, reads. */
  read(images: Float32Array[], base: boolean): { digits: number[]; scores: number[] };
  /** Trains on the drawings that are not held out; `progress` messages tell how far it is. */
  train(drawings: Drawing[], epochs: number): { losses: number[]; times: number[] };
  /** Returns the checkpoint with optimizer state. */
  save(): Uint8Array;
  /** Takes over a checkpoint. */
  load(checkpoint: Uint8Array): void;
  /** Goes back to the base model. */
  reset(): void;
}

export type Name = keyof Methods;
export type Arguments<N extends Name> = Parameters<Methods[N]>;
export type Result<N extends Name> = ReturnType<Methods[N]>;

/** A call from the page. */
export interface Call {
  readonly id: number;
  readonly name: Name;
  readonly args: unknown[];
}

/** An answer of the worker, or a message on the progress of a training. */
export type Answer =
  | { readonly kind: "result"; readonly id: number; readonly value: unknown }
  | { readonly kind: "error"; readonly id: number; readonly message: string }
  | {
      readonly kind: "progress";
      readonly step: number;
      readonly steps: number;
      readonly epoch: number;
      readonly loss: number;
    };
