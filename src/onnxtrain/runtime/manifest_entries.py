"""Defines the entries of a manifest, one class per kind (`docs/reference/file-formats.md`, "The manifest")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.runtime.dtypes import Array, DType

Dim = int | str | None
"""Size of an axis: an integer, a symbolic size such as "batch", or None if it is unknown."""
Signature = tuple[str, str, Sequence[int]]
"""Name, dtype and shape of one tensor, e.g. ("fc.weight", "float32", (2, 3))."""


@dataclass(frozen=True)
class ClassLabels:
    """Specifies which class labels an integer target may contain, and which logits they belong to.

    Attributes:
        count: number of classes; labels are 0 to count - 1. None if it is unknown.
        ignore_index: label of elements that are ignored, e.g. -100; None if there is no such label.
        axis: class axis of the logits, e.g. -1 for [batch, sequence, vocabulary].
        scores: shape of the logits, e.g. ("batch", "seq", 512); None if they have at most two axes, where `axis` is
            unambiguous.
        shift: distance between a label and the logits that predict it: the logits at position t of axis 1 predict the
            label at t + shift. It is 1 for next-token prediction.
    """

    count: int | None
    ignore_index: int | None
    axis: int = 1
    scores: tuple[Dim, ...] | None = None
    shift: int = 0


@dataclass(frozen=True)
class LossMean:
    """Denominator of a loss that is a mean over a batch's samples or labels.

    To average such losses over several batches, weight each batch by its :meth:`count`.

    Attributes:
        labels: name of the input or target with the labels, e.g. "labels"; None for a mean over samples.
        ignore_index: label that is ignored, e.g. -100; None if no label is ignored.
        weight: weight per class, e.g. (1.0, 0.5); None if all classes have weight 1.
        sample_weight: name of the input with one weight per sample. In :meth:`count`, samples or their labels count
            with this weight. None if all samples have weight 1.
        shift: number of labels to skip at the start of each sequence, because no logits predict them. It is 1 for
            next-token prediction.
    """

    labels: str | None = None
    ignore_index: int | None = None
    weight: tuple[float, ...] | None = None
    sample_weight: str | None = None
    shift: int = 0

    def count(self, specs: Sequence[InputSpec], arrays: Sequence[Array]) -> float:
        """Returns the weight of a batch's loss in a mean over batches.

        Args:
            specs: inputs and targets of the training model.
            arrays: one array per input and target.

        Returns:
            The number of samples or non-ignored labels, or the sum of their weights.
        """
        if self.labels is None and self.sample_weight is None:
            return float(len(arrays[0]))
        if self.sample_weight is not None:
            named = {spec.name: array for spec, array in zip(specs, arrays, strict=True)}
            return self._weighted(named, named[self.sample_weight])
        labels = next(a for spec, a in zip(specs, arrays, strict=True) if spec.name == self.labels)
        labels = labels[:, self.shift :] if self.shift else labels
        if self.weight is None:
            return float(
                labels.size if self.ignore_index is None else np.count_nonzero(labels != self.ignore_index)
            )
        # First, because the ignored label may not be a valid index of the weights.
        if self.ignore_index is not None:
            labels = labels[labels != self.ignore_index]
        return float(np.asarray(self.weight)[labels].sum())

    def _weighted(self, named: Mapping[str, Array], weights: Array) -> float:
        """Returns the denominator of a loss with sample weights: the total weight of the samples or of their labels.

        The default denominator is the sum of the sample weights. For a mean over labels with `ignore_index` or
        `weight`, each non-ignored label adds its sample's weight times its class weight.

        Args:
            named: the batch's inputs and targets by name.
            weights: the sample weights, [N].
        """
        # In float64, because a sum of many float32 weights would lose digits.
        if self.labels is None or (self.ignore_index is None and self.weight is None):
            # Then the loss is the weighted mean of the samples' losses.
            return float(weights.sum(dtype=np.float64))
        labels = named[self.labels]
        labels = labels[:, self.shift :] if self.shift else labels
        counted = np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
        of_class = np.ones(1) if self.weight is None else np.asarray(self.weight)
        # An ignored label, e.g. -100, is not a valid index: it reads the weight of class 0, which is replaced by 0.
        index = np.where(counted, labels, 0) if self.weight is not None else np.zeros(labels.shape, int)
        counts = np.where(counted, of_class[index], 0.0).reshape(len(labels), -1).sum(axis=1)
        return float(counts @ weights.astype(np.float64))


@dataclass(frozen=True)
class LabelSequences:
    """The allowed values of a target with a sequence of labels per sample, [N, S].

    Attributes:
        lengths: name of the target with the number of labels of each sample, [N]; numbers after them are padding.
        blank: class that is not a label.
        count: number of classes with the blank; None if it is unknown.
    """

    lengths: str
    blank: int
    count: int | None = None


@dataclass(frozen=True)
class InputSpec:
    """A user input or target of the training model.

    Attributes:
        name: name of the graph input, e.g. "x".
        dtype: element type.
        shape: sizes, e.g. ("batch", 4); None if the rank is unknown.
        class_labels: the allowed labels, for a target with class labels; else None.
        sample_weight: True if it contains a weight per sample.
        sequences: the allowed labels, for a target with a sequence of labels per sample; else None.
        groups: for a target of a loss over several rows per sample, e.g. the texts of a pair: their number or the name
            of a symbolic size. The training model's inputs then have the shape [batch, groups, ...]; else None.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...] | None
    class_labels: ClassLabels | None = None
    sample_weight: bool = False
    groups: int | str | None = None
    sequences: LabelSequences | None = None


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of the training model.

    Attributes:
        name: name of the graph input, e.g. "fc.weight".
        dtype: element type.
        shape: sizes, e.g. (3, 4).
        trainable: False if the parameter is frozen.
        gradient: name of the output with the gradient, e.g. "fc.weight_grad"; None if the parameter is frozen.
        gradient_indices: name of the output with the row indices of a sparse gradient; None for a dense gradient.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    trainable: bool
    gradient: str | None
    gradient_indices: str | None = None


