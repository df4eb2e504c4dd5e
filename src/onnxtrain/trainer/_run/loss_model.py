"""Computes the loss of the first samples of a batch from the model's outputs and the targets.

A model with a fixed batch size can run on an incomplete batch that is padded, but its loss then includes the padding.
Therefore the nodes of the loss are cut out of the eval model and run on the outputs of the real samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.errors import InputError
from onnxtrain.passes import CleanupPass, load_model, to_proto
from onnxtrain.runtime.binding import Binding
from onnxtrain.runtime.device import Device
from onnxtrain.runtime.dtypes import BY_NAME, Array, narrow
from onnxtrain.runtime.inputs import check_arguments
from onnxtrain.runtime.manifest import Manifest
from onnxtrain.runtime.session import open_session
from onnxtrain.runtime.store import Buffer, alias, to_array
from onnxtrain.trainer.data import dynamic_remedy, relaxed

# Relative tolerance between the loss of all samples and the sum over two parts. float16 has three significant digits,
# bfloat16 two.
_TOLERANCE, _TOLERANCE_OF_BFLOAT16 = 1e-3, 1e-2


class LossModel:
    """The part of an eval model between its outputs and its loss.

    Args:
        path: eval model file.
        manifest: manifest of the run.
        buffers: parameters and statistics by name; some losses use parameters, e.g. for weight decay.
        device: execution device of the run.
        options: session options of the run.

    Raises:
        InputError: the loss uses an input other than targets, or an output without samples along axis 0.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        buffers: Mapping[str, Buffer],
        device: Device,
        options: ort.SessionOptions | None,
    ) -> None:
        model = load_model(path)
        outputs = _cut(model, set(manifest.outputs[1:]))
        inputs = {str(value.name): value for value in model.graph.inputs}
        self._specs = [
            (index, spec) for index, spec in enumerate(relaxed(manifest.arguments)) if spec.name in inputs
        ]
        allowed = {spec.name for spec in manifest.targets} | {
            spec.name for spec in manifest.inputs if spec.class_labels is not None
        }
        # An input that reaches the loss without passing through an output would have to be cut as well, which is not
        # supported.
        foreign = [spec.name for _, spec in self._specs if spec.name not in allowed]
        batches = {spec.shape[0] for spec in manifest.arguments if spec.shape}
        shapes = [inputs[name].shape for name in outputs.values() if name in inputs]
        if foreign or any(shape is None or not shape or shape[0] not in batches for shape in shapes):
            raise _refusal("it is not computed from the model's outputs separately for each sample")
        _forget_batch(model, {*outputs.values(), *(spec.name for _, spec in self._specs)})
        self._outputs = [
            (index, outputs[name])
            for index, name in enumerate(manifest.outputs[1:])
            if outputs.get(name) in inputs
        ]
        self._narrow = {name for name, value in inputs.items() if value.dtype == ir.DataType.BFLOAT16}
        session = open_session(to_proto(model).SerializeToString(), "loss of the eval model", device, options)
        bfloat16 = model.graph.outputs[0].dtype == ir.DataType.BFLOAT16
        self._tolerance = _TOLERANCE_OF_BFLOAT16 if bfloat16 else _TOLERANCE
        self._mean = manifest.loss_mean
        self._arguments = manifest.arguments
        self._binding = Binding(
            session,
            device,
            arguments=[name for _, name in self._outputs] + [spec.name for _, spec in self._specs],
            results=manifest.outputs[:1],
            inputs={name: buffer for name, buffer in buffers.items() if name in inputs},
            outputs={},
            doing="The loss of an incomplete batch",
        )

    def loss_of_first(
        self, count: int, loss: float, outputs: Sequence[Array], arrays: Sequence[Array]
    ) -> float:
        """Returns the loss of the first `count` samples of a batch; the other samples are padding.

        To verify that the loss is a sum or mean over samples, `loss` is compared with the losses of the first `count`
        samples and of the rest.

        Args:
            count: number of samples.
            loss: loss of the whole batch, computed by the eval model.
            outputs: other outputs of the eval model for the whole batch.
            arrays: arguments of the eval model.

        Raises:
            InputError: the loss is not a sum or mean over samples, so there is no per-sample loss.
        """
        # Only a sum or mean over samples adds up from two parts; a loss over pairs of samples, for example, does not.
        cuts = (slice(None, count), slice(count, None))
        parts = [[[array[cut] for array in group] for group in (outputs, arrays)] for cut in cuts]
        losses = [self._run(*part) for part in parts]
        sums = [self._sum(value, part[1]) for value, part in zip(losses, parts, strict=True)]
        whole, size = self._sum(loss, arrays), sum(map(abs, sums))
        if np.isfinite([whole, size]).all() and abs(whole - sum(sums)) > self._tolerance * max(size, 1e-6):
            raise _refusal("it is not a mean or sum over the samples")
        return losses[0]

    def _run(self, outputs: Sequence[Array], arrays: Sequence[Array]) -> float:
        specs = [spec for _, spec in self._specs]
        targets = check_arguments(specs, [arrays[index] for index, _ in self._specs])
        values = [self._value(outputs[index], name) for index, name in self._outputs]
        try:
            return float(np.asarray(to_array(self._binding.run([*values, *targets])[0])))
        except InputError as error:
            raise _refusal(f"it cannot be run on {len(arrays[0])} samples") from error

    def _value(self, output: Array, name: str) -> Array | ort.OrtValue:
        """Converts an output of the eval model to the value of the input `name`.

        A bfloat16 output is read as a float32 array, but must be passed to a bfloat16 input as raw bits.
        """
        array = np.ascontiguousarray(output)
        bfloat16 = BY_NAME["bfloat16"]
        return alias(narrow(array, bfloat16), bfloat16) if name in self._narrow else array

    def _sum(self, loss: float, arrays: Sequence[Array]) -> float:
        """Returns the loss as a sum over samples; multiplies a mean loss by its divisor."""
        count = 1.0 if self._mean is None else self._mean.count(self._arguments, arrays)
        return loss * count if count else 0.0


def _refusal(reason: str) -> InputError:
    return InputError(
        "The model takes batches of one size, and the loss of an incomplete last batch cannot be computed: "
        f"{reason}. Pass samples that fill all batches. {dynamic_remedy()}"
    )


def _cut(model: ir.Model, names: set[str]) -> dict[str, str]:
    """Cuts the model at its outputs `names`: they become inputs, and the loss becomes the only output.

    Returns:
        The names of the new inputs, by output name.
    """
    graph = model.graph
    values = {str(value.name): value for value in graph.outputs}
    loss = graph.outputs[0]
    graph.outputs.clear()
    graph.outputs.append(loss)
    inputs = {}
    for name in names:
        value = values[name]
        cut = ir.Value(name=f"{name}/onnxtrain.cut", shape=value.shape, type=value.type)
        value.replace_all_uses_with(cut)
        graph.inputs.append(cut)
        inputs[name] = str(cut.name)
    # Only the nodes between the network's outputs and the loss are left.
    CleanupPass(keep=set())(model)
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    return inputs


def _forget_batch(model: ir.Model, inputs: set[str]) -> None:
    """Makes the first dimension of `inputs` symbolic, so that the model accepts any number of samples.

    The shapes of intermediate values are removed, because they may contain the old batch size.
    """
    for node in model.graph:
        for output in node.outputs:
            output.shape = None
    model.graph.outputs[0].shape = ir.Shape([])
    for value in model.graph.inputs:
        if value.name in inputs and value.shape is not None:
            value.shape = ir.Shape(["samples", *value.shape[1:]])
