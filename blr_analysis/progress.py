"""Progress of long work, with the time that remains.

On a terminal a bar appears after a second; in a log a line each half minute. ``progress=True``
shows bars anywhere, ``progress=False`` shows nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm as text_bar
from tqdm.auto import tqdm

T = TypeVar("T")

BAR_DELAY = 1.0  # seconds until a bar shows
LINE_INTERVAL = 30.0  # seconds between two lines of a log
_profiles: list[dict[str, float]] = []  # one for each open :func:`profiled`


def track(
    items: Iterable[T], *, total: int | None = None, label: str = "", show: bool | None = None
) -> Iterator[T]:
    """Iterate with a progress bar.

    ``show=None`` shows it only when the work takes over a second, and where there is no terminal
    writes a line each half minute; True shows a bar always, False never.

    >>> list(track([1, 2], label="counting", show=False))
    [1, 2]
    """
    started = time.perf_counter()
    try:
        with bar(total, label, show) as shown:
            for item in items:
                yield item
                shown.update()
    finally:
        seconds = time.perf_counter() - started
        for profile in _profiles:
            profile[label] = profile.get(label, 0.0) + seconds


@contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """The seconds that loops of :func:`track` inside take, by label.

    Loops of one label are added up.

    >>> with profiled() as seconds:
    ...     numbers = list(track([1, 2], label="counting", show=False))
    >>> list(seconds)
    ['counting']
    """
    profile: dict[str, float] = {}
    _profiles.append(profile)
    try:
        yield profile
    finally:
        _profiles.pop()


def bar(total: int | None, label: str, show: bool | None, **options: Any) -> Any:
    """The bar of :func:`track` for work that calls ``update`` itself; ``options`` are tqdm's."""
    is_notebook = tqdm is not text_bar and "ipykernel" in sys.modules
    if show is None and not is_notebook and not _is_terminal():
        return Lines(total, label, **options)
    disable = None if show is None else not show
    delay = 0.0 if show else BAR_DELAY
    return tqdm(total=total, desc=label, leave=False, disable=disable, delay=delay, **options)


def announce(text: str) -> None:
    """A line on standard error, beside the bars."""
    text_bar.write(text, file=sys.stderr)


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(0.02), duration(0.42), duration(93), duration(9000)
    ('below 0.1 s', '0.4 s', '2 minutes', '2.5 hours')
    """
    if seconds < 0.1:
        return "below 0.1 s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} minutes" if minutes <= 90 else f"{seconds / 3600:.1f} hours"


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class Lines:
    """Lines of a log in place of a bar.

    >>> Lines(5000, "gradients").line(1000, seconds=60)
    'gradients: 1000 of 5000, 04:00 left'
    """

    def __init__(
        self, total: int | None, label: str, *, unit: str = "", unit_scale: bool = False
    ) -> None:
        self.total = total
        self.label = label
        self.unit = unit
        self.unit_scale = unit_scale
        self.done = 0
        self._begun = time.monotonic()
        self._due = self._begun + LINE_INTERVAL

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """A bar of tqdm closes here; lines need no closing."""

    def update(self, n: int = 1) -> None:
        """Count n more, and print a line if half a minute has passed since the last one."""
        self.done += n
        now = time.monotonic()
        if now >= self._due:
            self._due = now + LINE_INTERVAL
            print(self.line(self.done, now - self._begun), file=sys.stderr, flush=True)

    def line(self, done: int, seconds: float) -> str:
        """The amount that is done after these seconds, and the time that remains."""
        label = self.label or "progress"
        if not self.total:
            return f"{label}: {self._amount(done)} in {text_bar.format_interval(seconds)}"
        left = seconds * (self.total - done) / max(done, 1)
        amounts = f"{self._amount(done)} of {self._amount(self.total)}"
        return f"{label}: {amounts}, {text_bar.format_interval(left)} left"

    def _amount(self, n: int) -> str:
        number = text_bar.format_sizeof(n) if self.unit_scale else str(n)
        return f"{number}{self.unit}"
