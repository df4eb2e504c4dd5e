"""Defines the outermost blocks: `ForwardBlock` builds one model, `TrainingBlock` a training model and an eval model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from onnxtrain._building import without_collection
from onnxtrain.errors import GraphBuildError, TrainingStateError
from onnxtrain.onnxblock import _graft
from onnxtrain.onnxblock._block import Block
from onnxtrain.onnxblock.checkpoint_utils import parameter_protos
from onnxtrain.onnxblock.model_accessor import ModelAccessor, base
from onnxtrain.passes import canonicalize, load_model, to_proto
from onnxtrain.recipe import Recipe
from onnxtrain.training.training_graph import TrainingGraphs, build_training_graphs

__all__ = ["ForwardBlock", "TrainingBlock", "build_forward", "output_names"]

_T = TypeVar("_T")


class ForwardBlock(Block):
    """A block whose outputs become the outputs of a model.

    Example:
        >>> from onnxtrain import onnxblock
        >>> class Classifier(onnxblock.ForwardBlock):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = onnxblock.blocks.Linear(16, 3)
        ...     def build(self, x):
        ...         return self.linear(x)
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block, makes its outputs the outputs of the base model, and returns their names."""
        result = super().__call__(*args, **kwargs)
        _set_outputs(self._accessor, output_names(result, self._doing), self._doing)
        # A copy, because blocks called later modify the base model.
        self._model = onnx.ModelProto()
        self._model.CopyFrom(self.base)
        return result

    def to_model_proto(self) -> onnx.ModelProto:
        """Returns the base model as it was after this block was built, without the nodes of later blocks.

        Raises:
            TrainingStateError: the block has not been built yet.
        """
        return _built(self._model, self)


class TrainingBlock(Block):
    """A block that ends in the loss, and builds the training model and the eval model.

    `build` returns the name of the loss, a tensor with one element. To add outputs to both models, return a tuple: the
    name of the loss, then the names of the other outputs.

    Example:
        >>> from onnxtrain import onnxblock
        >>> class Regression(onnxblock.TrainingBlock):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.loss = onnxblock.loss.MSELoss()
        ...     def build(self, y):
        ...         return self.loss(y), y
    """

    def __init__(self) -> None:
        super().__init__()
        # For each name passed to `requires_grad`, True to train and False to freeze.
        self._wanted: dict[str, bool] = {}
        self._graphs: TrainingGraphs | None = None
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Marks a parameter as trained or as frozen (in the checkpoint, but not trained).

        If no parameter is marked as trained, all floating-point parameters are trained, except frozen parameters and
        BatchNorm running statistics. Otherwise, parameters without a mark become constants of the models.

        If `argument_name` is an input of the base model, the training model returns the input's gradient as an
        additional output, named `<input>_grad` unless that name is in use. The on-device API ignores this output.

        Args:
            argument_name: name of an initializer or input of the base model, e.g. "fc.weight".
            value: True to train it, False to freeze it. The last call with the same name wins.
        """
        self._wanted[argument_name] = bool(value)

    @without_collection()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block and both models; returns the result of `build`.

        Afterwards, the base model is the training model.

        Raises:
            TrainingStateError: there is no base model.
            GraphBuildError: a name is unknown, or the base model is no longer valid ONNX.
            NothingToTrain: no parameter is left to train.
            DifferentiationError: the loss has more than one element, or an op between the
                parameters and the loss has no gradient rule.
        """
        result = super().__call__(*args, **kwargs)
        accessor = self._accessor
        loss, *additional = output_names(result, self._doing)
        _set_outputs(accessor, [loss, *additional], self._doing)
        # Frozen names are withheld from folding as well, because a device may set frozen parameters.
        model = canonicalize(load_model(accessor.to_ir()), self._wanted)
        # Names of inputs request gradients of inputs; all others are parameters.
        inputs = {str(value.name) for value in model.graph.inputs}
        wanted = {name: value for name, value in self._wanted.items() if name not in inputs}
        graphs = build_training_graphs(
            model,
            loss,
            Recipe(
                requires_grad=[name for name, value in wanted.items() if value] or None,
                frozen_params=[name for name, value in wanted.items() if not value],
                additional_output_names=additional,
            ),
            input_gradients=[name for name, value in self._wanted.items() if value and name in inputs],
        )
        self._graphs = graphs
        self._models = to_proto(graphs.training), to_proto(graphs.eval)
        # As in onnxruntime-training, whose users read the training model from the accessor.
        accessor.model.CopyFrom(self._models[0])
        return result

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """Returns the trainable and the frozen parameters, each in graph order.

        Protos of external tensors refer to the file by its absolute path. BatchNorm running statistics are at the end
        of the frozen list; :func:`save_checkpoint` recognizes them by their metadata.

        Raises:
            TrainingStateError: the block has not been built yet.
        """
        return parameter_protos(_built(self._graphs, self))

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Returns the training model and the eval model.

        Raises:
            TrainingStateError: the block has not been built yet.
        """
        return _built(self._models, self)


