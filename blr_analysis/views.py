"""How a result shows itself: ``.table`` and ``.plot()``.

Results stand below pandas and matplotlib. A result class inherits :class:`Tabular` or
:class:`Plottable`. Its table is made in :mod:`blr_analysis.tables`, its picture is drawn in
:mod:`blr_analysis.plots`. The two functions here import those rooms when somebody asks for a table
or a picture: the one way up in this package, which ``tests/test_imports.py`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blr_analysis.errors import BLRError, InputError


def make_table(result: object) -> Any:
    """The ``pandas.DataFrame`` of a result, one row per example (or per group).

    Raises:
        InputError: there is no table for this class.
    """
    from blr_analysis.tables import TABLES

    return _maker_for(result, TABLES)(result)


def make_plot(result: object, ax: Any = None, **options: Any) -> Any:
    """The picture of a result, on a ``matplotlib.axes.Axes``.

    Args:
        result: an object whose class, or one of its bases, has a picture.
        ax: the Axes to draw on; a new figure of its own if None.
        options: what this kind of picture understands.

    Raises:
        InputError: there is no picture for this class.
    """
    from blr_analysis.plots import PICTURES

    return _maker_for(result, PICTURES)(result, ax, **options)


def _maker_for(result: object, makers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function that shows a result, by the name of its class or of the nearest of its bases."""
    for base in type(result).__mro__:
        if base.__name__ in makers:
            return makers[base.__name__]
    raise InputError(f"a {type(result).__name__} has no table or picture of this kind")


PLUMBING = {"table_columns", "row", "likelihood"}  # what serves to make a result


class Listed:
    """A result whose ``dir()``, and so completion by the Tab key, lists what it found."""

    def __dir__(self) -> list[str]:
        names = set(vars(self))
        for kind in type(self).__mro__:
            if kind.__module__.startswith("blr_analysis"):
                names |= set(vars(kind))
        return sorted(name for name in names - PLUMBING if not name.startswith("_"))


class Tabular(Listed):
    """A result with a ``table``, made when first asked for and then kept."""

    @cached_property
    def table(self) -> Any:
        """The result as a ``pandas.DataFrame``, one row per example (or per group)."""
        return make_table(self)

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the first and last rows of the table; without one, text."""
        with suppress(BLRError):
            return self.table._repr_html_()


class Plottable(Listed):
    """A result with a ``plot`` method."""

    def plot(self, ax: Any = None, **options: Any) -> Any:
        """Draw the result; the ``matplotlib.axes.Axes`` come back.

        Args:
            ax: the Axes to draw on. If None, a new figure is made, which pyplot does not know: it
                shows itself at the end of a notebook's cell, and ``.savefig(path)`` saves it.
            options: what the picture of this kind of result understands; see
                :mod:`blr_analysis.plots`.
        """
        return make_plot(self, ax, **options)

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows: the picture; without one, text."""
        with suppress(BLRError):
            return self.plot()._repr_png_()


@dataclass(frozen=True)
class GroupRows(Tabular):
    """Rows of plain numbers, one per group taken out: ``GroupRows(rows).table``.

    For code that hands out a table without importing pandas.

    Attributes:
        rows: mappings with nll_before, nll_after, accuracy_before, accuracy_after and others.
    """

    rows: Sequence[Mapping[str, Any]]
