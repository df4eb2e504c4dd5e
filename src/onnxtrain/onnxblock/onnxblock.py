"""Outermost blocks: one that gives a model, and one that gives the models of a training run."""

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
from onnxtrain.onnxblock.checkpoint_utils import STATISTIC_KEY
from onnxtrain.onnxblock.model_accessor import ModelAccessor, base
from onnxtrain.passes import canonicalize, load_model, to_proto
from onnxtrain.training.training_graph import TrainingGraphs, build_training_graphs

__all__ = ["ForwardBlock", "TrainingBlock", "build_forward", "output_names", "parameter_protos"]

_T = TypeVar("_T")


class ForwardBlock(Block):
    """A block whose results become the outputs of the base model.

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
        """Builds the block, makes its results the outputs of the base model, and returns their names."""
        result = super().__call__(*args, **kwargs)
        _set_outputs(self._accessor, output_names(result, self._doing), self._doing)
        self._model = onnx.ModelProto()
        self._model.CopyFrom(self.base)
        return result

    def to_model_proto(self) -> onnx.ModelProto:
        """Returns the base model as it was when this block had been built.

        Raises:
            TrainingStateError: the block has not been built yet.
        """
        return _built(self._model, self)


class TrainingBlock(Block):
    """A block whose result is the loss: building it gives the training model and the eval model.

    `build` returns the name of the loss, a tensor of one element, or a tuple of the loss and further values
    that the models shall return.

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
        self._wanted: dict[str, bool] = {}
        self._graphs: TrainingGraphs | None = None
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Says whether a parameter is trained, or frozen (part of the checkpoint, but not trained).

        An input of the base model may be named too: the training model then has its gradient among its last
        outputs, named `<input>_grad` where that is free. The on-device API does not return it, sessions do.

        Where no parameter was named for training, every floating-point one that is neither frozen nor a
        BatchNorm running statistic is trained. Where some were, the ones not named stay embedded in the
        models.

        Args:
            argument_name: name of an initializer or input of the base model.
            value: True to train it, False to freeze it; the last call for a name counts.
        """
        self._wanted[argument_name] = bool(value)

    @without_collection()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block and from it both models; returns what `build` returned.

        The base model is the training model afterwards.

        Raises:
            TrainingStateError: there is no base model.
            GraphBuildError: a name is unknown, or the base model is no valid ONNX model any more.
            NothingToTrain: no parameter is left to train.
            DifferentiationError: the result has more than one element, or an op on the way has no gradient
                rule.
        """
        result = super().__call__(*args, **kwargs)
        accessor = self._accessor
        loss, *additional = output_names(result, self._doing)
        _set_outputs(accessor, [loss, *additional], self._doing)
        model = canonicalize(load_model(accessor.to_ir()), self._wanted)
        inputs = {str(value.name) for value in model.graph.inputs}
        wanted = {name: value for name, value in self._wanted.items() if name not in inputs}
        graphs = build_training_graphs(
            model,
            loss,
            additional,
            requires_grad=[name for name, value in wanted.items() if value] or None,
            frozen=[name for name, value in wanted.items() if not value],
            input_gradients=[name for name, value in self._wanted.items() if value and name in inputs],
        )
        self._graphs = graphs
        self._models = to_proto(graphs.training), to_proto(graphs.eval)
        accessor.model.CopyFrom(self._models[0])
        return result

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """Returns the parameters to train and the frozen ones, in the order of the model.

        Tensors in external data stay there: their protos refer to the file by its absolute path. BatchNorm
        running statistics come last among the frozen ones, with metadata that :func:`save_checkpoint` knows
        them by.

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
    """Returns the model with a block on top, and the names of its outputs: the block's results, then others.

    The block sees the model as it is, in its own opset: its author wrote the nodes for that one.

    Args:
        block: for example a loss.
        model: the model to build on; not changed.
        names: what the block is called with.
        model_path: the file of `model`, beside which its external data is.
        additional_outputs: further values to return.

    Raises:
        GraphBuildError: as when a block is called.
    """
    with base(model, model_path) as accessor:
        doing = f"building the block {type(block).__name__}"
        outputs = [*output_names(block(*names), doing), *additional_outputs]
        _set_outputs(accessor, outputs, doing)
        return load_model(accessor.to_ir()), outputs


def parameter_protos(graphs: TrainingGraphs) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
    """Returns the parameters to train and the frozen ones, as :meth:`TrainingBlock.parameters` does."""
    names = set(graphs.trainable)
    trainable = [_tensor_proto(n, t) for n, t in graphs.parameters.items() if n in names]
    frozen = [_tensor_proto(n, t) for n, t in graphs.parameters.items() if n not in names]
    statistics = [_tensor_proto(n, t) for n, t in graphs.statistics.items()]
    for tensor in statistics:
        tensor.metadata_props.append(onnx.StringStringEntryProto(key=STATISTIC_KEY, value="true"))
    return trainable, frozen + statistics


def output_names(result: str | Iterable[str], doing: str) -> list[str]:
    """Returns what a `build` method returned as a list of names.

    Raises:
        GraphBuildError: it is neither a name nor a non-empty tuple or list of names.
    """
    names = [result] if isinstance(result, str) else list(result) if isinstance(result, tuple | list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise GraphBuildError(
            f"{doing}: its build method returned {result!r}; return the name of the result, or a tuple of "
            "names"
        )
    return names


def _set_outputs(accessor: ModelAccessor, names: Sequence[str], doing: str) -> None:
    """Makes the values the outputs of the base model, instead of those it has."""
    infos = []
    for name in names:
        value = _graft.describe(accessor, name, doing)
        if value.type is None:
            raise GraphBuildError(
                f"{doing}: the dtype of {name!r} is unknown, so it cannot be an output of the model; "
                "declare it in the value_info of the base model"
            )
        infos.append(ir.serde.serialize_value(value))
    graph = accessor.model.graph
    del graph.output[:]
    graph.output.extend(infos)
    kept = [info for info in graph.value_info if info.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _built(thing: _T | None, block: Block) -> _T:
    if thing is None:
        raise TrainingStateError(
            f"reading the result of the block {type(block).__name__}: it has not been built yet; "
            "call it inside `with onnxblock.base(model):` first"
        )
    return thing


def _tensor_proto(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    if isinstance(tensor, ir.ExternalTensor):
        proto = onnx.TensorProto(
            dims=tensor.shape.numpy(), data_type=int(tensor.dtype), data_location=onnx.TensorProto.EXTERNAL
        )
        place = {"location": tensor.path, "offset": tensor.offset or 0, "length": tensor.nbytes}
        proto.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in place.items())
    else:
        proto = ir.serde.serialize_tensor(tensor)
    proto.name = name
    return proto
