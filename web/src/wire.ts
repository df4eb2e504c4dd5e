/** Reads and writes protobuf messages field by field, without a schema: enough to take ONNX models apart. */

const VARINT = 0;
const FIXED64 = 1;
const LENGTH = 2;
const FIXED32 = 5;

/** A field of a message. */
export interface Field {
  /** Number of the field in the schema. */
  readonly number: number;
  /** Content of a field with a length: text, bytes or a message; empty for other fields. */
  readonly payload: Uint8Array;
  /** Value of an integer field; 0 for other fields. */
  readonly integer: number;
  /** All bytes of the field, with its key. */
  readonly raw: Uint8Array;
}

/** Yields the fields of a message; throws an Error if it is damaged. Fields may be many times larger than their bytes. */
function* fieldsOf(data: Uint8Array): Generator<Field> {
  let position = 0;
  const varint = (): number => {
    let value = 0;
    // Ten bytes are the most that a varint has; beyond 2^53 the value is inexact, which no field used here reaches.
    for (let factor = 1, count = 0; count < 10; factor *= 128, count++) {
      const byte = data[position++];
      if (byte === undefined) throw new Error("a message ends within a field");
      value += (byte & 0x7f) * factor;
      if (byte < 0x80) return value;
    }
    throw new Error("a number is too long");
  };
  while (position < data.length) {
    const start = position;
    const key = varint();
    const kind = key % 8;
    let payload = data.subarray(0, 0);
    let integer = 0;
    if (kind === VARINT) integer = varint();
    else if (kind === LENGTH) {
      const length = varint();
      payload = data.subarray(position, position + length);
      position += length;
    } else if (kind === FIXED64 || kind === FIXED32) position += kind === FIXED64 ? 8 : 4;
    else throw new Error(`unknown wire type ${kind}`);
    if (position > data.length) throw new Error("a field reaches beyond the end of its message");
    yield { number: Math.floor(key / 8), payload, integer, raw: data.subarray(start, position) };
  }
}

/** Splits a message into its fields; throws an Error if it is damaged. */
export function parseMessage(data: Uint8Array): Field[] {
  return [...fieldsOf(data)];
}

/** Returns the payloads of a repeated message field. */
export function messages(data: Uint8Array, number: number): Uint8Array[] {
  const payloads: Uint8Array[] = [];
  for (const field of fieldsOf(data)) if (field.number === number) payloads.push(field.payload);
  return payloads;
}

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Returns the values of a repeated text field. */
export function texts(data: Uint8Array, number: number): string[] {
  return messages(data, number).map((payload) => decoder.decode(payload));
}

/** Returns the value of a text field, "" if it is absent. */
export function textOf(data: Uint8Array, number: number): string {
  // protobuf takes the last one if a field occurs several times.
  return texts(data, number).at(-1) ?? "";
}

function varintBytes(value: number): Uint8Array {
  const out: number[] = [];
  while (value > 0x7f) {
    out.push((value % 128) | 0x80);
    value = Math.floor(value / 128);
  }
  out.push(value);
  return Uint8Array.from(out);
}

/** Joins bytes. */
export function join(chunks: readonly Uint8Array[]): Uint8Array {
  const joined = new Uint8Array(chunks.reduce((sum, chunk) => sum + chunk.length, 0));
  let position = 0;
  for (const chunk of chunks) {
    joined.set(chunk, position);
    position += chunk.length;
  }
  return joined;
}

/** Encodes a field that holds an integer of 0 or more. */
export function integerField(number: number, value: number): Uint8Array {
  return join([varintBytes(number * 8 + VARINT), varintBytes(value)]);
}

/** Encodes a field whose payload is the concatenation of `chunks`. */
export function embed(number: number, ...chunks: Uint8Array[]): Uint8Array {
  const length = chunks.reduce((sum, chunk) => sum + chunk.length, 0);
  return join([varintBytes(number * 8 + LENGTH), varintBytes(length), ...chunks]);
}

/** Encodes a field that holds a text. */
export function textField(number: number, value: string): Uint8Array {
  return embed(number, new TextEncoder().encode(value));
}
