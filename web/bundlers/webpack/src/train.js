import { TrainingSession } from "onnxtrain-web";
import { ort } from "./runtime.js";

/** Trains 20 steps on a batch of random data, and calls `show` with the loss of each step. */
export async function train(threads, show) {
  ort.env.wasm.numThreads = threads;
  const session = await TrainingSession.create(ort, { artifacts: "/artifacts/" });
  session.setLearningRate(0.01);
  const data = Float32Array.from({ length: 16 * 64 }, () => session.random.uniform());
  const labels = BigInt64Array.from({ length: 16 }, (_, i) =>
    BigInt(data[64 * i] > 0.5),
  );
  const feeds = {
    [session.manifest.inputs[0].name]: new ort.Tensor("float32", data, [16, 64]),
    labels: new ort.Tensor("int64", labels, [16]),
  };
  for (let step = 0; step < 20; step++) {
    const { loss } = await session.trainStep(feeds);
    await session.optimizerStep();
    await session.lazyResetGrad();
    show(loss.toFixed(6));
  }
  session.release();
}
