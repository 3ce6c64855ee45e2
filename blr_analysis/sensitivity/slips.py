"""Hints for a query that selects nothing or cannot be read: what the user probably meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from blr_analysis.checks import some

NAME = re.compile(r"[^\W\d]\w*")
TEXT = re.compile(r"'([^']*)'|\"([^\"]*)\"")
QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`""")
ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)")  # outside of a call, which a query seldom has
WORDS = {"and", "or", "not", "in", "True", "False", "None"}  # of pandas' queries


def why_nothing(question: str, columns: Mapping[str, Sequence[Any]]) -> str:
    """A sentence for each column in a query: its values, and the one that was probably meant.

    >>> why_nothing("annotator == 'Eve'", {"annotator": ["eve", "ann"]})
    "annotator has 'ann', 'eve'; did you mean 'eve'?"
    >>> why_nothing("target == '1'", {"target": [0, 1]})
    'target has 0, 1: write numbers without quotes'
    """
    sentences = []
    texts = [single or double for single, double in TEXT.findall(question)]
    for name in dict.fromkeys(NAME.findall(QUOTED.sub("", question))):
        if name not in columns:
            continue
        values = _in_order(set(columns[name]))
        sentence = f"{name} has {some(values)}"
        has_words = any(isinstance(value, str) for value in values)
        close = [match for text in texts for match in _like(text, values)]
        if texts and not has_words:
            sentence += ": write numbers without quotes"
        elif close:
            sentence += f"; did you mean {close[0]!r}?"
        sentences.append(sentence)
    return "; ".join(sentences)


def why_unreadable(question: str, columns: Mapping[str, Sequence[Any]]) -> str:
    """One sentence on the first name in a query that is no column; "" if all names are columns.

    >>> why_unreadable("anotator == 'eve'", {"annotator": ["eve", "ann"]})
    "there is no column 'anotator'; did you mean 'annotator'?"
    >>> why_unreadable("annotator == eve", {"annotator": ["eve", "ann"]})
    "put eve in quotes: 'eve'"
    """
    for name in NAME.findall(QUOTED.sub("", question)):
        if name in columns or name in WORDS:
            continue
        if any(name in values for values in columns.values()):
            return f"put {name} in quotes: {name!r}"
        close = get_close_matches(name, list(columns), n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(columns)}"
        return f"there is no column {name!r}; {remedy}"
    return ""


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
