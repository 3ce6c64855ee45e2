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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blr_analysis.errors import InputError
from blr_analysis.merging.job import Weight


@dataclass(frozen=True)
class Rule:
    """A number, or a gradient over the depth, for the tensors whose name contains ``part``.

    Every name contains the empty ``part``.
    """

    values: tuple[float, ...]
    part: str = ""

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
        default: where no rule speaks; None: there must be one, as in mergekit.

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
    default: float | None = 1.0

    def __call__(self, name: str) -> float:
        """α of one tensor.

        Raises:
            InputError: no rule speaks of it, and there is no default.
        """
        rule = next((rule for rule in self.rules if rule.part in name), None)
        if rule is not None:
            return rule.at(depth_of(name, self.depths))
        if self.default is None:
            raise InputError(
                f"no rule of a weight speaks of {name!r}: end with {{value: …}} for the rest"
            )
        return self.default

    def unused(self, names: Iterable[str]) -> list[Rule]:
        """The rules whose filter no tensor's name holds."""
        names = list(names)
        return [rule for rule in self.rules if not any(rule.part in name for name in names)]

    def __repr__(self) -> str:
        deciding: list[object] = []
        for rule in self.rules:
            deciding.append(rule)
            if not rule.part:
                break
        else:
            deciding += [] if self.default is None else [self.default]
        return "; ".join(map(repr, deciding))


def weight_by_layer(
    rules: tuple[Rule, ...],
    depths: Mapping[str, int],
    default: float = 1.0,
    *,
    for_all: bool = False,
) -> Weight:
    """α as a number where all tensors get the same, else as a function of the name; ``for_all``:
    where there are rules, one must speak of every tensor.

    >>> weight_by_layer((Rule((0.5,)),), {}), weight_by_layer((Rule((0.5,), "mlp"),), {})
    (0.5, mlp: 0.5; 1.0)
    """
    if not rules:
        return default
    if not varies(rules):
        return rules[0].values[0]
    return LayerWeights(rules, depths, None if for_all else default)


def varies(rules: Sequence[Rule]) -> bool:
    """Whether a weight depends on the tensor's name."""
    return bool(rules) and (bool(rules[0].part) or len(set(rules[0].values)) > 1)


def rest(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """1 minus what the rules say."""
    return tuple(replace(rule, values=tuple(1 - v for v in rule.values)) for rule in rules)


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
    return {prefix: len(at) for prefix, at in stacks.items() if max(at) == len(at) - 1}


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
    for at, part in enumerate(parts):
        if part.isascii() and part.isdecimal() and len(part) < 7:
            return ".".join(parts[:at]), int(part)
    return "", None
