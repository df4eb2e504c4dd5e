/** Reads manifests: the inputs and outputs of the models of a run (docs/reference/file-formats.md, "The manifest"). */

import { type DType, dtypeOf } from "./dtypes.js";
import { ModelLoadError, messageOf } from "./errors.js";
import { type Json, asList, asNames, asObject, asSizes, asText, parseJson } from "./json.js";
import { sha256 } from "./sha256.js";

export const METADATA_KEY = "onnxtrain.manifest";
const FORMAT = "onnxtrain";
// 1 without sparse gradients, 2 with them.
const NEWEST_VERSION = 2;

/** Size of an axis: a number, a symbolic size such as "batch", or null if it is unknown. */
export type Dim = number | string | null;

/** Allowed values of an integer target that holds class labels. */
export interface ClassLabels {
  /** Number of classes, so that labels are 0 .. count - 1; null if it is unknown. */
  readonly count: number | null;
  /** Label whose elements do not count, e.g. -100; null if all count. */
  readonly ignoreIndex: number | null;
}

/** A user input or a target of the training model. */
export interface InputSpec {
  /** Name of the feed, e.g. "x". */
  readonly name: string;
  readonly dtype: DType;
  /** Sizes, e.g. ["batch", 4]; null if the rank is unknown. */
  readonly shape: readonly Dim[] | null;
  /** Allowed labels if it is a target of class labels. */
  readonly classLabels: ClassLabels | null;
}

/** A tensor of the run with a fixed shape. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: DType;
  readonly shape: readonly number[];
}

/** A parameter of the training model. */
export interface ParameterSpec extends TensorSpec {
  /** False if the parameter is frozen. */
  readonly trainable: boolean;
  /** Name of the output with the gradient, e.g. "fc.weight_grad"; null if the parameter is frozen. */
  readonly gradient: string | null;
  /** Name of the output with the numbers of the rows of a sparse gradient; null if the gradient is dense. */
  readonly gradientIndices: string | null;
}

/** A running statistic of a BatchNorm layer. */
export interface StatisticSpec extends TensorSpec {
  /** Name of the output with the updated value, e.g. "bn.running_mean_updated". */
  readonly output: string;
}

/** The optimizer model of a run. */
export interface OptimizerSpec {
  /** Name of the optimizer, e.g. "AdamW". */
  readonly type: string;
  /** Names of its states, e.g. ["momentum0", "momentum1"]. */
  readonly moments: readonly string[];
  /** Per moment, the value from which each element starts, e.g. [0, 0]. */
  readonly initialValues: readonly number[];
  /** Name of the input with the learning rate. */
  readonly learningRate: string;
  /** Name of the input with the number of the step, from 1. */
  readonly step: string;
}

/** Numbers that a host feeds beside data and parameters. */
export const HOST_VALUES = ["seed", "step", "run"] as const;
export type HostValue = (typeof HOST_VALUES)[number];

/** An input of the training model that holds numbers which the host knows, e.g. to draw masks of Dropout from. */
export interface HostInput {
  /** Name of the input, e.g. "onnxtrain.random". */
  readonly name: string;
  /** Per element of the input, an int64 vector, the number that it holds. */
  readonly holds: readonly HostValue[];
}

/** Names of the files of a run. */
export interface Files {
  readonly trainingModel: string;
  readonly evalModel: string | null;
  readonly inferenceModel: string | null;
  readonly optimizerModel: string | null;
  readonly checkpoint: string | null;
}

/** A file with weights that the models of a run share. */
export interface DataFileSpec {
  /** Size of the file. */
  readonly bytes: number;
  /** SHA-256 of the file, in hexadecimal. */
  readonly sha256: string;
}

/** A parsed manifest. */
export interface Manifest {
  /** Digest of names, dtypes and shapes of parameters and statistics. */
  readonly fingerprint: string;
  readonly files: Files;
  /** By name, files with shared weights whose content is checked; empty for small models. */
  readonly dataFiles: ReadonlyMap<string, DataFileSpec>;
  /** User inputs, in order. */
  readonly inputs: readonly InputSpec[];
  /** Targets, in order, e.g. the one named "labels". */
  readonly targets: readonly InputSpec[];
  /** Names of the outputs of the training and eval models, the loss first, e.g. ["loss", "logits"]. */
  readonly outputs: readonly string[];
  /** All parameters, in graph order. */
  readonly parameters: readonly ParameterSpec[];
  readonly statistics: readonly StatisticSpec[];
  /** Further inputs of the training model, which the session fills; empty for most models. */
  readonly hostInputs: readonly HostInput[];
  /** The optimizer, null if the run has no optimizer model. */
  readonly optimizer: OptimizerSpec | null;
  /** Inputs and outputs of the inference model, null if the run has none. */
  readonly inference: { readonly inputs: readonly string[]; readonly outputs: readonly string[] } | null;
}

