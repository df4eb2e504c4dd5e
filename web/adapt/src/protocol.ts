/** Messages between the page and the worker that trains. */

/** What computes. */
export type Device = "webgpu" | "wasm";

/** How a model was opened. */
export interface Opened {
  /** Number of trained parameters. */
  readonly parameters: number;
  readonly device: Device;
  /** Why WebGPU does not compute: the end of a sentence; "" if it does, or was not asked for. */
  readonly reason: string;
}

/** Per method of the worker, its arguments and its result. */
export interface Methods {
  /** Opens the model, with the adapter that is there: on WebGPU if it can, with "auto" only if that is hardware. */
  open(device: Device | "auto"): Opened;
  /** Trains on a text until `stop` is called; `progress` messages tell how far it is. */
  train(text: string): void;
  /** Ends the training after the present step. */
  stop(): void;
  /** Writes bytes that follow a text. */
  write(prompt: string, count: number): string;
  /** Returns the adapter, with optimizer state. */
  save(): Uint8Array;
  /** Takes over an adapter. */
  load(adapter: Uint8Array): void;
  /** Goes back to the adapter that changes nothing. */
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
      /** Optimizer steps that the adapter has taken. */
      readonly step: number;
      readonly loss: number;
      readonly tokensPerSecond: number;
    };
