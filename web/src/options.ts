/** Defines the arguments and results of `TrainingSession`, and checks the arguments. */

import type { Tensor } from "onnxruntime-common";
import type { Artifacts } from "./artifacts.js";
import { InputError } from "./errors.js";
import type { ExecutionProviders, OrtModule } from "./ort.js";

/** Options of `TrainingSession.create`. */
export interface CreateOptions {
  /** The files that generate_artifacts wrote: an object from file name to Uint8Array, or the URL of their folder. */
  readonly artifacts: Artifacts;
  /** Where ONNX Runtime computes, e.g. ["webgpu"]. Default: the CPU (in a browser, WebAssembly). */
  readonly executionProviders?: ExecutionProviders;
  /**
   * Run steps on zeros before `create` returns, so that a browser has compiled the engine when training begins: for at
   * most 0.75 seconds, in WebAssembly only, and not for nets of more than a million trained parameters. The steps change
   * nothing. Default: true.
   */
  readonly warmUp?: boolean;
  /** Start of `session.random`, and of the masks of Dropout in models of the portable profile. Default: 0. */
  readonly seed?: number;
  /**
   * Name of a cache of the Cache API, e.g. "models", in which files with the weights of a base are kept. They are found by
   * their content, so that adapters in different folders of a server, and later visits, load a base once. The page deletes
   * the cache: `caches.delete("models")`. Default: the browser's HTTP cache only.
   */
  readonly cache?: string;
}

/** Result of a training or an evaluation step. */
export interface StepResult {
  /** The loss of the batch. */
  readonly loss: number;
  /** All outputs of the model by name, the loss among them. */
  readonly outputs: Record<string, Tensor>;
}

/** Options of `saveCheckpoint`. */
export interface SaveOptions {
  /** Save a delta: the trained parameters only. Default: false. */
  readonly delta?: boolean;
  /** Also save moments, step count and learning rate, so that training can go on exactly. Default: false. */
  readonly optimizer?: boolean;
}

/** Options of `warmUp`. */
export interface WarmUpOptions {
  /** Most steps that are run. Default: 50. */
  readonly steps?: number;
  /** Time in milliseconds after which no further step begins. Default: 2000. */
  readonly milliseconds?: number;
  /** Ends the warm-up when it is aborted. */
  readonly signal?: AbortSignal;
}

const CREATE_OPTIONS = ["artifacts", "executionProviders", "warmUp", "seed", "cache"];

/** Throws an InputError unless the arguments of `TrainingSession.create` can be used. */
export function checkCreate(ort: OrtModule, options: CreateOptions): void {
  const problem = (text: string): InputError => new InputError(`TrainingSession.create: ${text}`);
  if (typeof ort?.InferenceSession?.create !== "function" || typeof ort.Tensor !== "function") {
    throw problem("the first argument must be ONNX Runtime, e.g. import * as ort from 'onnxruntime-web'.");
  }
  if (typeof options !== "object" || options === null || options.artifacts === undefined) {
    throw problem("pass the artifacts: TrainingSession.create(ort, {artifacts: 'https://.../artifacts/'}).");
  }
  const unknown = Object.keys(options).filter((key) => !CREATE_OPTIONS.includes(key));
  if (unknown.length) throw problem(`there is no option ${unknown.join(", ")}. Options: ${CREATE_OPTIONS.join(", ")}.`);
  const { warmUp = true, seed = 0, cache = "" } = options;
  if (!Number.isSafeInteger(seed)) throw problem(`the seed must be an integer, received ${String(seed)}.`);
  if (typeof warmUp !== "boolean") throw problem(`warmUp must be true or false, received ${String(warmUp)}.`);
  if (typeof cache !== "string") throw problem(`cache must be the name of a cache, received ${String(cache)}.`);
}

/** Throws an InputError unless the options of `saveCheckpoint` can be used. */
export function checkSave(options: SaveOptions): void {
  const unknown = Object.keys(options ?? {}).filter((key) => key !== "delta" && key !== "optimizer");
  if (typeof options !== "object" || options === null || unknown.length) {
    throw new InputError(
      `saveCheckpoint: expected {delta?: boolean, optimizer?: boolean}, received ${unknown.length ? `the option ${unknown.join(", ")}` : String(options)}.`,
    );
  }
}
