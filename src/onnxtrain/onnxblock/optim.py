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
from typing import Any

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


class AdamW(OptimizerBlock):
    """Adam with decoupled weight decay; see :class:`onnxtrain.optimizers.AdamW` for the formulas.

    Args:
        bias_correction: False leaves the running means uncorrected.
        betas: decay rates of the running means.
        eps: keeps the denominator from zero.
        weight_decay: decoupled from the gradient.
        clip_grad: how to limit the gradients first.
        adam_mode: 1 for Hugging Face's form, 0 for PyTorch's.
    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Clipping = None,
        adam_mode: int = 1,
    ) -> None:
        super().__init__(
            optimizers.AdamW(
                bias_correction=bias_correction,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                clip_grad=_clipping(clip_grad),
                adam_mode=adam_mode,
            )
        )


class Adam(OptimizerBlock):
    """Adam with an L2 penalty; see :class:`onnxtrain.optimizers.Adam`.

    Args:
        betas: decay rates of the running means.
        eps: keeps the denominator from zero.
        weight_decay: factor of the L2 penalty.
        clip_grad: how to limit the gradients first.
    """

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_grad: Clipping = None,
    ) -> None:
        super().__init__(
            optimizers.Adam(betas=betas, eps=eps, weight_decay=weight_decay, clip_grad=_clipping(clip_grad))
        )


class SGD(OptimizerBlock):
    """Stochastic gradient descent; see :class:`onnxtrain.optimizers.SGD`.

    Args:
        clip_grad: how to limit the gradients first.
        momentum: 0 has no state.
        dampening: of the gradient on its way into the momentum.
        weight_decay: factor of the L2 penalty.
        nesterov: look ahead; needs momentum, and no dampening.
    """

    def __init__(
        self,
        clip_grad: Clipping = None,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            optimizers.SGD(
                momentum=momentum,
                dampening=dampening,
                weight_decay=weight_decay,
                nesterov=nesterov,
                clip_grad=_clipping(clip_grad),
            )
        )


class Adagrad(OptimizerBlock):
    """Adagrad; see :class:`onnxtrain.optimizers.Adagrad`.

    Args:
        lr_decay: how fast the learning rate falls.
        weight_decay: factor of the L2 penalty.
        initial_accumulator_value: what the sum of squares is before the first step.
        eps: keeps the denominator from zero.
        clip_grad: how to limit the gradients first.
    """

    def __init__(
        self,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        clip_grad: Clipping = None,
    ) -> None:
        super().__init__(
            optimizers.Adagrad(
                lr_decay=lr_decay,
                weight_decay=weight_decay,
                initial_accumulator_value=initial_accumulator_value,
                eps=eps,
                clip_grad=_clipping(clip_grad),
            )
        )


class RMSprop(OptimizerBlock):
    """RMSprop; see :class:`onnxtrain.optimizers.RMSprop`.

    Args:
        alpha: decay rate of the running means.
        eps: keeps the denominator from zero.
        weight_decay: factor of the L2 penalty.
        momentum: of the changes; 0 has no state.
        centered: divide by the standard deviation instead of the root mean square.
        clip_grad: how to limit the gradients first.
    """

    def __init__(
        self,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        clip_grad: Clipping = None,
    ) -> None:
        super().__init__(
            optimizers.RMSprop(
                alpha=alpha,
                eps=eps,
                weight_decay=weight_decay,
                momentum=momentum,
                centered=centered,
                clip_grad=_clipping(clip_grad),
            )
        )


def _clipping(clip_grad: Clipping) -> optimizers.GradientClipping | None:
    return clip_grad.clipping if isinstance(clip_grad, ClippingBlock) else clip_grad
