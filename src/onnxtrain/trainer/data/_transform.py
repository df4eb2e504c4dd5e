"""Augments batches with a user's function, with random numbers derived from the trainer's seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer.data._convert import arrange
from onnxtrain.trainer.data._layout import Layout, Raw
from onnxtrain.trainer.data._random import seeded
from onnxtrain.trainer.data._source import TRANSFORM, Pass

_GENERATORS = ("rng", "generator")


class Transform:
    """Augmentation `(inputs, targets) -> (inputs, targets)`, optionally with a numpy Generator as the third argument.

    Args:
        function: function that is called with the inputs and the targets. Each is an array, a dict by name if there are
            several, or None if there are no targets. The Generator is passed as the third argument, or as the parameter
            named `rng` or `generator`.

    Raises:
        InputError: the function does not take two or three arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise InputError(
                f"transform must be a function (inputs, targets) -> (inputs, targets), received {function!r}."
            )
        self.function = function
        self._third, self._named = _generator_argument(function)

    def __call__(self, layout: Layout, raw: Raw, epoch: Pass, batch: int, *, lent: bool = False) -> Raw:
        """Transforms a batch; the result is not checked.

        Args:
            layout: arguments of the model.
            raw: arrays of the batch.
            epoch: the pass that is read.
            batch: index of the batch in the epoch.
            lent: True if the arrays may still belong to the user, e.g. to a list of batches, and must be copied.

        Raises:
            InputError: the function does not return inputs and targets.
        """
        key = epoch.worker.key(epoch.seed, TRANSFORM, epoch.epoch, batch)
        arguments: list[Any] = [
            _shown(layout.inputs, raw.inputs, lent),
            _shown(layout.targets, raw.targets, lent),
        ]
        named: dict[str, Any] = {}
        if self._third:
            arguments.append(np.random.default_rng(key))
        elif self._named is not None:
            named[self._named] = np.random.default_rng(key)
        # Most augmentation libraries draw from the process's generators, not from the argument.
        with seeded(*key):
            result = self.function(*arguments, **named)
        # Without targets, the function may return only the inputs.
        if not layout.targets and not isinstance(result, tuple):
            result = (result, None)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise InputError(
                f"transform must return (inputs, targets), received {type(result).__name__}"
                f"{f' of {len(result)}' if isinstance(result, tuple | list) else ''}."
            )
        inputs = arrange("input", layout.inputs, result[0])
        targets = arrange("target", layout.targets, result[1]) if layout.targets else []
        return layout.arrays(Raw(inputs, targets, raw.weights))


def _shown(specs: Sequence[InputSpec], arrays: Sequence[Array], lent: bool) -> Any:
    """Returns an argument for the user's transform, with arrays that the transform may modify.

    Args:
        specs: inputs or targets of the model.
        arrays: one array for each of `specs`.
        lent: True if the arrays may belong to the user, and must be copied.

    Returns:
        The array if there is one, a dict by name if there are several, and None if there are none.
    """
    # The user's arrays are copied, because augmentation in place would change the dataset.
    writable = [
        array if not lent and array.flags.owndata and array.flags.writeable else array.copy()
        for array in arrays
    ]
    if len(specs) > 1:
        return {spec.name: array for spec, array in zip(specs, writable, strict=True)}
    return writable[0] if writable else None


def _generator_argument(function: Callable[..., Any]) -> tuple[bool, str | None]:
    """Determines how to pass a random Generator to a transform function.

    Returns:
        True if the Generator is the third positional argument; otherwise False, and the name of the Generator
        parameter, which is None if the function has no such parameter.

    Raises:
        InputError: the function does not take two or three arguments.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # Built-in functions have no signature.
        return False, None
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p for p in places if p.default is p.empty]
    if (len(places) < 2 and not several) or len(required) > 3:
        raise InputError(
            "transform must take (inputs, targets), or (inputs, targets, rng); received a function of "
            f"({', '.join(p.name for p in parameters)})."
        )
    if len(required) == 3:
        return True, None
    return False, next((p.name for p in parameters if p.name in _GENERATORS), None)
