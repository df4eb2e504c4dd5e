/** Makes variants of a drawing, so that a few drawings teach the model a handwriting instead of single pictures. */

import type { Random } from "onnxtrain-web";
import { SIZE } from "./preprocess.js";

/** Returns a variant of 256 pixels: turned, sheared, scaled and moved a little, at random. */
export function variant(image: Float32Array, random: Random): Float32Array {
  const between = (low: number, high: number): number => low + (high - low) * random.uniform();
  const angle = between(-0.12, 0.12);
  const shear = between(-0.12, 0.12);
  const scale = between(0.92, 1.1);
  const [dx, dy] = [between(-1, 1), between(-1, 1)];
  const [a, b, c, d] = [
    Math.cos(angle) / scale,
    (Math.sin(angle) + shear) / scale,
    -Math.sin(angle) / scale,
    Math.cos(angle) / scale,
  ];
  const middle = (SIZE - 1) / 2;
  const result = new Float32Array(SIZE * SIZE);
  for (let row = 0; row < SIZE; row++) {
    for (let column = 0; column < SIZE; column++) {
      const [u, v] = [column - middle, row - middle];
      const x = a * u + b * v + middle + dx;
      const y = c * u + d * v + middle + dy;
      const [x0, y0] = [Math.floor(x), Math.floor(y)];
      const [fx, fy] = [x - x0, y - y0];
      const at = (i: number, j: number): number =>
        i < 0 || j < 0 || i >= SIZE || j >= SIZE ? 0 : image[j * SIZE + i]!;
      const upper = at(x0, y0) * (1 - fx) + at(x0 + 1, y0) * fx;
      const lower = at(x0, y0 + 1) * (1 - fx) + at(x0 + 1, y0 + 1) * fx;
      result[row * SIZE + column] = upper * (1 - fy) + lower * fy;
    }
  }
  return result;
}
