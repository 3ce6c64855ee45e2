"""Which tensors of an adapter belong together, and which names of the base they mean.

PEFT names a tensor ``base_model.model.<module>.<part>``. The base's files may name the module
without the prefix of the task's class (``encoder…`` for ``bert.encoder…``) or with one; the two
are brought together by one prefix for the whole adapter, and only where one alone fits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from blr_analysis.checks import some
from blr_analysis.errors import ModelError

PREFIX = "base_model.model."
PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|"
    r"lora_embedding_B|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
SHORT = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "bias",
    "lora_embedding_A": "A of embedding",
    "lora_embedding_B": "B of embedding",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
WRAPPED = ".base_layer"
KINDS = ({"A", "B"}, {"A of embedding", "B of embedding"})


@dataclass
class Grouped:
    """The tensors of an adapter file, by what they are; the values are their names in the file.

    Attributes:
        low_rank: module → part → name; a module of which several parameters are adapted stands
            here once for each, with ``.base_layer`` appended as in the file.
        tokens: module → the new rows of its embedding.
        whole: tensor of the model → what replaces it.
        copies: tensor of the model → a second copy of what replaces it.
        idle: tensors that PEFT stores but that have no effect while the adapter is on.
    """

    low_rank: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    tokens: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)


def group(keys: Iterable[str], file: str) -> Grouped:
    """Sort the names in an adapter file by what they are.

    Raises:
        ModelError: a name that is none of PEFT's, two for one thing, or a module of which a part
            is missing.
    """
    found, odd = Grouped(), []
    for key in keys:
        name = key.removeprefix(PREFIX)
        if name == key:
            odd.append(key)
        elif match := PART.fullmatch(name):
            module, part = match["module"], match["part"]
            if part not in SHORT:
                _put(found.tokens, module, key, file)
            else:
                _put(found.low_rank[module], SHORT[part], key, file)
        elif "lora_" in name or "trainable_tokens" in name:
            odd.append(key)
        elif ".original_module." in name:
            found.idle.append(key)
        elif ".modules_to_save." in name:
            _put(found.copies, name.replace(".modules_to_save.", "."), key, file)
        else:
            plain = name.replace(".token_adapter.base_layer.", ".").replace(f"{WRAPPED}.", ".")
            _put(found.whole, plain, key, file)
    if odd:
        raise ModelError(
            f"{file!r} holds {some(sorted(odd))}: no names that PEFT gives to the tensors of a "
            f"LoRA adapter ({PREFIX}<module>.lora_A.weight and the like)."
        )
    for module, parts in found.low_rank.items():
        if set(parts) - {"bias", "magnitude"} not in KINDS:
            raise ModelError(
                f"{file!r} holds only {some(sorted(parts.values()))} for the module {module!r}: "
                "expected a matrix A and a matrix B."
            )
    for name in sorted(found.copies.keys() - found.whole.keys()):
        found.whole[name] = found.copies.pop(name)
    return found


def _put(place: dict[str, str], name: str, key: str, file: str) -> None:
    if name in place:
        raise ModelError(f"{file!r} holds both {place[name]!r} and {key!r}: one is expected.")
    place[name] = key


def near(name: str, base: Collection[str]) -> bool:
    """Whether the base has a tensor of this name, with or without a prefix of either."""
    return name in base or any(own.endswith(f".{name}") or name.endswith(f".{own}") for own in base)


def translate(wanted: Iterable[str], base: Mapping[str, object], where: str) -> dict[str, str]:
    """The base's name of every tensor that an adapter names.

    Raises:
        ModelError: no one prefix brings all of them to names of the base, or several do.

    Example:
        >>> translate(["bert.pooler.weight"], {"pooler.weight": 1, "x": 2}, "./lora")
        {'bert.pooler.weight': 'pooler.weight'}
    """
    names = list(dict.fromkeys(wanted))
    best, fits = list(names), []
    for change in (str, *_prefix_changes(names, base)):
        there = {name: change(name) for name in names}
        if len(set(there.values())) < len(names):  # two names would become one
            continue
        missing = [name for name, own in there.items() if own not in base]
        if len(missing) < len(best):
            best = missing
        if not missing and there not in fits:
            fits.append(there)
            if change is str:  # the very names
                return there
    if not fits:
        raise ModelError(
            f"the adapter {where!r} changes {some(sorted(best))}, but the base has no tensor of "
            "that name, with or without a prefix: expected an adapter trained on this base. "
            "(A head that the base lacks, or an output layer tied to the embedding, has no place "
            "in the result: save the base with it first.)"
        )
    if len(fits) > 1:
        name = next(n for n in names if fits[0][n] != fits[1][n])
        raise ModelError(
            f"the adapter {where!r} may mean {fits[0][name]!r} or {fits[1][name]!r} of the base by "
            f"{name!r}: rename the tensors of the base as the adapter does."
        )
    return fits[0]


def _prefix_changes(names: Iterable[str], base: Iterable[str]) -> list[Callable[[str], str]]:
    """Ways to take a prefix of one or two words off, or to put one of the base's on."""

    def without(prefix: str) -> Callable[[str], str]:
        return lambda name: name.removeprefix(prefix)

    def with_(prefix: str) -> Callable[[str], str]:
        return lambda name: prefix + name

    return [without(p) for p in _prefixes(names)] + [with_(p) for p in _prefixes(base)]


def _prefixes(names: Iterable[str]) -> list[str]:
    words = {tuple(name.split(".")[:-1][:count]) for name in names for count in (1, 2)}
    return sorted(".".join(w) + "." for w in words if w)
