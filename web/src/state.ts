/** Holds the tensors and numbers of a run, and exchanges them with checkpoints. */

import type { Tensor } from "onnxruntime-common";
import { type Content, type Progress, type Properties, filled, frozenDigest } from "./checkpoint.js";
import { type DType } from "./dtypes.js";
import { CheckpointError } from "./errors.js";
import { type Gradients, disposeGradients } from "./gradients.js";
import type { Manifest, ParameterSpec } from "./manifest.js";
import { type OrtModule, bytesOf, dataOf, dispose, toRaw, toTensor } from "./ort.js";
import type { RawTensor } from "./safetensors.js";

const DEFAULT_LEARNING_RATE = 1e-3;

/** Dtype, shape and initial value of the moment of one parameter. */
export interface MomentSpec {
  readonly moment: string;
  readonly parameter: string;
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly initialValue: number;
}

/** The name by which a moment of a parameter is an input of the optimizer model. */
export function momentInput(spec: { parameter: string; moment: string }): string {
  return `${spec.parameter}_${spec.moment}`;
}

/** The state of a run. A step replaces tensors by new ones, so that a step that fails changes nothing. */
export class State {
  /** Per parameter, its value; null for one of a nominal checkpoint, which has no data yet. In graph order. */
  parameters = new Map<string, Tensor | null>();
  statistics = new Map<string, Tensor>();
  /** Moments by the names of the optimizer model's inputs, e.g. "fc.weight_momentum0". */
  moments = new Map<string, Tensor>();
  progress: Progress = { step: 0, learningRate: DEFAULT_LEARNING_RATE, initialLearningRate: DEFAULT_LEARNING_RATE };
  properties: Properties = {};
  /** Training steps since the last optimizer step. */
  runs = 0;
  #frozen: { tensors: readonly Tensor[]; digest: Promise<string> } | null = null;
  /** Null until a training step has computed gradients. */
  gradients: Gradients | null = null;

  constructor(
    private readonly ort: OrtModule,
    private readonly manifest: Manifest,
    private readonly momentSpecs: readonly MomentSpec[],
  ) {}

  /** Throws a CheckpointError if a parameter has no data yet; `doing` begins the message. */
  requireDefined(doing: string): void {
    const missing = [...this.parameters].filter(([, tensor]) => tensor === null).map(([name]) => name);
    if (missing.length) {
      throw new CheckpointError(
        `${doing}: ${missing.length} of ${this.parameters.size} parameters of this nominal checkpoint have no data yet (first: '${missing[0]}'). ` +
          "Call loadParameters(buffer) with all parameters, or loadCheckpoint(bytes), first.",
      );
    }
  }

  /** Returns parameters and statistics as feeds. */
  feeds(): Record<string, Tensor> {
    return Object.fromEntries([...this.parameters, ...this.statistics]) as Record<string, Tensor>;
  }

