"""How a model's weight changes over its layers: α_t as a function of the tensor's name.

A recipe gives a weight in one of three forms:

* a number, for every tensor;
* a list of numbers, a gradient: the line through these numbers, which are equally spaced over the
  depth d ∈ [0, 1] of the model. Layer i of L has d = i / (L − 1), a single layer has d = 1;
* a list of rules ``[{filter: mlp, value: ...}, {value: ...}]``. The first rule whose filter is part
  of the tensor's name decides. A rule without a filter, or with ``*``, is for every tensor.

The layers are found by the names of the tensors, so that every model can be merged. Tensors outside
the layers, before them (embeddings) and behind them (final norm, ``lm_head``, pooler, classifier),
have d = 0, as in mergekit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

FIRST_WORDS = ("wte", "wpe", "shared")  # of names of embeddings without "embed"
DIGITS = 6  # a longer number in a name is no number of a layer


@dataclass(frozen=True)
class Rule:
    """A number, or a gradient over the depth, for the tensors whose name contains ``part``.

    Every name contains the empty ``part``.
    """

    values: tuple[float, ...]
    part: str = ""

    @property
    def varies(self) -> bool:
        """Whether the value depends on the tensor's name."""
        return bool(self.part) or len(set(self.values)) > 1

    def at(self, depth: float) -> float:
        """The value at a depth in [0, 1]."""
        last = len(self.values) - 1
        return float(np.interp(depth * last, range(last + 1), self.values))

    def __repr__(self) -> str:
        shown = repr(self.values[0] if len(self.values) == 1 else list(self.values))
        return f"{self.part}: {shown}" if self.part else shown


@dataclass(frozen=True)
class LayerWeights:
    """α by tensor name.

    Attributes:
        rules: the first rule whose part is in a tensor's name decides.
        depths: the number of layers of each stack, as :func:`depths` finds them.
        default: α of tensors that no rule is for.

    Example:
        >>> names = ["embed.weight", *(f"layers.{i}.mlp.weight" for i in range(3)), "norm.weight"]
        >>> weight = LayerWeights((Rule((0.0, 1.0)),), depths(names))
        >>> weight
        [0.0, 1.0]
        >>> [weight(name) for name in names]
        [0.0, 0.0, 0.5, 1.0, 0.0]
    """

    rules: tuple[Rule, ...]
    depths: Mapping[str, int]
    default: float = 1.0

    def __call__(self, name: str) -> float:
        """α of one tensor."""
        return self.at(name, depth_of(name, self.depths))

    def at(self, name: str, depth: float) -> float:
        """α of one tensor, if it had this depth."""
        for rule in self.rules:
            if rule.part in name:
                return rule.at(depth)
        return self.default

    def __repr__(self) -> str:
        facts = []
        for rule in self.rules:
            facts.append(repr(rule))
            applies_to_all = not rule.part
            if applies_to_all:  # later rules have no effect
                return "; ".join(facts)
        facts.append(repr(self.default))
        return "; ".join(facts)


@dataclass(frozen=True)
class SliceWeights:
    """α by tensor name, where slices of the layers have weights of their own.

    A gradient runs over the layers of one slice. Tensors before the layers belong to the first
    slice, those behind them to the last one; both have depth 0, as in mergekit.

    Attributes:
        slices: the numbers of the layers of each slice, and its weights.
        depths: the number of layers of each stack, as :func:`depths` finds them.

    Example:
        >>> names = ["embed.weight", *(f"layers.{i}.mlp.weight" for i in range(4)), "norm.weight"]
        >>> gradient = LayerWeights((Rule((0.0, 1.0)),), depths(names))
        >>> weight = SliceWeights(((range(2), gradient), (range(2, 4), 0.7)), depths(names))
        >>> weight
        layers 0 to 1: [0.0, 1.0]; layers 2 to 3: 0.7
        >>> [weight(name) for name in names]
        [0.0, 0.0, 1.0, 0.7, 0.7, 0.7]
    """

    slices: tuple[tuple[range, LayerWeights | float], ...]
    depths: Mapping[str, int]

    def __call__(self, name: str) -> float:
        """α of one tensor."""
        prefix, index = layer_of(name)
        if index is None or prefix not in self.depths:
            _, weights = self.slices[0 if stands_before_layers(name) else -1]
            return weights.at(name, 0.0) if isinstance(weights, LayerWeights) else weights
        layers, weights = next(entry for entry in self.slices if index in entry[0])
        if not isinstance(weights, LayerWeights):
            return weights
        is_single = len(layers) == 1
        return weights.at(name, 1.0 if is_single else layers.index(index) / (len(layers) - 1))

    def __repr__(self) -> str:
        return "; ".join(
            f"layers {layers.start} to {layers.stop - 1}: {weights!r}"
            for layers, weights in self.slices
        )


def stands_before_layers(name: str) -> bool:
    """Whether a tensor outside the layers stands before them: an embedding, or its norm.

    >>> [stands_before_layers(n) for n in ("bert.embeddings.LayerNorm.bias", "wte.w", "lm_head.w")]
    [True, True, False]
    """
    words = [word for word in name.split(".") if word != "embed_out"]  # a head
    return any("embed" in word or word in FIRST_WORDS for word in words)


def depths(names: Iterable[str]) -> dict[str, int]:
    """The number of layers of each stack, by the part of the names before the layer's number.

    The numbers of a stack run from 0 without a gap. Names whose numbers have gaps
    (``classifier.0``, ``classifier.3``) are no layers of a stack.

    >>> depths(["h.0.w", "h.1.w", "h.1.experts.0.w", "head.0.w", "head.2.w", "wte.weight"])
    {'h': 2}
    """
    stacks: dict[str, set[int]] = {}
    for name in names:
        prefix, index = layer_of(name)
        if index is not None:
            stacks.setdefault(prefix, set()).add(index)
    return {
        prefix: len(indices)
        for prefix, indices in stacks.items()
        if max(indices) == len(indices) - 1  # they are 0, 1, 2, … without a gap
    }


def depth_of(name: str, depths: Mapping[str, int]) -> float:
    """The depth of a tensor, from 0 in the first layer to 1 in the last; 0 outside the layers.

    >>> [depth_of(n, {"h": 5}) for n in ("wte.weight", "h.1.mlp.weight", "ln_f.weight")]
    [0.0, 0.25, 0.0]
    """
    prefix, index = layer_of(name)
    n_layers = depths.get(prefix)
    if index is None or n_layers is None:
        return 0.0
    if n_layers == 1:
        return 1.0
    return min(index / (n_layers - 1), 1.0)


def layer_of(name: str) -> tuple[str, int | None]:
    """The parts of a name before its first number, and that number; "" and None without one."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        is_index = part.isascii() and part.isdecimal() and len(part) <= DIGITS
        if is_index:
            return ".".join(parts[:position]), int(part)
    return "", None
