"""Lists which parameters of a model could be trained: all, LoRA adapters, biases and norms, or the last layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.lora import LinearLayer, LoraConfig, linear_layers
from onnxtrain.op_facts import VIEWS
from onnxtrain.passes import ModelSource
from onnxtrain.selection import match_names, select_parameters

# Parts of the paths of attention modules, as named by PyTorch's and Hugging Face's models.
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
# Names of attention layers, for files that keep only the last part of a path.
_ATTENTION_LAYERS = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "qkv_proj",
        "out_proj",
        "query",
        "key",
        "value",
        "query_key_value",
    }
)
# Nodes between a weight and the matrix product that uses it.
_PASSED_ON = VIEWS | {"Cast", "DequantizeLinear", "Transpose"}


@dataclass(frozen=True)
class Choice:
    """A selection of parameters, or of layers with LoRA adapters, that could be trained.

    Attributes:
        name: description, e.g. "LoRA of rank 8, attention".
        requires_grad: patterns that select the parameters, for `generate_artifacts`; None for all parameters that
            train by default.
        lora: configuration of the adapters, for `generate_artifacts`; None to train without adapters.
        trained: number of trained elements, e.g. 2048.
        reached: number of elements that training can change, directly or through adapters: a measure of how far the
            model can adapt. An adapter counts as all weights of its layer.
    """

    name: str
    requires_grad: list[str] | None
    lora: LoraConfig | None
    trained: int
    reached: int


@dataclass(frozen=True)
class Choices:
    """All choices of what to train in a model, from :func:`list_choices`.

    Attributes:
        choices: the choices, in display order.
        elements: number of elements in all parameters of the model, including the weights of quantized linear layers.
    """

    choices: list[Choice]
    elements: int


def list_choices(
    source: ModelSource,
    model: ir.Model,
    requires_grad: Sequence[str] | None,
    frozen: Sequence[str] | None,
    ranks: Sequence[int],
) -> Choices:
    """Lists the choices of what to train: all parameters, LoRA adapters, the last layers, or biases and norms.

    Args:
        source: the model as the user passed it, to find the linear layers that adapters can be added to.
        model: the same model in canonical form.
        requires_grad: names and patterns of the parameters to choose from. If None, all parameters that train by
            default are considered, and adapters are listed as well; otherwise, adapters are not listed.
        frozen: names and patterns of parameters that are never trained. Adapters may be added to frozen layers.
        ranks: LoRA ranks, e.g. (4, 8).

    Raises:
        NothingToTrain: no parameters are left to train. If there are adapters to list, this is an error only with
            `frozen`.
        GraphBuildError: a name or pattern is unknown, or a rank is not between 1 and 65,536.
    """
    layers = linear_layers(source)
    # The parts of a merged layer are already counted in its weight.
    quantized = sum(
        layer.inputs * layer.outputs for layer in layers if layer.is_quantised and layer.part_of is None
    )
    adapters = [] if requires_grad is not None else list(_adapters(source, layers, ranks))
    try:
        trainable = select_parameters(model, requires_grad, frozen).trainable
    except GraphBuildError:
        # A model whose only floats are quantization scales trains adapters, or nothing.
        if not adapters or requires_grad or frozen:
            raise
        trainable = []
    sizes = {
        name: value.const_value.size
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    universe = trainable if requires_grad is None and not frozen else _all_parameters(model)
    # Passed on as the user spelled them.
    everything = None if requires_grad is None else list(requires_grad)
    # int4 or int8 weights cannot be trained directly: in such models, all parameters are the embedding, norms and
    # biases.
    title = "all float parameters" if quantized else "all parameters"
    if everything is not None or frozen:
        title = "all chosen parameters"
    plain = list(_parameter_choices(model, trainable, universe, sizes, everything, title))
    elements = sum(sizes[name] for name in universe) + quantized
    return Choices([*plain[:1], *adapters, *plain[1:]], max(elements, 1))


def _all_parameters(model: ir.Model) -> list[str]:
    """Returns the names of all parameters that train by default."""
    return select_parameters(model, None, None).trainable


def _parameter_choices(
    model: ir.Model,
    trainable: Sequence[str],
    universe: Sequence[str],
    sizes: dict[str, int],
    everything: list[str] | None,
    title_of_all: str,
) -> Iterator[Choice]:
    """Yields the choices without adapters: all parameters first, then the last layers, then biases and norms.

    Args:
        model: model in canonical form.
        trainable: names of the parameters to choose from.
        universe: names of the parameters that a choice's patterns are checked against: a pattern must not match any
            parameter outside the choice.
        sizes: number of elements of each parameter.
        everything: patterns for the choice of all parameters; None if these are the parameters that train by default.
        title_of_all: name of the choice of all parameters.
    """
    order = _reading_order(model, trainable)
    matrices = [name for name in order if len(model.graph.initializers[name].shape or ()) > 1]
    groups = {
        title_of_all: list(trainable),
        "the last layer": _from_matrix(order, matrices, len(matrices) - 1),
        "the last half of the layers": _from_matrix(order, matrices, len(matrices) // 2),
        "biases and norms": [name for name in trainable if name not in set(matrices)],
    }
    listed: list[set[str]] = []
    for title, names in groups.items():
        # In a small model, two groups may contain the same parameters.
        if names and set(names) not in listed:
            listed.append(set(names))
            elements = sum(sizes[name] for name in names)
            patterns = everything if set(names) == set(trainable) else shortest_patterns(names, universe)
            yield Choice(title, patterns, None, elements, elements)


def _from_matrix(order: Sequence[str], matrices: Sequence[str], number: int) -> list[str]:
    """Returns all parameters from a given weight matrix onwards, e.g. the last layer's weight and bias.

    Args:
        order: names of the parameters, in order of use.
        matrices: names of the parameters of rank 2 or higher, in the same order.
        number: index in `matrices` of the first parameter to return.
    """
    return list(order[order.index(matrices[number]) :]) if matrices else []


def _reading_order(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Sorts parameters by the first node that uses them, because files may list weights in any order."""
    places = {node: place for place, node in enumerate(model.graph)}

    def first(value: ir.Value) -> int:
        readers = [use.node for use in value.uses()]
        # Exporters emit the Transpose of a weight anywhere before the product, often at the beginning. Readers in the
        # body of a Loop have no position in this graph.
        return min(
            (
                first(reader.outputs[0]) if reader.op_type in _PASSED_ON else places.get(reader, 0)
                for reader in readers
            ),
            default=0,
        )

    return sorted(names, key=lambda name: first(model.graph.initializers[name]))


