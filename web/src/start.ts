/** Starts ONNX Runtime in a page. Where it would wait without end, or blame the model, the error says what is missing. */

import type { InferenceSession } from "onnxruntime-common";
import { ModelLoadError, memoryError, messageOf } from "./errors.js";
import type { OrtModule } from "./ort.js";

const GUIDE = "docs/devices/bundlers.md";
/** Name that ONNX Runtime gives to its workers. */
const THREAD = "em-pthread";
/** Milliseconds after which a start that still waits is worth a warning. */
const PATIENCE = 15_000;
/** Milliseconds in which the browser notes how a request has ended. */
const NOTED = 100;

/** What ONNX Runtime, Emscripten and browsers say where nothing could start. */
const NOT_STARTED =
  /^no available backend found|fetching of the wasm|wasm code generation|unsafe-eval|WebAssembly is not defined|Can't find variable: WebAssembly|initWasm|WebAssembly backend/i;

/** Builds of ONNX Runtime that run. */
const started = new WeakSet<object>();
/** Errors of builds whose threads have failed: asked again, they wait for them without end. */
const failed = new WeakMap<object, ModelLoadError>();

/** A worker of ONNX Runtime has failed. */
class ThreadError extends Error {}

// ONNX Runtime starts its threads from the script that it is in. Where a bundler has put it into the script of the page,
// that script would run again in each thread. An error ends it there, and reaches `watchThreads`.
if (typeof document === "undefined" && String((globalThis as { name?: unknown }).name).startsWith(THREAD))
  throw new Error("a bundler has put ONNX Runtime into your script, which runs again in each thread");

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
  const timer = setTimeout(() => {
    console.warn(
      `TrainingSession.create: ONNX Runtime has not started after ${PATIENCE / 1000} seconds.${files()} See ${GUIDE}.`,
    );
  }, PATIENCE);
  try {
    const session = await watchThreads(create);
    started.add(build);
    return session;
  } catch (error) {
    const stuck = error instanceof ThreadError;
    if (!stuck && !NOT_STARTED.test(messageOf(error))) throw error;
    const memory = memoryError("TrainingSession.create", error);
    if (memory) throw memory;
    await new Promise((resolve) => setTimeout(resolve, NOTED));
    const reason = reasonOf(messageOf(error));
    const refusal = new ModelLoadError(
      `TrainingSession.create: ONNX Runtime did not start: ${reason || "it has no backend"}. ${remedy(reason, stuck)}`,
      { cause: error },
    );
    if (stuck) failed.set(build, refusal);
    throw refusal;
  } finally {
    clearTimeout(timer);
  }
}

/** Warns if threads are asked for that browsers do not give, and asks for one. */
function requireIsolation(ort: OrtModule): void {
  const flags = ort.env?.wasm;
  // Chromium has a switch for tests that gives threads nevertheless.
  if (!flags?.numThreads || flags.numThreads <= 1 || typeof SharedArrayBuffer !== "undefined") return;
  console.warn(
    `TrainingSession.create: ort.env.wasm.numThreads is ${flags.numThreads}, but this page is not cross-origin isolated, so ONNX Runtime uses one thread. ` +
      "Serve the page and its scripts with the headers Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp, or set numThreads to 1.",
  );
  flags.numThreads = 1;
}

/** Waits for a job that may start threads; rejects if one of them fails, for which ONNX Runtime would wait. */
async function watchThreads<T>(job: () => Promise<T>): Promise<T> {
  const { Worker } = globalThis;
  if (typeof Worker !== "function" || typeof SharedArrayBuffer === "undefined") return job();
  let fail!: (error: ThreadError) => void;
  const failure = new Promise<never>((_, reject) => (fail = reject));
  // ONNX Runtime listens to its workers too late to hear that a script fails at once.
  globalThis.Worker = class extends Worker {
    constructor(script: string | URL, options?: WorkerOptions) {
      super(script, options);
      if (options?.name !== THREAD) return;
      this.addEventListener("error", ({ message }) =>
        fail(new ThreadError(`its thread ${script} ${message ? `fails: ${message}` : "does not load"}`)),
      );
    }
  };
  try {
    return await Promise.race([job(), failure]);
  } finally {
    globalThis.Worker = Worker;
  }
}

/** Shortens the message of an error of the start to what it says. */
function reasonOf(message: string): string {
  return message
    .replace(/^no available backend found\. ERR: */, "")
    .replace(/,? *\[\w+\] Error: (previous call|multiple calls) to 'init\w+\(\)' (failed|detected)\.?/g, "")
    .replace(/ Build with -sASSERTIONS for more info/, "")
    .replace(/found 3c [\da-f ]+/, "found a page of HTML ")
    .replace(/\.+$/, "");
}

/** Says what to do about an error of the start. */
function remedy(reason: string, stuck: boolean): string {
  if (reason.endsWith(" does not load"))
    return "The server must send Cross-Origin-Embedder-Policy: require-corp with this file, too; or set ort.env.wasm.numThreads to 1.";
  if (stuck)
    return `Set ort.env.wasm.wasmPaths to the files of onnxruntime-web, so that threads start from them, or ort.env.wasm.numThreads to 1: ${GUIDE}.`;
  if (reason === "" || /\[(wasm|cpu)\] backend not found/.test(reason))
    return "This build of ONNX Runtime does not compute in WebAssembly. Import 'onnxruntime-web/wasm'.";
  if (reason.includes("backend not found"))
    return "Leave out executionProviders to train in WebAssembly; for WebGPU, import 'onnxruntime-web/webgpu'.";
  if (/unsafe-eval|code generation/.test(reason))
    return "Let the Content-Security-Policy allow script-src 'wasm-unsafe-eval', and reload the page.";
  if (/gpu adapter|webgpu is not supported/i.test(reason))
    return "Leave out executionProviders to train in WebAssembly.";
  return `Serve the .wasm and .mjs files of the same version of onnxruntime-web, and set ort.env.wasm.wasmPaths to where they are: ${GUIDE}.${files()}`;
}

/** Lists the files of ONNX Runtime that the page has asked for, and what the server answered. */
function files(): string {
  const entries = globalThis.performance?.getEntriesByType?.("resource") ?? [];
  const answers = (entries as PerformanceResourceTiming[])
    .filter(({ name }) => /\.wasm(\?|$)|ort-wasm[^/]*\.mjs/.test(name))
    .map(({ name, responseStatus }) => (responseStatus ? `${name} (status ${responseStatus})` : name));
  return answers.length ? ` It asked for ${[...new Set(answers)].join(", ")}.` : "";
}
