/** Runs asynchronous jobs one after another, in the order in which they were added. */

export class Queue {
  #last: Promise<unknown> = Promise.resolve();
  #waiting = 0;

  /** True while no job runs or waits. */
  get idle(): boolean {
    return this.#waiting === 0;
  }

  /** Runs `job` after all jobs that were added before, whether those failed or not, and returns its result. */
  add<T>(job: () => Promise<T>): Promise<T> {
    this.#waiting += 1;
    const result = this.#last.then(job);
    // A failed job must not stop those behind it; its own caller gets the error through `result`.
    this.#last = result.then(
      () => this.#finish(),
      () => this.#finish(),
    );
    return result;
  }

  #finish(): void {
    this.#waiting -= 1;
  }
}
