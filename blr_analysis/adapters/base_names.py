"""The base's names for the tensors that an adapter names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from blr_analysis.checks import some
from blr_analysis.errors import ModelError

MAX_PREFIX_WORDS = 2  # a task's class puts one name before those of its model, or two


def translate(
    adapter_names: Iterable[str], base_names: Collection[str], folder: str
) -> dict[str, str]:
    """The base's name by the adapter's name of every tensor.

    An adapter or a base may be saved with the prefix of the task's class (``bert.encoder…``) or
    without it. One and the same prefix is added to all names of an adapter, or removed from them.

    Raises:
        ModelError: no prefix turns all of the names into names of the base, or several prefixes do.

    Example:
        >>> translate(["bert.pooler.weight"], ["pooler.weight", "x"], "./lora")
        {'bert.pooler.weight': 'pooler.weight'}
    """
    names = list(dict.fromkeys(adapter_names))
    translations = _translations(names, base_names)
    fitting = [
        translation
        for translation in translations
        if all(base_name in base_names for base_name in translation.values())
    ]
    if not fitting:
        raise ModelError(
            f"the adapter {folder!r} changes {some(_fewest_unknown(translations, base_names))}, "
            "which the base does not have (a tied layer is stored once): name the base that it "
            "was trained on"
        )
    first = fitting[0]
    # Names that fit as they are need no prefix, whatever else would fit.
    changes_names = any(first[name] != name for name in names)
    different = [translation for translation in fitting if translation != first]
    if changes_names and different:
        ambiguous = next(name for name in names if first[name] != different[0][name])
        raise ModelError(
            f"the adapter {folder!r} may mean {first[ambiguous]!r} or "
            f"{different[0][ambiguous]!r}: rename the base's tensors"
        )
    return first


def _translations(names: Sequence[str], base_names: Collection[str]) -> list[dict[str, str]]:
    """The names as they are, without one of their prefixes, and with a prefix of the base."""
    candidates = [{name: name for name in names}]
    for prefix in _prefixes(names):
        candidates.append({name: name.removeprefix(prefix) for name in names})
    for prefix in _prefixes(base_names):
        candidates.append({name: prefix + name for name in names})
    # Two different names must stay different.
    return [candidate for candidate in candidates if len({*candidate.values()}) == len(names)]


def _prefixes(names: Iterable[str]) -> list[str]:
    """The first word and the first two words of the names' modules."""
    prefixes = set()
    for name in names:
        modules = name.split(".")[:-1]
        for count in range(1, 1 + min(MAX_PREFIX_WORDS, len(modules))):
            prefixes.add(".".join(modules[:count]) + ".")
    return sorted(prefixes)


def _fewest_unknown(
    translations: Sequence[dict[str, str]], base_names: Collection[str]
) -> list[str]:
    """The adapter's names that the best of the translations leaves unknown, sorted."""
    unknown = [
        [name for name, base_name in translation.items() if base_name not in base_names]
        for translation in translations
    ]
    return sorted(min(unknown, key=len))