  /**
   * Takes over the content of a checkpoint or a delta; everything is checked before anything changes.
   *
   * @param frozen digest of the frozen parameters of a checkpoint, if it is computed already.
   * @throws CheckpointError if a delta belongs to other frozen values, or the moments are those of another optimizer.
   */
  async load(content: Content, source: string, frozen?: Promise<string>): Promise<void> {
    const kept = new Map(this.parameters);
    if (content.delta) {
      if (this.parameters.size === 0) {
        throw new CheckpointError(
          `Loading ${source}: it is a delta, which goes on top of a checkpoint. ` +
            "Put the artifacts' own checkpoint there, and pass the delta to loadCheckpoint.",
        );
      }
      for (const spec of this.manifest.parameters) if (spec.trainable) kept.delete(spec.name);
      this.requireDefined(`Loading ${source}`);
      if ((await this.#frozenDigest()) !== content.frozen) {
        throw new CheckpointError(
          `Loading ${source}: it is a delta of this model, but was trained on top of other values of the parameters that it does not hold. ` +
            "Load the full checkpoint it was trained from first. The session is unchanged.",
        );
      }
    }
    const moments = this.readMoments(content, source);
    const parameters = new Map<string, Tensor | null>();
    for (const { name } of this.manifest.parameters) {
      const raw = content.parameters.get(name);
      parameters.set(name, raw === undefined ? kept.get(name)! : raw && toTensor(this.ort, raw));
    }
    const statistics = new Map(
      this.manifest.statistics.map(({ name }) => [name, toTensor(this.ort, content.statistics.get(name)!)]),
    );
    // Nothing has changed up to here.
    dispose([...this.parameters].filter(([name]) => content.parameters.has(name)).map(([, tensor]) => tensor));
    dispose([...this.statistics.values(), ...this.moments.values()]);
    this.dropGradients();
    Object.assign(this, { parameters, statistics, moments });
    if (frozen) this.#keepDigest(frozen);
    const { learningRate, initialLearningRate } = this.progress;
    this.progress = content.progress ? { ...content.progress } : { step: 0, learningRate, initialLearningRate };
    this.properties = { ...content.properties };
    this.runs = 0;
  }

  /** Makes the moments of a checkpoint, or those from which an optimizer starts if it has none. */
  private readMoments(content: Content, source: string): Map<string, Tensor> {
    const moments = new Map<string, Tensor>();
    const problem = (text: string): CheckpointError =>
      new CheckpointError(
        `Loading ${source}: its optimizer state does not fit the optimizer (${this.manifest.optimizer?.type ?? "none"}): ${text}. ` +
          "To start the optimizer afresh, save the checkpoint without optimizer state and load that. The session is unchanged.",
      );
    let count = 0;
    for (const spec of this.momentSpecs) {
      const raw = content.progress && content.moments.get(spec.moment)?.get(spec.parameter);
      if (content.progress && !raw) throw problem(`${spec.moment} of '${spec.parameter}' is missing`);
      if (raw && (raw.dtype !== spec.dtype || raw.shape.join() !== spec.shape.join())) {
        throw problem(
          `${spec.moment} of '${spec.parameter}' is ${raw.dtype.name}[${raw.shape.join(", ")}], expected ${spec.dtype.name}[${spec.shape.join(", ")}]`,
        );
      }
      count += 1;
      moments.set(momentInput(spec), toTensor(this.ort, raw ?? filled(spec.initialValue, spec.dtype, spec.shape)));
    }
    const held = [...content.moments.values()].reduce((sum, group) => sum + group.size, 0);
    // A session without optimizer model evaluates and exports checkpoints of any optimizer.
    if (content.progress && this.manifest.optimizer && held !== count)
      throw problem(`it has ${held} tensors, the optimizer needs ${count}`);
    return moments;
  }

  /** Reads tensors as raw bytes, from wherever they lie. */
  async read(tensors: ReadonlyMap<string, Tensor | null>, doing: string): Promise<Map<string, RawTensor>> {
    this.requireDefined(doing);
    const raw = new Map<string, RawTensor>();
    for (const [name, tensor] of tensors) raw.set(name, await toRaw(tensor!));
    return raw;
  }

  /** Collects the content of a checkpoint or, if `delta`, of the trained parameters only. */
  async content(delta: boolean, optimizer: boolean, doing: string): Promise<Content> {
    const trainable = this.manifest.parameters.filter((spec) => spec.trainable).map((spec) => spec.name);
    const held = delta ? new Map(trainable.map((name) => [name, this.parameters.get(name)!])) : this.parameters;
    const moments = new Map<string, Map<string, RawTensor>>();
    if (optimizer) {
      for (const spec of this.momentSpecs) {
        if (!moments.has(spec.moment)) moments.set(spec.moment, new Map());
        moments.get(spec.moment)!.set(spec.parameter, await toRaw(this.moments.get(momentInput(spec))!));
      }
    }
    return {
      delta,
      parameters: await this.read(held, doing),
      trainable,
      statistics: await this.read(this.statistics, doing),
      moments,
      progress: optimizer ? { ...this.progress } : null,
      properties: { ...this.properties },
      fingerprint: this.manifest.fingerprint,
      frozen: delta ? await this.#frozenDigest() : null,
    };
  }

  get #frozenSpecs(): ParameterSpec[] {
    return this.manifest.parameters.filter((spec) => !spec.trainable);
  }

  /** Returns the digest of the frozen parameters, which is computed once as long as they stay the same. */
  #frozenDigest(): Promise<string> {
    const tensors = this.#frozenSpecs.map(({ name }) => this.parameters.get(name)!);
    // Parameters are replaced, never written to.
    if (this.#frozen && tensors.every((tensor, index) => tensor === this.#frozen!.tensors[index]))
      return this.#frozen.digest;
    const digest = (async (): Promise<string> => {
      const raw: (RawTensor & { name: string })[] = [];
      for (const [index, spec] of this.#frozenSpecs.entries())
        raw.push({ ...spec, bytes: bytesOf(await dataOf(tensors[index]!)) });
      return frozenDigest(raw);
    })();
    this.#keepDigest(digest);
    return digest;
  }

  /** Keeps the digest of the present frozen parameters. */
  #keepDigest(digest: Promise<string>): void {
    const frozen = { tensors: this.#frozenSpecs.map(({ name }) => this.parameters.get(name)!), digest };
    this.#frozen = frozen;
    // The next call tries again.
    digest.catch(() => {
      if (this.#frozen === frozen) this.#frozen = null;
    });
  }

  /** Forgets the gradients. */
  dropGradients(): void {
    if (this.gradients) disposeGradients(this.gradients);
    this.gradients = null;
  }

  /** Frees what lies on a GPU, and forgets all tensors. */
  release(): void {
    this.dropGradients();
    dispose([...this.parameters.values(), ...this.statistics.values(), ...this.moments.values()]);
    for (const group of [this.parameters, this.statistics, this.moments]) group.clear();
  }
}
