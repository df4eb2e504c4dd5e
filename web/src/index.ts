/** Trains ONNX models in browsers and in Node, with the artifacts and checkpoints of onnxtrain. */

export type { Artifacts } from "./artifacts.js";
export type { Properties } from "./checkpoint.js";
export {
  CheckpointError,
  DivergenceError,
  InputError,
  ModelLoadError,
  OnnxTrainError,
  OutOfMemoryError,
  TrainingStateError,
} from "./errors.js";
export type { Feeds } from "./feeds.js";
export type { Files, InputSpec, Manifest, OptimizerSpec, ParameterSpec, StatisticSpec } from "./manifest.js";
export type { CreateOptions, SaveOptions, StepResult, WarmUpOptions } from "./options.js";
export type { ExecutionProviders, OrtModule } from "./ort.js";
export { Random } from "./random.js";
export { TrainingSession } from "./session.js";
