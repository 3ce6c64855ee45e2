"""The precision of a model's weights as a merge needs it: what the task's data alone have said.

A stored precision S = H + δ holds a prior δ and a sum H over n_data examples. The merge takes
H = S − δ; a file without a record (a Fisher averaged over examples, as published scripts write
it) is multiplied by the n_data that the user names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, Loaded, Scratch, Source, Spec, storage
from blr_analysis.files.records import checked_diagonal
from blr_analysis.posterior import Posterior, Prior, n_data_of, take_off


@dataclass(frozen=True)
class DiagonalPrecision:
    """Named diagonal precisions, read piecewise as H = scale · (S − δ).

    Attributes:
        source: where the numbers are.
        stored: parameter name → the source's name for it, tied names included.
        prior: δ by parameter name, where it is not 0.
        scale: 1, or n_data for averages over examples.
        frozen: parameters that were not trained: H = 0 by intention.
        kind: what the numbers are, as the record says it.
    """

    source: Source
    stored: Mapping[str, str]
    prior: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    frozen: frozenset[str] = frozenset()
    kind: str = ""

    @property
    def name(self) -> str:
        """For messages."""
        return self.source.name

    def spec(self, name: str) -> Spec | None:
        """Shape and storage of one parameter's precision; None where there is none."""
        key = self.stored.get(name)
        return None if key is None else self.source.specs[key]

    def read(
        self, name: str, start: int, stop: int, scratch: Scratch, dtype: torch.dtype
    ) -> Tensor:
        """H of entries ``[start, stop)``; in ``dtype`` if it had to be computed.

        Raises:
            PosteriorError: S holds negative numbers, NaN or inf.
        """
        values = self.source.read(self.stored[name], start, stop, scratch)
        low, high = torch.aminmax(values) if values.numel() else (values.sum(),) * 2
        if not (bool(low >= 0) and bool(high < torch.inf)):
            raise PosteriorError(
                f"the precision of {name!r} in {self.name!r} is negative, NaN or inf "
                f"({float(low):g} to {float(high):g}): compute it again"
            )
        prior = self.prior.get(name, 0.0)
        if prior == 0 and self.scale == 1:
            return values
        if values.device.type == "cpu":
            own = scratch.array((self, "H"), values.numel(), dtype).copy_(values)
        else:
            own = values.to(dtype, copy=True)
        if prior:
            take_off(own, prior, values.dtype, roundings=4)
        return own.mul_(self.scale) if self.scale != 1 else own

    def __hash__(self) -> int:
        return id(self)


def open_precision(path: Path, n_data: int | None = None) -> DiagonalPrecision:
    """A precision folder or file on disk.

    Raises:
        StorageError: nothing there, damaged, or of a structure that is not diagonal.
        InputError: no record and no ``n_data``, or an ``n_data`` that contradicts the record.
    """
    source = Folder.open(path, stem=storage.STEM)
    record = storage.find_record(path)
    if record is None:
        if n_data is None:
            raise InputError(
                f"n_data is missing for {str(path)!r}: without a record its numbers are averages"
            )
        return DiagonalPrecision(source, {n: n for n in source.specs}, scale=n_data_of(n_data))
    record = checked_diagonal(record, str(path))
    if n_data is not None and n_data != record["n_data"]:
        raise InputError(
            f"{str(path)!r} is a sum over n_data={record['n_data']} examples, not {n_data}: leave "
            "n_data out"
        )
    names = record["parameters"]
    return DiagonalPrecision(
        source,
        _stored(source, names, record.get("tied")),
        Prior.of_any(record["prior_precision"]).within(record).numbers(names),
        frozen=frozenset(record.get("frozen") or ()),
        kind=record["kind"] or "",
    )


def precision_in_memory(label: str, given: Any, n_data: int | None) -> DiagonalPrecision:
    """A diagonal :class:`Posterior`, or named tensors H (averages, where ``n_data`` is given)."""
    if isinstance(given, Posterior):
        if given.structure != "diag":
            raise PosteriorError(
                f"{label} is of structure {given.structure!r}: fit a diagonal one "
                "(structure='diag') for a merge"
            )
        tensors = {n: given.precision(n) for n in given.mean}
        source = Loaded(label, tensors)
        tied = given.record.get("tied")
        frozen = frozenset(given.record.get("frozen") or ())
        prior = given.prior.within(given.record)
        if prior.tensors:
            source = Loaded(label, {n: s - prior.like(n, s) for n, s in tensors.items()})
            prior = Prior({None: 0.0})
        return DiagonalPrecision(
            source, _stored(source, list(tensors), tied), prior.numbers(tensors), frozen=frozen
        )
    source = Loaded(label, given)
    scale = 1.0 if n_data is None else float(n_data_of(n_data))
    return DiagonalPrecision(source, {n: n for n in source.specs}, scale=scale)


def _stored(source: Source, names: Iterable[str], tied: Any) -> dict[str, str]:
    missing = [n for n in names if n not in source.specs]
    if missing:
        raise StorageError(f"{source.name!r} lacks the precisions of {some(missing)}.")
    stored = {n: n for n in names}
    for first, aliases in (tied or {}).items():
        group = [first, *aliases]
        held = next((n for n in group if n in stored), None)
        if held is not None:
            stored |= {n: stored[held] for n in group}
    return stored


def check_fits(precision: DiagonalPrecision, reference: Source) -> None:
    """Raise :class:`PosteriorError` unless every entry belongs to a weight of the same shape."""
    ours = {precision.stored[n] for n in precision.stored if n in reference.specs}
    foreign = [n for n in precision.stored.values() if n not in ours]
    if foreign:
        raise PosteriorError(
            f"the precision {precision.name!r} belongs to another model than {reference.name!r}, "
            f"which has no {some(sorted(set(foreign)))}"
        )
    for name, spec in reference.specs.items():
        own = precision.spec(name)
        if own is not None and own.shape != spec.shape:
            raise PosteriorError(
                f"the precision of {name!r} in {precision.name!r} is {list(own.shape)}, the "
                f"weight {list(spec.shape)}"
            )
        if own is not None and not own.dtype.is_floating_point:
            raise PosteriorError(
                f"the precision of {name!r} in {precision.name!r} is of {own.dtype}: expected "
                "floating-point numbers"
            )
