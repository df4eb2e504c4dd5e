/** Knows the inputs and outputs of the models of a run, and checks sessions against the manifest. */

import type { InferenceSession } from "onnxruntime-common";
import { dtypeOf, elements } from "./dtypes.js";
import { ModelLoadError } from "./errors.js";
import type { Manifest } from "./manifest.js";
import { type MomentSpec, momentInput } from "./state.js";

// Moments of this many elements may be larger than their parameter.
const SMALL = 1024;

/** What a session computes: a training step, an optimizer step, or results for the caller. */
export type Kind = "training" | "optimizer" | "results";

/** Names of all inputs of the training model. */
export function trainingInputs(manifest: Manifest): string[] {
  return [manifest.inputs, manifest.targets, manifest.parameters, manifest.statistics, manifest.hostInputs]
    .flat()
    .map((spec) => spec.name);
}

/** Names of the outputs of the training model that a step reads. */
export function trainingOutputs(manifest: Manifest): string[] {
  const gradients = manifest.parameters.flatMap(({ gradient, gradientIndices }) => [gradient, gradientIndices]);
  return [
    ...manifest.outputs,
    ...gradients.filter((name) => name !== null),
    ...manifest.statistics.map((spec) => spec.output),
  ];
}

/** Says for WebGPU where each output goes: what the next step reads stays on the device. */
export function locations(manifest: Manifest, kind: Kind): Record<string, "cpu" | "gpu-buffer"> {
  const result: Record<string, "cpu" | "gpu-buffer"> = {};
  if (kind === "training") {
    for (const name of trainingOutputs(manifest)) result[name] = "gpu-buffer";
    // The caller reads the outputs, and rows of sparse gradients differ in number from step to step.
    for (const name of manifest.outputs) result[name] = "cpu";
    for (const { gradient, gradientIndices } of manifest.parameters)
      if (gradientIndices) result[gradient!] = result[gradientIndices] = "cpu";
  } else if (kind === "optimizer") {
    for (const { name, trainable } of manifest.parameters) {
      if (!trainable) continue;
      result[`${name}_updated`] = "gpu-buffer";
      for (const moment of manifest.optimizer!.moments) result[`${name}_${moment}_updated`] = "gpu-buffer";
    }
  }
  return result;
}

/** Throws a ModelLoadError unless a session has exactly these inputs, and at least these outputs. */
export function requireNames(
  session: InferenceSession,
  source: string,
  inputs: readonly string[],
  outputs: readonly string[],
): void {
  const missing = [
    ...inputs.filter((name) => !session.inputNames.includes(name)).map((name) => `input '${name}'`),
    ...outputs.filter((name) => !session.outputNames.includes(name)).map((name) => `output '${name}'`),
  ];
  const extra = session.inputNames.filter((name) => !inputs.includes(name)).map((name) => `input '${name}'`);
  if (missing.length || extra.length) {
    const text = [
      missing.length && `it lacks ${missing.slice(0, 5).join(", ")}`,
      extra.length && `the manifest lacks its ${extra.slice(0, 5).join(", ")}`,
    ];
    throw new ModelLoadError(
      `Loading ${source}: ${text.filter(Boolean).join("; ")}. Pass all files of one run as generate_artifacts wrote them.`,
    );
  }
}

/** Reads dtypes and shapes of the moments from the inputs of the optimizer model. */
export function momentSpecs(manifest: Manifest, session: InferenceSession, source: string): MomentSpec[] {
  const { moments, initialValues, learningRate, step } = manifest.optimizer ?? {
    moments: [],
    initialValues: [],
    learningRate: "",
    step: "",
  };
  if (!manifest.optimizer)
    throw new ModelLoadError(`Loading ${source}: the manifest describes no optimizer. Generate the artifacts again.`);
  const specs: MomentSpec[] = [];
  const names = [learningRate, step];
  for (const parameter of manifest.parameters.filter((spec) => spec.trainable)) {
    names.push(
      parameter.name,
      `${parameter.name}_grad`,
      ...(parameter.gradientIndices ? [`${parameter.name}_grad_indices`] : []),
    );
    for (const [index, moment] of moments.entries()) {
      const name = momentInput({ parameter: parameter.name, moment });
      // Groups of parameters may have optimizers of their own, so not every parameter has every moment.
      const input = session.inputMetadata[session.inputNames.indexOf(name)];
      if (!input) continue;
      names.push(name);
      if (!input.isTensor || !input.shape.every((size) => typeof size === "number")) {
        throw new ModelLoadError(
          `Loading ${source}: its input '${name}' is no tensor of a fixed shape. Generate the artifacts again.`,
        );
      }
      const count = elements(input.shape as number[]);
      // The state is allocated by these sizes, which nothing else in the files bounds.
      if (!(count <= Math.max(SMALL, elements(parameter.shape)))) {
        throw new ModelLoadError(
          `Loading ${source}: its input '${name}' has the shape [${input.shape.join(", ")}], more elements than the parameter's [${parameter.shape.join(", ")}]. Generate the artifacts again.`,
        );
      }
      specs.push({
        moment,
        parameter: parameter.name,
        dtype: dtypeOf(input.type),
        shape: input.shape as number[],
        initialValue: initialValues[index]!,
      });
    }
  }
  const outputs = [...manifest.parameters.filter((s) => s.trainable).map((s) => s.name), ...specs.map(momentInput)].map(
    (name) => `${name}_updated`,
  );
  requireNames(session, source, names, outputs);
  return specs;
}
