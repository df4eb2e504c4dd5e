"""Starts a build: finds the parameters that the loss depends on, and turns parameters into graph inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.autodiff import active_values, without_gradient
from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.losses import TARGET_KEY
from onnxtrain.passes import promote_initializers, settle_shapes
from onnxtrain.selection import Selection, some_names
from onnxtrain.training.build_state import Build

_log = get_logger()


def start_build(
    forward: ir.Model, selection: Selection, adapters: Collection[str]
) -> tuple[Build, Collection[ir.Value]]:
    """Starts building training graphs from a forward graph: checks which selected parameters the loss depends on.

    Parameters on which it does not depend are not trained; a warning names them.

    Args:
        forward: the forward graph.
        selection: the roles of its initializers, e.g. trained parameters and running statistics.
        adapters: names of parameters that were added for this training run; the loss must depend on the trained ones.

    Returns:
        The initial state of the build, and the values between the trained parameters and the loss.

    Raises:
        GraphBuildError: a parameter has no value; the loss does not depend on an adapter.
        NothingToTrain: the loss depends on none of the parameters to train.
    """
    values = {name: _tensor(forward, name) for name in forward.graph.initializers}
    build = Build(
        forward,
        list(selection.trainable),
        list(selection.sparse),
        parameters={name: tensor for name, tensor in values.items() if name in selection.parameters},
        statistics={name: values[name] for name in selection.statistics},
    )
    active = _active_values(forward, build.trainable)
    _check_adapters(forward, [name for name in build.trainable if name in adapters], active)
    _drop_unreached(build, active)
    _drop_stopped(build, adapters)
    return build, active


def promote_parameters(build: Build) -> None:
    """Makes parameters and statistics inputs of the forward graph, after the user's inputs and the targets."""
    # The device sets the values of these inputs, so nothing may rely on them any more: shapes are inferred again.
    inputs = build.forward.graph.inputs
    # The sort is stable: inputs keep the file's order, and targets the order of the loss.
    users = sorted(inputs, key=lambda value: TARGET_KEY in value.metadata_props)
    inputs.clear()
    inputs.extend(users)
    promote_initializers(build.forward, [*build.parameters, *build.statistics])
    build.forward = settle_shapes(build.forward)


def _active_values(model: ir.Model, trainable: Sequence[str]) -> set[ir.Value]:
    """Returns the values between the parameters to train and the loss, the model's first output.

    Raises:
        NothingToTrain: the loss depends on none of the parameters.
    """
    loss = model.graph.outputs[0]
    active = active_values(model.graph, [loss], [model.graph.initializers[name] for name in trainable])
    if loss not in active:
        raise NothingToTrain(
            f"building the training graph: no gradient flows from the loss {loss.name!r} to any of the "
            f"parameters to train ({some_names(trainable, 5)}): the loss does not depend on them, or only "
            "through ops that have no gradient. Choose another value of the model in "
            f"{argument('loss_input_names')}, or other parameters in {argument('requires_grad')}."
        )
    return active


def _drop_unreached(build: Build, active: Collection[ir.Value]) -> None:
    """Stops training the parameters on which the loss does not depend, and logs a warning that names them.

    PyTorch's optimizers skip parameters without a gradient (grad is None). With zero gradients instead, weight decay
    and momentum would change the parameters.
    """
    graph = build.forward.graph
    inactive = [name for name in build.trainable if graph.initializers[name] not in active]
    if not inactive:
        return
    # The gradient through Round or Sign is zero, not absent: PyTorch's optimizers decay such parameters.
    reached = active_values(
        graph, [graph.outputs[0]], [graph.initializers[name] for name in inactive], through_steps=True
    )
    build.unreached = [name for name in inactive if graph.initializers[name] not in reached]
    if build.unreached:
        _log.warning(
            "The loss %r does not depend on %d of the %d parameters to train: %s. They get no gradient and keep their "
            "values, as parameters whose grad is None do in PyTorch. To silence this warning, name them in %s. To "
            "train them, choose another value of the model in %s.",
            graph.outputs[0].name,
            len(build.unreached),
            len(build.trainable),
            some_names(build.unreached),
            argument("frozen_params"),
            argument("loss_input_names"),
        )
    _leave_out(build, build.unreached)


def _drop_stopped(build: Build, adapters: Collection[str]) -> None:
    """Stops training the parameters whose gradient is None by the formulas of users, and logs a warning.

    Raises:
        GraphBuildError: an adapter is among them.
        NothingToTrain: no parameter gets a gradient.
    """
    graph = build.forward.graph
    loss = str(graph.outputs[0].name)
    # Those that depend on the loss through Round or Sign alone have a gradient of zero.
    active = active_values(graph, [graph.outputs[0]], [graph.initializers[name] for name in build.trainable])
    names = [name for name in build.trainable if graph.initializers[name] in active]
    stopped = without_gradient(build.forward, loss, names)
    if not stopped:
        return
    cause = "the gradients that were registered for its ops (register_gradient) return None on all paths"
    if lost := [name for name in stopped if name in adapters]:
        raise GraphBuildError(
            f"building the training graph: no gradient flows from the loss {loss!r} to the adapters "
            f"{some_names(lost, 5)}: {cause}. Leave their layers out (target_modules, exclude_modules), or register "
            "other gradients"
        )
    if len(stopped) == len(names):
        raise NothingToTrain(
            f"building the training graph: no gradient flows from the loss {loss!r} to any of the parameters to train "
            f"({some_names(stopped, 5)}): {cause}. Register other gradients, or train other parameters: "
            f"{argument('requires_grad')}."
        )
    _log.warning(
        "No gradient flows from the loss %r to %d of the %d parameters to train: %s, because %s. They keep their "
        "values, as parameters whose grad is None do in PyTorch. To silence this warning, name them in %s.",
        loss,
        len(stopped),
        len(build.trainable),
        some_names(stopped),
        cause,
        argument("frozen_params"),
    )
    build.unreached += stopped
    _leave_out(build, stopped)


def _leave_out(build: Build, names: Collection[str]) -> None:
    """Stops training parameters."""
    left_out = set(names)
    build.trainable = [name for name in build.trainable if name not in left_out]
    build.sparse = [name for name in build.sparse if name not in left_out]


def _check_adapters(model: ir.Model, names: Sequence[str], active: Collection[ir.Value]) -> None:
    """Raises GraphBuildError for adapters without a gradient, which would be deployed with their initial values."""
    lost = [name for name in names if model.graph.initializers[name] not in active]
    if lost:
        layers = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in lost))
        raise GraphBuildError(
            f"building the training graph: no gradient flows from the loss {model.graph.outputs[0].name!r} "
            f"to the adapters of {some_names(layers, 5)}: the loss does not depend on these layers, or "
            "only through ops that have no gradient. Leave the layers out (target_modules, "
            f"exclude_modules), pass {argument('straight_through', True)} if Round, Ceil or Floor is in "
            f"the way, or choose another value of the model in {argument('loss_input_names')}"
        )


def _tensor(model: ir.Model, name: str) -> ir.TensorProtocol:
    """Returns the initial value of an initializer.

    Raises:
        GraphBuildError: the initializer has no value.
    """
    tensor = model.graph.initializers[name].const_value
    if tensor is None:
        raise GraphBuildError(
            f"building the training graph: the parameter {name!r} has no value; give its initializer a tensor"
        )
    return tensor
