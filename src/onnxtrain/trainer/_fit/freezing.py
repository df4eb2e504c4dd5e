"""Keeps parameters frozen until an epoch, and then trains them as an optimizer that sees them for the first time."""

from __future__ import annotations

from collections.abc import Mapping

from onnxtrain.api import Optimizer
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import BY_NAME
from onnxtrain.runtime.store import Buffer
from onnxtrain.trainer._fit.snapshot import StatisticsBackup
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._run.optimizer_part import OptimizerPart
from onnxtrain.trainer._run.run import Run

_DOING = "Unfreezing parameters during training"


class Freezing:
    """Takes the optimizer steps of a fit in which some parameters are frozen, or have been.

    As in PyTorch, where the gradient of a frozen parameter is None: it doesn't move and isn't decayed, its gradient
    doesn't count for clipping, and the step of its bias correction is the number of its own updates. That number
    follows from `Position.skipped`, which is saved with the run.

    Args:
        state: the trainer's state.
        until: for each parameter or running statistic that is frozen at first, the number of epochs, over all fits,
            after which it is trained.

    Raises:
        InputError: all parameters are frozen, or the optimizer cannot update some of the parameters alone.
    """

    def __init__(self, state: TrainingState, until: Mapping[str, int]) -> None:
        self._state, self._until = state, until
        self._store = state.run.store
        self._epoch: int | None = None
        self._frozen: list[str] = []
        self._frozen_statistics: list[str] = []
        # Parameters that are trained now, by the number of steps that they have skipped.
        self._groups: dict[int, list[str]] = {}
        self._optimizer: Optimizer = state.run.optimizer
        self.begin_epoch()

    @property
    def frozen(self) -> list[str]:
        """Names of the frozen parameters."""
        return self._frozen

    def begin_epoch(self) -> list[str]:
        """Freezes and unfreezes parameters when an epoch has begun; returns the names of those that are unfrozen."""
        position = self._state.position
        if position.epoch == self._epoch:
            return []
        self._epoch, before = position.epoch, self._frozen
        frozen = {name for name, epoch in self._until.items() if position.epoch < epoch}
        self._frozen = [name for name in self._store.trainable if name in frozen]
        self._frozen_statistics = [name for name in self._store.statistics if name in frozen]
        groups: dict[int, list[str]] = {}
        for name in self._store.trainable:
            if name not in frozen:
                groups.setdefault(position.skipped.get(name, 0), []).append(name)
        if not groups:
            raise InputError(
                f"{_DOING}: all parameters are frozen until epoch {min(self._until.values()) + 1}, so there is nothing "
                "to train. Leave out those to train first, e.g. the head."
            )
        if groups != self._groups:
            self._groups = groups
            whole = not self._frozen and groups.keys() == {0}
            self._optimizer = (
                self._state.run.optimizer if whole else _OptimizerOfGroups(self._state.run, groups)
            )
        return [name for name in before if name not in frozen]

    def clear_gradients(self) -> None:
        """Sets the gradients of frozen parameters to zero, so that they don't count for clipping."""
        for name in self._frozen:
            if name in self._store.row_gradients:
                self._store.row_gradients[name].clear()
                continue
            gradient = self._store.gradients[name]
            value = gradient.read()
            # On the CPU, this is the memory of the gradient.
            value[...] = 0
            if gradient.device.type != "cpu":
                gradient.write(value)

    def restore_statistics(self, backup: StatisticsBackup) -> None:
        """Restores the running statistics of frozen layers after a step of the training model."""
        if self._frozen_statistics:
            backup.restore(self._frozen_statistics)

    def step(self) -> None:
        """Updates the parameters that are not frozen."""
        self._optimizer.step()
        if self._frozen:
            # A new dictionary: snapshots of the position share the old one.
            position = self._state.position
            position.skipped = position.skipped | {
                name: position.skipped.get(name, 0) + 1 for name in self._frozen
            }


class _OptimizerOfGroups(Optimizer):
    """Updates groups of parameters, each with its own number of the step; other parameters are not changed.

    Args:
        run: the run.
        groups: names of the parameters to update, by the number of steps that they have skipped.

    Raises:
        InputError: the optimizer is shared by several processes, or its state is shared among parameters.
    """

    def __init__(self, run: Run, groups: Mapping[int, list[str]]) -> None:
        whole = run.optimizer
        if type(whole) is not Optimizer:
            raise InputError(
                f"{_DOING}: the optimizer state is sharded among the workers, so that no worker can update some "
                "parameters alone. Leave shard_optimizer out."
            )
        # Shares learning rate, step and progress with the checkpoint state, as the whole optimizer does.
        self.__dict__.update(whole.__dict__)
        device = self._step.device
        steps = {skipped: Buffer.zeros(BY_NAME["int64"], (), device) for skipped in groups}
        self._parts = [
            (skipped, steps[skipped], OptimizerPart(run, whole, names, steps[skipped]))
            for skipped, names in groups.items()
        ]
        for (_, _, part), names in zip(self._parts, groups.values(), strict=True):
            for other in set(run.store.trainable) - set(names):
                if not part.inputs.isdisjoint(
                    {other, *(f"{other}_{moment}" for moment in run.store.moments)}
                ):
                    spec = run.manifest.optimizer
                    raise InputError(
                        f"{_DOING}: {'the optimizer' if spec is None else spec.type} computes the step of a parameter "
                        f"from the state of others, e.g. of '{other}', so that it cannot update some parameters alone. "
                        "Choose another optimizer, e.g. 'adamw'."
                    )

    def _update(self) -> None:
        for skipped, step, part in self._parts:
            step.set(self._progress.step + 1 - skipped)
            part.update()
