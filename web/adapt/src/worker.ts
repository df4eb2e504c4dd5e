/** Trains in a worker, so that the page stays responsive. */

import type * as Runtime from "onnxruntime-web/wasm";
import { TrainingSession } from "onnxtrain-web";
import type { Answer, Call, Device, Methods, Name } from "./protocol.js";

/** Number of bytes that the model reads at a time. */
const LENGTH = 64;
const BATCH = 8;
const LEARNING_RATE = 0.004;
const TEMPERATURE = 0.7;
/** Steps over which the speed is averaged. */
const AVERAGED = 10;

let ort: typeof Runtime;
let session: TrainingSession | undefined;
let start: Uint8Array;
let stopped = true;

function post(answer: Answer, transfer: Transferable[] = []): void {
  (self as unknown as { postMessage(message: Answer, transfer: Transferable[]): void }).postMessage(answer, transfer);
}

/** Returns the session, which is open while the page lets one press anything. */
function present(): TrainingSession {
  if (!session) throw new Error("The model is not open. Reload the page.");
  return session;
}

function tensor(tokens: BigInt64Array): Runtime.Tensor {
  return new ort.Tensor("int64", tokens, [tokens.length / LENGTH, LENGTH]);
}

/** Draws pieces of a text. */
function pieces(bytes: Uint8Array): Runtime.Tensor {
  const { random } = present();
  const tokens = new BigInt64Array(BATCH * LENGTH);
  for (let row = 0; row < BATCH; row++) {
    const first = Math.floor(random.uniform() * (bytes.length - LENGTH + 1));
    for (let i = 0; i < LENGTH; i++) tokens[row * LENGTH + i] = BigInt(bytes[first + i]!);
  }
  return tensor(tokens);
}

/** Draws a byte by the scores of a row. */
function drawn(scores: Float32Array): number {
  const largest = scores.reduce((a, b) => Math.max(a, b));
  const weights = scores.map((score) => Math.exp((score - largest) / TEMPERATURE));
  let rest = present().random.uniform() * weights.reduce((a, b) => a + b);
  for (const [byte, weight] of weights.entries()) if ((rest -= weight) < 0) return byte;
  return weights.indexOf(Math.max(...weights));
}

/** Opens the model on a device. If that fails, the session before is still there. */
async function create(device: Device): Promise<void> {
  const runtime = await (device === "webgpu" ? import("onnxruntime-web/webgpu") : import("onnxruntime-web/wasm"));
  runtime.env.wasm.numThreads = 1;
  const created = await TrainingSession.create(runtime, {
    artifacts: new URL("model/", import.meta.url),
    cache: "teach-it-your-text",
    warmUp: false,
    executionProviders: [device],
  });
  start = await created.saveCheckpoint({ delta: true });
  [ort, session] = [runtime, created];
}

/** Runs what the page runs, and leaves the adapter and the random numbers as they were. */
async function rehearse(): Promise<void> {
  const tokens = tensor(new BigInt64Array(BATCH * LENGTH));
  const { loss } = await present().trainStep({ tokens, labels: tokens });
  if (!Number.isFinite(loss)) throw new Error("it computes a loss that is no number");
  await present().optimizerStep();
  await present().lazyResetGrad();
  await present().predict({ tokens: tensor(new BigInt64Array(LENGTH)) });
  await present().loadCheckpoint(start);
}

interface Adapter {
  readonly info?: { readonly isFallbackAdapter?: boolean };
}

/** Returns why WebGPU cannot or, unless the user wants it, should not compute; "" if nothing speaks against it. */
async function objection(wanted: boolean): Promise<string> {
  const { gpu } = navigator as { gpu?: { requestAdapter(): Promise<Adapter | null> } };
  if (!gpu) return "this browser has no WebGPU";
  const adapter = await gpu.requestAdapter().catch(() => null);
  if (!adapter) return "WebGPU finds no graphics card here";
  return adapter.info?.isFallbackAdapter && !wanted ? "WebGPU has no graphics card here and would be slower" : "";
}

type Implementation = { [N in Name]: (...args: Parameters<Methods[N]>) => Promise<ReturnType<Methods[N]>> };

const methods: Implementation = {
  async open(wanted) {
    const before = session;
    const adapter = await before?.saveCheckpoint({ delta: true, optimizer: true });
    let device: Device = "wasm";
    let reason = wanted === "wasm" ? "" : await objection(wanted === "webgpu");
    if (wanted !== "wasm" && !reason) {
      try {
        await create("webgpu");
        await rehearse();
        device = "webgpu";
      } catch (error) {
        if (session !== before) session?.release();
        reason = `WebGPU does not run this model (${(error as Error).message.split(/\.?\s*\n|\. /)[0]})`;
      }
    }
    if (device === "wasm") await create("wasm");
    before?.release();
    if (adapter) await present().loadCheckpoint(adapter);
    return { parameters: (await present().exportParameters(true)).length, device, reason };
  },
  async train(text) {
    const bytes = new TextEncoder().encode(text);
    if (bytes.length < LENGTH) throw new Error(`Paste a text of at least ${LENGTH} letters.`);
    stopped = false;
    const session = present();
    const times: number[] = [];
    session.setLearningRate(LEARNING_RATE);
    while (!stopped) {
      const begin = performance.now();
      const tokens = pieces(bytes);
      const { loss } = await session.trainStep({ tokens, labels: tokens });
      if (!Number.isFinite(loss)) throw new Error("The loss is no number any more. Press Forget and train again.");
      await session.optimizerStep();
      await session.lazyResetGrad();
      times.push(performance.now() - begin);
      const recent = times.slice(-AVERAGED);
      const seconds = recent.reduce((a, b) => a + b) / recent.length / 1000;
      post({ kind: "progress", step: session.step, loss, tokensPerSecond: (BATCH * LENGTH) / seconds });
      // Lets the message `stop` in.
      await new Promise((resolve) => setTimeout(resolve, 0));
    }
  },
  async stop() {
    stopped = true;
  },
  async write(prompt, count) {
    const bytes = [...new TextEncoder().encode(prompt || "\n")];
    for (let i = 0; i < count; i++) {
      const recent = bytes.slice(-LENGTH);
      // What follows the last byte does not matter: the model looks back only.
      const tokens = BigInt64Array.from({ length: LENGTH }, (_, place) => BigInt(recent[place] ?? 0));
      const { logits } = await present().predict({ tokens: tensor(tokens) });
      const classes = logits!.dims[2]!;
      const last = (recent.length - 1) * classes;
      bytes.push(drawn((logits!.data as Float32Array).slice(last, last + classes)));
    }
    return new TextDecoder().decode(Uint8Array.from(bytes));
  },
  async save() {
    return present().saveCheckpoint({ delta: true, optimizer: true });
  },
  async load(adapter) {
    await present().loadCheckpoint(adapter);
  },
  async reset() {
    await present().loadCheckpoint(start);
  },
};

self.addEventListener("message", ({ data }: MessageEvent<Call>) => {
  const method = methods[data.name] as (...args: unknown[]) => Promise<unknown>;
  method(...data.args).then(
    (value) => post({ kind: "result", id: data.id, value }),
    (error: Error) => post({ kind: "error", id: data.id, message: error.message }),
  );
});
