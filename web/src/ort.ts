/** The part of ONNX Runtime for JavaScript that this package uses; the caller passes it in. */

import type { InferenceSession, InferenceSessionFactory, Tensor, TensorConstructor } from "onnxruntime-common";
import { type DType, dtypeOf } from "./dtypes.js";
import { Queue } from "./queue.js";
import type { RawTensor } from "./safetensors.js";

/** `import * as ort from "onnxruntime-web"`, or "onnxruntime-node". */
export interface OrtModule {
  readonly InferenceSession: InferenceSessionFactory;
  readonly Tensor: TensorConstructor;
  readonly env?: {
    /** Tells the versions of the packages: `web` in onnxruntime-web, `node` in onnxruntime-node. */
    readonly versions?: { readonly web?: string; readonly node?: string };
    readonly wasm?: { numThreads?: number };
  };
}

export type ExecutionProviders = NonNullable<InferenceSession.SessionOptions["executionProviders"]>;

/** Returns true if WebGPU is among the execution providers. */
export function usesWebGpu(providers: ExecutionProviders | undefined): boolean {
  return providers?.some((provider) => (typeof provider === "string" ? provider : provider.name) === "webgpu") ?? false;
}

const queues = new WeakMap<object, Queue>();

/**
 * Runs a job that creates, runs or releases sessions. On WebGPU jobs wait for each other, also those of several training
 * sessions: onnxruntime-web 1.30 refuses to create a session while it creates another one.
 *
 * @param alone true if the job waits for others in any case.
 */
export function inTurn<T>(
  ort: OrtModule,
  providers: ExecutionProviders | undefined,
  job: () => Promise<T>,
  alone = false,
): Promise<T> {
  if (!alone && !usesWebGpu(providers)) return job();
  let queue = queues.get(ort.InferenceSession);
  if (!queue) queues.set(ort.InferenceSession, (queue = new Queue()));
  return queue.add(job);
}

/** Makes a tensor on the CPU from raw bytes; its data is a view of `raw.bytes`. */
export function toTensor(ort: OrtModule, raw: RawTensor): Tensor {
  const { buffer, byteOffset, byteLength } = raw.bytes;
  // Typed arrays need aligned offsets; bytes of a file may lie anywhere.
  const whole =
    byteOffset === 0 && byteLength === buffer.byteLength ? buffer : buffer.slice(byteOffset, byteOffset + byteLength);
  const data = viewAs(raw.dtype, whole as ArrayBuffer);
  return new ort.Tensor(raw.dtype.name as "float32", data as Float32Array, raw.shape);
}

/** Wraps a buffer in the array class that ONNX Runtime for JavaScript takes for an element type. */
function viewAs(dtype: DType, buffer: ArrayBuffer): unknown {
  // onnxruntime-common takes Float16Array where the engine has it, Uint16Array elsewhere.
  const half = (globalThis as { Float16Array?: new (buffer: ArrayBuffer) => unknown }).Float16Array;
  return dtype.name === "float16" && half ? new half(buffer) : new dtype.array(buffer);
}

/** Reads the data of a tensor from wherever it lies. A tensor of a GPU lies on the CPU afterwards. */
export async function dataOf(tensor: Tensor): Promise<unknown> {
  // `true` frees the buffer on the GPU, which nothing refers to after the download.
  return tensor.location === "gpu-buffer" ? tensor.getData(true) : tensor.data;
}

/**
 * Returns an element of the data of a floating-point tensor. Without Float16Array, halves are raw bits: these become 0,
 * Infinity or NaN.
 */
export function numberAt(data: unknown, index: number): number {
  const number = (data as ArrayLike<number>)[index]!;
  if (!(data instanceof Uint16Array)) return number;
  // An exponent of ones is infinity, or NaN if another bit follows.
  const magnitude = number & 0x7fff;
  return magnitude > 0x7c00 ? NaN : magnitude === 0x7c00 ? Infinity : 0;
}

/** Returns the bytes of the data of a tensor, not copied. */
export function bytesOf(data: unknown): Uint8Array {
  const array = data as Uint8Array;
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

/** Reads a tensor from wherever it lies, as a copy of its bytes. */
export async function toRaw(tensor: Tensor): Promise<RawTensor> {
  return { dtype: dtypeOf(tensor.type), shape: [...tensor.dims], bytes: bytesOf(await dataOf(tensor)).slice() };
}

/** Frees tensors on a GPU; on the CPU the garbage collector does. */
export function dispose(tensors: Iterable<Tensor | null | undefined>): void {
  for (const tensor of tensors) if (tensor && tensor.location === "gpu-buffer") tensor.dispose();
}
