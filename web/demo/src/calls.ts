/** Answers, in a worker, the calls of a page's `Model`. */

import type { Answer } from "./protocol.js";

/** A call from the page. */
export interface Call {
  readonly id: number;
  readonly name: string;
  readonly args: unknown[];
}

/** A file that the worker cannot use. */
export class FileError extends Error {
  override readonly name = "FileError";
}

/** Sends an answer to the page. */
export const post = (answer: Answer): void => self.postMessage(answer);

/** Answers the calls to `methods`, one after the other. */
export function answerCalls(methods: object): void {
  let last: Promise<unknown> = Promise.resolve();
  self.addEventListener("message", ({ data }: MessageEvent<Call>) => {
    const method = (methods as Record<string, (...args: unknown[]) => unknown>)[data.name]!;
    last = last
      .then(() => method(...data.args))
      .then(
        (value) => post({ kind: "result", id: data.id, value }),
        (error: unknown) => {
          const { name, message } = error instanceof Error ? error : new Error(String(error));
          post({ kind: "error", id: data.id, name, message });
        },
      );
  });
}
