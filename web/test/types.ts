/** The types that users see: this file is checked by the compiler and never run. */

import * as native from "onnxruntime-node";
import * as web from "onnxruntime-web/wasm";
import { CheckpointError, type StepResult, TrainingSession } from "../src/index.js";

export async function use(files: Record<string, Uint8Array>): Promise<void> {
  const session: TrainingSession = await TrainingSession.create(native, { artifacts: files, seed: 3 });
  await TrainingSession.create(web, {
    artifacts: new URL("https://example.org/artifacts/"),
    executionProviders: ["webgpu"],
  });
  const x = new native.Tensor("float32", new Float32Array(4), [1, 4]);
  const result: StepResult = await session.trainStep({ x });
  const loss: number = result.loss;
  const evaluated: StepResult = await session.evalStep({ x });
  const logits: native.Tensor | undefined = (await session.predict({ x }))["logits"];
  const nothing: void = await session.optimizerStep();
  const reset: void = await session.lazyResetGrad();
  const rate: void = session.setLearningRate(loss);
  const values: Float32Array = await session.exportParameters(true);
  await session.loadParameters(values, true);
  const bytes: Uint8Array = await session.saveCheckpoint({ delta: true, optimizer: true });
  await session.loadCheckpoint(bytes).catch((error: unknown) => error instanceof CheckpointError && error.message);
  const model: Uint8Array = await session.exportModel(["logits"]);
  const released: void = session.release();
  void [evaluated, logits, nothing, reset, rate, model, released];
  // @ts-expect-error artifacts are missing
  await TrainingSession.create(native, {});
  // @ts-expect-error feeds are tensors
  await session.trainStep({ x: new Float32Array(4) });
  // @ts-expect-error there is no such option
  await session.saveCheckpoint({ moments: true });
}
