"""Arguments that must be one of a few words, a positive count, or of a certain type.

Each function returns the argument as it is used, or raises an error that names it.

    >>> positive_int("batch_size", 32), one_of("solver", "auto", ("auto", "posterior"))
    (32, 'auto')
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blr_analysis.errors import InputError


def positive_int(name: str, value: Any) -> int:
    """A whole number above 0 (NumPy's too, but no booleans)."""
    return at_least(1, name, value)


def at_least(least: int, name: str, value: Any) -> int:
    """A whole number, ``least`` or more (NumPy's too, but no booleans)."""
    number = None if isinstance(value, float) else whole(value)
    if number is None or number < least:
        expected = "a positive integer" if least == 1 else f"a whole number, at least {least}"
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return number


def share(name: str, value: Any) -> float:
    """A number above 0 and at most 1."""
    return _within(name, value, "above 0 and at most 1", lambda number: 0 < number <= 1)


def positive_number(name: str, value: Any) -> float:
    """A finite number above 0 (NumPy's and tensors of one entry too, but no booleans or texts)."""
    return _within(name, value, "positive and finite", lambda number: 0 < number < math.inf)


def tolerance(name: str, value: Any) -> float:
    """A number, 0 or more (∞ too), such as a change below which a fit stops."""
    return _within(name, value, "0 or more", lambda number: number >= 0)


def _within(name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """The value as a float that ``fits``; NaN stands for anything that is no number."""
    number = math.nan
    if not isinstance(value, bool | str | bytes):
        with suppress(TypeError, ValueError, RuntimeError):
            number = float(value.detach() if hasattr(value, "detach") else value)
    if not fits(number):
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return number


def whole(value: Any) -> int | None:
    """A whole number, ``3.0`` and NumPy's too, but no booleans; None for anything else."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    with suppress(TypeError):
        return None if isinstance(value, bool) else operator.index(value)


def one_of(name: str, value: Any, words: Sequence[str]) -> str:
    """One of these words."""
    if isinstance(value, str) and value in words:
        return value
    word = value.lower() if isinstance(value, str) else ""
    close = get_close_matches(word, words, n=1, cutoff=0.5)
    question = f"; did you mean {close[0]!r}?" if close else ""
    raise InputError(
        f"{name} must be one of {', '.join(map(repr, words))}, got {value!r}{question}"
    )


def instance(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise :class:`InputError` unless the value is of this type; ``expected`` is it in words."""
    if not isinstance(value, kind):
        raise InputError(f"{name} must be {expected}, got {type(value).__name__}")


def path_of(value: Any) -> str | os.PathLike[str]:
    """A path, as text or a path object; not an empty text, which stands for nothing."""
    if not isinstance(value, (str, os.PathLike)) or value == "":
        raise InputError(f"path must be a file or folder name, got {value!r}")
    return value


def some(names: Sequence[object], limit: int = 5) -> str:
    """The first few names (quoted) or numbers, and how many more there are.

    >>> some(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(name) for name in names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def printable(text: str) -> str:
    """The text with a question mark for each character that steers a terminal or is invisible.

    >>> printable("to\\u202e be\\x1b[31m")
    'to? be?[31m'
    """
    return "".join(map(_printable_character, text))


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "?"


def install(extra: str) -> str:
    """How an extra is installed; the package is on no index."""
    return f"run pip install '.[{extra}]' in its checkout"


def package_version() -> str:
    """The version that is installed; 0.0.0 for a source tree that never was."""
    with suppress(PackageNotFoundError):
        return version("blr-analysis")
    return "0.0.0"


WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def bare_name(name: str) -> str:
    """A parameter's name without the words that wrappers of its modules put into it.

    These are ``torch.compile``, data parallel models and checkpoint wrappers.

    >>> bare_name("module._orig_mod.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
