"""Defines `CheckpointState`, and the views through which users access its parameters and properties."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.checkpoint import read_checkpoint, write_checkpoint
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.not_copyable import NotCopyable
from onnxtrain.runtime.store import Buffer, Store, to_storage


class Parameter:
    """A view of one parameter of the model, an element of `CheckpointState.parameters`.

    On the CPU, `data` and `grad` are live views: if you write to the arrays, the next step uses the new values. Arrays
    of bfloat16 tensors contain the raw bits as uint16.
    """

    def __init__(self, name: str, store: Store, group: Mapping[str, Buffer]) -> None:
        """Creates a view of the tensor `name` of `group`. Called by :class:`Parameters`, not by users."""
        # Not the buffer itself, which a Module of a nominal checkpoint replaces.
        self._name = name
        self._store = store
        self._group = group

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self._name

    @property
    def data(self) -> Array:
        """The value: a live view of the parameter's memory on the CPU, a copy on other devices.

        Assigning an array copies it to the parameter; it must have the parameter's dtype and shape.

        Raises:
            CheckpointError: the parameter belongs to a nominal checkpoint and has no data yet.
            InputError: an assigned array has the wrong dtype or shape.
        """
        buffer = self._group[self._name]
        if not buffer.defined:
            raise CheckpointError(
                f"Parameter '{self._name}' of a nominal checkpoint has no data yet. First call "
                "Module.copy_buffer_to_parameters(buffer, trainable_only=False), or assign a value."
            )
        return buffer.read()

    @data.setter
    def data(self, value: Array) -> None:
        buffer = self._group[self._name]
        doing = f"Setting parameter '{self._name}'"
        self._store.require_shapes(doing)
        array, dtype = to_storage(value, doing)
        # Storage dtypes are compared, so that uint16 bits, as returned by `data`, are accepted for bfloat16.
        same_storage = dtype.storage == buffer.dtype.storage
        if not same_storage or tuple(array.shape) != buffer.shape:
            raise InputError(
                f"{doing}: expected {buffer.dtype.name} of shape {list(buffer.shape)}, received {dtype.name} "
                f"of shape {list(array.shape)}. Convert with array.astype(...) or reshape it."
            )
        with self._store.lock:
            buffer.write(array)

    @property
    def grad(self) -> Array | None:
        """The gradient, a live view like `data`; None if the parameter is frozen or no `Module` exists yet.

        For a sparse gradient, each access creates a new, read-only array with the parameter's shape.
        """
        if not self.requires_grad:
            return None
        if self._name in self._store.row_gradients:
            with self._store.lock:
                return self._store.row_gradients[self._name].dense()
        gradient = self._store.gradients.get(self._name)
        return None if gradient is None else gradient.read()

    @property
    def requires_grad(self) -> bool:
        """True if the parameter is trained, False if it is frozen."""
        # Views of statistics, which are never trained, have another group.
        return self._group is self._store.parameters and self._name in self._store.trainable

    def __repr__(self) -> str:
        return f"Parameter(name={self._name}, requires_grad={self.requires_grad})"


class Parameters:
    """Mapping from names to the parameters of a checkpoint; iterating yields `(name, Parameter)`.

    Running statistics of BatchNorm layers can also be looked up by name, because onnxruntime-training stored them as
    frozen parameters. They are neither counted nor iterated over; see `CheckpointState.statistics`.
    """

    def __init__(
        self,
        store: Store,
        group: Mapping[str, Buffer],
        kind: str = "Parameter",
        found_by_name: Mapping[str, Buffer] | None = None,
    ) -> None:
        """Creates a view of `group`. Called by :class:`CheckpointState`, not by users.

        Args:
            store: the store that contains the tensors.
            group: the tensors by name.
            kind: what a tensor is called in error messages, e.g. "Statistic".
            found_by_name: tensors that can be looked up by name, but are not counted or iterated over.
        """
        self._store = store
        self._group = group
        self._kind = kind
        # Compared with None, because a Module may fill an empty mapping later.
        self._groups = (group,) if found_by_name is None else (group, found_by_name)

    def __getitem__(self, name: str) -> Parameter:
        for group in self._groups:
            if name in group:
                return Parameter(name, self._store, group)
        raise KeyError(f"{self._kind} {name} not found.")

    def __setitem__(self, name: str, value: Array) -> None:
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return any(name in group for group in self._groups)

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in self._group:
            yield name, self[name]

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        entries = (f"{name!r}: {b.dtype.name}{list(b.shape)}" for name, b in self._group.items())
        return f"{self._kind}s({{{', '.join(entries)}}})"


class Properties:
    """Mapping from names to a checkpoint's user-defined values: int, float or str. Iterating yields `(name, value)`."""

    def __init__(self, store: Store) -> None:
        """Creates a view of `store.properties`. Called by :class:`CheckpointState`, not by users."""
        self._store = store

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self._store.properties:
            raise KeyError(f"Property {name} not found.")
        return self._store.properties[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Setting a property: its name must be a str, received {type(name).__name__}.")
        # Plain Python values, so that a value is the same before and after it was saved as JSON. As in
        # onnxruntime-training, bool becomes int.
        kept: int | float | str
        if isinstance(value, str):
            kept = str(value)
        elif isinstance(value, int | np.integer | np.bool_):
            kept = int(value)
        elif isinstance(value, float | np.floating):
            kept = float(value)
        else:
            raise TypeError(
                f"Setting property '{name}': expected int, float or str, received {type(value).__name__}. "
                "Store other values as JSON text."
            )
        # A save in another thread may be writing them.
        with self._store.lock:
            self._store.properties[name] = kept

    def __contains__(self, name: object) -> bool:
        return name in self._store.properties

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        yield from self._store.properties.items()

    def __len__(self) -> int:
        return len(self._store.properties)

    def __repr__(self) -> str:
        return f"Properties({self._store.properties!r})"


class CheckpointState(NotCopyable):
    """The state of a training run: parameters, running statistics, optimizer state and user-defined properties.

    Create it from a file with :meth:`load_checkpoint`, or from arrays with :meth:`from_arrays`.

    >>> state = CheckpointState.from_arrays({"w": np.zeros((2, 3), np.float32)}, trainable=["w"])
    >>> state.parameters["w"].data[0] = 1.0
    >>> state.properties["epoch"] = 3
    >>> state.parameters, state.properties
    (Parameters({'w': float32[2, 3]}), Properties({'epoch': 3}))
    """

    def __init__(self, store: Store) -> None:
        """Wraps a store. Users call :meth:`load_checkpoint` or :meth:`from_arrays` instead."""
        if not isinstance(store, Store):
            raise TypeError(
                f"CheckpointState received {type(store).__name__}; use CheckpointState.load_checkpoint(path)."
            )
        self._store = store
        self._parameters = Parameters(store, store.parameters, found_by_name=store.statistics)
        self._statistics = Parameters(store, store.statistics, "Statistic")
        self._properties = Properties(store)

    @classmethod
    def load_checkpoint(
        cls, checkpoint_uri: str | os.PathLike[str], *, delta: str | os.PathLike[str] | None = None
    ) -> CheckpointState:
        """Loads the state from a checkpoint file of onnxtrain or onnxruntime-training.

        Args:
            checkpoint_uri: path of a full checkpoint.
            delta: path of a file written by `save_checkpoint(..., trainable_only=True)`. Its trained parameters,
                statistics, properties and optimizer state replace the checkpoint's. The checkpoint's frozen parameters
                must be the ones with which the delta was trained.

        Raises:
            CheckpointError: a file is missing, truncated, corrupt, or not a checkpoint; or the delta belongs to a
                different model or was trained with different frozen parameters.
        """
        store = read_checkpoint(checkpoint_uri)
        if delta is None:
            return cls(store)
        # Imported here, because few devices have deltas.
        from onnxtrain.runtime.delta import read_delta

        return cls(read_delta(delta, store, checkpoint_uri))

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
        *,
        nominal: bool = False,
        trainable_only: bool = False,
    ) -> None:
        """Saves `state` to a file, atomically: a killed process leaves either the old file or the new one.

        Values are saved unchanged, including NaN and infinity.

        Args:
            state: the state to save.
            checkpoint_uri: path of the file.
            include_optimizer_state: True to save moments, step count and learning rate as well, so that training can be
                resumed exactly.
            nominal: True to save only names, dtypes and shapes of the parameters.
            trainable_only: True to save a delta: trained parameters, statistics and properties, and a digest of the
                frozen parameters. Load it with `load_checkpoint(full_checkpoint, delta=...)`.

        Raises:
            CheckpointError: the file cannot be written, or some parameters have no data yet.
            ValueError: both `nominal` and `trainable_only` are True.
        """
        if nominal and trainable_only:
            raise ValueError(
                "Saving a checkpoint: nominal omits all parameters, trainable_only saves the trained "
                "ones; pass one of the two."
            )
        with state.lock:
            if trainable_only:
                from onnxtrain.runtime.delta import write_delta

                write_delta(state._store, checkpoint_uri, include_optimizer_state=include_optimizer_state)
            else:
                write_checkpoint(
                    state._store,
                    checkpoint_uri,
                    include_optimizer_state=include_optimizer_state,
                    nominal=nominal,
                )

    @classmethod
    def from_arrays(
        cls,
        parameters: Mapping[str, Array],
        trainable: Collection[str],
        statistics: Mapping[str, Array] | None = None,
        *,
        copy: bool = True,
    ) -> CheckpointState:
        """Creates a new state from arrays.

        Args:
            parameters: all parameters by name, in graph order. bfloat16 arrays of `ml_dtypes` are accepted.
            trainable: names of the trainable parameters, e.g. ["fc.weight"].
            statistics: BatchNorm running statistics by name.
            copy: False to use C-contiguous arrays without copying them, so that the state shares their memory.

        Raises:
            InputError: an array is not a numpy array, is masked or has an unsupported dtype; a name is in both
                `parameters` and `statistics`; or a trainable name is not in `parameters`.
        """
        statistics = statistics or {}
        unknown = sorted(set(trainable) - set(parameters))
        both = sorted(set(statistics) & set(parameters))
        if unknown or both:
            raise InputError(
                "Building a checkpoint state from arrays: "
                + (f"trainable names without a parameter: {unknown}. " if unknown else "")
                + (f"names that are both parameter and statistic: {both}." if both else "")
            )

        def buffer(name: str, array: Array) -> Buffer:
            storage, dtype = to_storage(array, f"Tensor '{name}'")
            return Buffer(np.array(storage, order="C") if copy else storage, dtype)

        return cls(
            Store(
                parameters={name: buffer(name, a) for name, a in parameters.items()},
                trainable=set(trainable),
                statistics={name: buffer(name, a) for name, a in statistics.items()},
            )
        )

    @property
    def lock(self) -> StateLock:
        """The lock of the state and of all modules and optimizers created from it; see `Module.lock`.

        While other threads train, hold it to access several arrays consistently, or to use a live view.
        """
        return self._store.lock

    @property
    def parameters(self) -> Parameters:
        """Trainable and frozen parameters by name."""
        return self._parameters

    @property
    def statistics(self) -> Parameters:
        """BatchNorm running statistics by name, with the same interface as frozen parameters."""
        return self._statistics

    @property
    def properties(self) -> Properties:
        """User-defined values by name."""
        return self._properties

    def __repr__(self) -> str:
        elements = sum(b.size for b in self._store.parameters.values())
        return f"CheckpointState({len(self._parameters)} parameters, {elements} elements)"
