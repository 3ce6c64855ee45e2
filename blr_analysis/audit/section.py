"""A section of an audit, and how its figures are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

STANDARD_ERRORS = 2.0  # standard errors on either side: 19 of 20 ranges hold the truth
NEAR_ALL = 0.05  # a share this close to none or all is written with a decimal


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, the columns of a small table, notes, and details that fold away."""

    title: str
    lead: str = ""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    details: Sequence[str] = ()

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The table, row by row."""
        return list(zip(*self.columns.values(), strict=True))

    @property
    def holds_words(self) -> list[bool]:
        """Whether each column holds words: the first one, and those without a digit."""
        columns = [" ".join(map(str, values)) for values in self.columns.values()]
        return [
            place == 0 or not any(letter.isdigit() for letter in text)
            for place, text in enumerate(columns)
        ]


def excerpt(text: Any, length: int) -> str:
    """The beginning of a text, with a sign of what was cut.

    >>> excerpt("Paris is large", 14), excerpt("Paris is larger", 14)
    ('Paris is large', 'Paris is larg…')
    """
    words = str(text)
    return words if len(words) <= length else f"{words[: length - 1]}…"


def short(values: Any) -> list[str]:
    """Numbers to two digits."""
    return [two_digits(value) for value in values]


def two_digits(value: float, sign: str = "") -> str:
    """A number to two digits, without an exponent where it is of ordinary size.

    >>> two_digits(0.03456), two_digits(0.999), two_digits(32870), two_digits(0.012, "+")
    ('0.035', '1.0', '33,000', '+0.012')
    """
    value = float(value)
    size = abs(value)
    if not math.isfinite(value) or size == 0:
        return f"{value:{sign}.2g}"
    if size >= 1e7 or size < 1e-4:
        return f"{value:{sign}.1e}"
    rounded = float(f"{value:.1e}")
    decimals = max(0, 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:{sign},.{decimals}f}"


def range_around(centre: float, half_width: float) -> str:
    """ "low to high", each to two digits; "" where the half width is unknown.

    >>> range_around(1.0, 0.25)
    '0.75 to 1.2'
    """
    if math.isnan(half_width):
        return ""
    return f"{two_digits(centre - half_width)} to {two_digits(centre + half_width)}"


def percent(share: float) -> str:
    """A share in percent; with a decimal where it is close to none or all.

    >>> percent(0.873), percent(0.9961), percent(0.99999), percent(1.0)
    ('87%', '99.6%', '99.9%', '100%')
    """
    distance = min(share, 1 - share)
    if 0 < distance < NEAR_ALL:
        return f"{min(max(share, 0.001), 0.999):.1%}"
    return f"{share:.0%}"


def mean_and_error(values: Tensor | np.ndarray) -> tuple[float, float]:
    """The mean of independent numbers, and its standard error; NaN where there is one number."""
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return float(numbers.mean()), math.nan
    return float(numbers.mean()), float(numbers.std(ddof=1) / math.sqrt(len(numbers)))
