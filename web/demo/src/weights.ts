/** Reads the parameters out of an ONNX file. */

import { messages, parseMessage, textOf } from "../../src/wire.js";

// Field numbers of onnx.proto.
const [MODEL_GRAPH, GRAPH_INITIALIZER] = [7, 5];
const TENSOR = { dims: 1, type: 2, floats: 4, name: 8, raw: 9 };
const FLOAT = 1;

const tensorsIn = (file: Uint8Array): Map<string, Uint8Array> =>
  new Map(
    messages(messages(file, MODEL_GRAPH).at(-1) ?? new Uint8Array(), GRAPH_INITIALIZER).map((tensor) => [
      textOf(tensor, TENSOR.name),
      tensor,
    ]),
  );

// Each size is a field of its own, or all of them are the payload of one.
const dimsOf = (tensor: Uint8Array): number[] =>
  parseMessage(tensor)
    .filter(({ number }) => number === TENSOR.dims)
    .flatMap(({ payload, integer }) => (payload.length ? varints(payload) : [integer]));

/** Returns the number of elements of a parameter along its last axis, 0 if the file has no such parameter. */
export function lastSizeOf(file: Uint8Array, parameter: string): number {
  const tensor = tensorsIn(file).get(parameter);
  return (tensor && dimsOf(tensor).at(-1)) ?? 0;
}

/**
 * Returns the values of `parameters` in one array, in their order.
 *
 * @throws Error if the file is not an ONNX model, or one of them is missing, of another shape or not float32.
 */
export function weightsOf(
  file: Uint8Array,
  parameters: readonly { readonly name: string; readonly shape: readonly number[] }[],
): Float32Array {
  const tensors = tensorsIn(file);
  const chunks = parameters.map(({ name, shape }) => {
    const tensor = tensors.get(name);
    if (!tensor) throw new Error(`it has no parameter '${name}'`);
    const fields = parseMessage(tensor);
    const type = fields.findLast(({ number }) => number === TENSOR.type)?.integer;
    if (type !== FLOAT || dimsOf(tensor).join() !== shape.join())
      throw new Error(`its parameter '${name}' is not float32 of the shape [${shape.join(", ")}]`);
    const data = fields.findLast(({ number }) => number === TENSOR.raw || number === TENSOR.floats)?.payload;
    if (data?.length !== 4 * shape.reduce((a, b) => a * b, 1))
      throw new Error(`the data of its parameter '${name}' is not in the file`);
    return new Float32Array(data.slice().buffer);
  });
  const flat = new Float32Array(chunks.reduce((sum, { length }) => sum + length, 0));
  let position = 0;
  for (const chunk of chunks) {
    flat.set(chunk, position);
    position += chunk.length;
  }
  return flat;
}

function varints(bytes: Uint8Array): number[] {
  const values = [0];
  let factor = 1;
  for (const byte of bytes) {
    values[values.length - 1]! += (byte & 0x7f) * factor;
    factor *= 128;
    if (byte < 0x80) {
      values.push(0);
      factor = 1;
    }
  }
  return values.slice(0, -1);
}
