"""How a model's weight changes over its layers: α_t as a function of the tensor's name; and slices
of layers put together.

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
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Source
from blr_analysis.merging.job import LayerSlice, Weight
from blr_analysis.merging.vocabularies import Arranged, Place

# Modules that stand before the layers, beside those called embed…
FIRST = {"wte", "wpe", "shared", "tok_embeddings", "word_embeddings", "patch_embedding"}


@dataclass(frozen=True)
class Rule:
    """A number, or a gradient over the depth, for the tensors whose name contains ``part``.

    Every name contains the empty ``part``. ``place`` is where the recipe says so.
    """

    values: tuple[float, ...]
    part: str = ""
    place: str = field(default="", compare=False)

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
                f"{self.rules[-1].place}: no rule for {name!r}: end with {{value: …}} for the rest."
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


@dataclass(frozen=True)
class SliceWeights:
    """α by tensor name of a result that is put together from slices of layers.

    A gradient runs over the layers of its slice; what stands before the layers belongs to the
    first slice, what stands after them to the last.

    >>> head, tail = LayerWeights((Rule((0.0, 1.0)),), {"h": 2}), 0.5
    >>> weight = SliceWeights((2, 3), (head, tail))
    >>> [weight(name) for name in ("wte.w", "h.0.w", "h.1.w", "h.2.w", "ln_f.w")]
    [0.0, 0.0, 1.0, 0.5, 0.5]
    """

    counts: tuple[int, ...]
    weights: tuple[Weight, ...]

    def __call__(self, name: str) -> float:
        """α of one tensor of the result."""
        prefix, index = layer_of(name)
        if index is None:
            return _at(self.weights[0 if before_layers(name) else -1], name)
        for count, weight in zip(self.counts, self.weights, strict=True):
            if index < count:
                return _at(
                    weight, f"{prefix}.{index}{name[len(prefix) + 1 :].lstrip('0123456789')}"
                )
            index -= count
        return _at(self.weights[-1], name)

    def unused(self, names: Iterable[str]) -> list[Rule]:
        """The rules whose filter no tensor's name holds."""
        names = list(names)
        own = [w.unused(names) for w in self.weights if isinstance(w, LayerWeights)]
        return [rule for rules in own for rule in rules]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.weights))


def rest(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """1 minus what the rules say."""
    return tuple(replace(rule, values=tuple(1 - v for v in rule.values)) for rule in rules)


def _at(weight: Weight, name: str) -> float:
    return weight(name) if callable(weight) else weight


def in_slices(
    slices: tuple[LayerSlice, ...], sources: Mapping[Path, Source], model: Path, *, base: bool
) -> Source:
    """A model as the slices arrange it. Slices that lack the model hold their first model's layers
    (its weight there is 0), those that lack the base hold its layers of the same numbers. What
    stands before the layers is of the first slice, what stands after them of the last.

    Raises:
        ModelError: the layers do not lie in one stack.
    """
    places: dict[str, Place] = {}
    offset = 0
    for k, part in enumerate(slices):
        first = next(iter(part.starts))
        owner = model if base or model in part.starts else first
        low = part.starts.get(owner, part.starts[first])
        source = sources[owner]
        stacks = {prefix for prefix, at in map(layer_of, source.specs) if at is not None}
        if len(stacks) != 1:
            raise ModelError(
                f"{source.name!r} has layers in {sorted(stacks)}: slices need one stack"
            )
        for name in source.specs:
            prefix, at = layer_of(name)
            if at is None:
                if k == (0 if before_layers(name) else len(slices) - 1):
                    places[name] = Place(source, name)
            elif low <= at < low + part.count:
                tail = name[len(f"{prefix}.{at}") :]
                places[f"{prefix}.{offset + at - low}{tail}"] = Place(source, name)
        has = 1 + max(at for _, at in map(layer_of, source.specs) if at is not None)
        if low + part.count > has:
            raise ModelError(f"{source.name!r} has fewer layers than the slices take")
        offset += part.count
    return Arranged(sources[model].name, places, sources[model].notes)


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


def before_layers(name: str) -> bool:
    """Whether a tensor outside of the layers is of what stands before them.

    >>> before_layers("model.embed_tokens.weight"), before_layers("lm_head.weight")
    (True, False)
    """
    return any(p.startswith("embed") or p in FIRST for p in name.split(".")[:-1])


def layer_of(name: str) -> tuple[str, int | None]:
    """What stands before the first number among the parts of a name, and that number."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isascii() and part.isdecimal() and len(part) < 7:
            return ".".join(parts[:at]), int(part)
    return "", None
