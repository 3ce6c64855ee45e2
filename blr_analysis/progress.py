"""Progress on long work: bars on a terminal or in a notebook that show up after a second, with the
time that remains. ``progress=True`` shows them anywhere, ``progress=False`` nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

GLANCE = 1.0  # seconds until a bar shows


def track(
    items: Iterable[T], *, total: int | None = None, label: str = "", show: bool | None = None
) -> Iterator[T]:
    """Iterate with a progress bar.

    ``show=None`` shows it on a terminal only, and only when the work takes over a second;
    True always, False never.

    >>> list(track([1, 2], label="counting", show=False))
    [1, 2]
    """
    with bar(total, label, show) as shown:
        for item in items:
            yield item
            shown.update()


def bar(total: int | None, label: str, show: bool | None, **options: Any) -> Any:
    """The bar of :func:`track` for work that calls ``update`` itself; ``options`` are tqdm's."""
    disable = None if show is None else not show
    delay = 0.0 if show else GLANCE
    return tqdm(total=total, desc=label, leave=False, disable=disable, delay=delay, **options)
