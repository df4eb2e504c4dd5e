/** Errors of the package: each says what was being done, what was received and what to do. */

// Characters that move a terminal's cursor, reorder text or break lines, and halves of surrogate pairs.
const UNPRINTABLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
// Messages quote names that strangers have chosen.
const LONGEST = 10_000;

/** Returns a text in which characters that a console would obey, or not show, are written as e.g. \u{1b}. */
function printable(text: string): string {
  const short = text.length > LONGEST ? `${text.slice(0, LONGEST)}...` : text;
  return short.replace(UNPRINTABLE, (character) => `\\u{${character.codePointAt(0)!.toString(16)}}`);
}

/** The base of all errors of this package; catch it to catch all of them. */
export class OnnxTrainError extends Error {
  // A literal in each class: minifiers rename classes, and consoles show this name.
  override name = "OnnxTrainError";

  constructor(message: string, options: ErrorOptions = {}) {
    const { cause } = options;
    // Consoles print the cause, too.
    const text = printable(messageOf(cause));
    super(printable(message), cause instanceof Error && text !== cause.message ? { cause: new Error(text) } : options);
  }
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
