"""Fixtures of tests that capture graphs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def fresh_dynamo() -> None:
    """Forgets what Dynamo has captured, and seeds PyTorch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
