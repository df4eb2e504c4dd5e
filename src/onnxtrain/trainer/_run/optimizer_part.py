"""Opens the part of an optimizer model that updates some of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from onnxtrain.api import Optimizer
from onnxtrain.fusion.grouped_steps import GroupStepsPass, SplitStepsPass
from onnxtrain.passes import load_model
from onnxtrain.runtime.binding import Binding
from onnxtrain.runtime.rows import RowGradient
from onnxtrain.runtime.session import open_session
from onnxtrain.runtime.store import Buffer
from onnxtrain.trainer._run.run import Run


class OptimizerPart:
    """The part of an optimizer that updates some of the parameters, on the same memory as the whole one.

    Args:
        run: the run.
        whole: the optimizer for all parameters.
        names: names of the parameters to update.
        step: buffer with the number of the step; None for that of the whole optimizer.

    Attributes:
        binding: runs the part; takes the values of `row_gradients`, each with its indices.
        row_gradients: the sparse gradients that the part reads.
        inputs: names of the part's inputs.
    """

    def __init__(self, run: Run, whole: Optimizer, names: Sequence[str], step: Buffer | None = None) -> None:
        store = run.store
        model = _part_of_optimizer(run.directory / run.files.optimizer_model, names, list(store.moments))
        session = open_session(
            ir.to_proto(model).SerializeToString(), "part of the optimizer model", run.device, run.options
        )
        buffers = dict(whole.bound_inputs)
        if step is not None and run.manifest.optimizer is not None:
            buffers[run.manifest.optimizer.step] = step
        rows = {key for name in store.row_gradients for key in (f"{name}_grad", f"{name}_grad_indices")}
        self.inputs = {value.name for value in session.get_inputs()}
        outputs = [value.name for value in session.get_outputs()]
        sparse = [name for name in store.row_gradients if f"{name}_grad" in self.inputs]
        self.row_gradients: list[RowGradient] = [store.row_gradients[name] for name in sparse]
        self.binding = Binding(
            session,
            run.device,
            arguments=[key for name in sparse for key in (f"{name}_grad", f"{name}_grad_indices")],
            inputs={name: buffers[name] for name in self.inputs if name not in rows},
            outputs={name: buffers[name.removesuffix("_updated")] for name in outputs},
            doing="The optimizer step",
        )

    def update(self) -> None:
        """Updates the parameters of the part."""
        self.binding.run([value for rows in self.row_gradients for value in (rows.rows, rows.indices)])


def _part_of_optimizer(path: Path, names: Collection[str], moments: Sequence[str]) -> ir.Model:
    """Returns the part of an optimizer model that updates the parameters `names`.

    Args:
        path: file of the whole optimizer model.
        names: names of the parameters to update.
        moments: names of the optimizer's moments, e.g. ["momentum0", "momentum1"].
    """
    # The gradient norm for clipping stays complete: it reads all gradients.
    model = load_model(path)
    SplitStepsPass()(model)
    kept = {f"{name}_updated" for name in names}
    kept |= {f"{name}_{moment}_updated" for name in names for moment in moments}
    for value in [value for value in model.graph.outputs if value.name not in kept]:
        model.graph.outputs.remove(value)
    common_passes.RemoveUnusedNodesPass()(model)
    for value in [value for value in model.graph.inputs if not value.uses()]:
        model.graph.inputs.remove(value)
    GroupStepsPass()(model)
    return model
