/**
 * Trains artifacts from a command line, as the example hosts do (docs/devices/own-host.md), so that tests exchange checkpoints
 * with it. Prints one loss per line.
 *
 *     node web/test/host.mjs ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta]
 *
 * The environment variable ONNXTRAIN_WEB is the path of the compiled package. Default: web/dist/index.js.
 */

import { readFileSync, renameSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";
import * as ort from "onnxruntime-node";
import { trainingFeeds } from "./support.mjs";

const built = process.env.ONNXTRAIN_WEB ? pathToFileURL(process.env.ONNXTRAIN_WEB).href : "../dist/index.js";
const { TrainingSession } = await import(built);

async function main() {
  const { values: options, positionals } = parseArgs({
    allowPositionals: true,
    options: { from: { type: "string", multiple: true, default: [] }, delta: { type: "boolean", default: false } },
  });
  const [artifacts, folder, out] = positionals;
  const { learningRate, seed, batches } = trainingFeeds(ort, resolve(folder));
  const session = await TrainingSession.create(ort, { artifacts: pathToFileURL(artifacts), seed });
  for (const file of options.from) await session.loadCheckpoint(readFileSync(file));
  session.setLearningRate(learningRate);
  for (const feeds of batches) {
    console.log((await session.trainStep(feeds)).loss);
    await session.optimizerStep();
    await session.lazyResetGrad();
  }
  if (out) {
    writeFileSync(`${out}.tmp`, await session.saveCheckpoint({ delta: options.delta, optimizer: true }));
    renameSync(`${out}.tmp`, out);
  }
}

try {
  await main();
} catch (error) {
  console.error(`${error.name}: ${error.message}`);
  process.exitCode = 1;
}
