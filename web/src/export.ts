/** Cuts an inference model out of the eval model, with the trained parameters as initializers. */

import { InputError, ModelLoadError, messageOf } from "./errors.js";
import { METADATA_KEY } from "./manifest.js";
import type { RawTensor } from "./safetensors.js";
import { type Field, embed, integerField, join, messages, parseMessage, textField, textOf, texts } from "./wire.js";

// Field numbers of onnx.proto.
const MODEL_GRAPH = 7;
const MODEL_OPSET = 8;
const MODEL_METADATA = 14;
const MODEL_FUNCTION = 25;
const NODE = 1;
const INITIALIZER = 5;
const INPUT = 11;
const OUTPUT = 12;
const VALUE_INFO = 13;
const SPARSE_INITIALIZER = 15;
const TENSOR_RAW = 9;
const TENSOR_EXTERNAL = 13;
const TENSOR_LOCATION = 14;
// Number of names that an error message lists.
const SHOWN = 20;

/** A file in which a model keeps data of its initializers. */
export interface ExternalFile {
  /** Name by which the model refers to it. */
  readonly path: string;
  readonly data: Uint8Array;
}

/** Place of a tensor that a model keeps in another file. */
export interface Reference {
  /** Name of the tensor, e.g. "fc.weight". */
  readonly name: string;
  /** Name by which the model refers to the file. */
  readonly path: string;
  /** Position of the first byte. */
  readonly begin: number;
  /** Position after the last byte; null for the end of the file. */
  readonly end: number | null;
}

/** Reads the place of a tensor, null if the model holds its data; NaN stands for what is no number. */
function referenceOf(tensor: Uint8Array): Reference | null {
  const entries = new Map(messages(tensor, TENSOR_EXTERNAL).map((entry) => [textOf(entry, 1), textOf(entry, 2)]));
  const path = entries.get("location");
  if (path === undefined) return null;
  const begin = Number(entries.get("offset") ?? 0);
  const end = entries.has("length") ? begin + Number(entries.get("length")) : null;
  return { name: textOf(tensor, 8), path, begin, end };
}

interface Node {
  raw: Uint8Array;
  /** Names of the values that the node and its subgraphs read. */
  reads: Set<string>;
  writes: string[];
  /** "domain:op" of the node and of the nodes in its subgraphs. */
  calls: Set<string>;
}

/** Collects what a node and its subgraphs read, and the ops that they call. */
function readsAndCalls(node: Uint8Array): { reads: Set<string>; calls: Set<string> } {
  const reads = new Set(texts(node, 1));
  const calls = new Set([`${textOf(node, 7)}:${textOf(node, 4)}`]);
  for (const attribute of messages(node, 5)) {
    for (const subgraph of [...messages(attribute, 6), ...messages(attribute, 11)]) {
      for (const output of messages(subgraph, OUTPUT)) reads.add(textOf(output, 1));
      for (const inner of messages(subgraph, NODE)) {
        const { reads: innerReads, calls: innerCalls } = readsAndCalls(inner);
        innerReads.forEach((name) => reads.add(name));
        innerCalls.forEach((call) => calls.add(call));
      }
    }
  }
  return { reads, calls };
}

/** Returns the nodes that `outputs` need, in topological order, and the names of all values that they need. */
function prune(nodes: Node[], outputs: readonly string[]): { kept: Node[]; needed: Set<string> } {
  const producers = new Map<string, Node>();
  for (const node of nodes) for (const name of node.writes) if (name) producers.set(name, node);
  const needed = new Set<string>();
  const kept: Node[] = [];
  const visited = new Set<Node>();
  // Depth first with a stack of its own: a node is kept once everything that it reads is. Deep nets would overflow
  // the call stack.
  const pending: { name?: string; done?: Node }[] = [...outputs].reverse().map((name) => ({ name }));
  while (pending.length) {
    const { name, done } = pending.pop()!;
    if (done) {
      kept.push(done);
      continue;
    }
    needed.add(name!);
    const node = producers.get(name!);
    if (!node || visited.has(node)) continue;
    visited.add(node);
    node.writes.forEach((written) => needed.add(written));
    pending.push({ done: node }, ...[...node.reads].map((read) => ({ name: read })));
  }
  return { kept, needed };
}

