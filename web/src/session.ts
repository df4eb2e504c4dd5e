/** Defines `TrainingSession`, which trains, evaluates and predicts with the artifacts of onnxtrain. */

import type { Tensor } from "onnxruntime-common";
import { type Run, loadArtifacts } from "./artifacts.js";
import { type Properties, beginDigest, encodeCheckpoint, readCheckpoint } from "./checkpoint.js";
import { Engine, type Outputs } from "./engine.js";
import { DivergenceError, InputError, ModelLoadError, TrainingStateError, memoryError } from "./errors.js";
import { exportInferenceModel } from "./export.js";
import { type Feeds, checkFeeds, requireTrainable } from "./feeds.js";
import { checkFlat, flatParameters, flatten, unflatten } from "./flat.js";
import { addGradients, findNonFinite, gradientsOf } from "./gradients.js";
import type { Manifest } from "./manifest.js";
import {
  type CreateOptions,
  type SaveOptions,
  type StepResult,
  type WarmUpOptions,
  checkCreate,
  checkSave,
} from "./options.js";
import { type OrtModule, dispose, usesWebGpu } from "./ort.js";
import { Queue } from "./queue.js";
import { Random } from "./random.js";
import { State } from "./state.js";
import { rehearse, warmOnZeros } from "./warmup.js";
import { requireRightResults } from "./webgpu.js";

/**
 * A training run: parameters, optimizer state, and the models that compute with them.
 *
 * Methods that are called without waiting for each other run in the order of the calls. A call that fails leaves the
 * session as it was.
 *
 * ```ts
 * const session = await TrainingSession.create(ort, { artifacts: "artifacts/" });
 * const { loss } = await session.trainStep({ x, labels });
 * await session.optimizerStep();
 * await session.lazyResetGrad();
 * ```
 */
export class TrainingSession {
  /** Inputs, outputs and parameters of the models. */
  readonly manifest: Manifest;
  /** Draws numbers from the seed: shuffled orders and dropout masks. */
  readonly random: Random;

  readonly #ort: OrtModule;
  readonly #run: Run;
  readonly #seed: number;
  readonly #state: State;
  readonly #queue = new Queue();
  readonly #engine: Engine;
  #reset = true;
  #released = false;

  private constructor(ort: OrtModule, run: Run, state: State, seed: number, engine: Engine) {
    this.manifest = run.manifest;
    this.random = new Random(seed);
    this.#seed = seed;
    this.#ort = ort;
    this.#run = run;
    this.#state = state;
    this.#engine = engine;
  }

  /**
   * Opens a training run.
   *
   * @param ort ONNX Runtime: `import * as ort from "onnxruntime-web"`, or "onnxruntime-node".
   * @throws ModelLoadError if an artifact is missing, damaged, or of another run.
   * @throws InputError if an argument is wrong, or this build of ONNX Runtime computes wrong results on WebGPU.
   */
  static async create(ort: OrtModule, options: CreateOptions): Promise<TrainingSession> {
    checkCreate(ort, options);
    const { executionProviders, warmUp = true, seed = 0, cache } = options;
    const run = await loadArtifacts(options.artifacts, cache);
    const { manifest } = run;
    if (!run.checkpoint)
      throw new ModelLoadError(
        "Loading the artifacts: the manifest names no checkpoint. Generate the artifacts again.",
      );
    const source = `the checkpoint '${manifest.files.checkpoint}'`;
    const content = readCheckpoint(run.checkpoint, manifest, source);
    if (usesWebGpu(executionProviders)) await requireRightResults(ort, executionProviders!);
    // Computed while the models are opened, so that deltas do not wait for it.
    const frozen = beginDigest(content, manifest);
    const engine = await Engine.open(ort, run, executionProviders);
    const state = new State(ort, manifest, engine.moments);
    await state.load(content, source, frozen).catch(async (error: unknown) => {
      await engine.release();
      throw error;
    });
    if (warmUp) await warmOnZeros(ort, engine, state, executionProviders);
    await frozen?.catch(() => undefined);
    // The state has copied the checkpoint.
    return new TrainingSession(ort, { ...run, checkpoint: null }, state, seed, engine);
  }

