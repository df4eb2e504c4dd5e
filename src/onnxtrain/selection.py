"""Resolves the names and patterns with which users select parameters and layers."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.passes import (
    TorchSignature,
    canonicalize,
    is_float_parameter,
    is_quantization_or_rotary,
    is_setting,
    is_training_batch_norm,
)

_T = TypeVar("_T")

# Names that PyTorch's exporters generate. Scalars with such names are constants, e.g. the exponent of x ** 2.
_GENERATED_NAME = re.compile(r"(val|const|onnx::\w+|_?inlfunc\w*|scalar_tensor\w*)_\d+|/.*")
# Converters that write constants of formulas as scalar initializers (the 1 of a sigmoid, the initial 0 of an LSTM).
# Their parameters are not scalars.
_CONVERTERS = frozenset({"tf2onnx", "skl2onnx", "OnnxMLTools"})
# A tensor is a mask if an element has at least this absolute value (1e30 for dtypes that are not listed). Larger
# tensors than _MOST_OF_A_MASK are not searched.
_ENDLESS = {ir.DataType.FLOAT16: 6e4}
_MOST_OF_A_MASK = 1 << 20
# TensorFlow's name for an unnamed variable contains this text. Such variables are trained.
_VARIABLE = "ReadVariableOp"
# Names of values that PyTorch's exporters compute from parameters, and the export option that prevents it.
_COMPUTED_NAMES = (
    (re.compile(r"val_\d+|.*\.val_\d+"), "optimize=False"),
    (re.compile(r"onnx::\w+_\d+"), "do_constant_folding=False"),
)


# Metadata key of PyTorch's Dynamo exporter. The value is the repr of a list, e.g. "['', 'encoder.fc', 'linear']".
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Selection:
    """Names of initializers by their role, each in graph order.

    Attributes:
        trainable: trained parameters.
        frozen: parameters that are inputs of the training model, but not trained.
        statistics: running statistics of BatchNormalization nodes in training mode.
        sparse: trained parameters with sparse gradients.
    """

    trainable: list[str]
    frozen: list[str]
    statistics: list[str]
    sparse: list[str]

    @property
    def parameters(self) -> set[str]:
        """All parameters, trainable and frozen."""
        return {*self.trainable, *self.frozen}


def module_scope(node: ir.Node) -> str | None:
    """Returns the path of a node's PyTorch module, e.g. "encoder.fc"; None if it is unknown.

    PyTorch's Dynamo exporter stores the modules around each node in its metadata.
    """
    scopes = node.metadata_props.get(_SCOPES)
    if scopes is None:
        return None
    # The metadata of a file may hold any text.
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # The first entry is the outermost module, without a name; the last entry is the node itself.
        named = [str(scope) for scope in ast.literal_eval(scopes)[:-1] if scope]
        return named[-1] if named else None
    return None


def set_module_scope(node: ir.Node, module: str) -> None:
    """Stores the path of a node's PyTorch module in its metadata, for :func:`module_scope`."""
    node.metadata_props[_SCOPES] = repr(["", module, node.name or ""])


def layer_names(node: ir.Node) -> list[str]:
    """Returns the names by which users can select a layer, without duplicates.

    A pattern selects the layer if it matches any of these names:

    - the path of the layer's PyTorch module, e.g. `body.bn`, if the file contains it;
    - for a BatchNormalization, the name of its scale, e.g. `body.bn.weight`, and the module path in it, `body.bn`;
    - the node's name, e.g. `/body/bn/BatchNormalization`, and if it starts with "/", the module path in it, `body.bn`.
    """
    # If a pattern matches nothing, the error message shows the first name.
    names = []
    scope = module_scope(node)
    if scope is not None:
        names.append(scope)
    scale = node.inputs[1] if node.op_type == "BatchNormalization" else None
    if scale is not None and scale.name:
        names += [scale.name.rpartition(".")[0], scale.name]
    if node.name:
        names.append(node.name)
        # TorchScript's exporter writes the path of the module, as in "/body/bn/BatchNormalization".
        if node.name.startswith("/"):
            names.append(node.name[1:].rpartition("/")[0].replace("/", "."))
    return [name for name in dict.fromkeys(names) if name]


