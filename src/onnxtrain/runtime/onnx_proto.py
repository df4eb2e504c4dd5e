"""Field numbers of `onnx.proto`, for the modules that parse and edit models without the onnx package."""

# ModelProto.
MODEL_GRAPH, MODEL_OPSET, MODEL_METADATA, MODEL_TRAINING, MODEL_FUNCTION = 7, 8, 14, 20, 25
# FunctionProto.
FUNCTION_NAME, FUNCTION_NODE, FUNCTION_DOMAIN, FUNCTION_ATTRIBUTE, FUNCTION_OVERLOAD = 1, 7, 10, 11, 13
# GraphProto. GRAPH_VALUE are the shapes and dtypes of values inside of the graph (value_info).
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_OUTPUT, GRAPH_VALUE, GRAPH_SPARSE = 1, 5, 11, 12, 13, 15
# NodeProto.
NODE_INPUT, NODE_OUTPUT, NODE_OP_TYPE, NODE_ATTRIBUTE, NODE_DOMAIN, NODE_OVERLOAD = 1, 2, 4, 5, 7, 8
# AttributeProto: one graph, or several.
ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 6, 11
# TensorProto. TENSOR_EXTERNAL are pairs such as ("offset", "4096"); TENSOR_LOCATION is 1 if the data is in a file.
TENSOR_DIMS, TENSOR_TYPE, TENSOR_NAME, TENSOR_RAW, TENSOR_EXTERNAL, TENSOR_LOCATION = 1, 2, 8, 9, 13, 14
