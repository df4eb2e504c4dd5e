"""Configures ONNX Runtime sessions for training on devices and in ORTModule."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime as ort

_SPINNING_STOP = "session.force_spinning_stop"


@dataclass(frozen=True)
class SessionSettings:
    """Settings for a session that takes turns on the CPU cores with other sessions or PyTorch.

    Attributes:
        severity: minimum severity of messages that ONNX Runtime prints, from 0 (all) to 4 (fatal), e.g. 3 for errors.
        threads: number of threads per op, e.g. 2; 0 for one per core.
        in_file_order: True to run nodes in file order where possible, so that values are freed early.
        basic_optimizations: True to apply only ONNX Runtime's basic graph optimizations.
    """

    severity: int = 3
    threads: int = 0
    in_file_order: bool = True
    basic_optimizations: bool = False

    def options(self) -> ort.SessionOptions:
        """Returns session options with these settings."""
        options = ort.SessionOptions()
        # By default, ONNX Runtime also prints warnings. Errors reach the caller as exceptions.
        options.log_severity_level = self.severity
        options.intra_op_num_threads = self.threads
        # ONNX Runtime's default order computes the gradients of all weights last, and keeps their factors until then.
        if self.in_file_order:
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        if self.basic_optimizations:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        suit_training(options)
        return options


def suit_training(options: ort.SessionOptions) -> None:
    """Modifies session options in place so that sessions use less memory and their threads sleep between runs.

    Sleeping threads leave the CPU cores to other sessions and to PyTorch. If `options` already has an entry for
    `session.force_spinning_stop`, its value is kept.
    """
    # With a memory pattern, the second run allocates one block for all values, in addition to the memory of the first
    # run. Without it, the peak memory of training a small encoder was 245 MB instead of 366.
    options.enable_mem_pattern = False
    # Without reuse, each value is freed after its last reader. With reuse, its memory would be passed on to later
    # values of the same size, and stay allocated until the last of these is unused.
    options.enable_mem_reuse = False
    # Threads that keep spinning after a run take the cores from the next session, or from PyTorch's threads: a step of
    # a small network took twice as long. An entry set by the user is kept.
    try:
        options.get_session_config_entry(_SPINNING_STOP)
    except RuntimeError:  # ONNX Runtime's answer for an entry that has not been set
        options.add_session_config_entry(_SPINNING_STOP, "1")
