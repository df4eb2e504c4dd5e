/** Errors of the package: each says what was being done, what was received and what to do. */

/** The base of all errors of this package; catch it to catch all of them. */
export class OnnxTrainError extends Error {
  // A literal in each class: minifiers rename classes, and consoles show this name.
  override name = "OnnxTrainError";
}

/** An argument of a method does not fit the model. */
export class InputError extends OnnxTrainError {
  override name = "InputError";
}

/** An artifact is missing, damaged, or of another run. */
export class ModelLoadError extends OnnxTrainError {
  override name = "ModelLoadError";
}

/** A checkpoint is damaged, of another model, or incomplete. */
export class CheckpointError extends OnnxTrainError {
  override name = "CheckpointError";
}

/** A method was called in an order that cannot work, e.g. `optimizerStep` before any `trainStep`. */
export class TrainingStateError extends OnnxTrainError {
  override name = "TrainingStateError";
}

/** Returns the message of anything that was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
