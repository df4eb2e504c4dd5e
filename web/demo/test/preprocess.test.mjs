/** The page preprocesses drawings as Python did the digits of the base model. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { it } from "node:test";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const python = process.env.PYTHON ?? join(here, "..", "..", "..", ".venv", "bin", "python");
const SCRIPT = `
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from preprocess import preprocess
cases = [(np.array(ink, np.float32).reshape(h, w)) for ink, w, h in json.load(sys.stdin)]
json.dump([preprocess(ink).ravel().tolist() for ink in cases], sys.stdout)
`;

it("equals preprocess.py on lines, blots and dots of any place and size", async () => {
  const { outputFiles } = await build({
    entryPoints: [join(here, "..", "src", "preprocess.ts")],
    bundle: true,
    format: "esm",
    write: false,
  });
  const { preprocess } = await import(`data:text/javascript,${encodeURIComponent(outputFiles[0].text)}`);
  let state = 7;
  const random = () => (state = (Math.imul(state, 1103515245) + 12345) >>> 0) / 2 ** 32;
  const cases = Array.from({ length: 30 }, (_, n) => {
    const [w, h] = [20 + Math.floor(random() * 60), 20 + Math.floor(random() * 60)];
    const ink = new Array(w * h).fill(0);
    const [x, y, dx, dy, radius] = [random() * w, random() * h, random() - 0.5, random() - 0.5, 1 + 4 * random()];
    for (let i = 0; i < w * h; i++) {
      const [u, v] = [(i % w) - x, Math.floor(i / w) - y];
      const along = n % 3 ? Math.max(-20, Math.min(20, (u * dx + v * dy) / Math.hypot(dx, dy) ** 2)) : 0;
      const distance = Math.hypot(u - along * dx, v - along * dy);
      ink[i] = Math.fround(Math.max(0, Math.min(1, radius - distance)));
    }
    return [ink, w, h];
  });
  const expected = JSON.parse(
    execFileSync(python, ["-c", SCRIPT, join(here, "..", "model")], { input: JSON.stringify(cases), encoding: "utf8" }),
  );
  for (const [i, [ink, w, h]] of cases.entries()) {
    const image = preprocess(Float32Array.from(ink), w, h);
    assert.ok(
      image.some((value) => value === 1),
      `case ${i}`,
    );
    // Where a value lies between two levels, rounding errors decide: one level is 1/256.
    const difference = Math.max(...image.map((value, k) => Math.abs(value - expected[i][k])));
    assert.ok(difference <= 1 / 256, `case ${i} differs by ${difference}`);
    assert.ok(image.filter((value, k) => value !== expected[i][k]).length <= 5, `case ${i}`);
  }
  assert.equal(preprocess(new Float32Array(100), 10, 10), null);
});
