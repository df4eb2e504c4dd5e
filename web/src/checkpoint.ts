/** Reads and writes checkpoints and deltas (docs/reference/file-formats.md, "The checkpoint"). */

import { type DType, dtypeOf, elements } from "./dtypes.js";
import { CheckpointError, messageOf } from "./errors.js";
import { type Json, asList, asNames, asObject, asSizes, asText, parseJson, scalarText } from "./json.js";
import { type Manifest, type TensorSpec, fingerprint, sortByName } from "./manifest.js";
import { Sha256, canDigest, digestOf } from "./sha256.js";
import { type RawTensor, decodeSafetensors, encodeSafetensors } from "./safetensors.js";
import { join } from "./wire.js";

const FORMAT = "onnxtrain-checkpoint";
const DELTA_FORMAT = "onnxtrain-checkpoint-delta";
const VERSION = "1";
// Bytes 4 to 8 of the FlatBuffer in which onnxruntime-training kept its checkpoints.
const LEGACY_IDENTIFIER = "ODTC";
// Number of differences that an error message lists.
const SHOWN = 5;

/** The user's own values in a checkpoint by name, e.g. {"epoch": 3}. Integers beyond 2^53 are bigints. */
export type Properties = Record<string, number | bigint | string>;

/** Step count and learning rates of an optimizer. */
export interface Progress {
  /** Number of steps taken, e.g. 12. */
  step: number;
  /** Learning rate of the next step, e.g. 0.001. */
  learningRate: number;
  /** Rate from which a schedule starts. */
  initialLearningRate: number;
}

/** Content of a checkpoint or a delta. */
export interface Content {
  /** True for a delta, which holds the trained parameters only. */
  readonly delta: boolean;
  /** Parameters by name; null for one of a nominal checkpoint, which has no data. */
  readonly parameters: ReadonlyMap<string, RawTensor | null>;
  /** Names of the parameters that were trained. */
  readonly trainable: readonly string[];
  readonly statistics: ReadonlyMap<string, RawTensor>;
  /** Per moment and parameter, a tensor. */
  readonly moments: ReadonlyMap<string, ReadonlyMap<string, RawTensor>>;
  /** Null if the file was saved without optimizer state. */
  readonly progress: Progress | null;
  readonly properties: Properties;
  /** Digest of names, dtypes and shapes of the model, also of the parameters that a delta leaves out; may be absent. */
  readonly fingerprint: string | null;
  /** Of a delta, the digest of the parameters that it leaves out. */
  readonly frozen: string | null;
}

function readProperties(text: string): Properties {
  const properties = asObject(parseJson(text), "the properties");
  return Object.fromEntries(
    Object.entries(properties).map(([name, value]) => {
      // In Python, true is the integer 1.
      if (typeof value === "boolean") return [name, Number(value)];
      if (!["number", "bigint", "string"].includes(typeof value))
        throw new Error("a property is neither number nor text");
      return [name, value as number | bigint | string];
    }),
  );
}

function readProgress(text: string): Progress | null {
  const value = parseJson(text);
  if (value === null) return null;
  const object = asObject(value, "the optimizer's state");
  const [step, learningRate, initialLearningRate] = [
    object["step"],
    object["learning_rate"],
    object["initial_learning_rate"],
  ];
  const valid = (rate: Json | undefined): boolean => typeof rate === "number" && rate >= 0 && rate < Infinity;
  if (!Number.isSafeInteger(step) || (step as number) < 0 || !valid(learningRate) || !valid(initialLearningRate)) {
    throw new Error(`the optimizer cannot be at step ${step} with the learning rate ${learningRate}`);
  }
  return { step, learningRate, initialLearningRate } as Progress;
}

