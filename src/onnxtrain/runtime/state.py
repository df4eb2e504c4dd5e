"""`CheckpointState` and its views of parameters and properties."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.checkpoint import read_checkpoint, write_checkpoint
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.store import Buffer, Store, to_storage


class Parameter:
    """One parameter of the model: a view, obtained from `CheckpointState.parameters`.

    On the CPU `data` and `grad` are live: writing into the arrays changes what the next step computes with.
    Arrays of bfloat16 tensors hold the raw bits as uint16.
    """

    def __init__(self, name: str, store: Store, group: Mapping[str, Buffer]) -> None:
        """Made by :class:`Parameters`, not by users."""
        self._name = name
        self._store = store
        self._group = group

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self._name

    @property
    def data(self) -> Array:
        """The value: a live view of the parameter's memory on the CPU, a copy when it is on another device.

        Assigning copies the array in; dtype and shape must be the parameter's.

        Raises:
            CheckpointError: The parameter comes from a nominal checkpoint and has no data yet.
            InputError: An assigned array has another dtype or shape.
        """
        buffer = self._group[self._name]
        if not buffer.defined:
            raise CheckpointError(
                f"Parameter '{self._name}' of a nominal checkpoint has no data yet. Call "
                "Module.copy_buffer_to_parameters(buffer, trainable_only=False), or assign it, first."
            )
        return buffer.read()

    @data.setter
    def data(self, value: Array) -> None:
        buffer = self._group[self._name]
        what = f"Setting parameter '{self._name}'"
        self._store.require_shapes(what)
        array, dtype = to_storage(value, what)
        raw_bits = dtype.storage == buffer.dtype.storage  # uint16 bits are accepted for bfloat16
        if not raw_bits or tuple(array.shape) != buffer.shape:
            raise InputError(
                f"{what}: expected {buffer.dtype.name} of shape {list(buffer.shape)}, received {dtype.name} "
                f"of shape {list(array.shape)}. Convert with array.astype(...) or reshape it."
            )
        with self._store.lock:
            buffer.write(array)

    @property
    def grad(self) -> Array | None:
        """The gradient (live as `data`), or None when the parameter is frozen or there is no `Module` yet.

        A sparse gradient is written out anew for each use, as an array of the parameter's shape that is read-only.
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
        """Whether the parameter is trained."""
        return self._group is self._store.parameters and self._name in self._store.trainable

    def __repr__(self) -> str:
        return f"Parameter(name={self._name}, requires_grad={self.requires_grad})"


class Parameters:
    """The parameters of a checkpoint by name; iterating yields `(name, Parameter)`.

    BatchNorm running statistics are found by name too (onnxruntime-training held them as frozen parameters),
    but neither counted nor iterated over: `CheckpointState.statistics` lists them.
    """

    def __init__(
        self,
        store: Store,
        group: Mapping[str, Buffer],
        kind: str = "Parameter",
        found_by_name: Mapping[str, Buffer] | None = None,
    ) -> None:
        """Made by :class:`CheckpointState`, not by users; `kind` is the word for an element in messages."""
        self._store = store
        self._group = group
        self._kind = kind
        # An empty mapping is not replaced: a Module fills it later.
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
    """The user's own values in a checkpoint: int, float or str by name; iterating yields `(name, value)`."""

    def __init__(self, store: Store) -> None:
        """Made by :class:`CheckpointState`, not by users."""
        self._store = store

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self._store.properties:
            raise KeyError(f"Property {name} not found.")
        return self._store.properties[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Setting a property: its name must be a str, received {type(name).__name__}.")
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
        with self._store.lock:  # a save in another thread may be writing them
            self._store.properties[name] = kept

    def __contains__(self, name: object) -> bool:
        return name in self._store.properties

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        yield from self._store.properties.items()

    def __len__(self) -> int:
        return len(self._store.properties)

    def __repr__(self) -> str:
        return f"Properties({self._store.properties!r})"


class CheckpointState:
    """The state of a training run: parameters, statistics, optimizer state, properties.

    Made by :meth:`load_checkpoint` from a file, or by :meth:`from_arrays`.

    >>> state = CheckpointState.from_arrays({"w": np.zeros((2, 3), np.float32)}, trainable=["w"])
    >>> state.parameters["w"].data[0] = 1.0
    >>> state.properties["epoch"] = 3
    >>> state.parameters, state.properties
    (Parameters({'w': float32[2, 3]}), Properties({'epoch': 3}))
    """

    def __init__(self, store: Store) -> None:
        """Wraps a store; users call :meth:`load_checkpoint`."""
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
        """Returns the state in a checkpoint file, of onnxtrain or of onnxruntime-training.

        Args:
            checkpoint_uri: Path of a full checkpoint.
            delta: Path of a file that `save_checkpoint(..., trainable_only=True)` has written: its trained
                parameters, statistics, properties and optimizer state (none, if it was saved without) take
                the place of those in the checkpoint. Its other parameters must have the values that they
                had when the delta was trained.

        Raises:
            CheckpointError: Missing, truncated, corrupt, or no checkpoint; a delta of another model, or
                trained on top of other values.
        """
        store = read_checkpoint(checkpoint_uri)
        if delta is None:
            return cls(store)
        from onnxtrain.runtime.delta import read_delta  # kept out of the time that a device takes to start

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
        """Saves `state` to a file, which is replaced whole or not at all, even if the process is killed.

        Args:
            state: What to save.
            checkpoint_uri: Path of the file.
            include_optimizer_state: Also save moments, step count and learning rate; loading then resumes
                exactly.
            nominal: Save only names, dtypes and shapes of the parameters.
            trainable_only: Save a delta: trained parameters, statistics and properties, and a digest of the
                frozen parameters. `load_checkpoint(full_checkpoint, delta=...)` loads it.

        Raises:
            CheckpointError: The file cannot be written, or some parameters have no data yet.
            ValueError: Both `nominal` and `trainable_only`.
        """
        if nominal and trainable_only:
            raise ValueError(
                "Saving a checkpoint: nominal leaves the parameters out, trainable_only saves the trained "
                "ones; choose one of the two."
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
        """Returns a new state that holds these arrays.

        Args:
            parameters: All parameters, in graph order. Arrays of dtype bfloat16 (of `ml_dtypes`) are
                accepted.
            trainable: Names of the trainable ones.
            statistics: BatchNorm running statistics.
            copy: With False, C-contiguous arrays become the state's own memory.

        Raises:
            InputError: Unsupported dtype, a name that is both parameter and statistic, or an unknown
                trainable name.
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
        """Lock of everything in the state, and of the modules and optimizers made from it: see `Module.lock`.

        Hold it to read or write several arrays, or a live view, while other threads train.
        """
        return self._store.lock

    @property
    def parameters(self) -> Parameters:
        """Trainable and frozen parameters by name."""
        return self._parameters

    @property
    def statistics(self) -> Parameters:
        """BatchNorm running statistics by name; they behave like frozen parameters."""
        return self._statistics

    @property
    def properties(self) -> Properties:
        """The user's own values by name."""
        return self._properties

    def __repr__(self) -> str:
        elements = sum(b.size for b in self._store.parameters.values())
        return f"CheckpointState({len(self._parameters)} parameters, {elements} elements)"
