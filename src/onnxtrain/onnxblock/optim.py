"""Optimizers as blocks: the optimizers of `onnxtrain.optimizers`, each called with the parameters of a model.

::

    optimizer = onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(1.0))
    with onnxblock.empty_base():
        optimizer(training_block.parameters())
    onnx.save(optimizer.to_model_proto(), "optimizer_model.onnx")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar

import onnx
import onnx_ir as ir

from onnxtrain import optimizers
from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock import _graft
from onnxtrain.onnxblock._block import Block
from onnxtrain.onnxblock.checkpoint_utils import is_statistic
from onnxtrain.onnxblock.model_accessor import empty_base
from onnxtrain.onnxblock.onnxblock import ForwardBlock
from onnxtrain.optimizers import ParameterSpec, build_optimizer_model
from onnxtrain.passes import CANONICAL_OPSET, to_proto
from onnxtrain.runtime.manifest import FORMAT, METADATA_KEY, VERSION, fingerprint

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ClipGradNorm",
    "ClipGradValue",
    "ClippingBlock",
    "OptimizerBlock",
    "RMSprop",
    "build_optimizer",
]


class ClippingBlock(Block):
    """A block that limits gradients; given to an optimizer as `clip_grad`, or called with names of gradients.

    Attributes:
        clipping: how.
    """

    def __init__(self, clipping: optimizers.GradientClipping) -> None:
        super().__init__()
        self.clipping = clipping

    def build(self, *gradients_names: str) -> tuple[str, ...]:
        """Appends the clipping of one or more gradients, tensors; returns the names of the results."""
        for name in gradients_names:
            if not isinstance(self._describe(name).type, ir.TensorType):
                raise GraphBuildError(
                    f"{self._doing}: {name!r} is no tensor; name the gradients, one argument for each"
                )
        return _graft.append(
            self._accessor, self._doing, gradients_names, lambda op, *gs: self.clipping.apply(op, gs)
        )


class ClipGradNorm(ClippingBlock):
    """Scales all gradients by max_norm/norm when the Euclidean norm of all of them together is larger.

    Args:
        max_norm: positive.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__(optimizers.ClipGradNorm(max_norm))


class ClipGradValue(ClippingBlock):
    """Limits each entry of each gradient to [-value, value].

    Args:
        value: positive.
    """

    def __init__(self, value: float) -> None:
        super().__init__(optimizers.ClipGradValue(value))


Clipping = ClippingBlock | optimizers.GradientClipping | None


class OptimizerBlock(ForwardBlock):
    """A block that builds the optimizer model of `onnxtrain.optimizers`, alone in an empty base model.

    Attributes:
        optimizer: the optimizer and its hyperparameters.
    """

    def __init__(self, optimizer: optimizers.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def build(
        self, parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
    ) -> tuple[str, ...]:
        """Builds the optimizer model.

        Args:
            parameters: the trainable and the frozen ones, as :meth:`TrainingBlock.parameters` returns them.

        Returns:
            The names of the outputs: `<p>_updated` and the moments of each trainable parameter.

        Raises:
            GraphBuildError: the base model is not empty, or a parameter cannot be trained.
            NothingToTrain: there is no trainable parameter.
        """
        base = self.base
        if base.graph.node or base.graph.input:
            raise GraphBuildError(
                f"{self._doing}: the base model is not empty; an optimizer is a model of its own, "
                "call it inside `with onnxblock.empty_base():`"
            )
        trainable, frozen = parameters
        specs = [ParameterSpec(t.name, ir.DataType(t.data_type), tuple(t.dims)) for t in trainable]
        opset = max(CANONICAL_OPSET, _graft.opset_of(base, "", CANONICAL_OPSET))
        model = build_optimizer_model(self.optimizer, specs, opset)
        manifest = _manifest(trainable, frozen, opset) | {
            "optimizer": optimizers.manifest_entry(self.optimizer, specs)
        }
        model.metadata_props[METADATA_KEY] = json.dumps(manifest)
        base.CopyFrom(to_proto(model))
        return tuple(output.name for output in base.graph.output)


def build_optimizer(
    block: Block, parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
) -> tuple[ir.Model, dict[str, Any]]:
    """Returns the optimizer model that a block builds, and what the manifest says of its optimizer.

    Args:
        block: an :class:`OptimizerBlock`, or a block that calls one.
        parameters: the trainable and the frozen ones, which the block is called with.

    Raises:
        GraphBuildError: the block has built no optimizer model.
    """
    with empty_base() as accessor:
        block(parameters)
        texts = [entry.value for entry in accessor.model.metadata_props if entry.key == METADATA_KEY]
        if not texts:
            raise GraphBuildError(
                f"building the block {type(block).__name__}: it was given as the optimizer, but has made no "
                "optimizer model; call a block of onnxblock.optim with the parameters in its build method"
            )
        return accessor.to_ir(), json.loads(texts[0])["optimizer"]


def _manifest(
    trainable: Sequence[onnx.TensorProto], frozen: Sequence[onnx.TensorProto], opset: int
) -> dict[str, Any]:
    """The manifest as far as the parameters tell: without the inputs and outputs of the training model."""
    kinds: dict[str, list[dict[str, Any]]] = {"parameters": [], "statistics": []}
    for tensor in (*trainable, *frozen):
        dtype = ir.DataType(tensor.data_type).numpy().name
        kinds["statistics" if is_statistic(tensor) else "parameters"].append(
            {"name": tensor.name, "dtype": dtype, "shape": list(tensor.dims)}
        )
    names = {tensor.name for tensor in trainable}
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint(
            *(
                [(e["name"], e["dtype"], e["shape"]) for e in kinds[kind]]
                for kind in ("parameters", "statistics")
            )
        ),
        "files": {},
        "inputs": [],
        "targets": [],
        "outputs": [],
        "loss": None,
        "parameters": [
            entry | {"trainable": True, "gradient": f"{entry['name']}_grad"}
            if entry["name"] in names
            else entry | {"trainable": False, "gradient": None}
            for entry in kinds["parameters"]
        ],
        "statistics": [entry | {"output": f"{entry['name']}_updated"} for entry in kinds["statistics"]],
        "opset": opset,
    }


