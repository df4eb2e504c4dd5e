/**
 * Computes SHA-256.
 *
 * `crypto.subtle` exists only on pages served by HTTPS or from localhost, and a phone that tries a page of the local
 * network has neither.
 */

const FRACTIONS = roots();

/** Computes the first 32 bits of the fractional parts of the cube roots (64) and square roots (8) of the primes. */
function roots(): { cube: Uint32Array; square: Uint32Array } {
  const cube = new Uint32Array(64);
  const square = new Uint32Array(8);
  for (let candidate = 2, count = 0; count < 64; candidate++) {
    let prime = true;
    for (let d = 2; d * d <= candidate; d++) if (candidate % d === 0) prime = false;
    if (!prime) continue;
    if (count < 8) square[count] = fraction(candidate, 2n);
    cube[count++] = fraction(candidate, 3n);
  }
  return { cube, square };
}

/** Computes the first 32 bits of the fractional part of the `degree`-th root of `value`, exactly. */
function fraction(value: number, degree: bigint): number {
  // floor(root * 2^32) by bisection in integers: floats would round in the last bits.
  const target = BigInt(value) << (32n * degree);
  let low = 0n;
  let high = 1n << 40n;
  while (high - low > 1n) {
    const middle = (low + high) >> 1n;
    if (middle ** degree <= target) low = middle;
    else high = middle;
  }
  return Number(low & 0xffffffffn);
}

/** A digest to which bytes are added piece by piece, so that large tensors need not be joined first. */
export class Sha256 {
  #state = FRACTIONS.square.slice();
  #block = new Uint8Array(64);
  #words = new Uint32Array(64);
  #length = 0;

  /** Adds bytes. */
  update(bytes: Uint8Array): this {
    let position = 0;
    while (position < bytes.length) {
      const used = this.#length % 64;
      const count = Math.min(64 - used, bytes.length - position);
      this.#block.set(bytes.subarray(position, position + count), used);
      this.#length += count;
      position += count;
      if (this.#length % 64 === 0) this.#compress();
    }
    return this;
  }

  /** Returns the digest of all bytes in hexadecimal; the object cannot be used after it. */
  hex(): string {
    const bits = this.#length * 8;
    const padding = new Uint8Array(((119 - (this.#length % 64)) % 64) + 9);
    padding[0] = 0x80;
    const view = new DataView(padding.buffer);
    view.setUint32(padding.length - 8, Math.floor(bits / 2 ** 32));
    view.setUint32(padding.length - 4, bits >>> 0);
    this.update(padding);
    return Array.from(this.#state, (word) => word.toString(16).padStart(8, "0")).join("");
  }

  #compress(): void {
    const w = this.#words;
    const view = new DataView(this.#block.buffer);
    const rotate = (x: number, n: number): number => (x >>> n) | (x << (32 - n));
    for (let i = 0; i < 16; i++) w[i] = view.getUint32(4 * i);
    for (let i = 16; i < 64; i++) {
      const [a, b] = [w[i - 15]!, w[i - 2]!];
      const s0 = rotate(a, 7) ^ rotate(a, 18) ^ (a >>> 3);
      const s1 = rotate(b, 17) ^ rotate(b, 19) ^ (b >>> 10);
      w[i] = w[i - 16]! + s0 + w[i - 7]! + s1;
    }
    let [a, b, c, d, e, f, g, h] = this.#state as unknown as [
      number,
      number,
      number,
      number,
      number,
      number,
      number,
      number,
    ];
    for (let i = 0; i < 64; i++) {
      const s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + FRACTIONS.cube[i]! + w[i]!) | 0;
      const s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + t2) | 0];
    }
    for (const [i, word] of [a, b, c, d, e, f, g, h].entries()) this.#state[i]! += word;
  }
}

/** True if the browser itself computes digests, beside the page. */
export function canDigest(): boolean {
  return (globalThis as { crypto?: Crypto }).crypto?.subtle !== undefined;
}

/** Returns the SHA-256 of bytes in hexadecimal, computed by the browser itself where it can. */
export async function digestOf(bytes: Uint8Array): Promise<string> {
  if (!canDigest()) return new Sha256().update(bytes).hex();
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes as Uint8Array<ArrayBuffer>));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns the SHA-256 of a text in UTF-8, in hexadecimal. */
export function sha256(text: string): string {
  return new Sha256().update(new TextEncoder().encode(text)).hex();
}