  /** Number of optimizer steps taken, with those before a checkpoint that was loaded. */
  get step(): number {
    return this.#state.progress.step;
  }

  /** Learning rate of the next optimizer step. */
  get learningRate(): number {
    return this.#state.progress.learningRate;
  }

  /** Your own numbers and texts by name, which checkpoints keep, e.g. `session.properties.epoch = 3`. */
  get properties(): Properties {
    return this.#state.properties;
  }

  /**
   * Computes loss and gradients of a batch. Gradients add up over calls until `lazyResetGrad`; statistics of BatchNorm
   * are updated.
   *
   * @param feeds tensors by the names of the manifest's inputs and targets. They are copied.
   * @throws InputError if a feed does not fit, the batch is empty, or an input holds NaN.
   * @throws DivergenceError if the loss is NaN or infinite, or an input holds infinity and makes a gradient NaN or
   *   infinite. Neither error changes the session.
   */
  async trainStep(feeds: Feeds): Promise<StepResult> {
    const checked = this.#check(feeds, "trainStep");
    const infinite = requireTrainable([...this.manifest.inputs, ...this.manifest.targets], checked, "trainStep");
    return this.#enqueue("trainStep", async () => {
      const state = this.#state;
      const outputs = await this.#engine.train(state, this.#seed, checked);
      const { loss } = this.#result(outputs);
      if (!Number.isFinite(loss)) {
        dispose(Object.values(outputs));
        throw new DivergenceError(
          `trainStep: the loss is ${loss}, so the step is not counted; the session is unchanged. Lower the learning rate, scale the inputs, or load the last saved checkpoint; if all labels of the batch are ignored, leave the batch out.`,
        );
      }
      const gradients = gradientsOf(this.#engine.trainable, outputs);
      const spoilt = infinite ? await findNonFinite(gradients) : undefined;
      if (spoilt !== undefined) {
        dispose(Object.values(outputs));
        throw new DivergenceError(
          `trainStep: an input holds infinity, and makes the gradient of '${spoilt}' NaN or infinite, so the step is not counted; the session is unchanged. Leave out or fill the samples with infinity.`,
        );
      }
      const add = !this.#reset && state.gradients !== null;
      const total = add ? await addGradients(this.#ort, state.gradients!, gradients) : gradients;
      state.dropGradients();
      if (add) dispose(gradients.dense.values());
      state.gradients = total;
      for (const { name, output } of this.manifest.statistics) {
        dispose([state.statistics.get(name)]);
        state.statistics.set(name, outputs[output]!);
      }
      this.#reset = false;
      state.runs += 1;
      return this.#result(outputs);
    });
  }

