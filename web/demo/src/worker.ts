/** Trains in a worker, so that drawing stays smooth. */

import * as ort from "onnxruntime-web/wasm";
import { TrainingSession } from "onnxtrain-web";
import { variant } from "./augment.js";
import { FileError, answerCalls, post } from "./calls.js";
import { DESCRIPTION, describe, described, descriptionOf, namesIn } from "./description.js";
import { type Files, MANIFEST, classesOf, withClasses, withColumns } from "./head.js";
import { MAX_NAMES } from "./names.js";
import { SIZE } from "./preprocess.js";
import type { Drawing, Methods, Name, Reading } from "./protocol.js";
import { lastSizeOf, weightsOf } from "./weights.js";

const PIXELS = SIZE * SIZE;
const BATCH = 16;
// Of each batch, this many digits are those on which the base model was trained: it does not forget them.
const REHEARSED = 4;
const DIGITS = 10;
const FILES = ["training_model.onnx", "eval_model.onnx", "inference_model.onnx", "optimizer_model.onnx"];
const CHECKPOINT = "checkpoint";
// Per epoch, variants of each drawing.
const VARIANTS = 8;
const LEARNING_RATE = 0.003;
const SEED = 1;

// The run of the digits' network, from which those of other numbers of classes are made.
let files: Files;
let session: TrainingSession;
// Number of classes of the session's network.
let classes = 0;
// What the base model knows: the digits, or none of the classes; and its parameters.
let knowsDigits = true;
let base: Float32Array;
let rehearsal: Uint8Array;
let warming = new AbortController();

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
  return { image: Float32Array.from(bytes, (value) => value / 256), label: Math.floor(index / (count / DIGITS)) };
}

/** Runs steps whose results are thrown away, until a training begins. */
function warm(): void {
  warming = new AbortController();
  const blank = Array.from({ length: BATCH }, () => new Float32Array(PIXELS).fill(0.5));
  const feeds = labelled(
    blank,
    blank.map((_, i) => i % classes),
  );
  void session.warmUp(feeds, { steps: 300, milliseconds: 5000, signal: warming.signal }).catch(() => {
    // What is wrong shows in the first step that counts, too, with a message to the user.
  });
}

/** Returns per image the probabilities of the classes, with the parameters that the session has. */
async function probabilities(images: readonly Float32Array[]): Promise<Reading[]> {
  const { logits } = await session.predict({ image: tensor(images) });
  const values = logits!.data as Float32Array;
  return images.map((_, i) => {
    const row = values.subarray(i * classes, (i + 1) * classes);
    const highest = Math.max(...row);
    const powers = Array.from(row, (value) => Math.exp(value - highest));
    const total = powers.reduce((sum, power) => sum + power, 0);
    return powers.map((power) => power / total);
  });
}

/** Returns the checkpoint of the base model. */
const baseCheckpoint = (count: number, digits: boolean): Uint8Array =>
  withColumns(files[CHECKPOINT]!, digits ? [...Array(count).keys()] : Array<number>(count).fill(-1));

/** Opens the network with this number of classes. */
function create(count: number): Promise<TrainingSession> {
  const run = count === DIGITS ? files : withClasses(files, count);
  const artifacts = { ...run, [CHECKPOINT]: baseCheckpoint(count, count === DIGITS) };
  // `warm` does more, while the page can be used already.
  return TrainingSession.create(ort, { artifacts, seed: SEED, warmUp: false });
}

/** Puts a session into the place of the present one. */
async function use(next: TrainingSession, count: number): Promise<void> {
  warming.abort();
  session?.release();
  [session, classes] = [next, count];
  await session.predict({ image: tensor([new Float32Array(PIXELS)]) });
  warm();
}

const methods: { [N in Name]: (...args: Parameters<Methods[N]>) => Promise<ReturnType<Methods[N]>> } = {
  async open(threads) {
    const start = performance.now();
    // Small nets gain nothing by a second thread: its start and the locks cost more than it computes.
    ort.env.wasm.numThreads = threads;
    ort.env.wasm.wasmPaths = new URL("ort/", self.location.href).href;
    const folder = new URL("model/", self.location.href);
    const fetched = async (name: string): Promise<Uint8Array> => {
      const response = await fetch(new URL(name, folder));
      if (!response.ok) throw new Error(`${name}: the server answered ${response.status}`);
      return new Uint8Array(await response.arrayBuffer());
    };
    const digits = fetched("digits.bin");
    const names = [MANIFEST, CHECKPOINT, ...FILES];
    const contents = await Promise.all(names.map(fetched));
    files = Object.fromEntries(names.map((name, i) => [name, contents[i]!]));
    const first = await create(DIGITS);
    rehearsal = await digits;
    base = await first.exportParameters();
    await use(first, DIGITS);
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
    const kept = knowsDigits ? REHEARSED : 0;
    const perEpoch = Math.max(1, Math.ceil((learned.length * VARIANTS) / (BATCH - kept)));
    const losses: number[] = [];
    const times: number[] = [];
    session.setLearningRate(LEARNING_RATE);
    for (let epoch = 0; epoch < epochs; epoch++) {
      const order = Array.from({ length: VARIANTS }, () => session.random.permutation(learned.length)).flat();
      for (let i = 0; i < perEpoch; i++) {
        const begin = performance.now();
        const batch = Array.from({ length: BATCH }, (_, k) => {
          if (k < kept) return rehearsed();
          const drawing = learned[order[(i * (BATCH - kept) + k - kept) % order.length]!]!;
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

  async save(names) {
    session.properties[DESCRIPTION] = describe(names, SIZE);
    return session.saveCheckpoint({ optimizer: true });
  },

  async export(names) {
    return described(await session.exportModel(), names, SIZE);
  },

  async load(checkpoint, columns, digits) {
    const initial = baseCheckpoint(columns.length, digits);
    let content = initial;
    if (checkpoint) {
      try {
        content = withColumns(checkpoint, columns);
      } catch (error) {
        throw new FileError(String(error));
      }
    }
    if (columns.length !== classes) await use(await create(columns.length), columns.length);
    await session.loadCheckpoint(initial);
    [base, knowsDigits] = [await session.exportParameters(), digits];
    await session.loadCheckpoint(content).catch((error: unknown) => {
      throw new FileError(String(error));
    });
  },

  async parse(file) {
    let trial: TrainingSession | null = null;
    try {
      // A checkpoint begins with the length of its header, in eight bytes, and the header with "{".
      const isCheckpoint = file[8] === 0x7b && file.subarray(4, 8).every((byte) => byte === 0);
      const count = isCheckpoint ? classesOf(file) : lastSizeOf(file, "head.bias");
      if (!(count >= 1 && count <= MAX_NAMES)) throw new Error(`it has ${count} classes`);
      trial = await create(count);
      if (isCheckpoint) await trial.loadCheckpoint(file);
      else await trial.loadParameters(weightsOf(file, trial.manifest.parameters));
      if (!(await trial.exportParameters()).every(Number.isFinite)) throw new Error("its parameters are not finite");
      const description = isCheckpoint ? trial.properties[DESCRIPTION] : descriptionOf(file);
      return { checkpoint: await trial.saveCheckpoint({ optimizer: true }), count, names: namesIn(description, count) };
    } catch (error) {
      throw new FileError(error instanceof Error ? error.message : String(error));
    } finally {
      trial?.release();
    }
  },
};

// `read` puts other parameters in for a moment: no other call may come in between.
answerCalls(methods);
