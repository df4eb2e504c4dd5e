"""Lists facts about the standard ONNX ops: which ops only move data, draw random numbers, read a shape, ...

`FACTS` has one line per group of ops. Other packages import the sets defined below it:

>>> sorted(RESHAPES)
['Flatten', 'Identity', 'Reshape', 'Squeeze', 'Unsqueeze']
>>> Fact.MOVES in FACTS["Slice"], "Slice" in VIEWS
(True, False)

Sets that only one module uses, such as the ops that a pass can rewrite, are defined in that module instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag


class Fact(Flag):
    """A property of an op. A flag contains the flags that it implies, e.g. VIEW contains MOVES."""

    EXACT = 1
    """Each element of the output is an element of an input, its negative, or zero. If the inputs are rounded to
    bfloat16, so is the output."""
    MOVES = 1 << 1 | EXACT
    """The elements of the first input (of all inputs: Concat) are copied to other positions; some may be repeated or
    dropped. No arithmetic, so the op can also be applied to elements that are not known yet."""
    VIEW = 1 << 2 | MOVES
    """The output contains each element of the first input exactly once. Recomputing the output needs no memory besides
    the input, and whatever holds for all elements of the input (e.g. a range of labels) holds for the output."""
    RESHAPE = 1 << 3 | VIEW
    """The elements also keep their row-major order, so the node can be repeated on any other tensor of the same shape.
    A Transpose is a view but not a reshape."""
    ELEMENTWISE = 1 << 4
    """Each element of the output is computed from the elements at the same position of the inputs, after broadcasting.
    Recomputing the output is cheap."""
    SAME_RANK = 1 << 5
    """The first output has the rank of the first input, and nothing else determines its rank. Ops whose attributes or
    other inputs determine the rank too (Pad, MaxPool, ...) are in `passes/shapes/ranks.py`."""
    OWN_DTYPE = 1 << 6
    """The output's dtype is not that of the first input: it is set by an attribute, or always bool."""
    UNARY = ELEMENTWISE | SAME_RANK
    """Maps a single tensor element by element; other inputs are settings."""
    CAST = 1 << 7 | UNARY | OWN_DTYPE
    """The output has the elements of the first input in another dtype."""
    ARITHMETIC = 1 << 8 | ELEMENTWISE
    """Two operands that broadcast, and an output of their dtype: an Expand can do the op's broadcasting."""
    COMMUTATIVE = 1 << 9
    """The order of the inputs doesn't matter: a pattern must try all orders."""
    RANDOM = 1 << 10
    """Two nodes with equal inputs give different outputs: they must be neither merged nor recomputed."""
    REDUCTION = 1 << 11
    """Reduces over the axes in input 1, or over all axes, with the attributes keepdims and noop_with_empty_axes."""
    READS_SHAPE = 1 << 12
    """Reads the shape of the input but no elements: it keeps no tensor alive, and no gradient flows through it."""
    RECURRENT = 1 << 13
    """Has the inputs X, W, R, B, sequence_lens, initial_h and the attributes of recurrent layers, including layout."""
    POOLING = 1 << 14
    """Slides a window over an image, with the attributes kernel_shape, pads, strides and ceil_mode."""
    PRODUCT = 1 << 15
    """Matrix product of inputs 0 and 1: the ops that take nearly all of a transformer's time."""
    SWITCHED = 1 << 16
    """Computes something different in training mode than in inference mode."""
    STEP = 1 << 17
    """Piecewise constant: the derivative is zero almost everywhere."""
    MIXING = 1 << 18
    """The cotangent of the first input sums over many elements of the output's cotangent, so a single infinite element
    makes a whole row or image NaN or infinite."""
    FINITE_COTANGENT = 1 << 19
    """The cotangents of the inputs are finite wherever the cotangent of the output is finite."""


def _with_facts(facts: Fact, names: str) -> dict[str, Fact]:
    """Maps each op in a space-separated list, e.g. "Abs Neg", to the same facts."""
    return dict.fromkeys(names.split(), facts)


