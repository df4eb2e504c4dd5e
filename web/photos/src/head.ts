/** Trains the head: a linear layer from features to classes, of which there are more or fewer from one moment to the next. */

import { type OrtModule, TrainingSession } from "onnxtrain-web";
import type { Column, Reading } from "./protocol.js";

const LEARNING_RATE = 0.002;
/** Most pictures of a step. */
const BATCH = 256;
// Weights of the classes that are not there: e^-1e30 is 0, and so are their gradients.
const ABSENT = -1e30;

/**
 * A head of as many classes as it is given. Its artifacts have room for more classes and features than that: `mask` closes the
 * classes that are not there, and the features that a backbone does not have are 0. Both have gradients of exactly 0.
 */
export class Head {
  /** Room for features and for classes. */
  readonly room: { readonly features: number; readonly classes: number };
  readonly #ort: OrtModule;
  readonly #session: TrainingSession;
  // The head with which the page begins: all zeros, and an optimizer that starts afresh.
  readonly #blank: Uint8Array;
  #features = 0;
  #classes = 0;
  #pictures: { features: readonly Float32Array[]; labels: readonly number[] } = { features: [], labels: [] };

  private constructor(ort: OrtModule, session: TrainingSession, blank: Uint8Array) {
    this.#ort = ort;
    this.#session = session;
    this.#blank = blank;
    const [features, classes] = session.manifest.parameters[0]!.shape as [number, number];
    this.room = { features, classes };
  }

  /** Opens the artifacts; `artifacts` is their folder or their files, as for `TrainingSession.create`. */
  static async open(ort: OrtModule, artifacts: URL | Record<string, Uint8Array>): Promise<Head> {
    const session = await TrainingSession.create(ort, { artifacts, seed: 1, warmUp: false });
    return new Head(ort, session, await session.saveCheckpoint());
  }

  /** Takes over a head for so many features; a null is a class that is new, whose weights are 0. */
  async set(features: number, columns: readonly (Column | null)[]): Promise<void> {
    [this.#features, this.#classes] = [features, columns.length];
    const { classes } = this.room;
    const flat = new Float32Array((this.room.features + 1) * classes);
    columns.forEach((column, c) => {
      column?.weights.forEach((weight, f) => (flat[f * classes + c] = weight));
      flat[this.room.features * classes + c] = column?.bias ?? 0;
    });
    await this.#session.loadCheckpoint(this.#blank);
    await this.#session.loadParameters(flat);
  }

  /** Takes what `train` learns: features of pictures, and the class of each. */
  learn(features: readonly Float32Array[], labels: readonly number[]): void {
    this.#pictures = { features, labels };
  }

  /** Trains for a number of steps on all pictures, or on as many of them by chance as a step takes; returns the losses. */
  async train(steps: number): Promise<number[]> {
    const { features, labels } = this.#pictures;
    const losses: number[] = [];
    this.#session.setLearningRate(LEARNING_RATE);
    for (let step = 0; step < steps; step++) {
      const chosen =
        features.length > BATCH
          ? [...this.#session.random.permutation(features.length)].slice(0, BATCH)
          : [...features.keys()];
      const batch = BigInt64Array.from(chosen, (index) => BigInt(labels[index]!));
      const { loss } = await this.#session.trainStep({
        ...this.#feeds(chosen.map((index) => features[index]!)),
        labels: new this.#ort.Tensor("int64", batch, [chosen.length]),
      });
      await this.#session.optimizerStep();
      await this.#session.lazyResetGrad();
      losses.push(loss);
    }
    return losses;
  }

  /** Returns the probabilities of the classes for pictures with these features. */
  async read(features: readonly Float32Array[]): Promise<Reading[]> {
    if (!features.length || !this.#classes) return features.map(() => []);
    const { logits } = await this.#session.predict(this.#feeds(features));
    const values = logits!.data as Float32Array;
    return features.map((_, i) => {
      const row = values.subarray(i * this.room.classes, i * this.room.classes + this.#classes);
      const highest = Math.max(...row);
      const powers = Array.from(row, (value) => Math.exp(value - highest));
      const total = powers.reduce((sum, power) => sum + power, 0);
      return powers.map((power) => power / total);
    });
  }

  /** Returns the weights of each class. */
  async columns(): Promise<Column[]> {
    const flat = await this.#session.exportParameters();
    const { features, classes } = this.room;
    return Array.from({ length: this.#classes }, (_, c) => ({
      weights: Float32Array.from({ length: this.#features }, (_, f) => flat[f * classes + c]!),
      bias: flat[features * classes + c]!,
    }));
  }

  #feeds(features: readonly Float32Array[]): Record<string, InstanceType<OrtModule["Tensor"]>> {
    const rows = new Float32Array(features.length * this.room.features);
    features.forEach((row, i) => rows.set(row, i * this.room.features));
    const mask = Float32Array.from({ length: this.room.classes }, (_, c) => (c < this.#classes ? 0 : ABSENT));
    return {
      features: new this.#ort.Tensor("float32", rows, [features.length, this.room.features]),
      mask: new this.#ort.Tensor("float32", mask, [this.room.classes]),
    };
  }
}