/** Returns the fields of the new ModelProto except its graph: no manifest, no functions and opsets that nothing uses. */
function modelFields(model: readonly Field[], nodes: readonly Node[]): Uint8Array[] {
  const functions = new Map<string, Field>();
  for (const field of model) {
    if (field.number === MODEL_FUNCTION)
      functions.set(`${textOf(field.payload, 10)}:${textOf(field.payload, 1)}`, field);
  }
  // Functions call functions: the calls are followed from the nodes of the graph.
  const called = new Set<string>();
  const pending = nodes.flatMap((node) => [...node.calls]);
  while (pending.length) {
    const key = pending.pop()!;
    if (called.has(key)) continue;
    called.add(key);
    const body = functions.get(key);
    if (body) for (const node of messages(body.payload, 7)) pending.push(...readsAndCalls(node).calls);
  }
  // The standard domain, which has two spellings, stays even if no node is left: onnx asks every model for it.
  const domains = new Set([...called].map((key) => key.slice(0, key.lastIndexOf(":")))).add("").add("ai.onnx");
  return model
    .filter((field) => {
      if (field.number === MODEL_GRAPH) return false;
      // The exported model is no model of a training run: no host must take it for one.
      if (field.number === MODEL_METADATA) return textOf(field.payload, 1) !== METADATA_KEY;
      if (field.number === MODEL_OPSET) return domains.has(textOf(field.payload, 1));
      if (field.number === MODEL_FUNCTION)
        return called.has(`${textOf(field.payload, 10)}:${textOf(field.payload, 1)}`);
      return true;
    })
    .map((field) => field.raw);
}

/** Encodes a tensor as an initializer. */
function initializer(name: string, tensor: RawTensor): Uint8Array {
  const dims = tensor.shape.map((size) => integerField(1, size));
  return embed(INITIALIZER, ...dims, integerField(2, tensor.dtype.onnx), textField(8, name), embed(9, tensor.bytes));
}

/** Encodes an initializer whose data is in a file of its own with the data inside. */
function embedded(tensor: Uint8Array, files: readonly ExternalFile[]): Uint8Array {
  const reference = referenceOf(tensor);
  const file = files.find(({ path }) => path === reference?.path);
  // The reference was checked against the file when both were read.
  if (!reference || !file) {
    throw new ModelLoadError(
      `Exporting for inference: the data of '${textOf(tensor, 8)}' is missing. Pass all files of the run.`,
    );
  }
  const others = parseMessage(tensor).filter(
    ({ number }) => ![TENSOR_RAW, TENSOR_EXTERNAL, TENSOR_LOCATION].includes(number),
  );
  return embed(
    INITIALIZER,
    ...others.map(({ raw }) => raw),
    embed(TENSOR_RAW, file.data.subarray(reference.begin, reference.end ?? file.data.length)),
  );
}

/**
 * Makes an ordinary ONNX model that computes `outputs`.
 *
 * @param evalModel bytes of the eval model; its parameters and statistics are graph inputs.
 * @param tensors parameters and statistics by name.
 * @param outputs names of values that the eval model declares, e.g. ["logits"].
 * @param externalData files in which the eval model keeps data; they are put into the exported model.
 * @throws InputError if a name is no value of the eval model.
 * @throws ModelLoadError if the eval model is damaged.
 */