def layer_name(node: ir.Node) -> str:
    """Returns a layer's name for messages: the first of its :func:`layer_names`, else the name of its output."""
    return next(iter(layer_names(node)), str(node.outputs[0].name))


def layer_choices(
    nodes: Sequence[ir.Node], choice: _T | Mapping[str, _T], option: str, kind: str
) -> dict[ir.Node, _T]:
    """Resolves an argument that has a value per layer, such as `dropout`: returns the value for each layer.

    Args:
        nodes: the layers, in graph order.
        choice: value of the argument: one for all layers, or a mapping from patterns (:func:`match_names`) to values.
            The first pattern that matches one of the :func:`layer_names` decides. Layers without a match are left out.
        option: name of the argument for the error message, e.g. "dropout".
        kind: kind of the layers for the error message, e.g. "Dropout".

    Raises:
        GraphBuildError: a pattern matches no node.
    """
    if not isinstance(choice, Mapping):
        return dict.fromkeys(nodes, choice)
    names = {node: layer_names(node) for node in nodes}
    all_names = list(dict.fromkeys(name for of_node in names.values() for name in of_node))
    chosen: dict[ir.Node, _T] = {}
    for pattern, matched in match_names(choice, all_names).items():
        if not matched:
            shown = [of_node[0] for of_node in names.values() if of_node]
            raise GraphBuildError(
                f"building the training graph: no {kind} matches {pattern!r} of {argument(option)}; the "
                f"model has {some_names(shown)}"
            )
        for node in nodes:
            if not set(matched).isdisjoint(names[node]):
                chosen.setdefault(node, choice[pattern])
    return chosen


def choice_at(node: ir.Node, choice: _T | Mapping[str, _T]) -> _T | None:
    """Returns the value for one layer, as in :func:`layer_choices`; None if no pattern matches."""
    if not isinstance(choice, Mapping):
        return choice
    names = layer_names(node)
    return next((value for pattern, value in choice.items() if match_names([pattern], names)[pattern]), None)


