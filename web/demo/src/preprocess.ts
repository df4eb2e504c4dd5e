/** Turns ink into the input of the model: 16x16 pixels, of one size, centred on the centre of mass. */

/** Width and height of the model's input. */
export const SIZE = 16;
// The same numbers as in model/preprocess.py, which says more about each.
const EXTENT = 12;
const THRESHOLD = 0.1;
const LEVELS = 256;

/** Computes how much each of `length` source pixels contributes to each output pixel along one axis. */
function weights(length: number, centre: number, scale: number): Float64Array[] {
  const width = 1 / scale;
  return Array.from({ length: SIZE }, (_, i) => {
    const begin = centre + (i - SIZE / 2) * width;
    return Float64Array.from(
      { length },
      (_, k) => Math.max(0, Math.min(begin + width, k + 1) - Math.max(begin, k)) / width,
    );
  });
}

/**
 * Preprocesses one drawing.
 *
 * @param ink rows of pixels, 0 (paper) to 1 (ink).
 * @returns 256 pixels in multiples of 1/256, which are short in JSON and exact in float32; null if there is no ink.
 */
export function preprocess(ink: Float32Array, width: number, height: number): Float32Array | null {
  let [left, right, top, bottom] = [width, -1, height, -1];
  let [total, y, x] = [0, 0, 0];
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const value = ink[row * width + column]!;
      total += value;
      y += value * (row + 0.5);
      x += value * (column + 0.5);
      if (value <= THRESHOLD) continue;
      left = Math.min(left, column);
      right = Math.max(right, column);
      top = Math.min(top, row);
      bottom = Math.max(bottom, row);
    }
  }
  if (right < 0) return null;
  const scale = EXTENT / (Math.max(right - left, bottom - top) + 1);
  const rows = weights(height, y / total, scale);
  const columns = weights(width, x / total, scale);
  // First along the columns, then along the rows: the mean over a rectangle is the mean of the means of its rows.
  const narrow = new Float64Array(height * SIZE);
  for (let row = 0; row < height; row++) {
    for (let i = 0; i < SIZE; i++) {
      let sum = 0;
      for (let k = 0; k < width; k++) sum += columns[i]![k]! * ink[row * width + k]!;
      narrow[row * SIZE + i] = sum;
    }
  }
  const small = new Float64Array(SIZE * SIZE);
  for (let j = 0; j < SIZE; j++) {
    for (let i = 0; i < SIZE; i++) {
      let sum = 0;
      for (let k = 0; k < height; k++) sum += rows[j]![k]! * narrow[k * SIZE + i]!;
      small[j * SIZE + i] = sum;
    }
  }
  const darkest = Math.max(...small, 1e-6);
  return Float32Array.from(small, (value) => Math.round((value / darkest) * LEVELS) / LEVELS);
}