# One table for all users, so that no user has its own, incomplete set of the same ops.
# tests/test_op_facts.py checks each fact on a small node in the reference evaluator of onnx, or against the schemas.
FACTS: Mapping[str, Fact] = {
    # Data movement.
    **_with_facts(Fact.RESHAPE | Fact.FINITE_COTANGENT, "Flatten Reshape Squeeze Unsqueeze"),
    **_with_facts(Fact.RESHAPE | Fact.FINITE_COTANGENT | Fact.SAME_RANK, "Identity"),
    **_with_facts(Fact.VIEW | Fact.FINITE_COTANGENT, "Transpose"),
    **_with_facts(Fact.MOVES | Fact.FINITE_COTANGENT, "Concat Expand"),
    **_with_facts(Fact.MOVES | Fact.FINITE_COTANGENT | Fact.SAME_RANK, "Slice Split"),
    **_with_facts(Fact.VIEW | Fact.SAME_RANK, "DepthToSpace ReverseSequence SpaceToDepth"),
    **_with_facts(Fact.MOVES | Fact.FINITE_COTANGENT, "Gather GatherND Tile"),
    **_with_facts(Fact.MOVES, "Compress"),
    **_with_facts(Fact.MOVES | Fact.SAME_RANK, "GatherElements"),
    # Elementwise functions of one tensor.
    **_with_facts(Fact.UNARY | Fact.EXACT | Fact.FINITE_COTANGENT, "Abs Neg Relu"),
    **_with_facts(Fact.UNARY | Fact.STEP, "Ceil Floor Round Sign"),
    **_with_facts(
        Fact.UNARY, "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Exp Log Reciprocal Sin Sinh Sqrt Tan"
    ),
    **_with_facts(
        Fact.UNARY | Fact.FINITE_COTANGENT,
        "Celu Elu Erf HardSigmoid HardSwish LeakyRelu Selu Shrink Sigmoid Softplus Tanh ThresholdedRelu",
    ),
    **_with_facts(Fact.UNARY, "Clip Gelu Mish PRelu Softsign Swish BitwiseNot Not"),
    **_with_facts(Fact.UNARY | Fact.OWN_DTYPE, "IsInf IsNaN"),
    **_with_facts(Fact.CAST, "Cast CastLike"),
    # Elementwise functions of several tensors.
    **_with_facts(Fact.ARITHMETIC | Fact.COMMUTATIVE | Fact.FINITE_COTANGENT, "Add"),
    **_with_facts(Fact.ARITHMETIC | Fact.COMMUTATIVE, "Mul"),
    **_with_facts(Fact.ARITHMETIC | Fact.FINITE_COTANGENT, "Sub"),
    **_with_facts(Fact.ARITHMETIC, "Div"),
    **_with_facts(Fact.ELEMENTWISE | Fact.COMMUTATIVE | Fact.EXACT | Fact.FINITE_COTANGENT, "Max Min"),
    **_with_facts(Fact.ELEMENTWISE | Fact.COMMUTATIVE | Fact.FINITE_COTANGENT, "Sum"),
    **_with_facts(Fact.ELEMENTWISE | Fact.COMMUTATIVE, "Mean And Or Xor BitwiseAnd BitwiseOr BitwiseXor"),
    **_with_facts(Fact.ELEMENTWISE | Fact.COMMUTATIVE | Fact.OWN_DTYPE, "Equal"),
    **_with_facts(Fact.ELEMENTWISE | Fact.OWN_DTYPE, "Greater GreaterOrEqual Less LessOrEqual"),
    **_with_facts(Fact.ELEMENTWISE | Fact.EXACT, "Where"),
    **_with_facts(Fact.ELEMENTWISE, "BitShift Mod Pow"),
    # Quantization.
    **_with_facts(Fact.STEP | Fact.OWN_DTYPE | Fact.SAME_RANK, "DynamicQuantizeLinear QuantizeLinear"),
    **_with_facts(Fact.OWN_DTYPE | Fact.SAME_RANK, "DequantizeLinear"),
    # Random numbers. Dropout draws from the session's generator, all others from their own state.
    **_with_facts(Fact.RANDOM | Fact.SWITCHED | Fact.SAME_RANK | Fact.FINITE_COTANGENT, "Dropout"),
    **_with_facts(Fact.RANDOM | Fact.SAME_RANK | Fact.OWN_DTYPE, "Bernoulli"),
    **_with_facts(Fact.RANDOM, "Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"),
    # Reductions and scans.
    **_with_facts(Fact.REDUCTION | Fact.FINITE_COTANGENT, "ReduceMax ReduceMean ReduceMin ReduceSum"),
    **_with_facts(
        Fact.REDUCTION, "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceProd ReduceSumSquare"
    ),
    **_with_facts(Fact.SAME_RANK, "CumProd CumSum DFT TopK"),
    # Layers.
    **_with_facts(Fact.PRODUCT | Fact.MIXING, "Gemm MatMul"),
    **_with_facts(Fact.MIXING, "Conv ConvTranspose"),
    **_with_facts(Fact.MIXING | Fact.RECURRENT, "GRU LSTM RNN"),
    **_with_facts(Fact.MIXING | Fact.SAME_RANK, "LayerNormalization"),
    **_with_facts(Fact.SWITCHED | Fact.SAME_RANK | Fact.FINITE_COTANGENT, "BatchNormalization"),
    **_with_facts(Fact.SAME_RANK, "GroupNormalization InstanceNormalization LRN LpNormalization LogSoftmax"),
    **_with_facts(Fact.SAME_RANK, "MeanVarianceNormalization RMSNormalization Softmax"),
    **_with_facts(Fact.POOLING | Fact.FINITE_COTANGENT, "AveragePool"),
    **_with_facts(Fact.POOLING | Fact.FINITE_COTANGENT | Fact.EXACT, "MaxPool"),
    **_with_facts(Fact.POOLING, "LpPool"),
    **_with_facts(Fact.SAME_RANK | Fact.FINITE_COTANGENT, "GlobalAveragePool GlobalMaxPool"),
    **_with_facts(Fact.SAME_RANK, "GlobalLpPool"),
    # Sizes, padding, writing into a tensor.
    **_with_facts(Fact.READS_SHAPE, "Shape Size"),
    **_with_facts(Fact.FINITE_COTANGENT, "Pad"),
    **_with_facts(
        Fact.SAME_RANK, "CenterCropPad GridSample ScatterElements ScatterND SwiGLU TensorScatter Trilu"
    ),
}
"""Facts about each op type of the standard domain, e.g. `FACTS["Slice"]`. Ops without facts are missing."""