function optionalText(value: Json | undefined, what: string): string | null {
  return value === undefined || value === null ? null : asText(value, what);
}

function optionalInteger(value: Json | undefined, what: string): number | null {
  if (value === undefined || value === null) return null;
  if (!Number.isSafeInteger(value)) throw new Error(`${what} is no integer`);
  return value as number;
}

function readInput(entry: Json): InputSpec {
  const object = asObject(entry, "an input");
  const name = asText(object["name"], "the name of an input");
  let shape: Dim[] | null = null;
  if (object["shape"] !== undefined && object["shape"] !== null) {
    const dims = asList(object["shape"], `the shape of '${name}'`);
    if (!dims.every((d) => d === null || typeof d === "string" || (Number.isSafeInteger(d) && (d as number) >= 0))) {
      throw new Error(`the shape of '${name}' is no list of sizes and names`);
    }
    shape = dims as Dim[];
  }
  let classLabels: ClassLabels | null = null;
  if (object["class_labels"] !== undefined && object["class_labels"] !== null) {
    const labels = asObject(object["class_labels"], "class_labels");
    classLabels = {
      count: optionalInteger(labels["count"], "the number of classes"),
      ignoreIndex: optionalInteger(labels["ignore_index"], "ignore_index"),
    };
  }
  return { name, dtype: dtypeOf(asText(object["dtype"], `the dtype of '${name}'`)), shape, classLabels };
}

function readTensor(object: { [key: string]: Json }): TensorSpec {
  const name = asText(object["name"], "the name of a parameter");
  return {
    name,
    dtype: dtypeOf(asText(object["dtype"], `the dtype of '${name}'`)),
    shape: asSizes(object["shape"], `'${name}'`),
  };
}

function readParameter(entry: Json): ParameterSpec {
  const object = asObject(entry, "a parameter");
  const trainable = object["trainable"] === true;
  return {
    ...readTensor(object),
    trainable,
    gradient: trainable ? asText(object["gradient"], "the gradient of a parameter") : null,
    gradientIndices: trainable ? optionalText(object["gradient_indices"], "gradient_indices") : null,
  };
}

function readStatistic(entry: Json): StatisticSpec {
  const object = asObject(entry, "a statistic");
  return { ...readTensor(object), output: asText(object["output"], "the output of a statistic") };
}

function readHostInput(entry: Json): HostInput {
  const object = asObject(entry, "a host input");
  const name = asText(object["name"], "the name of a host input");
  const holds = asNames(object["holds"], `what '${name}' holds`);
  const unknown = holds.filter((value) => !(HOST_VALUES as readonly string[]).includes(value));
  if (
    unknown.length ||
    object["dtype"] !== "int64" ||
    asSizes(object["shape"], `'${name}'`).join() !== String(holds.length)
  ) {
    throw new Error(
      `the input '${name}' holds ${holds.join(", ")}; known are int64 vectors of ${HOST_VALUES.join(", ")}; install a newer onnxtrain-web`,
    );
  }
  return { name, holds: holds as HostValue[] };
}

function readOptimizer(value: Json | undefined): OptimizerSpec | null {
  if (value === undefined || value === null) return null;
  const object = asObject(value, "the optimizer");
  const moments = asNames(object["moments"], "the moments");
  // Manifests without initial values stand for moments that start from 0.
  const values =
    object["initial_values"] === undefined ? moments.map(() => 0) : asList(object["initial_values"], "initial_values");
  if (values.length !== moments.length || !values.every((v) => typeof v === "number")) {
    throw new Error(`${values.length} initial values for ${moments.length} moments`);
  }
  return {
    type: asText(object["type"], "the optimizer's type"),
    moments,
    initialValues: values as number[],
    learningRate: asText(object["learning_rate"], "learning_rate"),
    step: asText(object["step"], "step"),
  };
}

