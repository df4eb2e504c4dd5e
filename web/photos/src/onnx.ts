/** Puts ONNX models together: pixels, backbone, features, and the head behind them. */

import { described } from "../../demo/src/description.js";
import { embed, integerField, join, messages, parseMessage, textField, textOf, texts } from "../../src/wire.js";

// Field numbers of onnx.proto.
const MODEL_GRAPH = 7;
const GRAPH = { node: 1, initializer: 5, input: 11, output: 12 };
const [FLOAT, INTEGER_ATTRIBUTE] = [1, 2];

type Bytes = Uint8Array;

function tensor(name: string, values: Float32Array, ...dims: number[]): Bytes {
  const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  const fields = [...dims.map((size) => integerField(1, size)), integerField(2, FLOAT), textField(8, name)];
  return embed(GRAPH.initializer, ...fields, embed(9, bytes));
}

/** Encodes a node; its attributes are integers. */
function node(op: string, inputs: readonly string[], output: string, attributes: Record<string, number> = {}): Bytes {
  const integers = Object.entries(attributes).map(([name, value]) =>
    embed(5, textField(1, name), integerField(3, value), integerField(20, INTEGER_ATTRIBUTE)),
  );
  const names = inputs.map((name) => textField(1, name));
  return embed(GRAPH.node, ...names, textField(2, output), textField(3, output), textField(4, op), ...integers);
}

/** Encodes the declaration of an input or output of float32; a text is a size that may vary. */
function declaration(field: number, name: string, shape: readonly (number | string)[]): Bytes {
  const dims = shape.map((size) => embed(1, typeof size === "number" ? integerField(1, size) : textField(2, size)));
  return embed(field, textField(1, name), embed(2, embed(1, integerField(1, FLOAT), embed(2, ...dims))));
}

const graphOf = (model: Bytes): Bytes => messages(model, MODEL_GRAPH).at(-1) ?? new Uint8Array();

/** Returns a function that makes names which the model does not have yet. */
function namer(model: Bytes): (text: string) => string {
  const used = new Set<string>();
  for (const { payload, number } of parseMessage(graphOf(model))) {
    if (number === GRAPH.node) [...texts(payload, 1), ...texts(payload, 2)].forEach((name) => used.add(name));
    else if (number === GRAPH.initializer) used.add(textOf(payload, 8));
    else if (number === GRAPH.input) used.add(textOf(payload, 1));
  }
  return (text) => {
    let name = text;
    while (used.has(name)) name += "_";
    return name;
  };
}

/** Returns the model with `before` and `behind` around what its graph holds but the input `replaced` and the outputs. */
function around(model: Bytes, before: readonly Bytes[], behind: readonly Bytes[], replaced?: string): Bytes {
  const kept = parseMessage(graphOf(model)).filter(
    ({ number, payload }) => number !== GRAPH.output && !(number === GRAPH.input && textOf(payload, 1) === replaced),
  );
  const others = parseMessage(model).filter(({ number }) => number !== MODEL_GRAPH);
  const raw = (fields: typeof others): Bytes[] => fields.map((field) => field.raw);
  return join([...raw(others), embed(MODEL_GRAPH, ...before, ...raw(kept), ...behind)]);
}

/** What a backbone takes and gives. */
export interface Description {
  /** Names of the backbone's own input and output. */
  readonly input: string;
  readonly output: string;
  /** Number of pictures, 3, height and width; a text for a number that may vary. */
  readonly shape: readonly (number | string)[];
  /** True if its output is of the shape [n, features, height, width], of which the mean is taken. */
  readonly isMap: boolean;
  /** Mean and deviation of the pixels that it takes, per channel. */
  readonly mean: readonly number[];
  readonly deviation: readonly number[];
  /** Number of features. */
  readonly features: number;
}

/** A model from RGB of 0 to 1 to features. */
export interface FeatureModel {
  readonly bytes: Bytes;
  /** Height and width of its images. */
  readonly size: number;
  /** Names of its input and its output. */
  readonly input: string;
  readonly output: string;
}

/** Returns the backbone with pixels of its range before it, and behind it vectors whose mean square is 1. */
export function featureModel(backbone: Bytes, description: Description): FeatureModel {
  const { input, output, shape, isMap, mean, deviation, features } = description;
  const name = namer(backbone);
  const [photo, named] = [name("photo"), name("features")];
  const [means, deviations, centred] = [name("photo/mean"), name("photo/deviation"), name("photo/centred")];
  const [pooled, flat, direction] = [name("features/pooled"), name("features/flat"), name("features/direction")];
  const length = name("features/length");
  const before = [
    tensor(means, Float32Array.from(mean), 1, 3, 1, 1),
    tensor(deviations, Float32Array.from(deviation), 1, 3, 1, 1),
    node("Sub", [photo, means], centred),
    node("Div", [centred, deviations], input),
  ];
  const behind = [
    tensor(length, Float32Array.of(Math.sqrt(features)), 1),
    ...(isMap ? [node("GlobalAveragePool", [output], pooled)] : []),
    node("Flatten", [isMap ? pooled : output], flat, { axis: 1 }),
    node("LpNormalization", [flat], direction, { axis: 1, p: 2 }),
    node("Mul", [direction, length], named),
    declaration(GRAPH.input, photo, shape),
    declaration(GRAPH.output, named, [shape[0]!, features]),
  ];
  return { bytes: around(backbone, before, behind, input), size: Number(shape[2]), input: photo, output: named };
}

/**
 * Returns the feature model with a head behind it: its output `scores` are the logits of the classes.
 *
 * @param columns per class the weights of the features, and the bias.
 * @param names of the classes, for the model's metadata.
 */
export function classifier(
  { bytes, size, output }: FeatureModel,
  columns: readonly { readonly weights: Float32Array; readonly bias: number }[],
  names: readonly string[],
): Bytes {
  const name = namer(bytes);
  const [weight, biases, scores] = [name("head.weight"), name("head.bias"), name("scores")];
  const [features, classes] = [columns[0]!.weights.length, columns.length];
  const weights = new Float32Array(features * classes);
  columns.forEach((column, c) => column.weights.forEach((weight, f) => (weights[f * classes + c] = weight)));
  const behind = [
    tensor(weight, weights, features, classes),
    tensor(
      biases,
      Float32Array.from(columns, ({ bias }) => bias),
      classes,
    ),
    node("Gemm", [output, weight, biases], scores),
    declaration(GRAPH.output, scores, ["n", classes]),
  ];
  return described(around(bytes, [], behind), names, size);
}
