"""Sets up ONNX Runtime sessions that train: those of the device and those of ORTModule."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime as ort

_SPINNING_STOP = "session.force_spinning_stop"


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session that takes turns with others, or with PyTorch, on the same cores.

    Attributes:
        severity: least severity of messages that ONNX Runtime prints, from 0 (all) to 4 (fatal only), e.g. 3: errors.
        threads: number of threads that compute one op, e.g. 2; 0 is one for each core.
        in_file_order: True to run nodes in the order of the file where possible, which frees values early.
        basic_optimizations: True to let ONNX Runtime do its basic graph optimizations only.
    """

    severity: int = 3
    threads: int = 0
    in_file_order: bool = True
    basic_optimizations: bool = False

    def options(self) -> ort.SessionOptions:
        """Makes session options with these settings."""
        options = ort.SessionOptions()
        # By default ONNX Runtime prints warnings, too. Everything that matters reaches the caller as an exception.
        options.log_severity_level = self.severity
        options.intra_op_num_threads = self.threads
        # ONNX Runtime's default order runs the gradients of all weights last, and keeps their factors until then.
        if self.in_file_order:
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        if self.basic_optimizations:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        suit_training(options)
        return options


def suit_training(options: ort.SessionOptions) -> None:
    """Changes session options, which may be the user's own, so that sessions which take turns save memory and time."""
    # From the second run on, a memory pattern allocates one block for all values, beside the memory of the first run.
    # Without it the peak memory of training a small encoder was 245 MB instead of 366.
    options.enable_mem_pattern = False
    # Without reuse each value is freed after its last reader. Passed on to later values of the same size, its memory
    # would stay until the last of these is done.
    options.enable_mem_reuse = False
    # Threads that go on spinning after a run take the cores from the next session, or from PyTorch's own threads: a
    # step of a small net took twice as long. Options in which the user has set the entry keep it.
    try:
        options.get_session_config_entry(_SPINNING_STOP)
    except RuntimeError:  # ONNX Runtime's answer for an entry that has not been set
        options.add_session_config_entry(_SPINNING_STOP, "1")
