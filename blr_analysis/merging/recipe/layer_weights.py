"""How a model's weight changes over its layers: α_t as a function of the tensor's name.

A recipe writes a weight as mergekit's users write it:

* a number, for every tensor;
* a list of numbers, a gradient: equally spaced over the depth t ∈ [0, 1] of the model and
  interpolated linearly. Layer i of L stands at t = i / (L − 1), a single layer at t = 1;
* a list of rules ``[{filter: mlp, value: ...}, {value: ...}]``: the first whose filter is a part
  of the tensor's name decides; no filter, or ``*``, fits every name.

Where this differs from mergekit: it takes L and what stands outside the layers from a table of
architectures, this takes both from the tensors' names, so that every model can be merged. Outside
the layers a name that speaks of an embedding (``embed``, ``wte``, ``wpe``, ``shared``; but not
``embed_out``, GPT-NeoX's head) stands at t = 0, and everything else (final norm, ``lm_head``,
pooler, classifier) at t = 1, as mergekit's tables have it for the usual architectures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blr_analysis.errors import InputError
from blr_analysis.merging.job import Weight

BEGINNING = ("embed", "wte", "wpe", "shared")
HEAD = "embed_out"
EVERY = "*"


@dataclass(frozen=True)
class Rule:
    """A number, or a gradient over the depth, for the tensors whose name contains ``filter``."""

    value: tuple[float, ...]
    filter: str | None = None

    def fits(self, name: str) -> bool:
        """Whether the rule speaks of this tensor."""
        return self.filter is None or self.filter == EVERY or self.filter in name

    def at(self, t: float) -> float:
        """The value at a depth t ∈ [0, 1], interpolated linearly between its neighbours."""
        place = t * (len(self.value) - 1)
        left = math.floor(place)
        right = min(left + 1, len(self.value) - 1)
        return (1 - (place - left)) * self.value[left] + (place - left) * self.value[right]

    def __repr__(self) -> str:
        return f"{self.filter}: {_text(self.value)}" if self.filter else _text(self.value)


Setting = tuple[Rule, ...]


@dataclass(frozen=True)
class LayerWeights:
    """α by tensor name.

    Attributes:
        settings: what decides, the first that has a rule for a tensor: the model's own before
            the recipe's.
        depths: the number of layers of each stack, as :func:`depths` finds them.
        default: where no rule fits.

    Example:
        >>> names = ["embed.weight", *(f"layers.{i}.mlp.weight" for i in range(3)), "norm.weight"]
        >>> weight = LayerWeights(((Rule((0.0, 1.0)),),), depths(names))
        >>> weight
        [0.0, 1.0]
        >>> [weight(name) for name in names]
        [0.0, 0.0, 0.5, 1.0, 1.0]
    """

    settings: tuple[Setting, ...]
    depths: Mapping[str, int]
    default: float = 1.0

    def __call__(self, name: str) -> float:
        """α of one tensor."""
        for rule in (rule for setting in self.settings for rule in setting):
            if rule.fits(name):
                return rule.at(depth_of(name, self.depths))
        return self.default

    def unused(self, names: Iterable[str]) -> list[str]:
        """The filters that no tensor's name holds."""
        held = list(names)
        rules = [rule for setting in self.settings for rule in setting]
        return [str(r.filter) for r in rules if not any(r.fits(name) for name in held)]

    def __repr__(self) -> str:
        rules = [rule for setting in self.settings for rule in setting]
        last = next((i for i, rule in enumerate(rules) if rule.filter in (None, EVERY)), None)
        texts = [repr(rule) for rule in (rules if last is None else rules[: last + 1])]
        return "; ".join(texts if last is not None else [*texts, repr(self.default)])


def constant(settings: Iterable[Setting], default: float = 1.0) -> float | None:
    """The one number that all tensors get, or None where it depends on the name.

    >>> constant([(Rule((0.5,)),)]), constant([(Rule((0.5,), "mlp"),)]), constant([])
    (0.5, None, 1.0)
    """
    rules = [rule for setting in settings for rule in setting]
    if not rules:
        return default
    first = rules[0]
    plain = first.filter in (None, EVERY) and len(set(first.value)) == 1
    return first.value[0] if plain else None


