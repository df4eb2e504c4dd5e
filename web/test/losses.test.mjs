/** The losses of 50 steps are those of Python, natively and in WebAssembly. */

import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";
import { before, describe, it } from "node:test";
import { TrainingSession } from "../dist/index.js";
import {
  NETS,
  artifactsOf,
  feedsOf,
  folderOf,
  loadRuntime,
  maxDifference,
  prepare,
  resultsOf,
  train,
} from "./support.mjs";

before(prepare, { timeout: 300_000 });

for (const runtime of ["node", "wasm"]) {
  describe(`losses of ${runtime}`, () => {
    for (const net of NETS) {
      it(net, async (t) => {
        const ort = await loadRuntime(runtime);
        const { learningRate, seed, batches } = feedsOf(ort, net);
        const session = await TrainingSession.create(ort, { artifacts: artifactsOf(net), seed });
        session.setLearningRate(learningRate);
        const expected = resultsOf(net);
        const losses = await train(session, batches);
        const difference = maxDifference(losses, expected.losses);
        t.diagnostic(`largest difference from Python: ${difference.toExponential(1)}`);
        assert.ok(difference <= 1e-5, `losses differ by ${difference}`);
        // Training must have changed something, or equal losses would say little.
        assert.ok(Math.abs(losses.at(-1) - losses[0]) > 0.05);
        assert.equal(session.step, batches.length);
        const evaluation = await session.evalStep(batches[0]);
        assert.ok(Math.abs(evaluation.loss - expected.eval_loss) <= 1e-4);
        const { labels, ...inputs } = batches[0];
        const { logits } = await session.predict(inputs);
        assert.ok(maxDifference(logits.data, evaluation.outputs.logits.data) <= 1e-5);
        session.release();
      });
    }
  });
}

it("Dropout draws from the seed and from the numbers of step and run", async () => {
  const ort = await loadRuntime("node");
  const { seed, batches } = feedsOf(ort, "dropout");
  const open = (seed) => TrainingSession.create(ort, { artifacts: artifactsOf("dropout"), seed });
  const session = await open(seed);
  const lossOf = async (s) => (await s.trainStep(batches[0])).loss;
  const first = await lossOf(session);
  const second = await lossOf(session);
  assert.notEqual(second, first);
  // The runs of a step count from 0 again after each step, and after a checkpoint.
  await session.loadCheckpoint(artifactsOf("dropout").checkpoint);
  assert.equal(await lossOf(session), first);
  assert.equal(await lossOf(session), second);
  session.setLearningRate(0);
  await session.optimizerStep();
  assert.ok(![first, second].includes(await lossOf(session)));
  assert.equal(await lossOf(await open(seed)), first);
  assert.notEqual(await lossOf(await open(seed + 1)), first);
});

it("reads the artifacts of a folder by its URL", async () => {
  const ort = await loadRuntime("node");
  for (const artifacts of [pathToFileURL(folderOf("mlp")), `${pathToFileURL(folderOf("mlp"))}/manifest.json`]) {
    const session = await TrainingSession.create(ort, { artifacts });
    const { loss } = await session.trainStep(feedsOf(ort, "mlp").batches[0]);
    assert.ok(Math.abs(loss - resultsOf("mlp").losses[0]) <= 1e-5);
    session.release();
  }
});
