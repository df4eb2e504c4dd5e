/** Reads and writes safetensors files. */

import { BY_SAFETENSORS, type DType, elements } from "./dtypes.js";
import { asList, asObject, asSizes, asText, parseJson } from "./json.js";

/** A tensor in memory: element type, sizes and bytes (little-endian). */
export interface RawTensor {
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly bytes: Uint8Array;
}

// The limit of the safetensors package.
const MAX_HEADER = 100_000_000;

/** Encodes tensors by key and a metadata of texts as a safetensors file. */
export function encodeSafetensors(
  tensors: ReadonlyMap<string, RawTensor>,
  metadata: Readonly<Record<string, string>>,
): Uint8Array {
  // Widest elements first keeps every tensor aligned to its element size.
  const ordered = [...tensors].sort(([, a], [, b]) => b.dtype.size - a.dtype.size);
  const header: Record<string, unknown> = { __metadata__: metadata };
  let end = 0;
  for (const [key, tensor] of ordered) {
    header[key] = {
      dtype: tensor.dtype.safetensors,
      shape: tensor.shape,
      data_offsets: [end, end + tensor.bytes.length],
    };
    end += tensor.bytes.length;
  }
  let text = JSON.stringify(header);
  let encoded = new TextEncoder().encode(text);
  text += " ".repeat((8 - (encoded.length % 8)) % 8);
  encoded = new TextEncoder().encode(text);
  const file = new Uint8Array(8 + encoded.length + end);
  new DataView(file.buffer).setBigUint64(0, BigInt(encoded.length), true);
  file.set(encoded, 8);
  let position = 8 + encoded.length;
  for (const [, tensor] of ordered) {
    file.set(tensor.bytes, position);
    position += tensor.bytes.length;
  }
  return file;
}

/**
 * Decodes a safetensors file. The bytes of the tensors are copies.
 *
 * @throws Error if the file is truncated or damaged; the message says how.
 */
export function decodeSafetensors(bytes: Uint8Array): {
  metadata: Record<string, string>;
  tensors: Map<string, RawTensor>;
} {
  // Node's Buffer is a Uint8Array whose `slice` copies nothing.
  const file = new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (file.length < 8) throw new Error(`it has ${file.length} bytes, too few for a header`);
  const length = Number(new DataView(file.buffer, file.byteOffset, 8).getBigUint64(0, true));
  if (length > MAX_HEADER) throw new Error("it does not begin as a safetensors file");
  if (8 + length > file.length) {
    throw new Error(`its header of ${length} bytes is longer than the file of ${file.length} bytes`);
  }
  // `fatal`, so that damaged names are an error instead of other names.
  const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(file.subarray(8, 8 + length));
  if (!text.startsWith("{")) throw new Error("its header is no JSON object");
  const header = asObject(parseJson(text), "its header");
  const data = file.subarray(8 + length);
  const metadata: Record<string, string> = {};
  const spans: { begin: number; end: number; key: string; dtype: DType; shape: number[] }[] = [];
  for (const [key, entry] of Object.entries(header)) {
    if (key === "__metadata__") {
      for (const [name, value] of Object.entries(asObject(entry, "its metadata")))
        metadata[name] = asText(value, `'${name}' in its metadata`);
      continue;
    }
    const object = asObject(entry, `the entry of '${key}'`);
    const name = asText(object["dtype"], `the element type of '${key}'`);
    const dtype = BY_SAFETENSORS.get(name);
    if (!dtype) throw new Error(`element type ${name} of '${key}' has no tensors in JavaScript`);
    const shape = asSizes(object["shape"], `'${key}'`);
    const offsets = asList(object["data_offsets"], `the offsets of '${key}'`);
    const [begin, end] = offsets as [number, number];
    if (
      offsets.length !== 2 ||
      !Number.isSafeInteger(begin) ||
      !Number.isSafeInteger(end) ||
      begin < 0 ||
      end < begin ||
      end > data.length
    ) {
      throw new Error(`the data of '${key}' lies outside of the file`);
    }
    if (end - begin !== elements(shape) * dtype.size)
      throw new Error(`the data of '${key}' has another size than its shape`);
    spans.push({ begin, end, key, dtype, shape });
  }
  // Gaps and overlaps: the safetensors package refuses both, as bytes that nobody reads could hide anything.
  let position = 0;
  for (const { begin, end, key } of [...spans].sort((a, b) => a.begin - b.begin || a.end - b.end)) {
    if (begin !== position) throw new Error(`the data of '${key}' does not follow that of the tensor before it`);
    position = end;
  }
  if (position !== data.length)
    throw new Error(`${data.length - position} bytes follow the last tensor, or the file is truncated`);
  // Copied when nothing overlaps: then all copies together are no larger than the file. They are aligned, too, as typed
  // arrays need it.
  const tensors = new Map<string, RawTensor>(
    spans.map(({ begin, end, key, dtype, shape }) => [key, { dtype, shape, bytes: data.slice(begin, end) }]),
  );
  return { metadata, tensors };
}
