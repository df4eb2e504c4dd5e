"""Generates in onnxruntime-genai."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime_genai as og


def folder_with(model: onnx.ModelProto, source: Path, folder: Path) -> Path:
    """Writes a copy of a folder of genai with another model; returns the folder."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.onnx*"))
    onnx.save(model, folder / "model.onnx")
    return folder


def generated(folder: Path, prompt: np.ndarray[Any, Any], count: int, adapter: Path | None) -> list[int]:
    """Returns the tokens that genai appends to a prompt [1, length], the most likely one each time."""
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=prompt.shape[1] + count, do_sample=False)
    generator = og.Generator(model, parameters)
    if adapter is not None:
        adapters = og.Adapters(model)
        adapters.load(str(adapter), "mine")
        generator.set_active_adapter(adapters, "mine")
    generator.append_tokens(prompt[0].astype(np.int32))
    result = []
    while not generator.is_done():
        generator.generate_next_token()
        result.append(int(generator.get_next_tokens()[0]))
    return result
