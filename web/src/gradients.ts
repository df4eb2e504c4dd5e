/** Holds the gradients of training steps, and adds them up. */

import type { Tensor } from "onnxruntime-common";
import { InputError } from "./errors.js";
import type { ParameterSpec } from "./manifest.js";
import { type OrtModule, dataOf, dispose, numberAt } from "./ort.js";

/** The gradients of one or more training steps: dense ones by parameter, and rows with their numbers of sparse ones. */
export interface Gradients {
  readonly dense: Map<string, Tensor>;
  readonly sparse: Map<string, { rows: Tensor; indices: Tensor }>;
}

/** Collects the gradients of the trainable parameters from the outputs of a training step. */
export function gradientsOf(trainable: readonly ParameterSpec[], outputs: Readonly<Record<string, Tensor>>): Gradients {
  const gradients: Gradients = { dense: new Map(), sparse: new Map() };
  for (const { name, gradient, gradientIndices } of trainable) {
    const value = outputs[gradient!]!;
    if (gradientIndices === null) gradients.dense.set(name, value);
    else gradients.sparse.set(name, { rows: value, indices: outputs[gradientIndices]! });
  }
  return gradients;
}

/** Returns the name of the first parameter whose gradient holds NaN or infinity; undefined if there is none. */
export async function findNonFinite({ dense, sparse }: Gradients): Promise<string | undefined> {
  const tensors = [...dense, ...[...sparse].map(([name, { rows }]) => [name, rows] as const)];
  for (const [name, tensor] of tensors) {
    const data = (await dataOf(tensor)) as ArrayLike<number>;
    for (let i = 0; i < data.length; i++) if (!Number.isFinite(numberAt(data, i))) return name;
  }
  return undefined;
}

/** Adds gradients, on the CPU. */
export async function addGradients(ort: OrtModule, total: Gradients, terms: Gradients): Promise<Gradients> {
  const sum: Gradients = { dense: new Map(), sparse: new Map() };
  for (const [name, term] of terms.dense) {
    if (term.type !== "float32" && term.type !== "float64") {
      throw new InputError(
        `trainStep: adding up gradients of ${term.type} is not supported. Call lazyResetGrad after each step.`,
      );
    }
    const values = ((await dataOf(total.dense.get(name)!)) as Float32Array).slice();
    const other = (await dataOf(term)) as Float32Array;
    for (let i = 0; i < values.length; i++) values[i]! += other[i]!;
    sum.dense.set(name, new ort.Tensor(term.type as "float32", values, term.dims));
  }
  for (const [name, term] of terms.sparse) {
    const before = total.sparse.get(name)!;
    // Appended, not summed: rows of equal indices add up in the optimizer, as those within one step do.
    sum.sparse.set(name, {
      rows: await append(ort, before.rows, term.rows),
      indices: await append(ort, before.indices, term.indices),
    });
  }
  return sum;
}

/** Joins two tensors along the first axis. */
async function append(ort: OrtModule, first: Tensor, second: Tensor): Promise<Tensor> {
  const [a, b] = [(await dataOf(first)) as Float32Array, (await dataOf(second)) as Float32Array];
  const data = new (a.constructor as { new (length: number): Float32Array })(a.length + b.length);
  data.set(a);
  data.set(b, a.length);
  return new ort.Tensor(first.type as "float32", data, [first.dims[0]! + second.dims[0]!, ...first.dims.slice(1)]);
}

/** Frees gradients that lie on a GPU. */
export function disposeGradients(gradients: Gradients): void {
  dispose(gradients.dense.values());
  for (const { rows, indices } of gradients.sparse.values()) dispose([rows, indices]);
}