@dataclass(eq=False, repr=False)
class _NamedOptimizer(OptimizerBlock):
    """A block that makes its optimizer from its arguments.

    Subclasses are dataclasses: their fields, in the order of onnxruntime-training's arguments, are the arguments
    of `__init__` and settings of the optimizer in `makes`.
    """

    makes: ClassVar[type[optimizers.Optimizer]]

    def __post_init__(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(settings["clip_grad"], ClippingBlock):
            settings["clip_grad"] = settings["clip_grad"].clipping
        super().__init__(self.makes(**settings))


@dataclass(eq=False, repr=False)
class AdamW(_NamedOptimizer):
    """Adam with decoupled weight decay; see :class:`onnxtrain.optimizers.AdamW` for the formulas.

    Args:
        bias_correction: False leaves the running means uncorrected.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator, to keep it from zero.
        weight_decay: factor of the decay, which is decoupled from the gradient.
        clip_grad: clipping of the gradients before the step, e.g. ClipGradNorm(1.0).
        adam_mode: 1 for Hugging Face's form, 0 for PyTorch's.
    """

    makes = optimizers.AdamW
    bias_correction: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    clip_grad: Clipping = None
    adam_mode: int = 1


@dataclass(eq=False, repr=False)
class Adam(_NamedOptimizer):
    """Adam with an L2 penalty; see :class:`onnxtrain.optimizers.Adam`.

    Args:
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator, to keep it from zero.
        weight_decay: factor of the L2 penalty.
        clip_grad: clipping of the gradients before the step, e.g. ClipGradNorm(1.0).
    """

    makes = optimizers.Adam
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: Clipping = None


@dataclass(eq=False, repr=False)
class SGD(_NamedOptimizer):
    """Stochastic gradient descent; see :class:`onnxtrain.optimizers.SGD`.

    Args:
        clip_grad: clipping of the gradients before the step, e.g. ClipGradNorm(1.0).
        momentum: factor of the momentum; with 0 the optimizer has no state.
        dampening: the gradient enters the momentum times 1 - dampening.
        weight_decay: factor of the L2 penalty.
        nesterov: look ahead; needs momentum, and no dampening.
    """

    makes = optimizers.SGD
    clip_grad: Clipping = None
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(eq=False, repr=False)
class Adagrad(_NamedOptimizer):
    """Adagrad; see :class:`onnxtrain.optimizers.Adagrad`.

    Args:
        lr_decay: the learning rate of step t, from 0, is divided by 1 + t·lr_decay.
        weight_decay: factor of the L2 penalty.
        initial_accumulator_value: sum of squares before the first step.
        eps: added to the denominator, to keep it from zero.
        clip_grad: clipping of the gradients before the step, e.g. ClipGradNorm(1.0).
    """

    makes = optimizers.Adagrad
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    clip_grad: Clipping = None


@dataclass(eq=False, repr=False)
class RMSprop(_NamedOptimizer):
    """RMSprop; see :class:`onnxtrain.optimizers.RMSprop`.

    Args:
        alpha: decay rate of the running means.
        eps: added to the denominator, to keep it from zero.
        weight_decay: factor of the L2 penalty.
        momentum: factor of the momentum of the changes; with 0 there is none.
        centered: divide by the standard deviation instead of the root mean square.
        clip_grad: clipping of the gradients before the step, e.g. ClipGradNorm(1.0).
    """

    makes = optimizers.RMSprop
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    clip_grad: Clipping = None