export function exportInferenceModel(
  evalModel: Uint8Array,
  tensors: ReadonlyMap<string, RawTensor>,
  outputs: readonly string[],
  externalData: readonly ExternalFile[],
): Uint8Array {
  let model: Field[];
  let graph: Field[];
  let nodes: Node[];
  try {
    model = parseMessage(evalModel);
    graph = parseMessage(model.find((field) => field.number === MODEL_GRAPH)!.payload);
    nodes = graph
      .filter((field) => field.number === NODE)
      .map((field) => ({ raw: field.raw, writes: texts(field.payload, 2), ...readsAndCalls(field.payload) }));
  } catch (error) {
    throw new ModelLoadError(
      `Exporting for inference: reading the eval model failed: ${messageOf(error)}. Generate the artifacts again.`,
      { cause: error },
    );
  }
  const infos = new Map<string, Uint8Array>();
  for (const field of graph)
    if (field.number === VALUE_INFO || field.number === OUTPUT) infos.set(textOf(field.payload, 1), field.payload);
  const computed = nodes.flatMap((node) => node.writes).filter((name) => infos.has(name));
  const unknown = outputs.filter((name) => !computed.includes(name));
  if (!outputs.length || unknown.length || new Set(outputs).size < outputs.length) {
    const problem = unknown.length
      ? `unknown names ${unknown.join(", ")}`
      : `expected different names, received [${outputs.join(", ")}]`;
    // From the end of the graph: predictions are near the loss.
    const candidates = computed.reverse();
    const more = candidates.length > SHOWN ? ", ..." : "";
    throw new InputError(
      `Exporting for inference: ${problem}. The eval model computes: ${candidates.slice(0, SHOWN).join(", ")}${more}.`,
    );
  }
  const { kept, needed } = prune(nodes, outputs);
  const parts: Uint8Array[] = kept.map((node) => node.raw);
  for (const { number, payload, raw } of graph) {
    const isTensor = number === INITIALIZER || number === SPARSE_INITIALIZER;
    if (number === NODE || number === OUTPUT) continue;
    if (!isTensor && number !== INPUT && number !== VALUE_INFO) {
      parts.push(raw);
      continue;
    }
    // The name of a SparseTensorProto is that of its values.
    const name = textOf(
      number === SPARSE_INITIALIZER ? (messages(payload, 1)[0] ?? payload) : payload,
      isTensor ? 8 : 1,
    );
    if (!needed.has(name) || tensors.has(name) || (number === VALUE_INFO && outputs.includes(name))) continue;
    if (number === INITIALIZER && messages(payload, TENSOR_EXTERNAL).length)
      parts.push(embedded(payload, externalData));
    else parts.push(raw);
  }
  for (const name of outputs) parts.push(embed(OUTPUT, infos.get(name)!));
  for (const [name, tensor] of tensors) if (needed.has(name)) parts.push(initializer(name, tensor));
  return join([...modelFields(model, kept), embed(MODEL_GRAPH, ...parts)]);
}

// [field number, kind of message] of the messages in which tensors can be, by the kind of the message around them.
const CONTENTS: Record<string, readonly [number, string][]> = {
  model: [
    [MODEL_GRAPH, "graph"],
    [20, "training"],
    [MODEL_FUNCTION, "function"],
  ],
  training: [
    [1, "graph"],
    [2, "graph"],
  ],
  function: [
    [7, "node"],
    [11, "attribute"],
  ],
  graph: [
    [NODE, "node"],
    [INITIALIZER, "tensor"],
    [SPARSE_INITIALIZER, "sparse"],
  ],
  node: [[5, "attribute"]],
  attribute: [
    [5, "tensor"],
    [6, "graph"],
    [10, "tensor"],
    [11, "graph"],
    [22, "sparse"],
    [23, "sparse"],
  ],
  sparse: [
    [1, "tensor"],
    [2, "tensor"],
  ],
};
// protobuf itself reads at most 100 messages inside one another.
const MAX_DEPTH = 100;

/**
 * Returns the places of tensors that a model keeps in other files, wherever they are in the model: ONNX Runtime would
 * look for a file that is not passed to it in the file system.
 */
export function externalReferences(model: Uint8Array): Reference[] {
  const references: Reference[] = [];
  const pending: { data: Uint8Array; kind: string; depth: number }[] = [{ data: model, kind: "model", depth: 0 }];
  while (pending.length) {
    const { data, kind, depth } = pending.pop()!;
    if (depth > MAX_DEPTH) throw new Error(`its graphs are nested more than ${MAX_DEPTH} messages deep`);
    if (kind === "tensor") {
      const reference = referenceOf(data);
      if (reference) references.push(reference);
      continue;
    }
    for (const [number, inner] of CONTENTS[kind]!)
      for (const payload of messages(data, number)) pending.push({ data: payload, kind: inner, depth: depth + 1 });
  }
  return references;
}

/** Returns the manifest in a model's metadata, null if there is none. */
export function embeddedManifest(model: Uint8Array): string | null {
  const entry = messages(model, MODEL_METADATA).find((payload) => textOf(payload, 1) === METADATA_KEY);
  return entry ? textOf(entry, 2) : null;
}