function parse(file: Uint8Array): Content {
  if (new TextDecoder("latin1").decode(file.subarray(4, 8)) === LEGACY_IDENTIFIER) {
    throw new Error(
      "it is a checkpoint of onnxruntime-training; load and save it once in Python, by CheckpointState, to convert it",
    );
  }
  const { metadata, tensors } = decodeSafetensors(file);
  const format = metadata["format"];
  if (format !== FORMAT && format !== DELTA_FORMAT)
    throw new Error("it is a safetensors file, but not a checkpoint of onnxtrain");
  if (metadata["version"] !== VERSION) {
    throw new Error(
      `it has version ${metadata["version"]}, this package reads ${VERSION}; install a newer onnxtrain-web`,
    );
  }
  const entry = (key: string): string => asText(metadata[key], `'${key}' in its metadata`);
  const groups = new Map<string, Map<string, RawTensor>>();
  for (const [key, tensor] of tensors) {
    const slash = key.indexOf("/");
    if (slash < 0) throw new Error(`unexpected tensor '${key}'`);
    const kind = key.slice(0, slash);
    if (!groups.has(kind)) groups.set(kind, new Map());
    groups.get(kind)!.set(key.slice(slash + 1), tensor);
  }
  const parameters = new Map<string, RawTensor | null>(groups.get("parameter"));
  const statistics = groups.get("statistic") ?? new Map<string, RawTensor>();
  groups.delete("parameter");
  groups.delete("statistic");
  const specs: TensorSpec[] = [];
  for (const [name, tensor] of parameters) if (tensor) specs.push({ name, ...tensor });
  const delta = format === DELTA_FORMAT;
  if (!delta && parseJson(entry("nominal")) === true) {
    for (const [name, signature] of Object.entries(asObject(parseJson(entry("shapes")), "the shapes"))) {
      const [type, shape] = asList(signature, `the entry of '${name}'`);
      specs.push({ name, dtype: dtypeOf(asText(type, "a dtype")), shape: asSizes(shape, `'${name}'`) });
      parameters.set(name, null);
    }
  }
  const trainable = asNames(parseJson(entry("trainable")), "what is trainable");
  const order = delta ? trainable : asNames(parseJson(entry("order")), "the order of the parameters");
  if (order.length !== parameters.size || !order.every((name) => parameters.has(name))) {
    throw new Error("the list of parameters does not match the tensors");
  }
  if (!trainable.every((name) => parameters.has(name))) throw new Error("a trainable parameter is missing");
  for (const group of groups.values()) {
    if (![...group.keys()].every((name) => parameters.has(name)))
      throw new Error("optimizer state does not match the parameters");
  }
  const expected = delta ? undefined : metadata["fingerprint"];
  const statisticSpecs = [...statistics].map(([name, tensor]) => ({ name, ...tensor }));
  if (expected && expected !== fingerprint(specs, statisticSpecs))
    throw new Error("the fingerprint does not match the tensors");
  return {
    delta,
    parameters,
    trainable,
    statistics,
    moments: groups,
    progress: readProgress(entry("optimizer")),
    properties: readProperties(entry("properties")),
    fingerprint: metadata["fingerprint"] ?? null,
    frozen: delta ? entry("frozen") : null,
  };
}

/**
 * Reads a checkpoint or a delta, and checks that it belongs to the model.
 *
 * @param file the bytes of the file.
 * @param manifest manifest of the model.
 * @param source the file in messages, e.g. "the checkpoint".
 * @throws CheckpointError if the file is damaged, no checkpoint, or of another model.
 */
export function readCheckpoint(file: Uint8Array, manifest: Manifest, source: string): Content {
  let content: Content;
  try {
    content = parse(file);
  } catch (error) {
    throw new CheckpointError(
      `Loading ${source}: ${messageOf(error)}. The file is truncated, corrupt or no checkpoint; restore it from another one. The session is unchanged.`,
      { cause: error },
    );
  }
  const expected = content.delta ? manifest.parameters.filter((spec) => spec.trainable) : manifest.parameters;
  const differences = [
    ...compare("parameter", expected, content.parameters),
    ...compare("statistic", manifest.statistics, content.statistics),
  ];
  // Of the frozen parameters of a delta, and of those of a nominal checkpoint, the file knows only the fingerprint.
  if (!differences.length && content.fingerprint !== null && content.fingerprint !== manifest.fingerprint) {
    differences.push("names, dtypes or shapes of parameters that it does not hold differ");
  }
  if (differences.length) {
    const more = differences.length > SHOWN ? `; and ${differences.length - SHOWN} more` : "";
    throw new CheckpointError(
      `Loading ${source}: it belongs to another model: ${differences.slice(0, SHOWN).join("; ")}${more}. ` +
        "Load a checkpoint that was trained from these artifacts. The session is unchanged.",
    );
  }
  return content;
}

