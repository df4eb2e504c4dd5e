/** Defines `TrainingSession`, which trains, evaluates and predicts with the artifacts of onnxtrain. */

import type { InferenceSession, Tensor } from "onnxruntime-common";
import { type Artifacts, type Model, type Run, loadArtifacts } from "./artifacts.js";
import { type Properties, encodeCheckpoint, readCheckpoint } from "./checkpoint.js";
import { elements } from "./dtypes.js";
import { InputError, ModelLoadError, TrainingStateError, messageOf } from "./errors.js";
import { exportInferenceModel } from "./export.js";
import { type Feeds, checkFeeds } from "./feeds.js";
import { type Gradients, addGradients, gradientsOf } from "./gradients.js";
import type { Manifest, ParameterSpec } from "./manifest.js";
import { type Kind, locations, momentSpecs, requireNames, trainingInputs, trainingOutputs } from "./models.js";
import { type ExecutionProviders, type OrtModule, dispose } from "./ort.js";
import { Queue } from "./queue.js";
import { Random } from "./random.js";
import { State } from "./state.js";

/** Options of `TrainingSession.create`. */
export interface CreateOptions {
  /** The files that generate_artifacts wrote: an object from file name to Uint8Array, or the URL of their folder. */
  readonly artifacts: Artifacts;
  /** Where ONNX Runtime computes, e.g. ["webgpu"]. Default: the CPU (in a browser, WebAssembly). */
  readonly executionProviders?: ExecutionProviders;
  /** Start of `session.random`, and of the masks of Dropout in models of the portable profile. Default: 0. */
  readonly seed?: number;
}

/** Result of a training or an evaluation step. */
export interface StepResult {
  /** The loss of the batch. */
  readonly loss: number;
  /** All outputs of the model by name, the loss among them. */
  readonly outputs: Record<string, Tensor>;
}

/** Options of `saveCheckpoint`. */
export interface SaveOptions {
  /** Save a delta: the trained parameters only. Default: false. */
  readonly delta?: boolean;
  /** Also save moments, step count and learning rate, so that training can go on exactly. Default: false. */
  readonly optimizer?: boolean;
}

/** Options of `warmUp`. */
export interface WarmUpOptions {
  /** Most steps that are run. Default: 50. */
  readonly steps?: number;
  /** Time in milliseconds after which no further step begins. Default: 2000. */
  readonly milliseconds?: number;
  /** Ends the warm-up when it is aborted. */
  readonly signal?: AbortSignal;
}

