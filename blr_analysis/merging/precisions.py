"""The precision of a model's weights as a merge needs it: what the task's data alone have said.

A stored precision S = H + δ holds a prior δ and a sum H over n_data examples. The merge takes
H = S − δ; a file without a record (a Fisher averaged over examples, as published scripts write
it) is multiplied by the n_data that the user names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis, Joint
from blr_analysis.checks import some
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, Loaded, Scratch, Source, Spec, fingerprint, storage
from blr_analysis.files.storage import SAMPLE, checked_record
from blr_analysis.merging.formula import is_precision
from blr_analysis.merging.layers import Factors
from blr_analysis.posterior import FACTORED, Posterior, Prior, n_data_of, take_off

VALUES, VECTORS = ".eigenvalues", (".input_eigenvectors", ".output_eigenvectors")
ROWS = ".row_eigenvalues"  # of a table that is head and embedding: what its look-ups add


@dataclass(frozen=True)
class StoredPrecision:
    """Named precisions, read piecewise as H = (scale · (S − δ))ᵖ.

    Attributes:
        source: where the numbers are.
        stored: parameter name → the source's name for it, tied names included.
        prior: δ by parameter name, where it is not 0.
        scale: 1, or n_data for averages over examples.
        frozen: parameters that were not trained: H = 0 by intention.
        kind: what the numbers are, as the record says it.
        layers: those with factors, by their weights: how they are read as matrices, and the mean
            eigenvalue of their inputs' moments, where it is known.
        sha256: the fingerprint of the model that it belongs to, where it was recorded, and how
            many numbers of each tensor it is of.
        mean: the weights that it belongs to, where they are in memory.
        adapter: whether the fingerprint is that of an adapter's file.
        power: p, of diagonals.
        chance: by layer of "gram", the part of the off-diagonals of its moments that is chance,
            where there were fewer rows than inputs.
    """

    source: Source
    stored: Mapping[str, str]
    prior: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    frozen: frozenset[str] = frozenset()
    kind: str = ""
    layers: Mapping[str, tuple[Joint, float | None]] = field(default_factory=dict)
    sha256: tuple[str, int | None] | None = None
    mean: Mapping[str, Tensor] | None = None
    adapter: bool = False
    power: float = 1.0
    chance: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For messages."""
        return self.source.name

    def spec(self, name: str) -> Spec | None:
        """Shape and storage of one parameter's precision; None where there is none."""
        key = self.stored.get(name)
        return None if key is None else self.source.specs[key]

    def covers(self, name: str) -> bool:
        """Whether a parameter has a precision of its own."""
        return name in self.stored or any(name in joint.names for joint, _ in self.layers.values())

    @property
    def structure(self) -> str:
        """ "diag", "gram" or "kron"."""
        wide = any(self.has_outputs(key) for key in self.layers)
        return "kron" if wide else "gram" if self.layers else "diag"

    def by_row(self, key: str) -> bool:
        """Whether each row of a layer's matrix has a number of its own on top of the others' H."""
        return key + ROWS in self.source.specs

    def raised(self, power: float) -> StoredPrecision:
        """Hᵖ where it has no factors, whose power is their own matter."""
        return self if self.layers else replace(self, power=power)

    def has_outputs(self, key: str) -> bool:
        """Whether a layer's H is no matrix for all rows alike."""
        joint = self.layers[key][0] if key in self.layers else None
        values = self.source.specs.get(key + VALUES)
        wide = values is not None and joint is not None and values.shape[1] > 1
        return wide or key + VECTORS[1] in self.source.specs

    def factor_bytes(self, key: str) -> int:
        """What a layer's factors take on disk."""
        parts = (VALUES, ROWS, *VECTORS)
        places = (key + part for part in parts) if key in self.layers else ()
        return sum(self.source.specs[p].nbytes for p in places if p in self.source.specs)

    def factors(
        self, key: str, shrink: float | None = 1.0, power: float = 1.0, damping: float | None = 0.0
    ) -> Factors:
        """H of a layer, in float64; ``shrink`` None: 1 less the part that is chance.

        Raises:
            PosteriorError: NaN, inf, or eigenvalues below 0.
        """
        joint, inputs = self.layers[key]
        held = {
            part: self.source.tensor(place).double().cpu()
            for part in (VALUES, ROWS, *VECTORS)
            if (place := key + part) in self.source.specs
        }
        values, rows = held.pop(VALUES), held.pop(ROWS, None)
        whole = [bool(t.isfinite().all()) for t in (values, *held.values())]
        if rows is not None:
            whole.append(bool((rows >= 0).all()) and bool((rows < torch.inf).all()))
            rows = rows * self.scale
        prior = self.prior.get(key, 0.0)
        rounding = 1e-5 * (prior + float(values.abs().max()))
        if not all(whole) or not bool((values >= prior - rounding).all()):
            raise PosteriorError(
                f"the factors of {key!r} in {self.name!r} are negative, NaN or inf: fit them again"
            )
        values = (values - prior).clamp_min_(0).mul_(self.scale)
        right, left = (held.get(key) for key in VECTORS)
        assert right is not None
        basis = Basis(joint.weight, joint.bias, joint.layout, right, left, inputs)
        shrink = 1.0 - self.chance.get(key, 0.0) if shrink is None else shrink
        return Factors(basis, values, shrink, rows).raised(power).damped(damping)

    def read(
        self, name: str, start: int, stop: int, scratch: Scratch, dtype: torch.dtype
    ) -> Tensor:
        """H of entries ``[start, stop)``; in ``dtype`` if it had to be computed.

        Raises:
            PosteriorError: S holds negative numbers, NaN or inf.
        """
        values = self.source.read(self.stored[name], start, stop, scratch)
        if values.numel() and not is_precision(values):
            low, high = map(float, torch.aminmax(values))
            raise PosteriorError(
                f"the precision of {name!r} in {self.name!r} is negative, NaN or inf "
                f"({low:g} to {high:g}): compute it again"
            )
        prior = self.prior.get(self.stored[name], 0.0)  # of a tied name too
        if prior == 0 and self.scale == 1 and self.power == 1:
            return values
        own = scratch.array((self, "H"), values.numel(), dtype, values.device).copy_(values)
        if prior:
            take_off(own, prior, values.dtype, roundings=4)
        if self.scale != 1:
            own.mul_(self.scale)
        return own if self.power == 1 else own.pow_(self.power)

    def __hash__(self) -> int:
        return id(self)


