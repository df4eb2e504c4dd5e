"""Trains adapters on a file by onnxtrain, and runs files in plain sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import nets
import numpy as np
import onnx
import onnxruntime

from onnxtrain import api, optimizers
from onnxtrain.artifacts import generate_artifacts

Array = np.ndarray[Any, Any]
Activations = Literal["float", "deployed"]


class Training:
    """A training of the adapters that a model has."""

    def __init__(
        self, model: onnx.ModelProto, folder: Path, activations: Activations, learning_rate: float
    ) -> None:
        generate_artifacts(
            model,
            loss="causal_lm",
            loss_input_names=["logits"],
            optimizer=optimizers.AdamW(),
            activations=activations,
            additional_output_names=["logits"],
            artifact_directory=folder,
        )
        self.state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = api.Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = api.Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(learning_rate)

    def loss_and_gradients(self, tokens: Array, labels: Array) -> tuple[float, dict[str, Array]]:
        """Computes the loss of a batch, and gradients by parameter, in the shapes of the graph."""
        loss = self._run(tokens, labels)[0]
        gradients = {name: p.grad.copy() for name, p in self.state.parameters}
        self.module.lazy_reset_grad()
        return loss, gradients

    def steps(self, batches: Sequence[tuple[Array, Array]]) -> list[float]:
        """Takes a step for each batch; returns the losses."""
        losses = []
        for tokens, labels in batches:
            losses.append(self._run(tokens, labels)[0])
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return losses

    def logits(self, tokens: Array) -> Array:
        """Computes logits by the eval model."""
        self.module.eval()
        result = self._run(tokens, tokens)[1]
        self.module.train()
        return result

    def _run(self, tokens: Array, labels: Array) -> tuple[float, Array]:
        names = [spec.name for spec in self.module.manifest.inputs]
        values = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        loss, logits = self.module(*(values[name] for name in names), labels)
        return float(loss), np.array(logits)


class Session:
    """A plain session of onnxruntime on a file, with an adapter or without."""

    def __init__(
        self, model: Path | bytes, adapter: Path | None = None, level: str = "ORT_ENABLE_ALL"
    ) -> None:
        options = onnxruntime.SessionOptions()
        # onnxruntime warns of optional inputs.
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        self._session = onnxruntime.InferenceSession(model, options)
        self._options = onnxruntime.RunOptions()
        # The adapter must live as long as the options.
        self._adapter = onnxruntime.LoraAdapter()
        if adapter is not None:
            self._adapter.Load(str(adapter))
            self._options.add_active_adapter(self._adapter)

    def outputs(self, tokens: Array) -> dict[str, Array]:
        """Computes all outputs, of an empty cache if there is one."""
        feeds: dict[str, Array] = {}
        for value in self._session.get_inputs():
            if value.name == "input_ids":
                feeds[value.name] = tokens
            elif value.name == "attention_mask":
                feeds[value.name] = np.ones_like(tokens)
            # Keys or values of a layer: batch, heads, length and size of a head.
            else:
                feeds[value.name] = np.zeros((len(tokens), value.shape[1], 0, nets.HEAD), np.float32)
        names = [value.name for value in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, feeds, self._options), strict=True))

    def logits(self, tokens: Array) -> Array:
        """Computes the logits."""
        return self.outputs(tokens)["logits"]


def loss_of(logits: Array, labels: Array) -> float:
    """Computes the loss of a language model in float64: the mean over all labels that are not -100."""
    scores, following = logits[:, :-1].astype(np.float64), labels[:, 1:]
    largest = scores.max(-1, keepdims=True)
    logarithms = scores - largest - np.log(np.exp(scores - largest).sum(-1, keepdims=True))
    counted = following != -100
    chosen = np.take_along_axis(logarithms, np.where(counted, following, 0)[..., None], -1)[..., 0]
    return float(-chosen[counted].mean())


def moved(model: onnx.ModelProto, seed: int) -> bytes:
    """Returns a model whose norms and biases are the next floating-point numbers, up or down."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rng = np.random.default_rng(seed)
    for tensor in copy.graph.initializer:
        if (
            tensor.data_type == onnx.TensorProto.FLOAT
            and len(tensor.dims) == 1
            and "scale" not in tensor.name
        ):
            array = onnx.numpy_helper.to_array(tensor)
            towards = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.nextafter(array, towards), tensor.name))
    return copy.SerializeToString()


def greedy(logits: Any, prompt: Array, count: int, end: int) -> list[int]:
    """Appends the most likely token again and again.

    Args:
        logits: computes logits [1, length, vocabulary] of tokens [1, length].
        prompt: the first tokens, int64 [1, length].
        count: number of tokens to append.
        end: the token after which nothing comes.
    """
    tokens, result = prompt, []
    for _ in range(count):
        following = int(logits(tokens)[0, -1].argmax())
        result.append(following)
        if following == end:
            break
        tokens = np.concatenate([tokens, [[following]]], 1)
    return result


def largest_difference(ours: Array, theirs: Array) -> float:
    """Returns the largest difference, as a part of the largest number if that is above 1."""
    return float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))


def relative(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> float:
    """Returns the largest norm of a difference, as a part of the norm of what is expected.

    Raises:
        ValueError: a name is missing, or a gradient that has to be zero is not.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"gradients of {sorted(ours)}, expected those of {sorted(theirs)}")
    worst = 0.0
    for name, expected in theirs.items():
        norm = float(np.linalg.norm(expected))
        difference = float(np.linalg.norm(ours[name] - expected))
        # While B is zero, A has no gradient.
        if norm == 0 and difference != 0:
            raise ValueError(f"the gradient of {name} is {difference} instead of 0")
        worst = max(worst, difference / norm if norm else 0.0)
    return worst