type Outputs = Record<string, Tensor>;

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
  readonly #open: (model: Model, outputs: Kind) => Promise<InferenceSession>;
  readonly #training: InferenceSession;
  readonly #optimizer: InferenceSession | null;
  readonly #later = new Map<Model, InferenceSession>();
  #reset = true;
  #released = false;

  private constructor(
    ort: OrtModule,
    run: Run,
    state: State,
    seed: number,
    open: (model: Model, outputs: Kind) => Promise<InferenceSession>,
    sessions: { training: InferenceSession; optimizer: InferenceSession | null },
  ) {
    this.manifest = run.manifest;
    this.random = new Random(seed);
    this.#seed = seed;
    this.#ort = ort;
    this.#run = run;
    this.#state = state;
    this.#open = open;
    this.#training = sessions.training;
    this.#optimizer = sessions.optimizer;
  }

  /**
   * Opens a training run.
   *
   * @param ort ONNX Runtime: `import * as ort from "onnxruntime-web"`, or "onnxruntime-node".
   * @throws ModelLoadError if an artifact is missing, damaged, or of another run.
   * @throws InputError if an argument is wrong.
   */
  static async create(ort: OrtModule, options: CreateOptions): Promise<TrainingSession> {
    if (typeof ort?.InferenceSession?.create !== "function" || typeof ort.Tensor !== "function") {
      throw new InputError(
        "TrainingSession.create: the first argument must be ONNX Runtime, e.g. import * as ort from 'onnxruntime-web'.",
      );
    }
    if (typeof options !== "object" || options === null || options.artifacts === undefined) {
      throw new InputError(
        "TrainingSession.create: pass the artifacts: TrainingSession.create(ort, {artifacts: 'https://.../artifacts/'}).",
      );
    }
    const { executionProviders, seed = 0 } = options;
    if (!Number.isSafeInteger(seed))
      throw new InputError(`TrainingSession.create: the seed must be an integer, received ${String(seed)}.`);
    const run = await loadArtifacts(options.artifacts);
    const { manifest } = run;
    const webgpu = executionProviders?.some((p) => (typeof p === "string" ? p : p.name) === "webgpu") ?? false;
    const open = async (model: Model, kind: Kind): Promise<InferenceSession> => {
      const settings: InferenceSession.SessionOptions = {
        // Errors only: everything that matters reaches the caller as an exception.
        logSeverityLevel: 3,
        ...(executionProviders && { executionProviders }),
        ...(model.externalData.length && { externalData: model.externalData }),
        ...(webgpu && { preferredOutputLocation: locations(manifest, kind) }),
      };
      try {
        return await ort.InferenceSession.create(model.bytes, settings);
      } catch (error) {
        throw new ModelLoadError(`Loading ${model.source}: ONNX Runtime refused it: ${messageOf(error)}`, {
          cause: error,
        });
      }
    };
    // One after the other: onnxruntime-web initialises its backend in the first.
    const training = await open(run.training, "training");
    requireNames(training, run.training.source, trainingInputs(manifest), trainingOutputs(manifest));
    const optimizer = run.optimizer && (await open(run.optimizer, "optimizer"));
    const specs = optimizer ? momentSpecs(manifest, optimizer, run.optimizer!.source) : [];
    const state = new State(ort, manifest, specs);
    const session = new TrainingSession(ort, run, state, seed, open, { training, optimizer });
    if (!run.checkpoint)
      throw new ModelLoadError(
        "Loading the artifacts: the manifest names no checkpoint. Generate the artifacts again.",
      );
    await state.load(
      readCheckpoint(run.checkpoint, manifest, `the checkpoint '${manifest.files.checkpoint}'`),
      "the checkpoint",
    );
    return session;
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
   */
  async trainStep(feeds: Feeds): Promise<StepResult> {
    const checked = this.#check(feeds, "trainStep");
    return this.#enqueue("trainStep", async () => {
      const state = this.#state;
      const outputs = await this.#runTraining(checked);
      const gradients = gradientsOf(this.#trainable(), outputs);
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
      return this.#result(await this.#runLater(model, checked, "evalStep"));
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
    return this.#enqueue("predict", async () => this.#runLater(model, checked, "predict"));
  }

  /** Updates the parameters from the present gradients, which stay. */
  async optimizerStep(): Promise<void> {
    return this.#enqueue("optimizerStep", async () => {
      const state = this.#state;
      const gradients = state.gradients;
      if (!gradients) throw new TrainingStateError("optimizerStep: there are no gradients yet. Call trainStep first.");
      const outputs = await this.#runOptimizer(gradients);
      for (const { name } of this.#trainable()) {
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
    const selected = this.#selected(trainableOnly, "exportParameters");
    return this.#enqueue("exportParameters", async () => {
      const state = this.#state;
      const raw = await state.read(
        new Map(selected.map(({ name }) => [name, state.parameters.get(name)!])),
        "exportParameters",
      );
      const flat = new Float32Array(selected.reduce((sum, { shape }) => sum + elements(shape), 0));
      const bytes = new Uint8Array(flat.buffer);
      let position = 0;
      for (const tensor of raw.values()) {
        bytes.set(tensor.bytes, position);
        position += tensor.bytes.length;
      }
      return flat;
    });
  }

  /**
   * Copies an array, as `exportParameters` returns it, into the parameters. Gradients and moments stay.
   *
   * @param buffer the elements of all parameters, or of the trainable ones, in graph order.
   * @param trainableOnly true if the array holds the trainable parameters only.
   */
  async loadParameters(buffer: Float32Array, trainableOnly = false): Promise<void> {
    const selected = this.#selected(trainableOnly, "loadParameters");
    const size = selected.reduce((sum, { shape }) => sum + elements(shape), 0);
    if (!(buffer instanceof Float32Array) || buffer.length !== size) {
      const received =
        buffer instanceof Float32Array
          ? `${buffer.length} elements`
          : `a ${(buffer as object | null)?.constructor?.name ?? String(buffer)}`;
      const which = trainableOnly ? "the trainable parameters" : "all parameters";
      throw new InputError(
        `loadParameters: expected a Float32Array of ${size} elements for ${which}, received ${received}. Is trainableOnly = ${trainableOnly} meant?`,
      );
    }
    const copy = buffer.slice();
    return this.#enqueue("loadParameters", async () => {
      let position = 0;
      for (const { name, shape } of selected) {
        const end = position + elements(shape);
        dispose([this.#state.parameters.get(name)]);
        this.#state.parameters.set(name, new this.#ort.Tensor("float32", copy.slice(position, end), shape));
        position = end;
      }
    });
  }

  /** Returns the bytes of a checkpoint file: safetensors, which onnxtrain's hosts in all languages load. */
  async saveCheckpoint(options: SaveOptions = {}): Promise<Uint8Array> {
    const unknown = Object.keys(options ?? {}).filter((key) => key !== "delta" && key !== "optimizer");
    if (typeof options !== "object" || options === null || unknown.length) {
      throw new InputError(
        `saveCheckpoint: expected {delta?: boolean, optimizer?: boolean}, received ${unknown.length ? `the option ${unknown.join(", ")}` : String(options)}.`,
      );
    }
    const { delta = false, optimizer = false } = options;
    if (optimizer && !this.#optimizer) {
      throw new TrainingStateError(
        "saveCheckpoint: these artifacts have no optimizer model, so there is no optimizer state to save. Leave out the option optimizer.",
      );
    }
    return this.#enqueue("saveCheckpoint", async () => {
      for (const [name, value] of Object.entries(this.#state.properties)) {
        if (typeof value === "string" || (typeof value === "number" && Number.isFinite(value))) continue;
        throw new InputError(
          `saveCheckpoint: the property '${name}' must be a finite number or a text, received ${String(value)}. Store other values as JSON text.`,
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
        `loadCheckpoint: expected the bytes of the file as a Uint8Array, received ${(bytes as object | null)?.constructor?.name ?? String(bytes)}.`,
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
      return exportInferenceModel(model.bytes, tensors, names, model.externalData);
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
      times.push(
        await this.#enqueue("warmUp", async () => {
          const begin = performance.now();
          const outputs = await this.#runTraining(checked);
          if (this.#optimizer)
            dispose(Object.values(await this.#runOptimizer(gradientsOf(this.#trainable(), outputs))));
          dispose(Object.values(outputs));
          return performance.now() - begin;
        }),
      );
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
      for (const session of [this.#training, this.#optimizer, ...this.#later.values()]) await session?.release();
    });
  }

  #requireOpen(doing: string): void {
    if (this.#released) throw new TrainingStateError(`${doing}: the session has been released. Create a new one.`);
  }

  /** Runs a job after all calls before it. */
  async #enqueue<T>(doing: string, job: () => Promise<T>): Promise<T> {
    this.#requireOpen(doing);
    return this.#queue.add(job);
  }

  #check(feeds: Feeds, doing: string): Record<string, Tensor> {
    return checkFeeds(this.#ort, [...this.manifest.inputs, ...this.manifest.targets], [], feeds, doing);
  }

  #trainable(): ParameterSpec[] {
    return this.manifest.parameters.filter((spec) => spec.trainable);
  }

  /** Returns the parameters of a flat array; InputError if they are not all float32. */
  #selected(trainableOnly: boolean, doing: string): readonly ParameterSpec[] {
    const selected = trainableOnly ? this.#trainable() : this.manifest.parameters;
    const other = selected.find((spec) => spec.dtype.name !== "float32");
    if (other)
      throw new InputError(
        `${doing}: the parameter '${other.name}' is ${other.dtype.name}, and a Float32Array holds float32 only. Use saveCheckpoint and loadCheckpoint.`,
      );
    return selected;
  }

  async #runModel(
    session: InferenceSession,
    feeds: Outputs,
    names: readonly string[],
    doing: string,
  ): Promise<Outputs> {
    try {
      return (await session.run(feeds, names)) as Outputs;
    } catch (error) {
      throw new InputError(`${doing} failed in ONNX Runtime: ${messageOf(error)}`, { cause: error });
    }
  }

  #runTraining(feeds: Outputs): Promise<Outputs> {
    this.#state.requireDefined("trainStep");
    const { progress, runs } = this.#state;
    const known = { seed: this.#seed, step: progress.step, run: runs };
    const numbers = this.manifest.hostInputs.map(({ name, holds }) => {
      const values = BigInt64Array.from(holds, (value) => BigInt(known[value]));
      return [name, new this.#ort.Tensor("int64", values, [values.length])];
    });
    return this.#runModel(
      this.#training,
      { ...feeds, ...this.#state.feeds(), ...Object.fromEntries(numbers) },
      trainingOutputs(this.manifest),
      "trainStep",
    );
  }

  /** Runs a model whose session is opened on first use: not every page evaluates or predicts. */
  async #runLater(model: Model, feeds: Outputs, doing: string): Promise<Outputs> {
    this.#state.requireDefined(doing);
    let session = this.#later.get(model);
    if (!session) {
      session = await this.#open(model, "results");
      this.#later.set(model, session);
    }
    const state = this.#state.feeds();
    // The inference model does not take parameters that only the loss reads.
    const used = Object.fromEntries(
      Object.entries({ ...feeds, ...state }).filter(([name]) => session.inputNames.includes(name)),
    );
    return this.#runModel(session, used, session.outputNames, doing);
  }

  #runOptimizer(gradients: Gradients): Promise<Outputs> {
    const { optimizer } = this.manifest;
    if (!this.#optimizer || !optimizer) {
      throw new TrainingStateError(
        "optimizerStep: these artifacts have no optimizer model. Generate them with generate_artifacts(..., optimizer=...).",
      );
    }
    const { parameters, moments, progress } = this.#state;
    const feeds: Outputs = {
      [optimizer.learningRate]: new this.#ort.Tensor("float32", Float32Array.of(progress.learningRate), []),
      [optimizer.step]: new this.#ort.Tensor("int64", BigInt64Array.of(BigInt(progress.step + 1)), []),
      ...Object.fromEntries(moments),
    };
    for (const { name } of this.#trainable()) {
      feeds[name] = parameters.get(name)!;
      const rows = gradients.sparse.get(name);
      feeds[`${name}_grad`] = rows?.rows ?? gradients.dense.get(name)!;
      if (rows) feeds[`${name}_grad_indices`] = rows.indices;
    }
    return this.#runModel(this.#optimizer, feeds, this.#optimizer.outputNames, "optimizerStep");
  }

  #result(outputs: Outputs): StepResult {
    const named = Object.fromEntries(this.manifest.outputs.map((name) => [name, outputs[name]!]));
    const loss = outputs[this.manifest.outputs[0]!]!;
    return { loss: Number((loss.data as Float32Array)[0]), outputs: named };
  }
}
