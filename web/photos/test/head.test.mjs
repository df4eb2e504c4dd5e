/** The head against PyTorch: with room for more classes and features, it learns as one of just the right size does. */

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { before, describe, it } from "node:test";
import { dist, load, runPython } from "./support.mjs";

const TOLERANCE = 1e-5;
const folder = join(dist, "model");
const artifacts = Object.fromEntries(
  readdirSync(folder)
    .filter((name) => name !== "backbone.onnx")
    .map((name) => [name, new Uint8Array(readFileSync(join(folder, name)))]),
);
let reference;
let Head;
before(async () => {
  reference = runPython("head.py");
  ({ Head } = await load("head"));
});

function near(found, expected, text) {
  assert.equal(found.length, expected.length, text);
  const difference = Math.max(...expected.map((value, i) => Math.abs(value - found[i])));
  assert.ok(difference < TOLERANCE, `${text}: ${difference}`);
  return difference;
}

for (const runtime of ["onnxruntime-node", "onnxruntime-web/wasm"]) {
  describe(runtime, () => {
    it("trains as PyTorch does while classes come and go", { timeout: 120_000 }, async (t) => {
      const ort = await import(runtime);
      if (ort.env.wasm) ort.env.wasm.numThreads = 1;
      const head = await Head.open(ort, artifacts);
      const features = reference.features.map((row) => Float32Array.from(row));
      const known = new Map();
      let largest = 0;
      for (const { classes, pictures, labels, losses, weights, biases, readings } of reference.lessons) {
        await head.set(
          features[0].length,
          classes.map((name) => known.get(name) ?? null),
        );
        head.learn(
          pictures.map((index) => features[index]),
          labels,
        );
        const found = await head.train(losses.length);
        largest = Math.max(largest, near(found, losses, "losses"));
        const columns = await head.columns();
        columns.forEach(({ weights: row, bias }, c) => near([...row, bias], [...weights[c], biases[c]], classes[c]));
        (await head.read(features)).forEach((row, i) => near(row, readings[i], `probabilities of picture ${i}`));
        columns.forEach((column, c) => known.set(classes[c], column));
      }
      t.diagnostic(`largest difference of a loss: ${largest.toExponential(1)}`);
    });

    it("keeps what it knows when a class is added", { timeout: 120_000 }, async () => {
      const ort = await import(runtime);
      const head = await Head.open(ort, artifacts);
      const columns = [1, -2].map((bias, c) => ({ weights: Float32Array.of(0.5, c, -1), bias }));
      await head.set(3, columns);
      const picture = Float32Array.of(1, 2, 3);
      const [before] = await head.read([picture]);
      await head.set(3, [...columns, null]);
      const [after] = await head.read([picture]);
      assert.deepEqual((await head.columns()).slice(0, 2), columns);
      // The new class takes its share from both.
      assert.equal(after.length, 3);
      assert.ok(Math.abs(after[0] / after[1] - before[0] / before[1]) < 1e-5 * (before[0] / before[1]));
    });
  });
}

it(
  "the backbone's features tell things apart that it has not seen, better than random ones",
  { timeout: 300_000 },
  (t) => {
    const figures = runPython("features.py", join(folder, "backbone.onnx"));
    t.diagnostic(JSON.stringify(figures));
    const { trained, random } = figures;
    // Five classes: a fifth is right by chance.
    assert.ok(trained.drawn > 0.62 && trained.drawn > random.drawn + 0.1, "drawn things");
    assert.ok(trained.photographed > 0.85 && trained.photographed > random.photographed + 0.02, "parts of photos");
  },
);
