/** Runs steps whose results are thrown away, so that the engine compiles its code before the steps that count. */

import type { Tensor } from "onnxruntime-common";
import { elements } from "./dtypes.js";
import type { Engine, Outputs } from "./engine.js";
import { gradientsOf } from "./gradients.js";
import type { InputSpec, Manifest } from "./manifest.js";
import { type ExecutionProviders, type OrtModule, dispose, toTensor } from "./ort.js";
import type { State } from "./state.js";

/** Size of axes that may change from step to step, such as the batch. One sample alone takes other code paths. */
const SIZE = 8;
/** Number of trained parameters above which a step is long, and has few functions that take most of its time. */
const LARGE = 1_000_000;
/** Most steps, and milliseconds, of the warm-up in `create`. In headless Chromium the engine compiles for about a second. */
const STEPS = 200;
const MILLISECONDS = 750;
/** Bytes of inputs and targets above which they are not made up: a manifest may declare any sizes. */
const LARGEST_FEEDS = 2 ** 28;
/** Milliseconds after which a page may draw: one frame. */
const FRAME = 16;

/** Takes a training step and an optimizer step and forgets the results; returns the time in milliseconds. */
export async function rehearse(engine: Engine, state: State, seed: number, feeds: Outputs): Promise<number> {
  const begin = performance.now();
  const outputs = await engine.train(state, seed, feeds);
  if (engine.updates) dispose(Object.values(await engine.update(state, gradientsOf(engine.trainable, outputs))));
  dispose(Object.values(outputs));
  return performance.now() - begin;
}

/**
 * Runs the first steps on zeros, where code is compiled while it runs: in WebAssembly. A large net is left out, as one
 * step of it may take longer than the warm-up may.
 */
export async function warmOnZeros(
  ort: OrtModule,
  engine: Engine,
  state: State,
  providers: ExecutionProviders | undefined,
): Promise<void> {
  const size = engine.trainable.reduce((sum, { shape }) => sum + elements(shape), 0);
  const names = providers?.map((provider) => (typeof provider === "string" ? provider : provider.name)) ?? [];
  // onnxruntime-node computes by machine code, and has no version of the web.
  const compiles = ort.env?.versions?.web !== undefined && names.every((name) => ["wasm", "cpu"].includes(name));
  if (!compiles || size > LARGE || feedBytes(engine.manifest) > LARGEST_FEEDS) return;
  const start = performance.now();
  try {
    const feeds = zeros(ort, engine.manifest);
    let pause = start;
    let steps = 0;
    do {
      await rehearse(engine, state, 0, feeds);
      steps += 1;
      if (performance.now() - pause < FRAME) continue;
      await new Promise((resolve) => setTimeout(resolve, 0));
      pause = performance.now();
    } while (steps < STEPS && performance.now() - start < MILLISECONDS);
  } catch {
    // Zeros of this size do not suit every model. What is wrong with the model shows in the first step that counts.
  }
}

/** Returns the sizes of an input, with `SIZE` for axes that may change. */
function sizesOf({ shape }: InputSpec): number[] {
  return (shape ?? []).map((axis) => (typeof axis === "number" ? axis : SIZE));
}

/** Returns the bytes of all inputs and targets. */
function feedBytes(manifest: Manifest): number {
  return [...manifest.inputs, ...manifest.targets].reduce(
    (sum, spec) => sum + elements(sizesOf(spec)) * spec.dtype.size,
    0,
  );
}

/** Makes inputs and targets of zeros. */
function zeros(ort: OrtModule, manifest: Manifest): Record<string, Tensor> {
  return Object.fromEntries(
    [...manifest.inputs, ...manifest.targets].map((spec) => {
      const shape = sizesOf(spec);
      const bytes = new Uint8Array(elements(shape) * spec.dtype.size);
      return [spec.name, toTensor(ort, { dtype: spec.dtype, shape, bytes })];
    }),
  );
}