  /** Computes the loss of a batch with Dropout and BatchNorm in inference mode; changes nothing. */
  async evalStep(feeds: Feeds): Promise<StepResult> {
    const checked = this.#check(feeds, "evalStep");
    return this.#enqueue("evalStep", async () => {
      const model = this.#run.evaluation;
      if (!model) throw new TrainingStateError("evalStep: these artifacts have no eval model. Generate them again.");
      return this.#result(await this.#engine.results(model, this.#state, checked, "evalStep"));
    });
  }

  /**
   * Computes the outputs of the original model with the present parameters, without labels.
   *
   * @param feeds tensors by the names of the model's inputs; targets are ignored.
   * @returns the outputs by name, e.g. {logits: Tensor}.
   */
  async predict(feeds: Feeds): Promise<Record<string, Tensor>> {
    const { inference, inputs, targets } = this.manifest;
    const model = this.#run.inference;
    if (!model || !inference) {
      throw new TrainingStateError(
        "predict: these artifacts have no inference model, as the model's only output is its loss. Use evalStep, or give the model another output.",
      );
    }
    const specs = inputs.filter((spec) => inference.inputs.includes(spec.name));
    if (specs.length < inference.inputs.length) {
      const missing = inference.inputs.filter((name) => !specs.some((spec) => spec.name === name));
      throw new TrainingStateError(
        `predict: the inference model takes ${missing.join(", ")}, the cache of a model that generates text. Use exportModel, and run that model.`,
      );
    }
    const ignored = [...inputs, ...targets].map((spec) => spec.name);
    const checked = checkFeeds(this.#ort, specs, ignored, feeds, "predict");
    return this.#enqueue("predict", async () => this.#engine.results(model, this.#state, checked, "predict"));
  }

  /** Updates the parameters from the present gradients, which stay. */
  async optimizerStep(): Promise<void> {
    return this.#enqueue("optimizerStep", async () => {
      const state = this.#state;
      const gradients = state.gradients;
      if (!gradients) throw new TrainingStateError("optimizerStep: there are no gradients yet. Call trainStep first.");
      const outputs = await this.#engine.update(state, gradients);
      for (const { name } of this.#engine.trainable) {
        dispose([state.parameters.get(name)]);
        state.parameters.set(name, outputs[`${name}_updated`]!);
      }
      for (const name of [...state.moments.keys()]) {
        dispose([state.moments.get(name)]);
        state.moments.set(name, outputs[`${name}_updated`]!);
      }
      state.progress.step += 1;
      state.runs = 0;
    });
  }

  /** Makes the next `trainStep` replace the gradients instead of adding to them. */
  async lazyResetGrad(): Promise<void> {
    return this.#enqueue("lazyResetGrad", async () => {
      this.#reset = true;
    });
  }

  /** Sets the learning rate of the optimizer steps that are called after it. */
  setLearningRate(rate: number): void {
    if (typeof rate !== "number" || !(rate >= 0) || rate === Infinity) {
      throw new InputError(
        `setLearningRate: the learning rate must be a finite number of 0 or more, received ${String(rate)}.`,
      );
    }
    this.#requireOpen("setLearningRate");
    const set = async (): Promise<void> => {
      this.#state.progress.learningRate = rate;
    };
    // At once where nothing waits, so that `learningRate` tells the new rate.
    if (this.#queue.idle) void set();
    else void this.#queue.add(set);
  }

  /**
   * Copies the parameters into one array, in graph order.
   *
   * @param trainableOnly copy the trainable parameters only.
   */
  async exportParameters(trainableOnly = false): Promise<Float32Array> {
    const selected = flatParameters(this.manifest, trainableOnly, "exportParameters");
    return this.#enqueue("exportParameters", async () => flatten(this.#state, selected, "exportParameters"));
  }

  /**
   * Copies an array, as `exportParameters` returns it, into the parameters. Gradients and moments stay.
   *
   * @param buffer the elements of all parameters, or of the trainable ones, in graph order.
   * @param trainableOnly true if the array holds the trainable parameters only.
   */
  async loadParameters(buffer: Float32Array, trainableOnly = false): Promise<void> {
    const selected = flatParameters(this.manifest, trainableOnly, "loadParameters");
    checkFlat(buffer, selected, trainableOnly);
    const copy = buffer.slice();
    return this.#enqueue("loadParameters", async () => unflatten(this.#ort, this.#state, selected, copy));
  }

  /** Returns the bytes of a checkpoint file: safetensors, which onnxtrain's hosts in all languages load. */
  async saveCheckpoint(options: SaveOptions = {}): Promise<Uint8Array> {
    checkSave(options);
    const { delta = false, optimizer = false } = options;
    if (optimizer && !this.#engine.updates) {
      throw new TrainingStateError(
        "saveCheckpoint: these artifacts have no optimizer model, so there is no optimizer state to save. Leave out the option optimizer.",
      );
    }
    return this.#enqueue("saveCheckpoint", async () => {
      for (const [name, value] of Object.entries(this.#state.properties)) {
        if (["string", "number", "bigint"].includes(typeof value)) continue;
        throw new InputError(
          `saveCheckpoint: the property '${name}' must be a number, a bigint or a text, received ${String(value)}. Store other values as JSON text.`,
        );
      }
      return encodeCheckpoint(await this.#state.content(delta, optimizer, "saveCheckpoint"), this.manifest);
    });
  }

  /**
   * Takes over a checkpoint or, on top of the present parameters, a delta. Step count, learning rate and moments are
   * restored if the file has them; else the optimizer starts afresh with the present rate. Gradients are forgotten.
   *
   * @throws CheckpointError if the file is damaged or of another model. The session is then unchanged.
   */
  async loadCheckpoint(bytes: Uint8Array): Promise<void> {
    const file: unknown =
      (bytes as unknown) instanceof ArrayBuffer ? new Uint8Array(bytes as unknown as ArrayBuffer) : bytes;
    if (!(file instanceof Uint8Array)) {
      throw new InputError(
        `loadCheckpoint: expected the bytes of the file as a Uint8Array, received ${(bytes as object | null)?.constructor?.name ?? String(bytes)}. Store what saveCheckpoint returns as it is; where nothing is stored yet, leave out this call.`,
      );
    }
    // Checked and copied here: the caller may change the array while the call waits.
    const content = readCheckpoint(file, this.manifest, "the checkpoint");
    return this.#enqueue("loadCheckpoint", async () => {
      await this.#state.load(content, "the checkpoint");
      this.#reset = true;
    });
  }

  /**
   * Returns the bytes of an ordinary ONNX model with the present parameters.
   *
   * @param outputs values that become its outputs, e.g. ["logits"]. Default: the outputs of the inference model.
   */
  async exportModel(outputs: readonly string[] = this.manifest.inference?.outputs ?? []): Promise<Uint8Array> {
    if (!Array.isArray(outputs) || !outputs.every((name) => typeof name === "string")) {
      throw new InputError(`exportModel: expected a list of names, e.g. ["logits"], received ${String(outputs)}.`);
    }
    const names = [...outputs] as string[];
    return this.#enqueue("exportModel", async () => {
      const model = this.#run.evaluation;
      if (!model) throw new TrainingStateError("exportModel: these artifacts have no eval model. Generate them again.");
      const state = this.#state;
      const tensors = await state.read(
        new Map<string, Tensor | null>([...state.parameters, ...state.statistics]),
        "exportModel",
      );
      return exportInferenceModel(model.bytes, tensors, names, await this.#run.data.of(model));
    });
  }

  /**
   * Runs training and optimizer steps and throws the results away, so that the engine compiles its code before the
   * steps that count. In a browser the first steps take several times as long as later ones. Calls that are made
   * meanwhile wait for the present step only.
   *
   * @param feeds a batch of the shape that will be trained on; its values do not matter.
   * @returns the time of each step in milliseconds.
   */
  async warmUp(feeds: Feeds, options: WarmUpOptions = {}): Promise<number[]> {
    const { steps = 50, milliseconds = 2000, signal } = options;
    const checked = this.#check(feeds, "warmUp");
    const times: number[] = [];
    const start = performance.now();
    while (times.length < steps && performance.now() - start < milliseconds && !signal?.aborted && !this.#released) {
      times.push(await this.#enqueue("warmUp", () => rehearse(this.#engine, this.#state, this.#seed, checked)));
      // Lets messages and drawing come in between.
      await new Promise((resolve) => setTimeout(resolve, 0));
    }
    return times;
  }

  /** Frees the session after the calls that were made before. Later calls are errors. */
  release(): void {
    if (this.#released) return;
    this.#released = true;
    void this.#queue.add(async () => {
      this.#state.release();
      await this.#engine.release();
    });
  }

  #requireOpen(doing: string): void {
    if (this.#released) throw new TrainingStateError(`${doing}: the session has been released. Create a new one.`);
  }

  /** Runs a job after all calls before it. */
  async #enqueue<T>(doing: string, job: () => Promise<T>): Promise<T> {
    this.#requireOpen(doing);
    try {
      return await this.#queue.add(job);
    } catch (error) {
      throw memoryError(doing, error) ?? error;
    }
  }

  #check(feeds: Feeds, doing: string): Record<string, Tensor> {
    return checkFeeds(this.#ort, [...this.manifest.inputs, ...this.manifest.targets], [], feeds, doing);
  }

  #result(outputs: Outputs): StepResult {
    const named = Object.fromEntries(this.manifest.outputs.map((name) => [name, outputs[name]!]));
    const loss = outputs[this.manifest.outputs[0]!]!;
    return { loss: Number((loss.data as Float32Array)[0]), outputs: named };
  }
}