def build_forward(
    block: Block,
    model: onnx.ModelProto,
    names: Sequence[str],
    *,
    model_path: str | os.PathLike[str] | None = None,
    additional_outputs: Sequence[str] = (),
) -> tuple[ir.Model, list[str]]:
    """Appends a block to a copy of a model, and makes the block's results the model's outputs.

    Args:
        block: the block, e.g. a loss.
        model: the base model; not modified.
        names: arguments of the call to the block, e.g. ["logits"].
        model_path: path of the file that `model` was loaded from. Its directory contains the external data.
        additional_outputs: names of other values that become outputs.

    Returns:
        The model with the block appended, and the names of its outputs: the block's outputs, then the additional
        outputs.

    Raises:
        GraphBuildError: a name is unknown, the dtype of an output is unknown, or the resulting model is not valid ONNX.
    """
    # Built in the model's own opset, for which the block was written, and converted together with the model afterwards.
    with base(model, model_path) as accessor:
        doing = f"building the block {type(block).__name__}"
        outputs = [*output_names(block(*names), doing), *additional_outputs]
        _set_outputs(accessor, outputs, doing)
        return load_model(accessor.to_ir()), outputs


def output_names(result: str | Iterable[str], doing: str) -> list[str]:
    """Converts the result of a `build` method to a list of names.

    Raises:
        GraphBuildError: the result is neither a name nor a non-empty tuple or list of names.
    """
    names = [result] if isinstance(result, str) else list(result) if isinstance(result, tuple | list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise GraphBuildError(
            f"{doing}: its build method returned {result!r}; return the name of the result, or a tuple of "
            "names"
        )
    return names


def _set_outputs(accessor: ModelAccessor, names: Sequence[str], doing: str) -> None:
    """Makes the named values the only outputs of the base model, in order."""
    infos = []
    for name in names:
        value = _graft.describe(accessor, name, doing)
        # ONNX requires a type for every output, but onnx cannot infer the output types of nonstandard ops.
        if value.type is None:
            raise GraphBuildError(
                f"{doing}: the dtype of {name!r} is unknown, so it cannot be an output of the model; "
                "declare its dtype in the base model's value_info"
            )
        infos.append(ir.serde.serialize_value(value))
    graph = accessor.model.graph
    del graph.output[:]
    graph.output.extend(infos)
    # The outputs now declare these values.
    kept = [info for info in graph.value_info if info.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _built(result: _T | None, block: Block) -> _T:
    """Returns `result`, or raises TrainingStateError if the block has not been built."""
    if result is None:
        raise TrainingStateError(
            f"reading the result of the block {type(block).__name__}: it has not been built yet; "
            "call it inside `with onnxblock.base(model):` first"
        )
    return result
