"""Wraps the optimizers of `onnxtrain.optimizers` as blocks that build an optimizer model when called with parameters.

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
    """A block that clips gradients: pass it to an optimizer as `clip_grad`, or call it with the gradients' names.

    Attributes:
        clipping: kind and limit of the clipping, e.g. `optimizers.ClipGradNorm(1.0)`.
    """

    def __init__(self, clipping: optimizers.GradientClipping) -> None:
        super().__init__()
        self.clipping = clipping

    def build(self, *gradients_names: str) -> tuple[str, ...]:
        """Appends ops that clip the named gradients; returns the names of the clipped gradients."""
        # Not a sequence of gradients, as SequenceConstruct returns, because its length is unknown here.
        for name in gradients_names:
            if not isinstance(self._describe(name).type, ir.TensorType):
                raise GraphBuildError(
                    f"{self._doing}: {name!r} is not a tensor; pass the names of the gradients, one "
                    "argument for each"
                )
        return _graft.append(
            self._accessor, self._doing, gradients_names, lambda op, *gs: self.clipping.apply(op, gs)
        )


class ClipGradNorm(ClippingBlock):
    """Scales all gradients by max_norm / norm if their total Euclidean norm exceeds max_norm.

    Args:
        max_norm: positive limit, e.g. 1.0.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__(optimizers.ClipGradNorm(max_norm))


class ClipGradValue(ClippingBlock):
    """Clamps each element of each gradient to [-value, value].

    Args:
        value: positive limit, e.g. 0.5.
    """

    def __init__(self, value: float) -> None:
        super().__init__(optimizers.ClipGradValue(value))


# onnxruntime-training takes a block; the clipping classes of `onnxtrain.optimizers` are accepted as well.
Clipping = ClippingBlock | optimizers.GradientClipping | None


class OptimizerBlock(ForwardBlock):
    """A block that builds the model of an optimizer from `onnxtrain.optimizers`; the base model must be empty.

    Attributes:
        optimizer: the optimizer and its settings, e.g. `optimizers.SGD(momentum=0.9)`.
    """

    def __init__(self, optimizer: optimizers.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def build(
        self, parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
    ) -> tuple[str, ...]:
        """Builds the optimizer model.

        Args:
            parameters: the trainable and the frozen parameters, as returned by :meth:`TrainingBlock.parameters`.

        Returns:
            The names of the outputs: for each trainable parameter `<p>_updated` and its updated moments.

        Raises:
            GraphBuildError: the base model is not empty, or a parameter cannot be trained.
            NothingToTrain: there is no trainable parameter.
        """
        base = self.base
        # The optimizer model replaces the base model, which would be lost.
        if base.graph.node or base.graph.input:
            raise GraphBuildError(
                f"{self._doing}: the base model is not empty; an optimizer is a model of its own, "
                "call it inside `with onnxblock.empty_base():`"
            )
        trainable, frozen = parameters
        specs = [ParameterSpec(t.name, ir.DataType(t.data_type), tuple(t.dims)) for t in trainable]
        # A newer opset is the user's choice; older opsets are not supported by the formulas.
        opset = max(CANONICAL_OPSET, _graft.opset_of(base, "", CANONICAL_OPSET))
        model = build_optimizer_model(self.optimizer, specs, opset)
        manifest = _manifest(trainable, frozen, opset) | {
            "optimizer": optimizers.manifest_entry(self.optimizer, specs)
        }
        # With a manifest, so that the on-device API can load an optimizer model that was not written by
        # `generate_artifacts`.
        model.metadata_props[METADATA_KEY] = json.dumps(manifest)
        base.CopyFrom(to_proto(model))
        return tuple(output.name for output in base.graph.output)


def build_optimizer(
    block: Block, parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
) -> tuple[ir.Model, dict[str, Any]]:
    """Calls a block to build an optimizer model.

    Args:
        block: an :class:`OptimizerBlock`, or a block that calls one.
        parameters: the trainable and the frozen parameters with which the block is called.

    Returns:
        The model, and the optimizer's manifest entry.

    Raises:
        GraphBuildError: the block has not built an optimizer model.
    """
    # Whatever its class, the block is called, because a subclass may have a build method of its own.
    with empty_base() as accessor:
        block(parameters)
        texts = [entry.value for entry in accessor.model.metadata_props if entry.key == METADATA_KEY]
        if not texts:
            raise GraphBuildError(
                f"building the block {type(block).__name__}: it was passed as the optimizer, but built no "
                "optimizer model; call a block of onnxblock.optim with the parameters in its build method"
            )
        return accessor.to_ir(), json.loads(texts[0])["optimizer"]


def _manifest(
    trainable: Sequence[onnx.TensorProto], frozen: Sequence[onnx.TensorProto], opset: int
) -> dict[str, Any]:
    """Returns the manifest of an optimizer model; its entries for the training model's inputs and outputs are empty."""
    # The fingerprint and the trainable parameters suffice to compare it with the training model.
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
        # Required entries of the format that don't depend on the parameters.
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
    """Base class for blocks that wrap one optimizer class, `makes`.

    Subclasses are dataclasses; their fields are the optimizer's settings, in onnxruntime-training's argument order.
    """

    makes: ClassVar[type[optimizers.Optimizer]]

    def __post_init__(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        # The optimizer accepts settings, not the block.
        if isinstance(settings["clip_grad"], ClippingBlock):
            settings["clip_grad"] = settings["clip_grad"].clipping
        super().__init__(self.makes(**settings))


@dataclass(eq=False, repr=False)
class AdamW(_NamedOptimizer):
    """Adam with decoupled weight decay; see :class:`onnxtrain.optimizers.AdamW` for the formulas.

    Args:
        bias_correction: False to use the running means without bias correction.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator for numerical stability.
        weight_decay: coefficient of decoupled weight decay.
        clip_grad: clipping of the gradients before the step, e.g. ClipGradNorm(1.0).
        adam_mode: 1 decays the weights after Adam's step, as onnxruntime-training does; 0 before it, as PyTorch does.
    """

    # The defaults are those of onnxruntime-training, not PyTorch's.
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
        eps: added to the denominator for numerical stability.
        weight_decay: coefficient of the L2 penalty.
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
        momentum: decay rate of the momentum; with 0 the optimizer has no state.
        dampening: the gradient is multiplied by 1 - dampening before it is added to the momentum.
        weight_decay: coefficient of the L2 penalty.
        nesterov: True for Nesterov momentum, which requires momentum > 0 and dampening 0.
    """

    makes = optimizers.SGD
    clip_grad: Clipping = None
    # onnxruntime-training had no further arguments.
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(eq=False, repr=False)
class Adagrad(_NamedOptimizer):
    """Adagrad; see :class:`onnxtrain.optimizers.Adagrad`.

    Args:
        lr_decay: the learning rate at step t (0 at the first step) is divided by 1 + t·lr_decay.
        weight_decay: coefficient of the L2 penalty.
        initial_accumulator_value: sum of squared gradients before the first step, e.g. 0.1.
        eps: added to the denominator for numerical stability.
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
        alpha: decay rate of the running mean of squared gradients.
        eps: added to the denominator for numerical stability.
        weight_decay: coefficient of the L2 penalty.
        momentum: decay rate of the momentum; 0 disables it.
        centered: True to divide by the standard deviation of the gradient instead of its root mean square.
        clip_grad: clipping of the gradients before the step, e.g. ClipGradNorm(1.0).
    """

    makes = optimizers.RMSprop
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    clip_grad: Clipping = None
