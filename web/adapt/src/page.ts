/** The page on which a language model learns to write like a text. */

import type { Answer, Arguments, Call, Device, Name, Opened, Result } from "./protocol.js";

const EXAMPLE = `Twinkle, twinkle, little star,
How I wonder what you are!
Up above the world so high,
Like a diamond in the sky.

When the blazing sun is gone,
When he nothing shines upon,
Then you show your little light,
Twinkle, twinkle, all the night.
`;
/** Letters that the model writes. */
const WRITTEN = 160;
/** Steps of which each point of the line is the mean. */
const SMOOTHED = 5;

const element = <T extends Element>(id: string): T => document.getElementById(id) as unknown as T;
const page = element<HTMLElement>("page");
const text = element<HTMLTextAreaElement>("text");
const prompt = element<HTMLInputElement>("prompt");
const file = element<HTMLInputElement>("load");
const status = element<HTMLElement>("status");
const trainButton = element<HTMLButtonElement>("train");
const devices = element<HTMLSelectElement>("device");
const others = ["reset", "save", "write", "device"].map((id) => element<HTMLButtonElement | HTMLSelectElement>(id));

/** Calls the worker. */
class Client {
  readonly #worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  readonly #waiting = new Map<number, { resolve(value: unknown): void; reject(error: Error): void }>();
  #next = 0;

  constructor(progress: (message: Answer & { kind: "progress" }) => void) {
    this.#worker.addEventListener("message", ({ data }: MessageEvent<Answer>) => {
      if (data.kind === "progress") return progress(data);
      const { resolve, reject } = this.#waiting.get(data.id)!;
      this.#waiting.delete(data.id);
      if (data.kind === "result") resolve(data.value);
      else reject(new Error(data.message));
    });
    this.#worker.addEventListener("error", (event) => {
      const error = new Error(
        `The worker has failed: ${event.message || "its script does not load"}. Reload the page.`,
      );
      for (const { reject } of this.#waiting.values()) reject(error);
      this.#waiting.clear();
    });
  }

  call<N extends Name>(name: N, ...args: Arguments<N>): Promise<Result<N>> {
    const id = this.#next++;
    const call: Call = { id, name, args };
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve: resolve as (value: unknown) => void, reject });
      this.#worker.postMessage(call);
    });
  }
}

let losses: number[] = [];
let training = false;

function drawLosses(): void {
  const means = losses.map((_, i) => {
    const recent = losses.slice(Math.max(0, i + 1 - SMOOTHED), i + 1);
    return recent.reduce((a, b) => a + b) / recent.length;
  });
  const top = Math.max(...means, 0.1);
  const x = (i: number): number => (300 * i) / Math.max(1, means.length - 1);
  const points = means.map((loss, i) => `${x(i).toFixed(1)},${(100 - (96 * loss) / top).toFixed(1)}`);
  element<SVGPolylineElement>("line").setAttribute("points", points.join(" "));
  const last = means.at(-1);
  element<SVGElement>("chart").setAttribute(
    "aria-label",
    last === undefined ? "No step yet" : `The loss went from ${means[0]!.toFixed(2)} to ${last.toFixed(2)}`,
  );
  element("loss").textContent = last === undefined ? "-" : last.toFixed(2);
}

const client = new Client(({ step, loss, tokensPerSecond }) => {
  losses.push(loss);
  element("steps").textContent = String(step);
  element("speed").textContent = tokensPerSecond.toFixed(0);
  drawLosses();
});

/** Shows the memory of the page with its worker, where the browser tells it. */
async function showMemory(): Promise<void> {
  const { measureUserAgentSpecificMemory: measure } = performance as unknown as {
    measureUserAgentSpecificMemory?: () => Promise<{ bytes: number }>;
  };
  if (!measure || !crossOriginIsolated) return;
  const { bytes } = await measure.call(performance);
  element("memory").textContent = `${(bytes / 1e6).toFixed(0)} MB`;
}

/** Runs a job while the buttons wait, and tells what fails. */
async function run(what: string, job: () => Promise<string>): Promise<void> {
  page.setAttribute("aria-busy", "true");
  for (const button of others) button.disabled = true;
  file.disabled = true;
  trainButton.disabled = !training;
  status.textContent = what;
  try {
    status.textContent = await job();
  } catch (error) {
    status.textContent = (error as Error).message;
  }
  training = false;
  trainButton.textContent = "Train";
  trainButton.disabled = false;
  for (const button of others) button.disabled = false;
  file.disabled = false;
  page.setAttribute("aria-busy", "false");
  void showMemory().catch(() => undefined);
}

async function write(): Promise<void> {
  element("now").textContent = await client.call("write", prompt.value, WRITTEN);
}

trainButton.addEventListener("click", () => {
  if (training) {
    status.textContent = "Stopping.";
    void client.call("stop");
    return;
  }
  training = true;
  trainButton.textContent = "Stop";
  void run("Training. Press Stop when the loss is low enough.", async () => {
    await client.call("train", text.value);
    await write();
    return "Trained.";
  });
});
element("write").addEventListener("click", () => {
  void run("Writing.", async () => {
    await write();
    return "";
  });
});
element("reset").addEventListener("click", () => {
  void run("Forgetting.", async () => {
    await client.call("reset");
    losses = [];
    element("steps").textContent = "0";
    drawLosses();
    await write();
    return "The model is as it was.";
  });
});
element("save").addEventListener("click", () => {
  void run("Saving.", async () => {
    const adapter = await client.call("save");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([adapter as Uint8Array<ArrayBuffer>]));
    link.download = "adapter.delta";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    return `Saved ${(adapter.length / 1000).toFixed(0)} KB.`;
  });
});
file.addEventListener("change", () => {
  const [chosen] = file.files ?? [];
  if (!chosen) return;
  void run("Loading.", async () => {
    await client.call("load", new Uint8Array(await chosen.arrayBuffer()));
    file.value = "";
    await write();
    return `Loaded ${chosen.name}.`;
  });
});

/** Opens the model on the device that is chosen, and shows which computes. */
async function open(): Promise<Opened> {
  const opened = await client.call("open", devices.value as Device | "auto");
  const name = { webgpu: "WebGPU", wasm: "WebAssembly" }[opened.device];
  element("used").textContent = opened.reason ? `${name} computes, as ${opened.reason}.` : `${name} computes.`;
  return opened;
}

devices.addEventListener("change", () => {
  void run("Loading the model.", async () => {
    await open();
    return "Ready. The adapter is as it was.";
  });
});

text.value = EXAMPLE;
// ?device=webgpu, for example, chooses from the start.
const asked = new URLSearchParams(location.search).get("device");
if (asked && [...devices.options].some(({ value }) => value === asked)) devices.value = asked;
void run("Loading the model.", async () => {
  const { parameters } = await open();
  await write();
  element("before").textContent = element("now").textContent;
  return `Ready: ${parameters.toLocaleString("en")} numbers to train.`;
});
