/** Runs the models of a run in ONNX Runtime, with the state that the caller holds. */

import type { InferenceSession, Tensor } from "onnxruntime-common";
import type { Run } from "./artifacts.js";
import type { DataFiles, Model } from "./datafiles.js";
import { InputError, ModelLoadError, TrainingStateError, explained, messageOf } from "./errors.js";
import type { Gradients } from "./gradients.js";
import type { Manifest, ParameterSpec } from "./manifest.js";
import { type Kind, locations, momentSpecs, requireNames, trainingInputs, trainingOutputs } from "./models.js";
import { type ExecutionProviders, type OrtModule, inTurn, usesWebGpu } from "./ort.js";
import { createSession } from "./start.js";
import type { MomentSpec, State } from "./state.js";

export type Outputs = Record<string, Tensor>;

/** The sessions of the models of a run. No method changes the state. */
export class Engine {
  readonly #ort: OrtModule;
  readonly manifest: Manifest;
  readonly #providers: ExecutionProviders | undefined;
  readonly #data: DataFiles;
  readonly #later = new Map<Model, InferenceSession>();
  #training!: InferenceSession;
  #optimizer: InferenceSession | null = null;
  /** Dtypes and shapes of the moments that the optimizer model takes. */
  moments: readonly MomentSpec[] = [];

  private constructor(ort: OrtModule, run: Run, providers: ExecutionProviders | undefined) {
    this.#ort = ort;
    this.manifest = run.manifest;
    this.#data = run.data;
    this.#providers = providers;
  }

  /**
   * Opens the models for training and for the optimizer.
   *
   * @throws ModelLoadError if ONNX Runtime refuses a model, or one does not fit the manifest.
   */
  static async open(ort: OrtModule, run: Run, providers: ExecutionProviders | undefined): Promise<Engine> {
    const { manifest, training, optimizer } = run;
    const engine = new Engine(ort, run, providers);
    // One after the other: onnxruntime-web initialises its backend in the first.
    engine.#training = await engine.#open(training, "training");
    requireNames(engine.#training, training.source, trainingInputs(manifest), trainingOutputs(manifest));
    if (optimizer) {
      engine.#optimizer = await engine.#open(optimizer, "optimizer");
      engine.moments = momentSpecs(manifest, engine.#optimizer, optimizer.source);
    }
    return engine;
  }

  /** True if there is an optimizer model. */
  get updates(): boolean {
    return this.#optimizer !== null;
  }

  get trainable(): ParameterSpec[] {
    return this.manifest.parameters.filter((spec) => spec.trainable);
  }

  /** Computes the outputs of a training step: loss, gradients, statistics. */
  train(state: State, seed: number, feeds: Outputs): Promise<Outputs> {
    state.requireDefined("trainStep");
    const { progress, runs } = state;
    const known = { seed, step: progress.step, run: runs };
    const numbers = this.manifest.hostInputs.map(({ name, holds }) => {
      const values = BigInt64Array.from(holds, (value) => BigInt(known[value]));
      return [name, new this.#ort.Tensor("int64", values, [values.length])];
    });
    return this.#run(
      this.#training,
      { ...feeds, ...state.feeds(), ...Object.fromEntries(numbers) },
      trainingOutputs(this.manifest),
      "trainStep",
    );
  }

  /** Computes the outputs of an optimizer step: parameters and moments. */
  update(state: State, gradients: Gradients): Promise<Outputs> {
    const { optimizer } = this.manifest;
    if (!this.#optimizer || !optimizer) {
      throw new TrainingStateError(
        "optimizerStep: these artifacts have no optimizer model. Generate them with generate_artifacts(..., optimizer=...).",
      );
    }
    const { parameters, moments, progress } = state;
    const feeds: Outputs = {
      [optimizer.learningRate]: new this.#ort.Tensor("float32", Float32Array.of(progress.learningRate), []),
      [optimizer.step]: new this.#ort.Tensor("int64", BigInt64Array.of(BigInt(progress.step + 1)), []),
      ...Object.fromEntries(moments),
    };
    for (const { name } of this.trainable) {
      feeds[name] = parameters.get(name)!;
      const rows = gradients.sparse.get(name);
      feeds[`${name}_grad`] = rows?.rows ?? gradients.dense.get(name)!;
      if (rows) feeds[`${name}_grad_indices`] = rows.indices;
    }
    return this.#run(this.#optimizer, feeds, this.#optimizer.outputNames, "optimizerStep");
  }

  /** Runs a model whose session is opened on first use: not every page evaluates or predicts. */
  async results(model: Model, state: State, feeds: Outputs, doing: string): Promise<Outputs> {
    state.requireDefined(doing);
    let session = this.#later.get(model);
    if (!session) {
      session = await this.#open(model, "results");
      this.#later.set(model, session);
    }
    // The inference model does not take parameters that only the loss reads.
    const used = Object.fromEntries(
      Object.entries({ ...feeds, ...state.feeds() }).filter(([name]) => session.inputNames.includes(name)),
    );
    return this.#run(session, used, session.outputNames, doing);
  }

  async release(): Promise<void> {
    for (const session of [this.#training, this.#optimizer, ...this.#later.values()])
      await inTurn(this.#ort, this.#providers, async () => session?.release());
  }

  async #open(model: Model, kind: Kind): Promise<InferenceSession> {
    const externalData = await this.#data.of(model);
    const settings: InferenceSession.SessionOptions = {
      // Errors only: everything that matters reaches the caller as an exception.
      logSeverityLevel: 3,
      ...(this.#providers && { executionProviders: this.#providers }),
      ...(externalData.length && { externalData }),
      ...(usesWebGpu(this.#providers) && { preferredOutputLocation: locations(this.manifest, kind) }),
    };
    try {
      const create = (): Promise<InferenceSession> => createSession(this.#ort, model.bytes, settings);
      // onnxruntime-web has one table of external data for all sessions, and empties it after each creation.
      const session = await inTurn(this.#ort, this.#providers, create, externalData.length > 0);
      this.#data.opened(model);
      return session;
    } catch (error) {
      const doing = `Loading ${model.source}`;
      throw explained(
        doing,
        error,
        () => new ModelLoadError(`${doing}: ONNX Runtime refused it: ${messageOf(error)}`, { cause: error }),
      );
    }
  }

  async #run(session: InferenceSession, feeds: Outputs, names: readonly string[], doing: string): Promise<Outputs> {
    try {
      return (await inTurn(this.#ort, this.#providers, () => session.run(feeds, names))) as Outputs;
    } catch (error) {
      throw explained(
        doing,
        error,
        () => new InputError(`${doing} failed in ONNX Runtime: ${messageOf(error)}`, { cause: error }),
      );
    }
  }
}
