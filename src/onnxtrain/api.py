"""Trains on a device; source-compatible with `onnxruntime.training.api`.

::

    from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer

    state = CheckpointState.load_checkpoint("checkpoint")
    module = Module("training_model.onnx", state, "eval_model.onnx")
    optimizer = Optimizer("optimizer_model.onnx", module)
    for x, labels in batches:
        loss = module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, "checkpoint", include_optimizer_state=True)
    module.export_model_for_inferencing("trained.onnx", ["logits"])
"""

from onnxtrain.runtime.custom_ops import register_custom_ops_library
from onnxtrain.runtime.module import Module
from onnxtrain.runtime.optimizer import Optimizer
from onnxtrain.runtime.scheduler import LinearLRScheduler
from onnxtrain.runtime.state import CheckpointState, Parameter, Parameters, Properties

__all__ = [
    "CheckpointState",
    "LinearLRScheduler",
    "Module",
    "Optimizer",
    "Parameter",
    "Parameters",
    "Properties",
    "register_custom_ops_library",
]
