"""Checks of single arguments, and words that messages share.

A check returns the argument in the form in which it is used, or raises an error that names it.

    >>> positive_int("batch_size", 32), one_of("solver", "auto", ("auto", "posterior"))
    (32, 'auto')
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blr_analysis.errors import InputError


def positive_int(name: str, value: Any) -> int:
    """The value as a whole number above 0; refuses floats and booleans, takes NumPy's integers."""
    return at_least(1, name, value)


def at_least(least: int, name: str, value: Any) -> int:
    """The value as a whole number, ``least`` or more; see :func:`positive_int`."""
    number = None if isinstance(value, float) else whole(value)
    if number is None or number < least:
        expected = "a positive integer" if least == 1 else f"a whole number, at least {least}"
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return number


def share(name: str, value: Any) -> float:
    """The value as a number above 0 and at most 1."""
    return _within(name, value, "above 0 and at most 1", lambda number: 0 < number <= 1)


def positive_number(name: str, value: Any) -> float:
    """The value as a finite number above 0.

    NumPy's numbers and tensors of one entry are numbers; booleans and texts are not.
    """
    return _within(name, value, "positive and finite", lambda number: 0 < number < math.inf)


def tolerance(name: str, value: Any) -> float:
    """The value as a number, 0 or more, such as a change below which a fit stops; ∞ is allowed."""
    return _within(name, value, "0 or more", lambda number: number >= 0)


def _within(name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """The value as a float, which must lie in a range.

    Args:
        expected: the range in words.
        fits: whether a number lies in the range; false for NaN.
    """
    number = _float_or_nan(value)
    if not fits(number):
        raise InputError(f"{name} must be {expected}, got {value!r}")
    return number


def _float_or_nan(value: Any) -> float:
    """The value as a float; NaN for anything that is no number."""
    if isinstance(value, bool | str | bytes):
        return math.nan
    number = value.detach() if hasattr(value, "detach") else value
    try:
        return float(number)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def whole(value: Any) -> int | None:
    """The value as a whole number; None for booleans, fractions and anything that is no number.

    >>> whole(3.0), whole(3.5), whole(True)
    (3, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def one_of(name: str, value: Any, words: Sequence[str]) -> str:
    """The value, which must be one of these words."""
    if isinstance(value, str) and value in words:
        return value
    expected = ", ".join(map(repr, words))
    raise InputError(f"{name} must be one of {expected}, got {value!r}{did_you_mean(value, words)}")


def did_you_mean(value: Any, words: Sequence[str]) -> str:
    """The end of a sentence that names the word closest to a value; "" where none is close.

    >>> did_you_mean("Anotator", ["annotator", "source"]), did_you_mean(3, ["annotator"])
    ("; did you mean 'annotator'?", '')
    """
    lowercase = value.lower() if isinstance(value, str) else ""
    close_words = get_close_matches(lowercase, words, n=1, cutoff=0.5)
    return f"; did you mean {close_words[0]!r}?" if close_words else ""


def instance(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise :class:`InputError` unless the value has this type.

    Args:
        kind: a type, or a union of types.
        expected: the type in words.
    """
    if not isinstance(value, kind):
        raise InputError(f"{name} must be {expected}, got {type(value).__name__}")


def path_of(value: Any) -> str | os.PathLike[str]:
    """The value, which must be a path: a path object, or a text that is not empty."""
    if not isinstance(value, (str, os.PathLike)) or value == "":
        raise InputError(f"path must be a file or folder name, got {value!r}")
    return value


def some(names: Sequence[object], limit: int = 5) -> str:
    """The first few names (in quotation marks) or numbers, and how many more there are.

    >>> some(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    if len(names) == 0:
        return "none"
    shown = ", ".join(repr(name) for name in names[:limit])
    n_more = len(names) - limit
    return f"{shown} and {n_more} more" if n_more > 0 else shown


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
    """The remedy for a missing extra. The package is on no index, so pip needs its checkout."""
    return f"run pip install '.[{extra}]' in its checkout"


def package_version() -> str:
    """The version that is installed; 0.0.0 for a source tree that was never installed."""
    try:
        return version("blr-analysis")
    except PackageNotFoundError:
        return "0.0.0"


WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What ``torch.compile``, sharded data parallelism and checkpointing put into parameters' names."""


def bare_name(name: str) -> str:
    """A parameter's name without the words that wrappers of its modules put into it.

    The wrappers are those of :data:`WRAPPERS`, and ``module.`` of data parallel models.

    >>> bare_name("module._orig_mod.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
