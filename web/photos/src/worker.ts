/** Computes features and trains in a worker, so that the page stays responsive. */

import * as ort from "onnxruntime-web/wasm";
import { FileError, answerCalls } from "../../demo/src/calls.js";
import { digestOf } from "../../src/sha256.js";
import { Head } from "./head.js";
import { type Description, type FeatureModel, classifier, featureModel } from "./onnx.js";
import type { Backbone, Methods, Name, OwnBackbone, Range } from "./protocol.js";

/** Largest picture that a backbone may take. */
const MAX_SIZE = 512;
// Mean and deviation, per channel, of pixels of 0 to 1.
const RANGES: Record<Range, readonly [readonly number[], readonly number[]]> = {
  "0..1": [
    [0, 0, 0],
    [1, 1, 1],
  ],
  "-1..1": [
    [0.5, 0.5, 0.5],
    [0.5, 0.5, 0.5],
  ],
  "0..255": [
    [0, 0, 0],
    [1 / 255, 1 / 255, 1 / 255],
  ],
  imagenet: [
    [0.485, 0.456, 0.406],
    [0.229, 0.224, 0.225],
  ],
};

let head: Head;
/** The page's own backbone. */
let standard: Uint8Array;
let backbone: Backbone;
let model: FeatureModel;
let session: ort.InferenceSession;

const settings = { logSeverityLevel: 3 } as const;

async function created(bytes: Uint8Array): Promise<ort.InferenceSession> {
  try {
    return await ort.InferenceSession.create(bytes, settings);
  } catch (error) {
    console.info(error);
    throw new FileError("ONNX Runtime can't open it as an .onnx model");
  }
}

/** Returns what a model takes and gives; it is run once, on a grey picture. */
async function describe(bytes: Uint8Array, { size: chosen, range }: Omit<OwnBackbone, "bytes">): Promise<Description> {
  const plain = await created(bytes);
  try {
    const [taken, ...more] = plain.inputMetadata;
    const shown = plain.inputMetadata.map((item) =>
      item.isTensor ? `${item.type} [${item.shape.join(", ")}]` : item.name,
    );
    const wrong = (): FileError =>
      new FileError(
        `its input is ${shown.join(" and ") || "missing"}, not a single float32 image [1, 3, height, width]`,
      );
    if (!taken?.isTensor || more.length || taken.type !== "float32" || taken.shape.length !== 4) throw wrong();
    const [batch, channels, height, width] = taken.shape as [
      number | string,
      number | string,
      number | string,
      number | string,
    ];
    if ((typeof batch === "number" && batch !== 1) || channels !== 3) throw wrong();
    const sizes = [height, width].map((size) => (typeof size === "number" ? size : chosen));
    if (sizes[0] !== sizes[1])
      throw new FileError(`its images are ${height} x ${width}, and this page only has square ones`);
    const size = sizes[0]!;
    if (size > MAX_SIZE)
      throw new FileError(`its images are ${size} x ${size}, larger than the maximum of ${MAX_SIZE} x ${MAX_SIZE}`);
    const shape = [typeof batch === "number" ? batch : "n", 3, size, size];
    const [mean, deviation] = RANGES[range];
    const pixels = new Float32Array(3 * size * size).fill((0.5 - mean[0]!) / deviation[0]!);
    const results = await plain
      .run({ [taken.name]: new ort.Tensor("float32", pixels, [1, 3, size, size]) })
      .catch((error: unknown) => {
        console.info(error);
        throw new FileError(`it fails on an image of ${size} x ${size}`);
      });
    const output = plain.outputNames.find((name) => {
      const { type, dims } = results[name]!;
      return type === "float32" && dims[0] === 1 && (dims.length === 2 || dims.length === 4);
    });
    const dims = output === undefined ? [] : results[output]!.dims;
    const features = dims[1] ?? 0;
    const limit = head.room.features;
    if (output === undefined || features < 2 || features > limit)
      throw new FileError(
        `its output is ${describeOutputs(plain.outputNames.map((name) => results[name]!))}, not 2 to ${limit} features as float32 [1, features]`,
      );
    if (!(results[output]!.data as Float32Array).every(Number.isFinite))
      throw new FileError("its features for a gray image aren't finite");
    return { input: taken.name, output, shape, isMap: dims.length === 4, mean, deviation, features };
  } finally {
    await plain.release();
  }
}

const describeOutputs = (outputs: readonly ort.Tensor[]): string =>
  outputs.map(({ type, dims }) => `${type} [${dims.join(", ")}]`).join(" and ");

async function use(own: OwnBackbone | null): Promise<Backbone> {
  const { bytes, size, range } = own ?? { bytes: standard, size: 64, range: "0..1" as const };
  const description = await describe(bytes, { size, range });
  const next = featureModel(bytes, description);
  const opened = await created(next.bytes);
  await session?.release();
  [session, model] = [opened, next];
  const settled = `${await digestOf(bytes)} ${next.size} ${range}`;
  backbone = { digest: settled, size: next.size, features: description.features };
  await head.set(backbone.features, []);
  return backbone;
}

const methods: { [N in Name]: (...args: Parameters<Methods[N]>) => Promise<ReturnType<Methods[N]>> } = {
  async open() {
    // Small nets gain nothing by a second thread.
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.wasmPaths = new URL("ort/", self.location.href).href;
    const folder = new URL("model/", self.location.href);
    const loading = fetch(new URL("backbone.onnx", folder)).then((response) => response.arrayBuffer());
    head = await Head.open(ort, folder);
    standard = new Uint8Array(await loading);
    return use(null);
  },
  use,
  async features(pixels) {
    const { size, features } = backbone;
    const image = new ort.Tensor("float32", pixels, [1, 3, size, size]);
    const values = (await session.run({ [model.input]: image }))[model.output]!.data as Float32Array;
    if (values.length !== features || !values.every(Number.isFinite))
      throw new Error("has no finite features with this backbone");
    return values.slice();
  },
  setHead: (columns) => head.set(backbone.features, columns),
  async learn(features, labels) {
    head.learn(features, labels);
  },
  train: (steps) => head.train(steps),
  head: () => head.columns(),
  read: (features) => head.read(features),
  async export(names) {
    return classifier(model, await head.columns(), names);
  },
};

answerCalls(methods);