def open_precision(
    given: Any, n_data: int | None = None, *, label: str = "precision"
) -> StoredPrecision:
    """A precision folder or file on disk, a :class:`Posterior`, or tensors H by name.

    Args:
        n_data: where the numbers are averages over so many examples: of tensors, and of files
            without a record, which need it.

    Raises:
        StorageError: nothing there, damaged, or of a structure that is not diagonal.
        InputError: no record and no ``n_data``, or an ``n_data`` that contradicts the record.
        PosteriorError: a posterior of a structure that does not merge.
    """
    if isinstance(given, Posterior):
        return _of_posterior(given, label)
    if not isinstance(given, str | os.PathLike):
        return _plain(Loaded(label, given), 1 if n_data is None else n_data)
    path = Path(given).expanduser()
    source, record = Folder.open(path, stem=storage.STEM), storage.find_record(path)
    if record is None:
        if n_data is None:
            raise InputError(
                f"n_data is missing for {str(path)!r}: without a record its numbers are averages"
            )
        return _plain(source, n_data)
    record = checked_record(record, str(path))
    if n_data is not None and n_data != record["n_data"]:
        raise InputError(
            f"{str(path)!r} is a sum over n_data={record['n_data']} examples, not {n_data}: leave "
            "n_data out"
        )
    prior = Prior.of_any(record["prior_precision"])
    return _recorded(source, record, prior.numbers(record["parameters"]))


def _plain(source: Source, n_data: int) -> StoredPrecision:
    return StoredPrecision(source, {n: n for n in source.specs}, scale=n_data_of(n_data))


def _of_posterior(q: Posterior, label: str) -> StoredPrecision:
    if q.structure in FACTORED:
        about = {**q.record, **q.form.record(), "parameters": list(q.mean), "n_data": q.n_data}
        made = _recorded(Loaded(label, q.form.tensors()), about, q.prior.numbers(q.mean))
        return replace(made, sha256=None, mean=q.mean)
    if q.structure != "diag":
        raise PosteriorError(
            f"{label} is of structure {q.structure!r}: fit 'diag', 'gram' or 'kron'"
        )
    tensors = {n: q.precision(n) for n in q.mean}
    source = Loaded(label, tensors)
    stored = _stored(source, list(tensors), q.record.get("tied"))
    return StoredPrecision(
        source, stored, q.prior.numbers(tensors), frozen=_frozen(q.record), mean=q.mean
    )


