"""How a result shows itself: one open door to tables, one to pictures.

Results live below pandas and matplotlib, yet offer ``.table`` and ``.plot()``. The two
functions here are the doors: a result class inherits :class:`Tabular` or :class:`Plottable`,
and a module further up registers how to make its table or picture::

    @make_table.register
    def _(result: Scores) -> DataFrame: ...

:mod:`blr_analysis.tables` and :mod:`blr_analysis.plots` register the makers of this package
and are imported the first time somebody asks; any other module may register its own. This
module imports neither pandas nor matplotlib.

    >>> class Odd(Tabular):
    ...     def __init__(self, values): self.values = values
    >>> @make_table.register
    ... def _(result: Odd): return {"value": list(result.values)}
    >>> Odd([1, 2]).table
    {'value': [1, 2]}
"""

from __future__ import annotations

import base64
import html
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import Any

from blr_analysis.errors import BLRError, InputError

__all__ = ["GroupRows", "Plottable", "Tabular", "make_plot", "make_table"]


ROWS, COLUMNS, LINE = 10, 30, 400  # of a table, and characters of a line, that a notebook shows


@singledispatch
def make_table(result: object) -> Any:
    """The DataFrame of a result, by the maker registered for its class.

    Args:
        result: an object whose class, or one of its bases, has a maker.

    Returns:
        A ``pandas.DataFrame`` with one row per example (or per group).

    Raises:
        InputError: no maker is registered for this class.
    """
    return _maker(make_table, result, "table", "blr_analysis.tables")(result)


@singledispatch
def make_plot(result: object, ax: Any = None, **options: Any) -> Any:
    """The picture of a result, by the maker registered for its class.

    Args:
        result: an object whose class, or one of its bases, has a maker.
        ax: the ``matplotlib.axes.Axes`` to draw on; a new figure of its own if None.
        options: what that maker understands.

    Returns:
        The ``matplotlib.axes.Axes`` drawn on.

    Raises:
        InputError: no maker is registered for this class.
    """
    return _maker(make_plot, result, "picture", "blr_analysis.plots")(result, ax, **options)


class Tabular:
    """A result with a ``table``, made when first asked for and then kept."""

    @cached_property
    def table(self) -> Any:
        """The result as a ``pandas.DataFrame``, one row per example (or per group)."""
        return make_table(self)

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the result in a line, and the first rows of its table."""
        try:
            table = self.table
        except BLRError:
            return None  # as text, then
        rows = table.head(ROWS).to_html(max_cols=COLUMNS)
        return f"{_line(self)}{rows}<p>{len(table):,} rows</p>"


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

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the result in a line, and its picture."""
        try:
            png = self.plot()._repr_png_()
        except BLRError:
            return None  # as text, then
        return f'{_line(self)}<img src="data:image/png;base64,{base64.b64encode(png).decode()}">'


@dataclass(frozen=True)
class GroupRows(Tabular):
    """Rows of plain numbers, one per group taken out: ``GroupRows(rows).table``.

    For code that must know nothing of pandas and yet hand out a table.

    Attributes:
        rows: mappings; nll_before, nll_after, accuracy_before, accuracy_after and others.
    """

    rows: Sequence[Mapping[str, Any]]


def _line(result: object) -> str:
    said = repr(result)
    return (
        f"<p><code>{html.escape(said if len(said) <= LINE else type(result).__name__)}</code></p>"
    )


def _maker(door: Any, result: object, thing: str, module: str) -> Callable[..., Any]:
    """The maker for a result that nobody had registered before ``module`` was imported."""
    kind = type(result)
    nobody = door.dispatch(object)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in ("", "blr_analysis"):
            raise
        raise BLRError(
            f"a {thing} needs the package {package!r}, which is not installed: "
            f"run `pip install {package}`"
        ) from missing
    if door.dispatch(kind) is nobody:
        raise InputError(
            f"no {thing} is known for {kind.__module__}.{kind.__qualname__}: register it with "
            f"`@blr_analysis.views.{nobody.__name__}.register`"
        )
    return door.dispatch(kind)
