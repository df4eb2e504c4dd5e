/** Refuses builds of ONNX Runtime that compute wrong results on WebGPU. */

import { InputError, ModelLoadError, explained, messageOf } from "./errors.js";
import { type ExecutionProviders, type OrtModule, inTurn } from "./ort.js";
import { createSession } from "./start.js";

/**
 * An ONNX model: y = CumSum(x) of four numbers, exclusive and from the end.
 *
 * The default bundle of onnxruntime-web 1.30 (JSEP) gives zeros for it on WebGPU, without an error, and wrong gradients of
 * convolutions and of attention. Nothing that a bundle exports tells which it is.
 */
const MODEL =
  "CAg6ZwozCgF4CgFhEgF5IgZDdW1TdW0qEAoJZXhjbHVzaXZlGAGgAQIqDgoHcmV2ZXJzZRgBoAECEgFnKgsQBkIBYUoEAAAAAFoPCgF4EgoKCAgBEgQKAggEYg8KAXkSCgoICAESBAoCCARCBAoAEA4=";
const INPUT = [1, 2, 3, 4];
const OUTPUT = [9, 7, 4, 0];

const known = new WeakSet<OrtModule["InferenceSession"]>();

/**
 * Computes a model of which the result is known, once for each build of ONNX Runtime.
 *
 * @throws InputError if the result is wrong.
 * @throws ModelLoadError if WebGPU does not start.
 */
export async function requireRightResults(ort: OrtModule, providers: ExecutionProviders): Promise<void> {
  if (known.has(ort.InferenceSession)) return;
  const bytes = Uint8Array.from(atob(MODEL), (letter) => letter.charCodeAt(0));
  let result: number[];
  try {
    result = await inTurn(ort, providers, async () => {
      const session = await createSession(ort, bytes, { executionProviders: providers, logSeverityLevel: 3 });
      const { y } = await session.run({ x: new ort.Tensor("float32", Float32Array.from(INPUT), [INPUT.length]) });
      await session.release();
      return Array.from(y!.data as Float32Array);
    });
  } catch (error) {
    throw explained(
      "TrainingSession.create",
      error,
      () =>
        new ModelLoadError(
          `TrainingSession.create: WebGPU does not run a model of one node: ${messageOf(error)}. Leave out executionProviders to train in WebAssembly.`,
          { cause: error },
        ),
    );
  }
  if (result.join() !== OUTPUT.join()) {
    throw new InputError(
      `TrainingSession.create: this build of ONNX Runtime computes wrong results on WebGPU: CumSum gave ${result.join(", ")} instead of ${OUTPUT.join(", ")}. ` +
        "Import 'onnxruntime-web/webgpu' instead of 'onnxruntime-web', or leave out executionProviders to train in WebAssembly.",
    );
  }
  known.add(ort.InferenceSession);
}
