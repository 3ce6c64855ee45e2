"""The facts about a posterior's fit, data and training by which analyses decide.

They are attributes of a posterior, and entries of a file's record. The other entries of a record
are for people to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn, TypeVar

from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.minimum import PrecisionMatch, Stationarity

STANDARD_ERRORS = 2  # on either side of a measurement
Numbers = dict[str, list[float]]  # several numbers by name, which identify data or weights
Part = TypeVar("Part")


@dataclass(frozen=True)
class Calibration:
    """A measured temperature.

    Attributes:
        temperature: τ.
        error: the standard error of log τ; None where it is not known.
        how: what the predicted rises of the loss were compared with, in words.
        examples: the number of examples that were compared.
        ending: one line, if the training for it ended elsewhere than the model; else "".
        left_out_loss: the mean loss of these examples by models without them, in nats; of sequences
            in nats per token. None where it is not known.
        left_out_loss_error: its standard error.
    """

    temperature: float
    error: float | None = None
    how: str = ""
    examples: int = 0
    ending: str = ""
    left_out_loss: float | None = None
    left_out_loss_error: float | None = None

    @property
    def highest_left_out_loss(self) -> float | None:
        """The mean left-out loss that the measurement still allows: two standard errors above it.

        >>> Calibration(0.3, left_out_loss=5.0, left_out_loss_error=0.1).highest_left_out_loss
        5.2
        """
        if self.left_out_loss is None or self.left_out_loss_error is None:
            return None
        return self.left_out_loss + STANDARD_ERRORS * self.left_out_loss_error


@dataclass(frozen=True)
class Rerun:
    """A training from fresh weights.

    Attributes:
        seed: of the weights and the order of the data.
        known: whether the recipe was that of the run, and not a default one.
        ending: one line, if such trainings ended elsewhere than the model; else "".
        missing: what the run did and the recipe does not repeat, in words; "" if nothing.
    """

    seed: int = 0
    known: bool = True
    ending: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Facts:
    """What steers the analyses of a posterior; see the attributes of
    :class:`~blr_analysis.posterior.posterior.Posterior`.

    >>> facts = facts_of({"source": "laplace", "calibration": {"temperature": 0.3}, "step": 7})
    >>> facts.source, facts.calibration.temperature
    ('laplace', 0.3)
    >>> recorded(facts)["calibration"]["temperature"]
    0.3
    """

    source: str = ""
    is_classifier: bool = False
    saturated: float = 0.0
    ending: str = ""
    calibration: Calibration | None = None
    stationarity: Stationarity | None = None
    rerun: Rerun | None = None
    fingerprint: Numbers | None = None
    frozen_values: Numbers | None = None
    input_ranges: Numbers | None = None
    start: Numbers | None = None
    precision_match: PrecisionMatch | None = None


class Record(dict[str, Any]):
    """What a file says of a posterior, read-only: writing into it would change no posterior."""

    def _refuse(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        remedy = "posterior.changed(record={**posterior.record, ...}) makes another posterior"
        raise InputError(f"a posterior's record is not written into; {remedy}")

    __setitem__ = _refuse
    __delitem__ = _refuse
    __ior__ = _refuse
    update = _refuse
    setdefault = _refuse
    pop = _refuse
    popitem = _refuse
    clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain dicts."""
        return dict, (dict(self),)


# The key of each fact in a record.
KEYS = {field.name: field.name for field in fields(Facts)} | {"is_classifier": "classifier"}


def facts_of(record: Mapping[str, Any]) -> Facts:
    """The facts among the entries of a record.

    Raises:
        PosteriorError: an entry is damaged.
    """
    calibration = _part(Calibration, record, "calibration")
    rerun = _part(Rerun, record, "rerun")
    endings = [part.ending for part in (calibration, rerun) if part is not None]
    endings.append(str(record.get("ending") or ""))
    return Facts(
        source=str(record.get("source") or ""),
        is_classifier=bool(record.get("classifier")),
        saturated=_share(record, "saturated"),
        ending=next((ending for ending in endings if ending), ""),
        calibration=calibration,
        stationarity=_part(Stationarity, record, "stationarity"),
        rerun=rerun,
        fingerprint=_numbers(record, "fingerprint"),
        frozen_values=_numbers(record, "frozen_values"),
        input_ranges=_numbers(record, "input_ranges"),
        start=_numbers(record, "start"),
        precision_match=_part(PrecisionMatch, record, "precision_match"),
    )


def without_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a record that are no facts."""
    return {key: entry for key, entry in record.items() if key not in KEYS.values()}


def recorded(facts: Facts) -> dict[str, Any]:
    """The entries of a record for these facts; a fact that is unknown has none."""
    entries = asdict(facts)
    unknown = asdict(Facts())
    return {KEYS[name]: entries[name] for name in KEYS if entries[name] != unknown[name]}


def _part(kind: type[Part], record: Mapping[str, Any], key: str) -> Part | None:
    """An entry as an object of this class; fields that this version does not know are left out."""
    entry = record.get(key)
    if entry is None:
        return None
    try:
        names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
        return kind(**{name: value for name, value in entry.items() if name in names})
    except (AttributeError, TypeError) as error:
        raise _damaged(key, entry) from error


def _share(record: Mapping[str, Any], key: str) -> float:
    """An entry as a number; 0 where it is missing."""
    entry = record.get(key)
    try:
        return float(entry or 0.0)
    except (TypeError, ValueError) as error:
        raise _damaged(key, entry) from error


def _numbers(record: Mapping[str, Any], key: str) -> Numbers | None:
    """An entry as several numbers by name; None where it is missing."""
    entry = record.get(key)
    if entry is None:
        return None
    try:
        return {name: [float(number) for number in numbers] for name, numbers in entry.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _damaged(key, entry) from error


def _damaged(key: str, entry: Any) -> PosteriorError:
    return PosteriorError(f"the record's entry {key!r} is damaged: {entry!r}; leave it out")
