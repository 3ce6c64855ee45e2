"""Progress bars on long work: on a terminal or in a notebook after a second, silent elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def track(
    items: Iterable[T], *, total: int | None = None, label: str = "", show: bool | None = None
) -> Iterator[T]:
    """Iterate with a progress bar.

    ``show=None`` shows it on a terminal only, and only when the work takes over a second;
    True always, False never.

    >>> list(track([1, 2], label="counting", show=False))
    [1, 2]
    """
    yield from items if show is False else bar(total, label, show, iterable=items)


def bar(total: int | None, label: str, show: bool | None, **options: Any) -> tqdm[Any]:
    """The bar of :func:`track` for work that tells its own progress (``update``); ``options`` are
    tqdm's."""
    disable = None if show is None else not show
    delay = 0.0 if show else 1.0
    return tqdm(total=total, desc=label, disable=disable, delay=delay, leave=False, **options)
