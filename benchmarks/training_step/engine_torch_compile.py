"""PyTorch with torch.compile; compiling happens before anything is timed."""

from __future__ import annotations

import functools

import engine_torch
import torch
from timing import serve

if __name__ == "__main__":
    serve(functools.partial(engine_torch.make, wrap=torch.compile))
