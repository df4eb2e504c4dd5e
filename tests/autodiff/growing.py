"""The cases of the gradient rules with longer axes, in ONNX Runtime and in eager PyTorch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from autodiff.case import C, Case, F, R, runtime_inputs
from onnxtrain.autodiff import differentiate
from ortmodule.growing import Growing
from ortmodule.growth import Cost, Program, cost_of_session

Axes = frozenset[tuple[int, int]]
"""Pairs of an input and an axis of it."""


def cost_of_model(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Cost:
    """Returns the cost of a run of a model."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.log_severity_level = True, 3
    options.enable_mem_pattern = options.enable_mem_reuse = False
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = os.path.join(folder, "profile")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        session.run(None, dict(feeds))
        cost = cost_of_session(session)
    return cost + Cost(sum(a.nbytes for a in feeds.values()), sum(a.size for a in feeds.values()))


@dataclass(frozen=True)
class GrownRule(Growing):
    """A case of a rule with some axes longer.

    Attributes:
        case: the case.
        axes: the axes, which have `size` elements in the case.
        size: see `axes`.
        dynamic: whether sizes are symbols.
    """

    case: Case
    axes: Axes
    size: int
    dynamic: bool = False

    @property
    def name(self) -> str:
        names = "+".join(f"{place}.{axis}" for place, axis in sorted(self.axes))
        return f"{self.case.id}, {names}"

    def of(self, target: int) -> tuple[Program, Sequence[Any]]:
        case = self._at(target)
        arrays = case.arrays(np.dtype(np.float32))
        tensors = [None if array is None else torch.from_numpy(np.array(array)) for array in arrays]
        for index in case.wrt:
            tensors[index].requires_grad_()
        return case.twin, tensors

    def cost(self, target: int) -> Cost:
        case = self._at(target)
        model = case.model(np.dtype(np.float32), symbolic=self.dynamic)
        trained = differentiate(model, of="loss", wrt=[f"x{index}" for index in case.wrt])
        feeds = runtime_inputs(case, case.arrays(np.dtype(np.float32)))
        feeds |= {f"w{k}": np.ones(shape, np.float32) for k, shape in enumerate(case.output_shapes())}
        return cost_of_model(trained, feeds)

    def is_valid(self) -> bool:
        """Returns whether the op takes the longer axes, in ONNX Runtime as in PyTorch: not if an input is a shape."""
        target = 4 * max(16, self.size)
        try:
            case = self._at(target)
            shapes = case.output_shapes()
            model = case.model(np.dtype(np.float32))
            del model.graph.node[1:], model.graph.output[:]
            kept = len(model.graph.input) - case.outputs
            del model.graph.input[kept:]
            model.graph.output.extend(onnx.ValueInfoProto(name=f"y{k}") for k in range(case.outputs))
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(model.SerializeToString(), options)
            results = session.run(None, runtime_inputs(case, case.arrays(np.dtype(np.float32))))
            # Reductions take an axis twice, their gradients do not.
            self.cost(target)
        # Neither library has a common class of errors.
        except Exception:
            return False
        return [result.shape for result in results] == shapes and self.start(16) is not None

    def _at(self, target: int) -> Case:
        factor = max(1, target // self.size)
        inputs: list[F | C | R | None] = []
        for place, item in enumerate(self.case.inputs):
            grows = [axis for at, axis in self.axes if at == place]
            if isinstance(item, F):
                shape = [n * (factor if axis in grows else 1) for axis, n in enumerate(item.shape)]
                item = F(*shape, low=item.low, high=item.high, wrt=item.wrt, distinct=item.distinct)
            elif isinstance(item, C | R) and grows:
                array = np.asarray(item.value)
                tiles = [factor if axis in grows else 1 for axis in range(array.ndim)]
                item = replace(item, value=np.tile(array, tiles))
            inputs.append(item)
        return replace(self.case, inputs=tuple(inputs), name=f"{self.case.id}, grown")


def _names_axes(item: F | C | R) -> bool:
    """True for a constant vector of integers: axes, a shape or sizes, of which there are not more."""
    return (
        isinstance(item, C) and np.asarray(item.value).ndim == 1 and np.asarray(item.value).dtype.kind == "i"
    )


def grown_rules(case: Case, dynamic: bool = False) -> Iterator[GrownRule]:
    """Yields a case for each axis that can be made longer, alone or with all axes of its size."""
    axes = {
        (place, axis): size
        for place, item in enumerate(case.inputs)
        if item is not None and not _names_axes(item)
        for axis, size in enumerate(item.shape if isinstance(item, F) else np.shape(item.value))
        if size
    }
    tried: set[Axes] = set()
    for at, size in axes.items():
        together = frozenset(other for other, length in axes.items() if length == size)
        for chosen in (frozenset([at]), together):
            if chosen in tried:
                continue
            tried.add(chosen)
            candidate = GrownRule(case, chosen, size, dynamic)
            if candidate.is_valid():
                yield candidate
                break