def ops_with(fact: Fact) -> frozenset[str]:
    """Returns the standard ops whose entry in :data:`FACTS` includes `fact`."""
    return frozenset(op_type for op_type, facts in FACTS.items() if fact in facts)


RESHAPES = ops_with(Fact.RESHAPE)
VIEWS = ops_with(Fact.VIEW)
MOVES = ops_with(Fact.MOVES)
EXACT_OPS = ops_with(Fact.EXACT)
ELEMENTWISE = ops_with(Fact.ELEMENTWISE)
CASTS = ops_with(Fact.CAST)
ARITHMETIC = ops_with(Fact.ARITHMETIC)
COMMUTATIVE = ops_with(Fact.COMMUTATIVE)
RANDOM_OPS = ops_with(Fact.RANDOM)
REDUCTIONS = ops_with(Fact.REDUCTION)
SHAPE_READERS = ops_with(Fact.READS_SHAPE)
RECURRENT = ops_with(Fact.RECURRENT)
POOLINGS = ops_with(Fact.POOLING)
PRODUCTS = ops_with(Fact.PRODUCT)
SWITCHED = ops_with(Fact.SWITCHED)
STEPS = ops_with(Fact.STEP)
MIXING = ops_with(Fact.MIXING)
FINITE_COTANGENTS = ops_with(Fact.FINITE_COTANGENT)
SAME_RANK = ops_with(Fact.SAME_RANK)
SAME_DTYPE = SAME_RANK - ops_with(Fact.OWN_DTYPE)

SHAPING_INPUTS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(REDUCTIONS, (1,)),
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "If": (0,),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
"""For each op, the inputs whose elements determine the shape of the outputs: sizes, axes, counts. If these elements are
not known when the graph is built, neither is the shape."""