def _recorded(
    source: Source, record: Mapping[str, Any], prior: Mapping[str, float]
) -> StoredPrecision:
    names = list(record["parameters"])
    try:
        blocks = [(Joint.read(entry), entry) for entry in record.get("blocks", ())]
        layers = {joint.key: (joint, entry.get("inputs")) for joint, entry in blocks}
        chance = {joint.key: float(entry.get("chance") or 0.0) for joint, entry in blocks}
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{source.name!r} has malformed layers: {error}") from error
    _check_layers(source, layers)
    joined = {n for joint, _ in layers.values() for n in joint.names}
    sample = record.get("sample_sha256")
    digest = sample or record.get("model_sha256")
    return StoredPrecision(
        source,
        _stored(source, [n for n in names if n not in joined], record.get("tied")),
        prior,
        frozen=_frozen(record),
        kind=record.get("kind") or "",
        layers=layers,
        sha256=(digest, SAMPLE if sample else None) if digest else None,
        adapter=bool(record.get("adapter")),
        chance=chance,
    )


def _frozen(record: Mapping[str, Any]) -> frozenset[str]:
    """The parameters that were not trained, by all their names."""
    tied = record.get("tied") or {}
    first = record.get("frozen") or ()
    return frozenset(name for own in first for name in (own, *tied.get(own, ())))


def check_belongs(precision: StoredPrecision, model: Source) -> None:
    """Raise :class:`PosteriorError` where the precision was recorded for other weights."""
    other = False
    whole = model.whole or model
    origin = model.origin if precision.adapter else whole if isinstance(whole, Folder) else None
    if precision.sha256 is not None and origin is not None:
        digest, most = precision.sha256
        other = fingerprint(origin, most=most, progress=False) != digest
    for name, mean in (precision.mean or {}).items():
        if other or name not in model.specs or model.specs[name].shape != mean.shape:
            continue
        weights = model.tensor(name)
        own = mean.to(weights)
        apart = float((weights.double() - own.double()).norm())
        other = apart > 4 * torch.finfo(weights.dtype).eps * float(own.double().norm())
    if other:
        raise PosteriorError(
            f"{precision.name!r} was taken at other weights than {model.name!r}: are precisions or "
            "models swapped? trust=True (--trust) merges all the same"
        )


def _check_layers(source: Source, layers: Mapping[str, tuple[Joint, float | None]]) -> None:
    for key, (joint, _) in layers.items():
        g, o = joint.layout.groups, joint.layout.rows
        i = (0 if joint.weight is None else joint.layout.columns) + (joint.bias is not None)
        shapes = {VECTORS[0]: (g, i, i), VECTORS[1]: (g, o, o), ROWS: (g, o, 1), VALUES: (g, o, i)}
        for part, wanted in shapes.items():
            spec, needed = source.specs.get(key + part), part in (VALUES, VECTORS[0])
            alike = spec is not None and spec.shape in (wanted, (g, 1, i) if part == VALUES else ())
            if not alike and (needed or spec is not None):
                raise PosteriorError(
                    f"{key + part!r} of {source.name!r} is not {list(wanted)}: factors of another "
                    "layer?"
                )


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


def check_fits(precision: StoredPrecision, reference: Source) -> None:
    """Raise :class:`PosteriorError` unless every entry belongs to a weight of the same shape."""
    shapes = {n: s for joint, _ in precision.layers.values() for n, s in joint.shapes.items()}
    stored = {n: precision.source.specs[key] for n, key in precision.stored.items()}
    ours = {key for n, key in precision.stored.items() if n in reference.specs}
    foreign = [n for n in shapes if n not in reference.specs]
    foreign += [n for n, key in precision.stored.items() if key not in ours]
    if foreign:
        raise PosteriorError(
            f"the precision {precision.name!r} belongs to another model than {reference.name!r}, "
            f"which has no {some(sorted(set(foreign)))}"
        )
    shapes |= {n: spec.shape for n, spec in stored.items() if n in reference.specs}
    for name, shape in shapes.items():
        if reference.specs[name].shape != shape:
            raise PosteriorError(
                f"the precision of {name!r} in {precision.name!r} is {list(shape)}, the weight "
                f"{list(reference.specs[name].shape)}"
            )
    for name, spec in stored.items():
        if not spec.dtype.is_floating_point:
            raise PosteriorError(f"the precision of {name!r} in {precision.name!r} is {spec.dtype}")
