/** Starts ONNX Runtime in a page. Where it would wait without end, or blame the model, the error says what is missing. */

import type { InferenceSession } from "onnxruntime-common";
import { ModelLoadError, TrainingStateError, messageOf } from "./errors.js";
import type { OrtModule } from "./ort.js";

const GUIDE = "docs/devices/bundlers.md";
/** Milliseconds after which a start that still waits is worth a warning. */
const PATIENCE = 15_000;

/** Builds of ONNX Runtime that run. */
const started = new WeakSet<object>();
/** Errors of builds whose threads have failed: asked again, they wait for them without end. */
const failed = new WeakMap<object, ModelLoadError>();

/** A worker of ONNX Runtime has failed. */
class ThreadError extends Error {}

/** True in a worker that ONNX Runtime started as one of its threads. */
function isThread(): boolean {
  const { document, name } = globalThis as { document?: unknown; name?: unknown };
  return document === undefined && typeof name === "string" && name.startsWith("em-pthread");
}

// ONNX Runtime's own script does not import this module: a bundler has made one script of both.
if (isThread()) {
  console.warn(
    `onnxtrain-web: ONNX Runtime starts its threads from the script that it is in, and a bundler has put it into yours: your script runs again in each thread. Set ort.env.wasm.wasmPaths: ${GUIDE}`,
  );
}

/** Throws a TrainingStateError in a thread of ONNX Runtime, which runs the page's script by mistake. */
export function refuseThread(): void {
  if (!isThread()) return;
  throw new TrainingStateError(
    `TrainingSession.create: this is a thread of ONNX Runtime, which runs your script again because a bundler has put ONNX Runtime into it. Set ort.env.wasm.wasmPaths: ${GUIDE}`,
  );
}

/**
 * Creates a session.
 *
 * @throws ModelLoadError if ONNX Runtime does not start. Other errors are those of the model.
 */
export async function createSession(
  ort: OrtModule,
  bytes: Uint8Array,
  options: InferenceSession.SessionOptions,
): Promise<InferenceSession> {
  const build = ort.InferenceSession;
  const create = (): Promise<InferenceSession> => ort.InferenceSession.create(bytes, options);
  if (ort.env?.versions?.node !== undefined || started.has(build)) return create();
  const before = failed.get(build);
  if (before) throw before;
  requireIsolation(ort);
  try {
    const session = await watch(create);
    started.add(build);
    return session;
  } catch (error) {
    const stuck = error instanceof ThreadError;
    const message = messageOf(error);
    if (!stuck && !message.startsWith("no available backend found")) throw error;
    const refusal = new ModelLoadError(
      `TrainingSession.create: ONNX Runtime did not start: ${message}. ${remedy(message, stuck)}`,
      { cause: error },
    );
    if (stuck) failed.set(build, refusal);
    throw refusal;
  }
}

/** Warns if threads are asked for that browsers do not give, and asks for one. */
function requireIsolation(ort: OrtModule): void {
  const flags = ort.env?.wasm;
  const { crossOriginIsolated } = globalThis as { crossOriginIsolated?: boolean };
  if (!flags?.numThreads || flags.numThreads <= 1 || crossOriginIsolated !== false) return;
  // Chromium has a switch for tests that gives threads nevertheless.
  if (typeof SharedArrayBuffer !== "undefined") return;
  console.warn(
    `TrainingSession.create: ort.env.wasm.numThreads is ${flags.numThreads}, but this page is not cross-origin isolated, so ONNX Runtime uses one thread. ` +
      "Serve page and scripts with the headers Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp, or set numThreads to 1.",
  );
  flags.numThreads = 1;
}

/** Waits for a job that may start threads; rejects if one of them fails, for which ONNX Runtime would wait. */
async function watch<T>(job: () => Promise<T>): Promise<T> {
  if (typeof globalThis.addEventListener !== "function") return job();
  let listener!: (event: ErrorEvent) => void;
  const failure = new Promise<never>((_, reject) => {
    // ONNX Runtime throws the event of a worker that fails, where nothing catches it.
    listener = ({ error }) => {
      if (!(error instanceof Event) || !(error.target instanceof Worker)) return;
      const { filename, message } = error as Partial<ErrorEvent>;
      reject(
        new ThreadError(
          message ? `${filename || "a script"} fails as a thread of it: ${message}` : "the script of its threads does not load",
        ),
      );
    };
    globalThis.addEventListener("error", listener);
  });
  const timer = setTimeout(
    () =>
      console.warn(
        `TrainingSession.create: ONNX Runtime has not started after ${PATIENCE / 1000} seconds.${files()} If these files have arrived, its threads do not answer: ${GUIDE}`,
      ),
    PATIENCE,
  );
  try {
    return await Promise.race([job(), failure]);
  } finally {
    clearTimeout(timer);
    globalThis.removeEventListener("error", listener);
  }
}

/** Says what to do about an error of the start. */
function remedy(message: string, stuck: boolean): string {
  if (stuck)
    return `Threads run the script that ONNX Runtime is in: set ort.env.wasm.wasmPaths to files of their own (${GUIDE}), or ort.env.wasm.numThreads to 1.`;
  if (/\[(wasm|cpu)\] backend not found|ERR: *$/.test(message))
    return "This build of ONNX Runtime does not compute in WebAssembly: import 'onnxruntime-web/wasm'.";
  if (message.includes("backend not found."))
    return "This build of ONNX Runtime has no such execution provider: import 'onnxruntime-web/webgpu' for WebGPU, or leave out executionProviders.";
  if (/gpu adapter|webgpu is not supported/i.test(message))
    return "Leave out executionProviders to train in WebAssembly.";
  return `Serve the .wasm and the .mjs file of the same version of onnxruntime-web, and set ort.env.wasm.wasmPaths to where they are: ${GUIDE}.${files()}`;
}

/** Lists the files of ONNX Runtime that the page has asked for, and what the server answered. */
function files(): string {
  const entries = globalThis.performance?.getEntriesByType?.("resource") ?? [];
  const answers = (entries as PerformanceResourceTiming[])
    .filter(({ name }) => /\.wasm(\?|$)|ort-wasm[^/]*\.mjs/.test(name))
    .map(({ name, responseStatus }) => (responseStatus ? `${name} (status ${responseStatus})` : name));
  return answers.length ? ` It asked for ${[...new Set(answers)].join(", ")}.` : "";
}