function readFiles(value: Json | undefined): Files {
  const object = asObject(value, "files");
  return {
    trainingModel: asText(object["training_model"], "the file name of the training model"),
    evalModel: optionalText(object["eval_model"], "the file name of the eval model"),
    inferenceModel: optionalText(object["inference_model"], "the file name of the inference model"),
    optimizerModel: optionalText(object["optimizer_model"], "the file name of the optimizer model"),
    checkpoint: optionalText(object["checkpoint"], "the file name of the checkpoint"),
  };
}

function readDataFiles(value: Json | undefined): Map<string, DataFileSpec> {
  return new Map(
    Object.entries(asObject(value ?? {}, "data_files")).map(([name, entry]) => {
      const { bytes, sha256: digest } = asObject(entry, `the entry of '${name}'`);
      if (!Number.isSafeInteger(bytes) || typeof digest !== "string" || !/^[0-9a-f]{64}$/.test(digest))
        throw new Error(`the size or the SHA-256 of '${name}' is none`);
      return [name, { bytes: bytes as number, sha256: digest }];
    }),
  );
}

/**
 * Parses a manifest.
 *
 * @param text the JSON text of `manifest.json`.
 * @param source the file in messages, e.g. "'manifest.json'".
 * @throws ModelLoadError if the text is no manifest, incomplete, or of a newer version.
 */
export function parseManifest(text: string, source: string): Manifest {
  try {
    const raw = asObject(parseJson(text), "the manifest");
    if (raw["format"] !== FORMAT || typeof raw["version"] !== "number")
      throw new Error("it is no manifest of onnxtrain");
    if (raw["version"] > NEWEST_VERSION) {
      throw new Error(
        `it has version ${raw["version"]}, this package reads up to ${NEWEST_VERSION}; install a newer onnxtrain-web`,
      );
    }
    const inference = raw["inference"] ? asObject(raw["inference"], "inference") : null;
    const manifest: Manifest = {
      fingerprint: asText(raw["fingerprint"], "the fingerprint"),
      files: readFiles(raw["files"]),
      dataFiles: readDataFiles(raw["data_files"]),
      inputs: asList(raw["inputs"], "inputs").map(readInput),
      targets: asList(raw["targets"], "targets").map(readInput),
      outputs: asNames(raw["outputs"], "outputs"),
      parameters: asList(raw["parameters"], "parameters").map(readParameter),
      statistics: asList(raw["statistics"], "statistics").map(readStatistic),
      // Absent from artifacts of earlier versions.
      hostInputs: asList(raw["host_inputs"] ?? [], "host_inputs").map(readHostInput),
      optimizer: readOptimizer(raw["optimizer"]),
      inference: inference && {
        inputs: asNames(inference["inputs"], "the inference model's inputs"),
        outputs: asNames(inference["outputs"], "the inference model's outputs"),
      },
    };
    if (!manifest.outputs.length) throw new Error("there is no output");
    const computed = fingerprint(manifest.parameters, manifest.statistics);
    if (computed !== manifest.fingerprint) throw new Error("the fingerprint does not match the parameters");
    return manifest;
  } catch (error) {
    throw new ModelLoadError(
      `Loading ${source}: ${messageOf(error)}. Generate the artifacts again, or pass the folder that generate_artifacts wrote.`,
      { cause: error },
    );
  }
}

/** Computes the SHA-256 of names, dtypes and shapes, in any order; see docs/reference/file-formats.md. */
export function fingerprint(parameters: Iterable<TensorSpec>, statistics: Iterable<TensorSpec>): string {
  const list = (specs: Iterable<TensorSpec>): unknown[] =>
    sortByName([...specs]).map((spec) => [spec.name, spec.dtype.name, spec.shape]);
  return sha256(JSON.stringify({ parameters: list(parameters), statistics: list(statistics) }));
}

/** Sorts by name as Python sorts texts: by code points, where JavaScript compares halves of surrogate pairs. */
export function sortByName<T extends { readonly name: string }>(specs: T[]): T[] {
  const compare = (a: string, b: string): number => {
    const [x, y] = [Array.from(a, (c) => c.codePointAt(0)!), Array.from(b, (c) => c.codePointAt(0)!)];
    for (let i = 0; i < Math.min(x.length, y.length); i++) if (x[i] !== y[i]) return x[i]! - y[i]!;
    return x.length - y.length;
  };
  return specs.sort((a, b) => compare(a.name, b.name));
}
