"""Makes default attributes of convolutions explicit."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.portable._nodes import standard_nodes


class ConvolutionAttributesPass(ir.passes.InPlacePass):
    """Makes the default dilations, group, kernel_shape, pads and strides of Conv and ConvTranspose explicit.

    The default bundle of onnxruntime-web (JSEP, 1.30) fails on WebGPU for a Conv without them. Nodes with a weight of
    unknown rank, as in a function, are not modified.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Annotates nodes of the model in place."""
        modified = False
        for op_type in ("Conv", "ConvTranspose"):
            for node in standard_nodes(model, op_type):
                for attribute in _missing(node):
                    node.attributes.add(attribute)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _missing(node: ir.Node) -> list[ir.Attr]:
    """Returns the attributes that a node lacks, with their default values."""
    weight = node.inputs[1]
    if weight is None or weight.shape is None:
        return []
    rank = weight.shape.rank() - 2
    kernel = [size for size in list(weight.shape)[2:] if isinstance(size, int)]
    defaults = {
        "dilations": [1] * rank,
        "kernel_shape": kernel if len(kernel) == rank else None,
        # With auto_pad, the pads depend on the sizes at run time.
        "pads": [0] * (2 * rank) if node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET" else None,
        "strides": [1] * rank,
    }
    missing = [
        ir.AttrInt64s(name, value)
        for name, value in defaults.items()
        if value is not None and name not in node.attributes
    ]
    if "group" not in node.attributes:
        missing.append(ir.AttrInt64("group", 1))
    # output_shape determines the pads of a transposed convolution.
    return [a for a in missing if not (a.name == "pads" and "output_shape" in node.attributes)]
