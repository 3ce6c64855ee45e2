"""How a result shows itself: ``.table`` and ``.plot()``.

Results live below pandas and matplotlib. A result class inherits :class:`Tabular` or
:class:`Plottable`; how its table is made stands in :mod:`blr_analysis.tables`, how its picture is
drawn in :mod:`blr_analysis.plots`; both are imported when somebody asks first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from blr_analysis.errors import BLRError, InputError


def make_table(result: object) -> Any:
    """The ``pandas.DataFrame`` of a result, one row per example (or per group).

    Raises:
        InputError: none is known for this class.
    """
    return _maker(result, import_module("blr_analysis.tables").TABLES)(result)


def make_plot(result: object, ax: Any = None, **options: Any) -> Any:
    """The picture of a result, on a ``matplotlib.axes.Axes``.

    Args:
        result: an object whose class, or one of its bases, has one.
        ax: the Axes to draw on; a new figure of its own if None.
        options: what this kind of picture understands.

    Raises:
        InputError: none is known for this class.
    """
    return _maker(result, import_module("blr_analysis.plots").PICTURES)(result, ax, **options)


def _maker(result: object, makers: Mapping[str, Any]) -> Any:
    """What shows a result, by the name of its class or of the nearest of its bases."""
    for kind in type(result).__mro__:
        if kind.__name__ in makers:
            return makers[kind.__name__]
    raise InputError(f"a {type(result).__name__} has no table or picture of this kind")


class Tabular:
    """A result with a ``table``, made when first asked for and then kept."""

    @cached_property
    def table(self) -> Any:
        """The result as a ``pandas.DataFrame``, one row per example (or per group)."""
        return make_table(self)

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the first and last rows of the table; without one, text."""
        with suppress(BLRError):
            return self.table._repr_html_()


class Plottable:
    """A result with a ``plot`` method."""

    def plot(self, ax: Any = None, **options: Any) -> Any:
        """Draw the result; the ``matplotlib.axes.Axes`` come back.

        Args:
            ax: the Axes to draw on. If None, a new figure is made that belongs to nobody
                else (pyplot does not know it): it shows itself at the end of a notebook's cell,
                and ``.savefig(path)`` saves it.
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

    For code that must know nothing of pandas and yet hand out a table.

    Attributes:
        rows: mappings; nll_before, nll_after, accuracy_before, accuracy_after and others.
    """

    rows: Sequence[Mapping[str, Any]]
