"""The ONNX reference evaluator, corrected where it does not compute in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator as OnnxReferenceEvaluator
from onnx.reference.op_run import OpRun


class Erf(OpRun):
    """Erf in the dtype of its input; onnx rounds it to float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (torch.erf(torch.from_numpy(np.array(x))).numpy(),)


class ConvTranspose(OpRun):
    """ConvTranspose tap by tap; onnx's handles neither groups nor `output_shape` without `auto_pad`."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        b: np.ndarray | None = None,
        auto_pad: str | None = None,
        dilations: list[int] | None = None,
        group: int | None = None,
        kernel_shape: list[int] | None = None,
        output_padding: list[int] | None = None,
        output_shape: list[int] | None = None,
        pads: list[int] | None = None,
        strides: list[int] | None = None,
    ) -> tuple[np.ndarray]:
        kernel = np.array(w.shape[2:])
        rank, group = len(kernel), group or 1
        strides, dilations = np.array(strides or [1] * rank), np.array(dilations or [1] * rank)
        extra, counts = np.array(output_padding or [0] * rank), np.array(x.shape[2:])
        full = (counts - 1) * strides + (kernel - 1) * dilations + 1 + extra
        begins, ends = np.reshape(pads or [0] * 2 * rank, (2, rank))
        if output_shape or (auto_pad or "").startswith("SAME"):
            total = np.maximum(full - (output_shape or counts * strides), 0)
            halves = total // 2, total - total // 2
            begins, ends = halves if auto_pad == "SAME_UPPER" else halves[::-1]
        grouped = w.reshape(group, -1, *w.shape[1:])
        out = np.zeros((x.shape[0], group, w.shape[1], *full), x.dtype)
        for tap in np.ndindex(*kernel):
            first = np.array(tap) * dilations
            where = tuple(map(slice, first, first + counts * strides, strides))
            out[(..., *where)] += np.einsum(
                "ngc...,gcm->ngm...", x.reshape(x.shape[0], group, -1, *counts), grouped[(..., *tap)]
            )
        out = out.reshape(x.shape[0], -1, *full)
        out = out[(..., *map(slice, begins, full - ends))]
        return (out if b is None else out + b.reshape(-1, *[1] * rank),)


CORRECTED = {("", "Erf"): Erf, ("", "ConvTranspose"): ConvTranspose}


class ReferenceEvaluator(OnnxReferenceEvaluator):
    """As onnx's, with the implementations above also inside functions, which do not get `new_ops`."""

    def _load_impl(self, node: onnx.NodeProto, input_types: onnx.TypeProto | None = None) -> Any:
        return CORRECTED.get((node.domain, node.op_type)) or super()._load_impl(node, input_types)
