/** Translates element types between the manifest, ONNX, ONNX Runtime for JavaScript and safetensors. */

export type Storage =
  | Float32Array
  | Float64Array
  | Uint8Array
  | Int8Array
  | Uint16Array
  | Int16Array
  | Int32Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array;

type StorageConstructor = { new (buffer: ArrayBuffer): Storage; new (length: number): Storage };

/** An element type with its name in each of the libraries. */
export interface DType {
  /** Name in the manifest and in `Tensor.type`, e.g. "float32". */
  readonly name: string;
  /** Size of an element in bytes. */
  readonly size: number;
  /** Number in `TensorProto.DataType`, e.g. 1. */
  readonly onnx: number;
  /** Name in the header of a safetensors file, e.g. "F32". */
  readonly safetensors: string;
  /** Class of the arrays that hold such elements; float16 as raw bits. */
  readonly array: StorageConstructor;
}

const table: [string, number, number, string, unknown][] = [
  ["float32", 4, 1, "F32", Float32Array],
  ["uint8", 1, 2, "U8", Uint8Array],
  ["int8", 1, 3, "I8", Int8Array],
  ["uint16", 2, 4, "U16", Uint16Array],
  ["int16", 2, 5, "I16", Int16Array],
  ["int32", 4, 6, "I32", Int32Array],
  ["int64", 8, 7, "I64", BigInt64Array],
  ["bool", 1, 9, "BOOL", Uint8Array],
  ["float16", 2, 10, "F16", Uint16Array],
  ["float64", 8, 11, "F64", Float64Array],
  ["uint32", 4, 12, "U32", Uint32Array],
  ["uint64", 8, 13, "U64", BigUint64Array],
];

const DTYPES: DType[] = table.map(([name, size, onnx, safetensors, array]) => ({
  name,
  size,
  onnx,
  safetensors,
  array: array as StorageConstructor,
}));

export const BY_NAME: ReadonlyMap<string, DType> = new Map(DTYPES.map((d) => [d.name, d]));
export const BY_SAFETENSORS: ReadonlyMap<string, DType> = new Map(DTYPES.map((d) => [d.safetensors, d]));

/** Returns the element type called `name` in a manifest; throws an Error for types that JavaScript has no tensors of. */
export function dtypeOf(name: string): DType {
  const dtype = BY_NAME.get(name);
  if (!dtype) {
    throw new Error(`element type ${name} has no tensors in JavaScript; use one of ${[...BY_NAME.keys()].join(", ")}`);
  }
  return dtype;
}

/** Returns the number of elements of a tensor of these sizes; 1 for a scalar. */
export function elements(shape: readonly number[]): number {
  return shape.reduce((product, size) => product * size, 1);
}