@dataclass(frozen=True)
class Scaled:
    """A weight times a factor, over the sum of all weights if those are given.

    >>> Scaled(1.0, 0.5, (1.0, 3.0))("any"), Scaled(LayerWeights(((Rule((2.0,), "a"),),), {}), 0.5)
    (0.125, 0.5 × (a: 2.0; 1.0))
    """

    weight: Weight
    factor: Weight
    among: tuple[Weight, ...] = ()

    def __call__(self, name: str) -> float:
        """λ α_t, or λ α_t / Σ_s α_s, of one tensor."""
        total = sum(_at(weight, name) for weight in self.among) if self.among else 1.0
        if abs(total) < 1e-8:
            raise InputError(
                f"the weights{f' of {name!r}' if name else ''} sum to 0: nothing to normalize by"
            )
        return _at(self.weight, name) * _at(self.factor, name) / total

    def unused(self, names: Iterable[str]) -> list[str]:
        """The filters of the weight that no tensor's name holds."""
        return self.weight.unused(names) if isinstance(self.weight, LayerWeights) else []

    def __repr__(self) -> str:
        shown = [f"({w!r})" if callable(w) else repr(w) for w in (self.factor, self.weight)]
        share = f" / sum of {len(self.among)} weights" if self.among else ""
        return f"{' × '.join(shown)}{share}"


def scaled(weights: Sequence[Weight], factor: Weight, *, normalize: bool) -> tuple[Weight, ...]:
    """λ α_t of each model, or λ α_t / Σ_s α_s; numbers where all of them are.

    >>> scaled([1.0, 3.0], 0.5, normalize=True)
    (0.125, 0.375)
    """
    among = tuple(weights) if normalize else ()
    found = tuple(Scaled(weight, factor, among) for weight in weights)
    if any(callable(weight) for weight in (*weights, factor)):
        return found
    return tuple(weight("") for weight in found)


def _at(weight: Weight, name: str) -> float:
    return weight(name) if callable(weight) else weight


def depths(names: Iterable[str]) -> dict[str, int]:
    """The number of layers of each stack, by what stands before the layer's number.

    A stack is a prefix whose next part is a number that runs from 0 without a gap; what has gaps
    (``classifier.0``, ``classifier.3``) is no stack of layers.

    >>> depths(["h.0.w", "h.1.w", "h.1.experts.0.w", "head.0.w", "head.2.w", "wte.weight"])
    {'h': 2}
    """
    found: dict[str, set[int]] = {}
    for name in names:
        prefix, index = _layer(name)
        if index is not None:
            found.setdefault(prefix, set()).add(index)
    return {prefix: len(at) for prefix, at in found.items() if max(at) == len(at) - 1}


def depth_of(name: str, depths: Mapping[str, int]) -> float:
    """Where a tensor stands between the beginning (0) and the end (1) of its model.

    >>> [depth_of(n, {"h": 5}) for n in ("wte.weight", "h.1.mlp.weight", "ln_f.weight")]
    [0.0, 0.25, 1.0]
    """
    prefix, index = _layer(name)
    layers = depths.get(prefix)
    if index is not None and layers is not None:
        return min(index / (layers - 1), 1.0) if layers > 1 else 1.0
    if HEAD in name:
        return 1.0
    return 0.0 if any(word in name for word in BEGINNING) else 1.0


def _layer(name: str) -> tuple[str, int | None]:
    """What stands before the first number among the parts of a name, and that number."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isascii() and part.isdecimal() and len(part) < 7:
            return ".".join(parts[:at]), int(part)
    return "", None


def _text(value: tuple[float, ...]) -> str:
    return repr(value[0]) if len(value) == 1 else f"[{', '.join(map(repr, value))}]"