def _adapters(model: ModelSource, layers: Sequence[LinearLayer], ranks: Sequence[int]) -> Iterator[Choice]:
    """Yields the LoRA choices: for each rank, adapters on all linear layers and adapters on attention layers only."""
    everywhere: set[str] | None = None
    for title, modules in (("all linear layers", None), ("attention", _attention_names(layers))):
        if modules == []:
            continue
        for rank in ranks:
            config = LoraConfig(r=rank) if modules is None else LoraConfig(r=rank, target_modules=modules)
            try:
                chosen = linear_layers(model, config)
            except GraphBuildError:
                # The model has no linear layers, which is not an error here.
                return
            if modules is None:
                everywhere = {layer.path for layer in chosen}
            elif {layer.path for layer in chosen} == everywhere:
                return
            trained = sum(rank * (layer.inputs + layer.outputs) for layer in chosen)
            reached = sum(layer.inputs * layer.outputs for layer in chosen)
            yield Choice(f"LoRA of rank {rank}, {title}", None, config, trained, reached)


def _attention_names(layers: Sequence[LinearLayer]) -> list[str]:
    """Returns names for `target_modules` that select the attention layers, e.g. ["q_proj", "k_proj", "v_proj"].

    Each name is the shortest suffix of an attention layer's path that matches no other kind of layer. In BERT, it is
    "attention.output.dense", because "output.dense" also matches feed-forward layers.
    """
    merged = {layer.part_of for layer in layers}
    modules = [layer.path for layer in layers if layer.path not in merged]
    attention = [module for module in modules if _is_attention(module)]
    others = [module for module in modules if module not in attention]
    names: dict[str, None] = {}
    for module in attention:
        parts = module.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        # The whole path is always a unique suffix.
        names[next(end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others))] = (
            None
        )
    return list(names)


def _is_attention(module: str) -> bool:
    """True if the path of a module belongs to an attention layer."""
    path, _, last = module.rpartition(".")
    return _ATTENTION.search(path) is not None or last in _ATTENTION_LAYERS


def shortest_patterns(names: Collection[str], universe: Collection[str]) -> list[str]:
    """Returns patterns that match all of `names` and nothing else in `universe`, to keep command lines short.

    >>> shortest_patterns(["0.norm.w", "1.norm.w", "fc.bias"], ["0.norm.w", "1.norm.w", "fc.bias", "fc.w"])
    ['*.norm.w', '*.bias']
    """
    patterns: list[str] = []
    left = dict.fromkeys(names)
    while left:
        name = next(iter(left))
        # Without digits, "layers.0.norm.weight" becomes the norm of all layers; "*.bias" matches every bias.
        ends = [f"*.{name.rpartition('.')[2]}"] if "." in name else []
        for pattern in [*ends, re.sub(r"\d+", "*", name), name]:
            matched = match_names([pattern], universe)[pattern]
            if matched and set(matched) <= set(names):
                break
        patterns.append(pattern)
        for other in matched:
            left.pop(other, None)
    return patterns
