from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _kernels_are_used() -> Iterator[None]:
    """Whatever `ONNXTRAIN_KERNELS` says for the other tests: it is the kernels that are tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXTRAIN_KERNELS", "auto")
        yield