/** Describes the tensors that are missing, extra, or have the wrong dtype or shape. */
function compare(
  kind: string,
  expected: readonly TensorSpec[],
  actual: ReadonlyMap<string, RawTensor | null>,
): string[] {
  const differences: string[] = [];
  for (const spec of expected) {
    const tensor = actual.get(spec.name);
    if (tensor === undefined) differences.push(`${kind} '${spec.name}' is missing`);
    // Null is a parameter of a nominal checkpoint: its dtype and shape are in the fingerprint, which was compared.
    else if (tensor && (tensor.dtype !== spec.dtype || tensor.shape.join() !== spec.shape.join())) {
      differences.push(
        `${kind} '${spec.name}' is ${spec.dtype.name}[${spec.shape.join(", ")}] in the model and ` +
          `${tensor.dtype.name}[${tensor.shape.join(", ")}] in the file`,
      );
    }
  }
  const names = new Set(expected.map((spec) => spec.name));
  for (const name of actual.keys()) if (!names.has(name)) differences.push(`${kind} '${name}' is not in the model`);
  return differences;
}

/** Encodes a checkpoint or a delta; moments are saved if `content.progress` is not null. */
export function encodeCheckpoint(content: Content, manifest: Manifest): Uint8Array {
  const tensors = new Map<string, RawTensor>();
  const put = (kind: string, group: ReadonlyMap<string, RawTensor | null>): void => {
    for (const [name, tensor] of group) if (tensor) tensors.set(`${kind}/${name}`, tensor);
  };
  put("statistic", content.statistics);
  put("parameter", content.parameters);
  if (content.progress) for (const [moment, group] of content.moments) put(moment, group);
  const { progress } = content;
  // safetensors allows texts only as values of its metadata: lists and objects are JSON texts.
  const metadata: Record<string, string> = {
    format: content.delta ? DELTA_FORMAT : FORMAT,
    version: VERSION,
    fingerprint: manifest.fingerprint,
    trainable: JSON.stringify(content.trainable),
    properties: `{${Object.entries(content.properties)
      .map(([name, value]) => `${scalarText(name)}: ${scalarText(value)}`)
      .join(", ")}}`,
    optimizer: JSON.stringify(
      progress && {
        step: progress.step,
        learning_rate: progress.learningRate,
        initial_learning_rate: progress.initialLearningRate,
      },
    ),
  };
  if (content.delta) metadata["frozen"] = content.frozen!;
  else Object.assign(metadata, { order: JSON.stringify([...content.parameters.keys()]), nominal: "false" });
  return encodeSafetensors(tensors, metadata);
}

/**
 * Computes the digest of the frozen parameters by which a delta recognises its base; see docs/reference/file-formats.md.
 * Where the browser can, it computes the digest beside the page.
 */
export async function frozenDigest(frozen: readonly (RawTensor & { readonly name: string })[]): Promise<string> {
  const chunks = sortByName([...frozen]).flatMap(({ name, dtype, shape, bytes }) => [
    new TextEncoder().encode(JSON.stringify([name, dtype.name, shape])),
    bytes,
  ]);
  try {
    if (canDigest()) return await digestOf(join(chunks));
  } catch {
    // There is no memory for all of them in one piece.
  }
  const digest = new Sha256();
  for (const chunk of chunks) digest.update(chunk);
  return digest.hex();
}

/** Begins to compute the digest of the frozen parameters of a checkpoint; undefined if that would block the page. */
export function beginDigest(content: Content, manifest: Manifest): Promise<string> | undefined {
  if (content.delta || !canDigest()) return undefined;
  const frozen = manifest.parameters.filter((spec) => !spec.trainable);
  const raw = frozen.map(({ name }) => ({ name, tensor: content.parameters.get(name) }));
  if (!raw.every(({ tensor }) => tensor)) return undefined;
  const digest = frozenDigest(raw.map(({ name, tensor }) => ({ name, ...tensor! })));
  // Reported by whoever waits for it.
  digest.catch(() => undefined);
  return digest;
}

/** Makes a tensor whose elements all have one value, e.g. a moment that starts from 0. */
export function filled(value: number, dtype: DType, shape: readonly number[]): RawTensor {
  const array = new dtype.array(elements(shape));
  if (value !== 0) {
    if (dtype.name !== "float32" && dtype.name !== "float64")
      throw new Error(`moments of ${dtype.name} that start from ${value} are not supported`);
    (array as Float32Array).fill(value);
  }
  return { dtype, shape, bytes: new Uint8Array(array.buffer as ArrayBuffer) };
}
