"""Patches PyTorch while Dynamo captures. Each patch works around one fault, which its module describes.

`tests/ortmodule/test_dynamo_faults.py` shows each fault without its patch: a patch can be removed once its test fails
for all supported versions of PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from onnxtrain.ortmodule.capture.dynamo.patches._aliased_writes import aliased_writes
from onnxtrain.ortmodule.capture.dynamo.patches._asserted_numbers import asserted_numbers
from onnxtrain.ortmodule.capture.dynamo.patches._caught_errors import caught_errors
from onnxtrain.ortmodule.capture.dynamo.patches._deque_maxlen import deque_maxlen
from onnxtrain.ortmodule.capture.dynamo.patches._id_guards import id_guards
from onnxtrain.ortmodule.capture.dynamo.patches._inactive_dropout import inactive_dropout
from onnxtrain.ortmodule.capture.dynamo.patches._list_contains import list_contains
from onnxtrain.ortmodule.capture.dynamo.patches._metric_tracebacks import metric_tracebacks
from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import missing_fakes
from onnxtrain.ortmodule.capture.dynamo.patches._module_integers import module_integers
from onnxtrain.ortmodule.capture.dynamo.patches._random_objects import random_objects
from onnxtrain.ortmodule.capture.dynamo.patches._transformed_functions import transformed_functions

Patch = Callable[[], AbstractContextManager[None]]

DURING_CAPTURE: Mapping[str, Patch] = {
    "aliased writes": aliased_writes,
    "caught errors": caught_errors,
    "deque maxlen": deque_maxlen,
    "id guards": id_guards,
    "inactive dropout": inactive_dropout,
    "list contains": list_contains,
    "metric tracebacks": metric_tracebacks,
    "module integers": module_integers,
    "random objects": random_objects,
    "transformed functions": transformed_functions,
}
"""Patches that are active during a whole capture."""

WITH_DATA_DEPENDENT_SIZES: Mapping[str, Patch] = {
    "asserted numbers": asserted_numbers,
    "missing fakes": missing_fakes,
}
"""Patches for an attempt to capture data-dependent sizes and numbers as symbols."""


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Context manager that applies the patches in `DURING_CAPTURE`."""
    with contextlib.ExitStack() as stack:
        for patch in DURING_CAPTURE.values():
            stack.enter_context(patch())
        yield