def match_names(patterns: Iterable[str], names: Collection[str]) -> dict[str, list[str]]:
    """Maps each pattern to the names that it matches. A pattern that equals a name matches only that name.

    `*` matches any text, including dots; `?` matches one character, and `[...]` one of several. Matching is
    case-sensitive.

    >>> match_names(["conv.*", "fc[0].w"], ["conv.w", "conv.b", "fc[0].w", "fc0.w"])
    {'conv.*': ['conv.w', 'conv.b'], 'fc[0].w': ['fc[0].w']}
    """
    # Names such as "fc[0].w" look like patterns, so a name that exists is taken literally.
    return {
        pattern: [pattern]
        if pattern in names
        else [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        for pattern in patterns
    }


def reached_patterns(
    patterns: Sequence[str], trained: Collection[str], unreached: Collection[str]
) -> list[str]:
    """Filters out patterns that match only parameters on which the loss does not depend.

    Patterns that match nothing at all are kept, so that they can be reported later.

    Args:
        patterns: names and patterns of parameters.
        trained: names of the trained parameters.
        unreached: names of the parameters on which the loss does not depend.

    >>> reached_patterns(["body.*", "aside.*", "unknown"], trained=["body.w"], unreached=["aside.w"])
    ['body.*', 'unknown']
    """
    of_trained, of_unreached = match_names(patterns, trained), match_names(patterns, unreached)
    return [pattern for pattern in patterns if of_trained[pattern] or not of_unreached[pattern]]


def matched_names(
    patterns: Iterable[str], names: Collection[str], refusal: Callable[[str], Exception]
) -> set[str]:
    """Returns the names that match any of the patterns, as in :func:`match_names`.

    Args:
        patterns: names and patterns.
        names: names to choose from.
        refusal: returns the exception to raise for a pattern that matches nothing.
    """
    matched = match_names(patterns, names)
    for pattern, matches in matched.items():
        if not matches:
            raise refusal(pattern)
    return {name for matches in matched.values() for name in matches}


def some_names(names: Collection[str], limit: int = 20) -> str:
    """Returns at most `limit` names joined for a message, e.g. "a, b, ... (40 in all)", or "none"."""
    shown = ", ".join(list(names)[:limit])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > limit else shown or "none"


def canonical_with_names(
    model: ir.Model, requires_grad: Sequence[str] | None, frozen: Sequence[str] | None
) -> tuple[ir.Model, Sequence[str] | None, Sequence[str] | None]:
    """Returns the canonical form of a model, and the names of the parameters to train and to freeze.

    These parameters are excluded from constant folding, so that they remain initializers.

    Args:
        model: a loaded model.
        requires_grad: names and patterns of the parameters to train; None for the default.
        frozen: names and patterns of the parameters to freeze.

    Returns:
        The canonical model, and both lists with patterns expanded to names (:func:`expand_requests`).

    Raises:
        GraphBuildError: see :func:`expand_requests`.
    """
    names = [*(requires_grad or ()), *(frozen or ())]
    known = {str(value.name) for node in model.graph for value in node.outputs} | {*model.graph.initializers}
    if not known.issuperset(names):
        # Patterns match names of the canonical form, so the model is canonicalized twice: first to match them.
        matched = canonicalize(model, [name for name in names if name in known])
        requires_grad, frozen = expand_requests(matched, requires_grad, frozen)
        names = [*(requires_grad or ()), *frozen]
    return canonicalize(model, names), requires_grad, frozen


def expand_requests(
    model: ir.Model, requires_grad: Iterable[str] | None, frozen: Iterable[str] | None
) -> tuple[list[str] | None, list[str]]:
    """Expands the patterns in the lists of parameters to train and to freeze to names of initializers.

    Patterns match only parameters, not running statistics or settings of ops (e.g. Clip's bounds or Resize's scales),
    and not buffers or constants if the file identifies them. Only a pattern that matches no parameter can match
    quantization scales and rotary caches. A parameter in both lists is frozen, unless `requires_grad` contains its
    exact name and `frozen` only a pattern; so one layer of a frozen backbone can be trained.

    Args:
        model: a canonical model.
        requires_grad: names and patterns of the parameters to train; None for the default.
        frozen: names and patterns of the parameters to freeze.

    Returns:
        The names of the parameters to train (None if `requires_grad` is None) and of those to freeze.

    Raises:
        GraphBuildError: a name is unknown, not floating point, or in both lists; a pattern matches nothing.
    """
    to_train, to_freeze = list(requires_grad or ()), list(frozen or ())
    _check_names(model, to_train, to_freeze)
    exact_train, exact_freeze = (
        {name for name in names if name in model.graph.initializers} for names in (to_train, to_freeze)
    )
    wins = exact_train - exact_freeze
    frozen_names = [name for name in _expanded(model, to_freeze) if name not in wins]
    if requires_grad is None:
        return None, frozen_names
    taken = set(frozen_names) - exact_train
    return [name for name in _expanded(model, to_train) if name not in taken], frozen_names


def _expanded(model: ir.Model, names_or_patterns: Sequence[str]) -> list[str]:
    """Returns the names of the initializers that `names_or_patterns` selects, exact names first."""
    exact = [name for name in names_or_patterns if name in model.graph.initializers]
    patterns = [name for name in names_or_patterns if name not in model.graph.initializers]
    # Skipped if all names are exact, because matching goes through all initializers.
    matched = _match_patterns(model, patterns) if patterns else {}
    return list(dict.fromkeys([*exact, *(name for names in matched.values() for name in names)]))


def _match_patterns(model: ir.Model, patterns: Iterable[str]) -> dict[str, list[str]]:
    """Maps each pattern to the names of the parameters that it matches.

    A pattern that matches no parameter is mapped to the quantization scales and rotary caches that it matches.
    """
    # In an int4 language model, 13 of 19 floating-point initializers were scales and rotary caches. "*" should not
    # match these.
    patterns = list(patterns)
    fixed = [name for name, value in float_initializers(model) if is_quantization_or_rotary(value)]
    parameters, others = match_names(patterns, _parameter_names(model)), match_names(patterns, fixed)
    return {pattern: parameters[pattern] or others[pattern] for pattern in patterns}


def select_parameters(
    model: ir.Model,
    requires_grad: Iterable[str] | None,
    frozen: Iterable[str] | None,
    sparse: Iterable[str] | None = None,
) -> Selection:
    """Sorts the initializers of a canonical model into trained parameters, frozen parameters and running statistics.

    Names may be patterns, see :func:`expand_requests`. Quantization scales and rotary caches are trained only if an
    exact name, or a pattern that matches no parameter, selects them.

    Args:
        model: a canonical model.
        requires_grad: names and patterns of the parameters to train; None for all that are not frozen.
        frozen: names and patterns of the parameters to freeze.
        sparse: names and patterns of the trained parameters that get sparse gradients.

    Raises:
        GraphBuildError: a name is unknown, not floating point, or both trained and frozen; a pattern matches nothing;
            `requires_grad` selects a running statistic.
        NothingToTrain: nothing is left to train.
    """
    floats = dict(float_initializers(model))
    # Training steps update the running statistics: these are state of the model, but not parameters.
    running = _statistics(model, in_training=True)
    statistics = [name for name in floats if name in running]
    requested, frozen_list = expand_requests(model, requires_grad, frozen)
    for name in requested or ():
        if name in statistics:
            raise GraphBuildError(
                f"selecting parameters: {name!r} is a running statistic of a BatchNormalization in "
                "training mode; it is updated by every training step and has no gradient"
            )
    frozen_names = set(frozen_list)
    wanted = set(_parameter_names(model)) - frozen_names if requested is None else set(requested)
    trainable = [name for name in model.graph.initializers if name in wanted]
    if not trainable:
        others = (
            ""
            if frozen_names.issuperset(floats)
            else " and the others are quantization scales, rotary caches, settings of ops or constants of formulas"
        )
        raise NothingToTrain(
            "building the training graph: no parameter is left to train; the model has "
            f"{len(floats)} floating-point initializers, of which {len(frozen_names)} are frozen{others}. "
            f"Name the parameters to train in {argument('requires_grad')}, or freeze fewer."
        )
    kept = [name for name in model.graph.initializers if name in frozen_names - set(statistics)]
    return Selection(trainable, kept, statistics, _match_sparse(sparse or (), trainable))


def _match_sparse(patterns: Iterable[str], trainable: Sequence[str]) -> list[str]:
    """Returns the trained parameters that match the names and patterns of `sparse_gradients`, in graph order."""
    wanted = matched_names(
        patterns,
        trainable,
        lambda pattern: GraphBuildError(
            f"building the training graph: no trained parameter matches {pattern!r} of {argument('sparse_gradients')}; "
            f"the trained parameters are {some_names(trainable)}"
        ),
    )
    return [name for name in trainable if name in wanted]


def _check_names(model: ir.Model, requested: list[str], frozen: list[str]) -> None:
    """Checks the names and patterns of the parameters to train and to freeze.

    Args:
        model: the model.
        requested: names and patterns of the parameters to train.
        frozen: names and patterns of the parameters to freeze.

    Raises:
        GraphBuildError: a name is in both lists, a name or pattern matches no tensor of the model, or a tensor to train
            is not floating point.
    """
    both = sorted(set(requested) & set(frozen))
    if both:
        raise GraphBuildError(
            f"selecting parameters: {', '.join(both)} cannot be frozen and require gradient computation at "
            "the same time; name each in one of the two lists"
        )
    for role, names in (("requires_grad", requested), ("frozen_params", frozen)):
        for name in names:
            value = model.graph.initializers.get(name)
            if value is None:
                _check_pattern(model, role, name)
                continue
            if role == "requires_grad" and not is_float(value):
                raise GraphBuildError(
                    f"selecting parameters: {name!r} is {value.dtype}; only floats can be trained"
                )


def _check_pattern(model: ir.Model, role: str, pattern: str) -> None:
    """Raises GraphBuildError for a pattern that matches nothing; `role` is the argument, e.g. "requires_grad"."""
    if _match_patterns(model, [pattern])[pattern]:
        return
    parameters = _parameter_names(model)
    if set(pattern) & set("*?["):
        problem = f"no parameter matches {pattern!r} of {argument(role)}; the parameters are {some_names(parameters)}"
    else:
        candidates = some_names([name for name, _ in float_initializers(model)])
        problem = f"{argument(role)} names {pattern!r}; the parameters are {candidates}"
    raise GraphBuildError(f"selecting parameters: {problem}{_hint(model)}")


def _parameter_names(model: ir.Model) -> list[str]:
    """Returns the names of the initializers that are trained by default."""
    # Running statistics are buffers in PyTorch, which are not trained in either mode.
    fixed = _statistics(model, in_training=True) | _statistics(model, in_training=False)
    signature = TorchSignature(model)
    converted = bool(_CONVERTERS & {model.producer_name, model.graph.name})
    return [
        name
        for name, value in float_initializers(model)
        if name not in fixed and not _is_used_as_setting(value) and _is_parameter(value, signature, converted)
    ]


def _hint(model: ir.Model) -> str:
    """Returns advice for an error message if PyTorch's exporter replaced parameters with computed values, else ""."""
    for pattern, option in _COMPUTED_NAMES:
        computed = next((name for name, _ in float_initializers(model) if pattern.fullmatch(name)), None)
        if computed is not None:
            return (
                f". torch.onnx.export has replaced parameters by computed values such as {computed!r}: export with "
                f"{option}"
            )
    return ""


def is_float(value: ir.Value) -> bool:
    """True if a value is known to be floating point."""
    return value.dtype is not None and value.dtype.is_floating_point()


def is_generated_name(name: str) -> bool:
    """True if a name looks as if PyTorch's exporters had generated it, e.g. "val_12" or "onnx::MatMul_7"."""
    return _GENERATED_NAME.fullmatch(name) is not None


def _is_parameter(value: ir.Value, signature: TorchSignature, converted: bool) -> bool:
    """True if a value is a parameter, not a constant of the model.

    Args:
        value: a floating-point initializer.
        signature: the list of parameters that PyTorch's exporter has written to the file, if any.
        converted: True if a converter such as tf2onnx, not PyTorch's exporter, has written the file.
    """
    # PyTorch's Dynamo exporter lists the module's parameters in the file. For other files, heuristics decide.
    listed = signature.is_parameter(value)
    if listed is not None:
        return listed
    tensor = value.const_value
    size = tensor.size if tensor is not None else None
    # tf2onnx and skl2onnx write constants of formulas as scalar initializers; variables keep TensorFlow's name.
    if converted and tensor is not None and tensor.shape.rank() == 0:
        return _VARIABLE in str(value.name)
    if (size == 1 or signature) and is_generated_name(value.name or ""):
        return False
    return not (_is_power(value) or _is_mask(value))


def _is_mask(value: ir.Value) -> bool:
    """True if a tensor looks like an attention mask: it has an element of magnitude 1e30 (float16: 6e4) or more."""
    # onnxruntime's optimizer drops PyTorch's list of parameters from a file; masks would then be trained.
    tensor = value.const_value
    if tensor is None or tensor.size > _MOST_OF_A_MASK:
        return False
    return bool((np.abs(tensor.numpy().astype(np.float64)) >= _ENDLESS.get(tensor.dtype, 1e30)).any())


def _is_power(value: ir.Value) -> bool:
    """True if a value is a scalar that is used only as an integer exponent, e.g. the 2 in x ** 2."""
    # Training would make the exponent fractional, and powers of negative bases NaN.
    tensor = value.const_value
    if tensor is None or tensor.shape.rank() != 0 or not float(tensor.numpy()).is_integer():
        return False
    uses = value.uses()
    return bool(uses) and all(use.node.op_type == "Pow" and use.idx == 1 for use in uses)


def _is_used_as_setting(value: ir.Value) -> bool:
    """True if ops use a value as a setting, such as a bound of Clip or a quantization scale, not as a weight."""
    return is_setting(value) or is_quantization_or_rotary(value)


def float_initializers(model: ir.Model) -> list[tuple[str, ir.Value]]:
    """Returns the floating-point initializers that may be parameters, as pairs of name and value in graph order."""
    return [(name, value) for name, value in model.graph.initializers.items() if is_float_parameter(value)]


def _statistics(model: ir.Model, *, in_training: bool) -> set[str]:
    """Returns the running statistics of BatchNormalization nodes in training mode, or in inference mode.

    Args:
        model: the model.
        in_training: True for the nodes in training mode, False for those in inference mode.

    Returns:
        Names of the initializers with the means and variances.
    """
    nodes = [
        node
        for node in model.graph
        if node.op_type == "BatchNormalization"
        and node.domain == ""
        and is_training_batch_norm(node) == in_training
    ]
    return {str(value.name) for node in nodes for value in node.inputs[3:5] if value}
