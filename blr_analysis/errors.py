"""The exceptions users may catch.

Every error that this package raises on purpose derives from :class:`BLRError`, names the
input that is wrong, says what was expected and what to do about it.

    >>> from blr_analysis.errors import BLRError, DataError
    >>> issubclass(DataError, BLRError), issubclass(DataError, ValueError)
    (True, True)
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_CAUSE = 300  # characters of another program's message


class BLRError(Exception):
    """Base class of every exception of :mod:`blr_analysis`."""


class InputError(BLRError, ValueError):
    """An argument has a wrong value, type, shape, dtype or device."""


class DataError(InputError):
    """Examples or targets are missing, malformed, out of range, or not finite."""


class ModelError(InputError):
    """The model cannot be analysed as it stands (mode, weights, outputs)."""


class PosteriorError(InputError):
    """The posterior does not fit the model or the data, or is no valid Gaussian."""


class OptimizerError(InputError):
    """The optimizer keeps no precision, has not stepped, or holds a state that cannot be read."""


class StorageError(BLRError, OSError):
    """A file or folder cannot be read or written, is truncated, or is of a foreign format."""


class DeviceError(BLRError, RuntimeError):
    """A device was asked for that this machine does not have."""


class PosteriorWarning(UserWarning):
    """A posterior meets another model, or other data, than it was learned with."""


class InitialPrecisionWarning(UserWarning):
    """The precision that an optimizer learned is mostly noise, or still what it began with."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line that called this package, however deep inside it the cause is found.

    Torch's decorators stand between the package's own calls, so that they are passed over, too.
    """
    package = os.path.dirname(__file__) + os.sep
    decorators = os.path.join("torch", "utils", "_contextlib.py")
    inside = (package, decorators)
    level = 1
    frame = sys._getframe(0)
    while frame.f_back is not None and any(path in frame.f_code.co_filename for path in inside):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def told_as(
    kind: type[BLRError], fault: str | Callable[[], str], remedy: str = ""
) -> Iterator[None]:
    """Inside, any error becomes an error of this kind; for code of the user or of a library.

    Its words are the fault, the error that was raised, and the remedy. Errors of this package, and
    errors for lack of memory, stay as they are.

    Args:
        kind: the class of the new error.
        fault: what failed, in words; or a function that returns them when an error was raised.
        remedy: what the user can do.

    >>> with told_as(InputError, "it failed on 0", "give 1"):
    ...     1 / 0
    Traceback (most recent call last):
    ...
    blr_analysis.errors.InputError: it failed on 0: ZeroDivisionError: division by zero; give 1
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, BLRError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        words = fault if isinstance(fault, str) else fault()
        cause = " ".join(str(error).split())[:MAX_CAUSE]
        text = f"{words}: {type(error).__name__}: {cause}"
        raise kind(f"{text}; {remedy}" if remedy else text) from error
