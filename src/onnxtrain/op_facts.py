"""States facts about the standard ONNX ops: which only move data, draw random numbers, read a shape.

`FACTS` has one line per group of ops. The other rooms import the sets below it:

>>> sorted(RESHAPES)
['Flatten', 'Identity', 'Reshape', 'Squeeze', 'Unsqueeze']
>>> Fact.MOVES in FACTS["Slice"], "Slice" in VIEWS
(True, False)

A set of ops that depends on the reader, such as the ops that a pass knows how to rewrite, stays with that reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag


class Fact(Flag):
    """One property of an op. A fact that includes another one is written as a sum: all views move data."""

    EXACT = 1
    """Each element of the result is an element of an input, its negative, or zero. Rounding the result to bfloat16
    changes nothing if the inputs were rounded."""
    MOVES = 1 << 1 | EXACT
    """The elements of the first input (of all inputs: Concat) are copied to other places; some may be repeated or left
    out. No arithmetic, so the op may also be computed on elements that are not known yet."""
    VIEW = 1 << 2 | MOVES
    """The result has each element of the first input exactly once. Recomputing the result costs no memory beside the
    input, and whatever holds for all elements of the input (a range of labels, say) holds for the result."""
    RESHAPE = 1 << 3 | VIEW
    """The elements also keep their row-major order, so the node may be written again on any other tensor of this size
    and shape. A Transpose is a view, but no reshape."""
    ELEMENTWISE = 1 << 4
    """Each element of the result is computed from the elements at the same place of the inputs, after broadcasting.
    Computing the result again is cheap."""
    SAME_RANK = 1 << 5
    """The first result has as many axes as the first input, and only this tells the rank. Ops whose attributes or other
    inputs tell it too (Pad, MaxPool, ...) are in `passes/shapes/ranks.py`."""
    OWN_DTYPE = 1 << 6
    """The dtype of the result is not that of the first input: it has an attribute for it, or is always bool."""
    UNARY = ELEMENTWISE | SAME_RANK
    """One tensor is mapped element by element; other inputs are settings."""
    CAST = 1 << 7 | UNARY | OWN_DTYPE
    """The result has the elements of the first input in another dtype."""
    ARITHMETIC = 1 << 8 | ELEMENTWISE
    """Two operands that broadcast, and a result of their dtype: a reader may broadcast an operand for the op."""
    COMMUTATIVE = 1 << 9
    """The order of the inputs makes no difference: a pattern has to try all orders."""
    RANDOM = 1 << 10
    """Two nodes with equal inputs give different results: they must not be merged, nor computed again."""
    REDUCTION = 1 << 11
    """Reduces over the axes in input 1, or all of them, with the attributes keepdims and noop_with_empty_axes."""
    READS_SHAPE = 1 << 12
    """Reads the shape of the input but no element: it keeps no tensor alive and no gradient flows through."""
    RECURRENT = 1 << 13
    """Has the inputs X, W, R, B, sequence_lens, initial_h and the attributes of recurrent layers, layout among them."""
    POOLING = 1 << 14
    """Slides a window over an image, with the attributes kernel_shape, pads, strides and ceil_mode."""
    PRODUCT = 1 << 15
    """A product of the matrices in inputs 0 and 1: the ops that take nearly all of the time of a transformer."""
    SWITCHED = 1 << 16
    """Computes something else in training than in inference."""
    STEP = 1 << 17
    """Piecewise constant: the derivative is zero almost everywhere."""
    MIXING = 1 << 18
    """A cotangent of the first input is a sum over many elements of the cotangent of the result, so one infinite
    element makes NaN or infinity of a whole row or image."""
    FINITE_COTANGENT = 1 << 19
    """The cotangents of the inputs are finite wherever the cotangent of the result is."""


def _of(facts: Fact, names: str) -> dict[str, Fact]:
    """Gives the same facts to several ops, e.g. "Abs Neg"."""
    return dict.fromkeys(names.split(), facts)


# One table instead of a set per reader: sets of the same ops stood in 22 files, some shorter than others by accident.
# tests/test_op_facts.py checks each fact on a small node in the reference evaluator of onnx, or against the schemas.
FACTS: Mapping[str, Fact] = {
    # Data movement.
    **_of(Fact.RESHAPE | Fact.FINITE_COTANGENT, "Flatten Reshape Squeeze Unsqueeze"),
    **_of(Fact.RESHAPE | Fact.FINITE_COTANGENT | Fact.SAME_RANK, "Identity"),
    **_of(Fact.VIEW | Fact.FINITE_COTANGENT, "Transpose"),
    **_of(Fact.MOVES | Fact.FINITE_COTANGENT, "Concat Expand"),
    **_of(Fact.MOVES | Fact.FINITE_COTANGENT | Fact.SAME_RANK, "Slice Split"),
    **_of(Fact.VIEW | Fact.SAME_RANK, "DepthToSpace ReverseSequence SpaceToDepth"),
    **_of(Fact.MOVES, "Compress Gather GatherND Tile"),
    **_of(Fact.MOVES | Fact.SAME_RANK, "GatherElements"),
    # Elementwise functions of one tensor.
    **_of(Fact.UNARY | Fact.EXACT, "Abs Neg"),
    **_of(Fact.UNARY | Fact.EXACT | Fact.FINITE_COTANGENT, "Relu"),
    **_of(Fact.UNARY | Fact.STEP, "Ceil Floor Round Sign"),
    **_of(
        Fact.UNARY, "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Log Reciprocal Sin Sinh Sqrt Tan Tanh"
    ),
    **_of(Fact.UNARY, "Celu Clip Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Selu Shrink Sigmoid"),
    **_of(Fact.UNARY, "Softplus Softsign Swish ThresholdedRelu BitwiseNot Not"),
    **_of(Fact.UNARY | Fact.OWN_DTYPE, "IsInf IsNaN"),
    **_of(Fact.CAST, "Cast CastLike"),
    # Elementwise functions of several tensors.
    **_of(Fact.ARITHMETIC | Fact.COMMUTATIVE | Fact.FINITE_COTANGENT, "Add"),
    **_of(Fact.ARITHMETIC | Fact.COMMUTATIVE, "Mul"),
    **_of(Fact.ARITHMETIC | Fact.FINITE_COTANGENT, "Sub"),
    **_of(Fact.ARITHMETIC, "Div"),
    **_of(Fact.ELEMENTWISE | Fact.COMMUTATIVE | Fact.EXACT, "Max Min"),
    **_of(Fact.ELEMENTWISE | Fact.COMMUTATIVE | Fact.FINITE_COTANGENT, "Sum"),
    **_of(Fact.ELEMENTWISE | Fact.COMMUTATIVE, "Mean And Or Xor BitwiseAnd BitwiseOr BitwiseXor"),
    **_of(Fact.ELEMENTWISE | Fact.COMMUTATIVE | Fact.OWN_DTYPE, "Equal"),
    **_of(Fact.ELEMENTWISE | Fact.OWN_DTYPE, "Greater GreaterOrEqual Less LessOrEqual"),
    **_of(Fact.ELEMENTWISE | Fact.EXACT, "Where"),
    **_of(Fact.ELEMENTWISE, "BitShift Mod Pow"),
    # Quantisation.
    **_of(Fact.STEP | Fact.OWN_DTYPE, "DynamicQuantizeLinear QuantizeLinear"),
    # Random numbers. Dropout draws from the generator of the session, all others from a state of their own.
    **_of(Fact.RANDOM | Fact.SWITCHED | Fact.SAME_RANK | Fact.FINITE_COTANGENT, "Dropout"),
    **_of(Fact.RANDOM | Fact.SAME_RANK | Fact.OWN_DTYPE, "Bernoulli"),
    **_of(Fact.RANDOM, "Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"),
    # Reductions and scans.
    **_of(Fact.REDUCTION | Fact.FINITE_COTANGENT, "ReduceMean ReduceSum"),
    **_of(Fact.REDUCTION, "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMin ReduceProd"),
    **_of(Fact.REDUCTION, "ReduceSumSquare"),
    **_of(Fact.SAME_RANK, "CumProd CumSum DFT TopK"),
    # Layers.
    **_of(Fact.PRODUCT | Fact.MIXING, "Gemm MatMul"),
    **_of(Fact.MIXING, "Conv ConvTranspose"),
    **_of(Fact.MIXING | Fact.RECURRENT, "GRU LSTM RNN"),
    **_of(Fact.MIXING | Fact.SAME_RANK, "LayerNormalization"),
    **_of(Fact.SWITCHED | Fact.SAME_RANK | Fact.FINITE_COTANGENT, "BatchNormalization"),
    **_of(Fact.SAME_RANK, "GroupNormalization InstanceNormalization LRN LpNormalization LogSoftmax"),
    **_of(Fact.SAME_RANK, "MeanVarianceNormalization RMSNormalization Softmax"),
    **_of(Fact.POOLING | Fact.FINITE_COTANGENT, "AveragePool"),
    **_of(Fact.POOLING | Fact.FINITE_COTANGENT | Fact.EXACT, "MaxPool"),
    **_of(Fact.POOLING, "LpPool"),
    **_of(Fact.SAME_RANK | Fact.FINITE_COTANGENT, "GlobalAveragePool GlobalMaxPool"),
    **_of(Fact.SAME_RANK, "GlobalLpPool"),
    # Sizes, padding, writing into a tensor.
    **_of(Fact.READS_SHAPE, "Shape Size"),
    **_of(Fact.FINITE_COTANGENT, "Pad"),
    **_of(Fact.SAME_RANK, "CenterCropPad ScatterElements ScatterND Trilu"),
}
"""Facts per op type of the standard domain, e.g. `FACTS["Slice"]`. Ops without facts are missing."""


def ops_with(fact: Fact) -> frozenset[str]:
    """Collects the standard ops for which a fact holds."""
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
"""Per op, the inputs whose elements decide the shape of the outputs: sizes, axes, counts. If nobody knows these
elements when the graph is built, nobody knows the shape."""