@dataclass(frozen=True)
class StatisticSpec:
    """A running statistic of a BatchNorm layer.

    Attributes:
        name: name of the graph input, e.g. "bn.running_mean".
        dtype: element type.
        shape: sizes, e.g. (16,).
        output: name of the output with the updated value, e.g. "bn.running_mean_updated".
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    output: str


HOST_VALUES = ("seed", "step", "run")
"""Numbers that a host provides in addition to data and parameters: the user's seed, 0 by default; the number of
optimizer steps taken so far, which checkpoints keep; and the number of runs of the training model since the last of
these steps."""


@dataclass(frozen=True)
class HostInput:
    """An input for the seed and step counts, from which the training model computes e.g. Dropout masks.

    The host, i.e. `Module` or another program that runs the model, sets the input before each call.

    Attributes:
        name: name of the graph input, e.g. "onnxtrain.random".
        holds: the meaning of each element of the input (int64 [n]), e.g. ("seed", "step", "run"). See
            :data:`HOST_VALUES`.
    """

    name: str
    holds: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerSpec:
    """Describes the optimizer model that belongs to a training model: its algorithm, state tensors and inputs.

    Attributes:
        type: name of the optimizer, e.g. "AdamW".
        settings: settings of the optimizer by name, e.g. {"eps": 1e-8, "weight_decay": 0.01}; empty if the manifest
            doesn't list them.
        moments: names of the optimizer's state tensors, e.g. ("momentum0", "momentum1"). A trainable parameter has at
            most one tensor per name.
        initial_values: for each moment, the initial value of all elements, e.g. (0.0, 0.0).
        learning_rate: name of the input with the learning rate, e.g. "learning_rate".
        step: name of the input with the step number, counted from 1, e.g. "step".
    """

    type: str
    moments: tuple[str, ...]
    initial_values: tuple[float, ...]
    learning_rate: str
    step: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


class DataFile(NamedTuple):
    """A file with weights that the models of a run share.

    Attributes:
        name: path relative to the artifacts' folder, e.g. "model.onnx.data".
        size: size in bytes.
        sha256: SHA-256 of the file in hexadecimal.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Lists the inputs, outputs and parameters of a training model and its eval, inference and optimizer models.

    The manifest is parsed from JSON in the models' metadata. `Module` and `Optimizer` use it to bind buffers to the
    models, and to check that the models and the checkpoint belong together.

    Attributes:
        fingerprint: digest of the parameters' and statistics' names, dtypes and shapes; see :func:`fingerprint`.
        inputs: user inputs, in order.
        targets: targets and sample weights, in order, e.g. "labels" and "sample_weight".
        outputs: names of the outputs of the training and eval models, the loss first, e.g. ("loss", "logits").
        parameters: all parameters, in graph order.
        statistics: running statistics of BatchNorm layers.
        optimizer: the optimizer; None if there is no optimizer model.
        loss_mean: the denominator of the loss; None if the loss is a sum.
        inference_outputs: names of the outputs of the inference model; empty if there is none.
        inference_inputs: names of the user inputs of the inference model. For a language model that generates text,
            these are `inputs` and its key-value cache, e.g. "past_key_values.0.key".
        profile: "default", or "portable" for models that run in every build of ONNX Runtime.
        host_inputs: inputs of the training model that the runtime fills, not the user; empty for most models.
        draws: True if the training model may use ONNX Runtime's random number generator, e.g. for Dropout.
        trainer: True if a `Trainer` wrote the models; checkpoints of the run then contain the trainer's settings.
        data_files: files with shared weights whose content is checked when a model is loaded.
    """

    fingerprint: str
    inputs: tuple[InputSpec, ...]
    targets: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    statistics: tuple[StatisticSpec, ...]
    optimizer: OptimizerSpec | None
    loss_mean: LossMean | None = LossMean()
    inference_outputs: tuple[str, ...] = ()
    inference_inputs: tuple[str, ...] = ()
    profile: str = "default"
    host_inputs: tuple[HostInput, ...] = ()
    draws: bool = True
    trainer: bool = False
    data_files: tuple[DataFile, ...] = ()

    @property
    def arguments(self) -> tuple[InputSpec, ...]:
        """Arguments of `Module.__call__`: user inputs, then targets."""
        return self.inputs + self.targets

    @property
    def groups(self) -> int | str | None:
        """Number of rows per sample (see :attr:`InputSpec.groups`); None if each sample is one row."""
        return next((spec.groups for spec in self.targets if spec.groups is not None), None)

    @property
    def row_inputs(self) -> tuple[InputSpec, ...]:
        """User inputs of the inference model, which have no axis for the rows of a sample."""
        if self.groups is None:
            return self.inputs
        return tuple(replace(spec, shape=(None, *(spec.shape or ())[2:])) for spec in self.inputs)

    @property
    def sample_weight(self) -> InputSpec | None:
        """The target with a weight per sample, or None."""
        return next((spec for spec in self.targets if spec.sample_weight), None)

    @property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        """The trainable parameters in graph order."""
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def sparse(self) -> tuple[ParameterSpec, ...]:
        """The trainable parameters with a sparse gradient, in graph order."""
        return tuple(p for p in self.trainable if p.gradient_indices is not None)
