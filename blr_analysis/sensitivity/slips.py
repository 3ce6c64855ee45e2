"""Hints for a query that selects nothing or cannot be read: what the user probably meant."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from blr_analysis.checks import did_you_mean, some

NAME = re.compile(r"[^\W\d]\w*")
TEXT = re.compile(r"'([^']*)'|\"([^\"]*)\"")
QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`""")
ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)")  # outside of a call, which a query seldom has
# What other languages write, and what pandas' queries do.
FOREIGN = {
    "&&": "and",
    "||": "or",
    "===": "==",
    "<>": "!=",
    "is": "==",
    "equals": "==",
    "AND": "and",
    "OR": "or",
    "NOT": "not",
    "null": "None",
}
FOREIGN_SIGN = re.compile(r"&&|\|\||===|<>|\b(?:is|equals|AND|OR|NOT|null)\b")
SHOWN_VALUES = 5  # of a column of numbers; of more, the range is shown
WORDS = {"and", "or", "not", "in", "True", "False", "None"}  # of pandas' queries
JOINING = ("and", "or", "not")  # words that a comparison follows


def why_nothing(question: str, columns: Mapping[str, Sequence[Any]]) -> str:
    """A sentence for each column in a query: its values, and the one that was probably meant.

    >>> why_nothing("annotator == 'Eve'", {"annotator": ["eve", "ann"]})
    "annotator has 'ann', 'eve'; did you mean 'eve'?"
    >>> why_nothing("target == '1'", {"target": [0, 1]})
    'target has 0, 1: write numbers without quotes'
    >>> why_nothing("loss > 9", {"loss": [0.1, 0.25, 0.5, 1.0, 2.0, 3.125]})
    'loss lies between 0.1 and 3.12'
    """
    sentences = []
    texts = [single or double for single, double in TEXT.findall(question)]
    for name in dict.fromkeys(NAME.findall(QUOTED.sub("", question))):
        if name not in columns:
            continue
        values = _in_order(set(columns[name]))
        sentence = f"{name} {_extent(values)}"
        has_words = any(isinstance(value, str) for value in values)
        close = [match for text in texts for match in _like(text, values)]
        if texts and not has_words:
            sentence += ": write numbers without quotes"
        elif close:
            sentence += f"; did you mean {close[0]!r}?"
        sentences.append(sentence)
    return "; ".join(sentences)


def why_unreadable(question: str, columns: Mapping[str, Sequence[Any]]) -> str:
    """One sentence on the first slip in a query: a quote that is not closed, a sign of another
    language, a name that is no column, or a comparison that is missing; "" without such a slip.

    >>> why_unreadable("anotator == 'eve'", {"annotator": ["eve", "ann"]})
    "there is no column 'anotator'; did you mean 'annotator'?"
    >>> why_unreadable("annotator == eve", {"annotator": ["eve", "ann"]})
    "put eve in quotes: annotator == 'eve'"
    >>> why_unreadable("annotator == 'eve' && target == 1", {"annotator": [], "target": []})
    'write and in place of &&'
    >>> why_unreadable("annotator == 'eve' and", {"annotator": []})
    'a comparison is missing after and'
    """
    outside_of_quotes = QUOTED.sub("", question)
    if not question.strip():
        return "it is empty; compare a column with a value, as in target == 3"
    if "'" in outside_of_quotes or '"' in outside_of_quotes:
        return "a quote is not closed"
    for sign in FOREIGN_SIGN.findall(outside_of_quotes):
        if sign not in columns:
            return f"write {FOREIGN[sign]} in place of {sign}"
    for name in NAME.findall(outside_of_quotes):
        if name in columns or name in WORDS:
            continue
        for column, values in columns.items():
            if name in values:
                return f"put {name} in quotes: {column} == {name!r}"
        remedy = did_you_mean(name, list(columns)) or f"; there are {', '.join(columns)}"
        return f"there is no column {name!r}{remedy}"
    words = outside_of_quotes.split()
    if words and words[-1] in JOINING:
        return f"a comparison is missing after {words[-1]}"
    return ""


def _extent(values: Sequence[Any]) -> str:
    """The values of a column, or the range of many numbers, as the end of a sentence."""
    are_numbers = all(isinstance(value, int | float) for value in values)
    numbers = [value for value in values if are_numbers and not math.isnan(value)]
    if len(numbers) > SHOWN_VALUES:
        return f"lies between {min(numbers):.3g} and {max(numbers):.3g}"
    return f"has {some(values)}"


def _in_order(values: set[Any]) -> list[Any]:
    """The values sorted; values that cannot be compared are sorted by their text."""
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=str)


def _like(text: str, values: Sequence[Any]) -> list[str]:
    """The value that is closest to a text, ignoring case, as a list of one or none."""
    by_lower = {str(value).strip().lower(): str(value) for value in values}
    matches = get_close_matches(text.strip().lower(), list(by_lower), n=1, cutoff=0.5)
    return [by_lower[match] for match in matches]
