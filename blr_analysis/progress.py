"""Progress on long work: bars on a terminal or in a notebook, a line of the log anywhere.

A bar shows after a second, with the time that is left. Where more than ten seconds are left after
the first one, ``logging.getLogger("blr_analysis")`` says so at level INFO, on a terminal or not:
``examples: about 00:42 more (10 of 430 done)``. ``progress=False`` silences both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

LOG = logging.getLogger("blr_analysis")
GLANCE, LONG = 1.0, 10.0  # seconds until the rest is estimated, and of a rest that is said


def track(
    items: Iterable[T], *, total: int | None = None, label: str = "", show: bool | None = None
) -> Iterator[T]:
    """Iterate with a progress bar.

    ``show=None`` shows it on a terminal only, and only when the work takes over a second;
    True always, False never.

    >>> list(track([1, 2], label="counting", show=False))
    [1, 2]
    """
    with Bar(total, label, show) as shown:
        for item in items:
            yield item
            shown.update()


class Bar(tqdm):  # type: ignore[type-arg]
    """The bar of :func:`track` for work that tells its own progress (``update``), which logs once
    what is left of long work; ``options`` are tqdm's."""

    def __init__(self, total: int | None, label: str, show: bool | None, **options: Any) -> None:
        self.began, self.done, self.what = 0.0 if show is False else perf_counter(), 0.0, label
        how = {"disable": None if show is None else not show, "delay": 0.0 if show else GLANCE}
        super().__init__(total=total, desc=label, leave=False, **how, **options)

    def update(self, n: float | None = 1) -> bool | None:
        self.done += n or 0
        if self.began and (spent := perf_counter() - self.began) > GLANCE and self.done:
            self.began = 0.0
            left = spent * ((self.total or 0) / self.done - 1)
            if left > LONG:
                rest, done = self.format_interval(left), f"{self.done:.3g} of {self.total:.3g} done"
                LOG.info("%s: about %s more (%s)", self.what, rest, done)
        return super().update(n)


bar = Bar
