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

/**
 * The loss, or a gradient of infinite inputs, became NaN or infinite. The step is not counted: parameters, statistics and
 * gradients are unchanged.
 */
export class DivergenceError extends OnnxTrainError {
  override name = "DivergenceError";
}

/** The browser or the process has not enough memory. */
export class OutOfMemoryError extends OnnxTrainError {
  override name = "OutOfMemoryError";
}

// What Chromium, Firefox, WebKit, Node, Emscripten, WebGPU and ONNX Runtime say.
const MEMORY =
  /out of memory|\bOOM\b|bad.alloc|allocation (failed|size overflow)|failed to allocate|failure to allocate|(could not|cannot) allocate|not enough memory|enlarge memory|invalid (typed )?array (buffer )?length/i;

/** Returns an OutOfMemoryError for an error that says that memory is used up, or null. */
export function memoryError(doing: string, error: unknown): OutOfMemoryError | null {
  const text = messageOf(error);
  if (error instanceof OnnxTrainError || !MEMORY.test(text)) return null;
  return new OutOfMemoryError(
    `${doing}: there is not enough memory (${text}). Use a smaller batch or model, or close other tabs; a page has to be reloaded first.`,
    { cause: error },
  );
}

/**
 * Explains an error of ONNX Runtime or of the platform.
 *
 * @param doing begins the message, e.g. "trainStep".
 * @param error anything that was thrown.
 * @param otherwise makes the error if memory is not the reason.
 */
export function explained(doing: string, error: unknown, otherwise: () => OnnxTrainError): OnnxTrainError {
  if (error instanceof OnnxTrainError) return error;
  return memoryError(doing, error) ?? otherwise();
}

/** Returns the message of anything that was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
