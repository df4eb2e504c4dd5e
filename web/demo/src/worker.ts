/** Trains in a worker, so that drawing stays smooth. */

import * as ort from "onnxruntime-web/wasm";
import { TrainingSession } from "onnxtrain-web";
import { variant } from "./augment.js";
import { SIZE } from "./preprocess.js";
import type { Answer, Call, Drawing, Methods, Name, Reading } from "./protocol.js";
import { weightsOf } from "./weights.js";

const PIXELS = SIZE * SIZE;
const BATCH = 16;
// Of each batch, this many digits are those on which the base model was trained: it does not forget them.
const REHEARSED = 4;
// Per epoch, variants of each drawing.
const VARIANTS = 8;
const LEARNING_RATE = 0.003;
const SEED = 1;

let session: TrainingSession;
// The base model: as a checkpoint, with which the optimizer starts afresh, and its parameters.
let baseCheckpoint: Uint8Array;
let base: Float32Array;
let rehearsal: Uint8Array;
let warming = new AbortController();

function post(answer: Answer, transfer: Transferable[] = []): void {
  (self as unknown as { postMessage(message: Answer, transfer: Transferable[]): void }).postMessage(answer, transfer);
}

function tensor(images: readonly Float32Array[]): ort.Tensor {
  const data = new Float32Array(images.length * PIXELS);
  images.forEach((image, i) => data.set(image, i * PIXELS));
  return new ort.Tensor("float32", data, [images.length, 1, SIZE, SIZE]);
}

function labelled(images: readonly Float32Array[], labels: readonly number[]): Record<string, ort.Tensor> {
  return {
    image: tensor(images),
    labels: new ort.Tensor("int64", BigInt64Array.from(labels, BigInt), [labels.length]),
  };
}

/** Draws one of the digits of the base model's training; ten of each class lie in the file, class after class. */
function rehearsed(): { image: Float32Array; label: number } {
  const count = rehearsal.length / PIXELS;
  const index = Math.floor(session.random.uniform() * count);
  const bytes = rehearsal.subarray(index * PIXELS, (index + 1) * PIXELS);
  return { image: Float32Array.from(bytes, (value) => value / 256), label: Math.floor(index / (count / 10)) };
}

/** Runs steps whose results are thrown away, until a training begins. */
function warm(): void {
  warming = new AbortController();
  const blank = Array.from({ length: BATCH }, () => new Float32Array(PIXELS).fill(0.5));
  const feeds = labelled(
    blank,
    blank.map((_, i) => i % 10),
  );
  void session.warmUp(feeds, { steps: 300, milliseconds: 5000, signal: warming.signal }).catch(() => {
    // What is wrong shows in the first step that counts, too, with a message to the user.
  });
}

/** Returns per image the probabilities of the digits, with the parameters that the session has. */
async function probabilities(images: readonly Float32Array[]): Promise<Reading[]> {
  const { logits } = await session.predict({ image: tensor(images) });
  const values = logits!.data as Float32Array;
  return images.map((_, i) => {
    const row = values.subarray(i * 10, i * 10 + 10);
    const highest = Math.max(...row);
    const powers = Array.from(row, (value) => Math.exp(value - highest));
    const total = powers.reduce((sum, power) => sum + power, 0);
    return powers.map((power) => power / total);
  });
}

/** A file that is no model of this page. */
class FileError extends Error {
  override readonly name = "FileError";
}

const methods: { [N in Name]: (...args: Parameters<Methods[N]>) => Promise<ReturnType<Methods[N]>> } = {
  async open(threads) {
    const start = performance.now();
    // Small nets gain nothing by a second thread: its start and the locks cost more than it computes.
    ort.env.wasm.numThreads = threads;
    ort.env.wasm.wasmPaths = new URL("ort/", self.location.href).href;
    const folder = new URL("model/", self.location.href);
    const digits = fetch(new URL("digits.bin", folder)).then((response) => response.arrayBuffer());
    // `warm` does more, while the page can be used already.
    session = await TrainingSession.create(ort, { artifacts: folder, seed: SEED, warmUp: false });
    rehearsal = new Uint8Array(await digits);
    baseCheckpoint = await session.saveCheckpoint();
    base = await session.exportParameters();
    await session.predict({ image: tensor([new Float32Array(PIXELS)]) });
    warm();
    return { milliseconds: performance.now() - start };
  },

  async read(images) {
    if (!images.length) return { before: [], after: [] };
    const present = await session.exportParameters();
    // The calls run in order: nothing trains the parameters that are put in for a moment.
    await session.loadParameters(base);
    const before = await probabilities(images).finally(() => session.loadParameters(present));
    return { before, after: await probabilities(images) };
  },

  async train(drawings, epochs) {
    warming.abort();
    const learned = drawings.filter((drawing: Drawing) => !drawing.heldOut);
    const perEpoch = Math.max(1, Math.ceil((learned.length * VARIANTS) / (BATCH - REHEARSED)));
    const losses: number[] = [];
    const times: number[] = [];
    session.setLearningRate(LEARNING_RATE);
    for (let epoch = 0; epoch < epochs; epoch++) {
      const order = Array.from({ length: VARIANTS }, () => session.random.permutation(learned.length)).flat();
      for (let i = 0; i < perEpoch; i++) {
        const begin = performance.now();
        const batch = Array.from({ length: BATCH }, (_, k) => {
          if (k < REHEARSED) return rehearsed();
          const drawing = learned[order[(i * (BATCH - REHEARSED) + k - REHEARSED) % order.length]!]!;
          return { image: variant(drawing.image, session.random), label: drawing.label };
        });
        const step = session.trainStep(
          labelled(
            batch.map((b) => b.image),
            batch.map((b) => b.label),
          ),
        );
        const update = session.optimizerStep();
        const reset = session.lazyResetGrad();
        const { loss } = await step;
        await Promise.all([update, reset]);
        if (!Number.isFinite(loss)) throw new Error("The training has diverged: its loss is no longer a number");
        losses.push(loss);
        times.push(performance.now() - begin);
        post({ kind: "progress", step: losses.length, steps: perEpoch * epochs, epoch: epoch + 1, loss });
      }
    }
    return { losses, times };
  },

  async save() {
    return session.saveCheckpoint({ optimizer: true });
  },

  async export() {
    return session.exportModel();
  },

  async load(file) {
    const present = await session.saveCheckpoint({ optimizer: true });
    try {
      // A checkpoint begins with the length of its header, in eight bytes, and the header with "{".
      if (file[8] === 0x7b && file.subarray(4, 8).every((byte) => byte === 0)) await session.loadCheckpoint(file);
      else {
        const weights = weightsOf(file, session.manifest.parameters);
        await session.loadCheckpoint(baseCheckpoint);
        await session.loadParameters(weights);
      }
      if (!(await session.exportParameters()).every(Number.isFinite)) throw new Error("its parameters are not finite");
    } catch (error) {
      await session.loadCheckpoint(present);
      throw new FileError(error instanceof Error ? error.message : String(error));
    }
  },

  async reset() {
    await session.loadCheckpoint(baseCheckpoint);
  },
};

// One call after the other: `read` puts other parameters in for a moment.
let last: Promise<unknown> = Promise.resolve();
self.addEventListener("message", ({ data }: MessageEvent<Call>) => {
  const method = methods[data.name] as (...args: unknown[]) => Promise<unknown>;
  last = last
    .then(() => method(...data.args))
    .then(
      (value) => post({ kind: "result", id: data.id, value }),
      (error: unknown) => {
        const { name, message } = error instanceof Error ? error : new Error(String(error));
        post({ kind: "error", id: data.id, name, message });
      },
    );
});
