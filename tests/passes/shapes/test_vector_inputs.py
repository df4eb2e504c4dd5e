"""Values whose shapes a file does not declare."""

from __future__ import annotations

import logging

import onnx
import pytest

from onnxtrain.passes import canonicalize, load_model


@pytest.mark.parametrize("file", [
    """y = Slice(x, start, end, axes)""",
    """unknown = Unsqueeze(sizes, axes)  y = Resize(x, , , unknown)""",
], ids=["Slice", "Resize"])  # fmt: skip
def test_nothing_is_declared_without_a_type(file: str, caplog: pytest.LogCaptureFixture) -> None:
    """onnxruntime's optimizer leaves values of which a file says neither type nor shape."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        main (float[n, 4] x, int64 from, int64 to, int64[k] parts) => (y)
        <int64[1] axes = {{0}}> {{
            start = Unsqueeze(from, axes)  end = Unsqueeze(to, axes)  sizes = Squeeze(parts)
            {file}
        }}""")
    with caplog.at_level(logging.WARNING):
        canonical = canonicalize(load_model(model))
    assert not caplog.records
    assert canonical.graph.outputs[0].shape is not None
