"""The exceptions users may catch.

Every error that this package raises on purpose derives from :class:`BLRError`, names the
input that is wrong, says what was expected and what to do about it.

    >>> from blr_analysis.errors import BLRError, DataError
    >>> issubclass(DataError, BLRError), issubclass(DataError, ValueError)
    (True, True)
"""

from __future__ import annotations


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
    """More than half of the precision that an optimizer learned is still what it began with."""
