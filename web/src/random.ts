/**
 * Draws random numbers that a host in any language can draw, too: shuffled orders, dropout masks.
 *
 * ONNX Runtime's own random ops give other values in a browser than in Python, also with a fixed seed.
 */

/** A counter-based generator: number `i` of seed `s` is a hash of both, so that Python computes many at once. */
export class Random {
  readonly #key: number;
  #counter = 0;

  /** @param seed an integer; equal seeds draw equal numbers. */
  constructor(seed: number) {
    this.#key = mix(seed >>> 0);
  }

  /** Draws an integer from 0 to 2^32 - 1. */
  integer(): number {
    return mix((this.#counter++ ^ this.#key) >>> 0);
  }

  /** Draws a number from 0 (included) to 1 (excluded), a multiple of 2^-24: exact in float32. */
  uniform(): number {
    return (this.integer() >>> 8) / 2 ** 24;
  }

  /** Draws an order of `count` elements: the numbers 0 to count - 1, shuffled. */
  permutation(count: number): number[] {
    const order = Array.from({ length: count }, (_, i) => i);
    for (let i = count - 1; i > 0; i--) {
      const j = Math.floor(this.uniform() * (i + 1));
      [order[i], order[j]] = [order[j]!, order[i]!];
    }
    return order;
  }

  /**
   * Draws a dropout mask: 0 with probability `rate`, else 1 / (1 - rate).
   *
   * @param count number of elements.
   * @param rate probability of a 0, e.g. 0.1.
   */
  dropoutMask(count: number, rate: number): Float32Array {
    return Float32Array.from({ length: count }, () => (this.uniform() < rate ? 0 : 1 / (1 - rate)));
  }
}

/** Hashes 32 bits: the finaliser "lowbias32" of Chris Wellons, after an addition so that 0 does not stay 0. */
function mix(value: number): number {
  let x = (value + 0x9e3779b9) | 0;
  x = Math.imul(x ^ (x >>> 16), 0x21f0aaad);
  x = Math.imul(x ^ (x >>> 15), 0x735a2d97);
  return (x ^ (x >>> 15)) >>> 0;
}
