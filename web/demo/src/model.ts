/** Calls the worker that trains, from the page. */

import type { Answer, Methods } from "./protocol.js";

export type Progress = Extract<Answer, { kind: "progress" }>;

/** The model, in its worker, which has the methods `M`. */
export class Model<M extends { [N in keyof M]: (...args: never[]) => unknown } = Methods> {
  /** Called at each training step. */
  onProgress: (progress: Progress) => void = () => {};
  readonly #worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  readonly #waiting = new Map<number, { resolve: (value: never) => void; reject: (error: Error) => void }>();
  #calls = 0;
  #broken: Error | null = null;

  constructor() {
    this.#worker.addEventListener("message", ({ data }: MessageEvent<Answer>) => {
      if (data.kind === "progress") {
        this.onProgress(data);
        return;
      }
      const waiting = this.#waiting.get(data.id)!;
      this.#waiting.delete(data.id);
      if (data.kind === "result") waiting.resolve(data.value as never);
      else waiting.reject(Object.assign(new Error(data.message), { name: data.name }));
    });
    // A worker that could not be loaded answers no call.
    this.#worker.addEventListener("error", (event) => {
      event.preventDefault();
      this.#broken = new Error(event.message || "the worker could not be started");
      for (const { reject } of this.#waiting.values()) reject(this.#broken);
      this.#waiting.clear();
    });
  }

  /** Calls a method of the worker; an error has the name of the worker's. */
  call<N extends keyof M>(name: N, ...args: Parameters<M[N]>): Promise<ReturnType<M[N]>> {
    if (this.#broken) return Promise.reject(this.#broken);
    const id = this.#calls++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve: resolve as (value: never) => void, reject });
      this.#worker.postMessage({ id, name, args });
    });
  }
}
