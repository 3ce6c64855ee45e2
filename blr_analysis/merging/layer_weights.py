"""How a model's weight changes over its layers: α_t as a function of the tensor's name.

A recipe gives a weight as

* a number, for every tensor;
* a list of numbers, a gradient: the line through these numbers, equally spaced over the depth
  d ∈ [0, 1] of the model. Layer i of L stands at d = i / (L − 1), a single layer at d = 1;
* a list of rules ``[{filter: mlp, value: ...}, {value: ...}]``: the first whose filter is a part
  of the tensor's name decides; no filter, or ``*``, speaks of every tensor.

How many layers there are, and what stands outside of them, is taken from the tensors' names, so
that every model can be merged. Outside the layers everything, before them (embeddings) and after
(final norm, ``lm_head``, pooler, classifier), stands at d = 0, as in mergekit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


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
        rules: the first that speaks of a tensor decides.
        depths: the number of layers of each stack, as :func:`depths` finds them.
        default: where no rule speaks.

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
        rule = next((rule for rule in self.rules if rule.part in name), None)
        return self.default if rule is None else rule.at(depth_of(name, self.depths))

    def __repr__(self) -> str:
        facts = []
        for rule in self.rules:
            facts.append(repr(rule))
            applies_to_all = not rule.part
            if applies_to_all:  # later rules have no effect
                return "; ".join(facts)
        facts.append(repr(self.default))
        return "; ".join(facts)


def depths(names: Iterable[str]) -> dict[str, int]:
    """The number of layers of each stack, by what stands before the layer's number.

    A stack is a prefix whose next part is a number that runs from 0 without a gap; what has gaps
    (``classifier.0``, ``classifier.3``) is no stack of layers.

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
    """Where a tensor stands between the first layer (0) and the last (1); 0 outside of them.

    >>> [depth_of(n, {"h": 5}) for n in ("wte.weight", "h.1.mlp.weight", "ln_f.weight")]
    [0.0, 0.25, 0.0]
    """
    prefix, index = layer_of(name)
    layers = depths.get(prefix)
    if index is not None and layers is not None:
        return min(index / (layers - 1), 1.0) if layers > 1 else 1.0
    return 0.0


def layer_of(name: str) -> tuple[str, int | None]:
    """What stands before the first number among the parts of a name, and that number."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        is_index = part.isascii() and part.isdecimal() and len(part) < 7
        if is_index:
            return ".".join(parts[:position]), int(part)
    return "", None
