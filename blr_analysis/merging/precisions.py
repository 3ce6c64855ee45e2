"""The precision of a model's weights as a merge needs it: the part H that comes from the data.

A stored precision S = H + δ holds a prior δ and a sum H over n_data examples. The merge uses
H = S − δ. Files without a record hold averages over examples, as published scripts write them.
They are multiplied by the n_data that the user names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.adapters import Untied
from blr_analysis.backprop.matrices import Basis, Joint
from blr_analysis.checks import some
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, Loaded, Scratch, Source, Spec, fingerprint, storage
from blr_analysis.files.storage import SAMPLE, checked_record
from blr_analysis.merging.formula import BLOCK, is_precision
from blr_analysis.merging.layers import Factors
from blr_analysis.posterior import FACTORED, Posterior, Prior, n_data_of, take_off

# The ends of the names of a layer's factors; they begin with the name of its weight.
VALUES = ".eigenvalues"
INPUT_VECTORS = ".input_eigenvectors"
OUTPUT_VECTORS = ".output_eigenvectors"
ROWS = ".row_eigenvalues"  # of a table that is head and embedding: counts of look-ups
FACTORS = (VALUES, ROWS, INPUT_VECTORS, OUTPUT_VECTORS)
ROUNDINGS = 4  # a difference of up to so many roundings of its dtype counts as none
ROUNDING = 1e-5  # of the largest eigenvalue: by so much rounding may put one below the prior


@dataclass(frozen=True)
class StoredPrecision:
    """Named precisions, read piecewise as Hᵖ + d mean(Hᵖ), H = scale · (S − δ).

    Balanced ones are read as Hᵖ / mean(Hᵖ) + d.

    Attributes:
        source: the tensors with S.
        stored: by parameter, its name in the source; tied names are included.
        prior: δ by parameter, where it is not 0.
        scale: 1, or n_data for averages over examples.
        frozen: parameters that were not trained: their H is 0 on purpose.
        kind: the kind of precision in the record, such as "fisher_mc".
        layers: the layers with factors, by their weights: how their parameters form a matrix, and
            the mean eigenvalue of their inputs' moments (None: unknown).
        sha256: the fingerprint of the model that it belongs to, and the number of entries of each
            tensor that the fingerprint covers (None: all). None where it was not recorded.
        mean: the weights that it belongs to, if they are in memory.
        adapter: whether the fingerprint is that of an adapter's file.
        power: p; for diagonals only.
        damping: d; for diagonals only. The mean is that of the tensor.
        balanced: whether diagonals are divided by this mean.
        n_data: the number of examples that it is a sum over; None: unknown.
        tied: by first name, the other names of a tied parameter.
        chance: by layer of "gram" with fewer rows than inputs, the part of the off-diagonals of its
            moments that is chance.
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
    damping: float = 0.0
    balanced: bool = False
    n_data: int | None = None
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    chance: Mapping[str, float] = field(default_factory=dict)
    _means: dict[str, float] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def name(self) -> str:
        """The source's name, for messages."""
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
        if not self.layers:
            return "diag"
        return "kron" if any(self.has_outputs(layer) for layer in self.layers) else "gram"

    def by_row(self, layer: str) -> bool:
        """Whether each row of a layer's matrix adds a number to its eigenvalues (look-ups)."""
        return layer + ROWS in self.source.specs

    def adjusted(
        self, power: float, damping: float | None, *, balanced: bool = False
    ) -> StoredPrecision:
        """The precision as Hᵖ + d mean(Hᵖ), or balanced, for the tensors that have no factors.

        The power is for precisions without any factors. Factors are adjusted when they are read.
        """
        if self.layers:
            power = 1.0
        return replace(self, power=power, damping=damping or 0.0, balanced=balanced, _means={})

    def for_names(self, names: Collection[str]) -> StoredPrecision:
        """The precision of a result with these names: factors of a tied weight under each of them.

        Where factors are of a weight and its bias together, only the first name has them.
        """
        layers = dict(self.layers)
        chance = dict(self.chance)
        prior = dict(self.prior)
        stored_names: dict[str, str] = {}
        for first, aliases in self.tied.items():
            joint, mean_of_inputs = self.layers.get(first, (None, None))
            if joint is None or joint.bias is not None:
                continue
            for alias in set(aliases) & set(names) - layers.keys():
                layers[alias] = (replace(joint, weight=alias), mean_of_inputs)
                chance[alias] = chance.get(first, 0.0)
                prior[alias] = prior.get(first, 0.0)
                stored_names |= {
                    alias + part: first + part
                    for part in FACTORS
                    if first + part in self.source.specs
                }
        if not stored_names:
            return self
        source = Untied(self.source, stored_names)
        return replace(self, source=source, layers=layers, chance=chance, prior=prior)

    @property
    def reads_twice(self) -> bool:
        """Whether a tensor's mean is found before its first entry is read."""
        return self.balanced or self.damping > 0

    def has_outputs(self, layer: str) -> bool:
        """Whether a layer's H differs between the rows of its matrix, as "kron" does."""
        if layer + OUTPUT_VECTORS in self.source.specs:
            return True
        values = self.source.specs.get(layer + VALUES)
        return layer in self.layers and values is not None and values.shape[1] > 1

    def is_poorly_sampled(self, layer: str) -> bool:
        """Whether a layer's factors sum over fewer examples than it has inputs.

        The rows of one example are not independent, so that such sums are mostly chance in many
        directions.
        """
        if layer not in self.layers or self.n_data is None:
            return False
        inputs = self.source.specs[layer + INPUT_VECTORS].shape[-1]
        return self.n_data < inputs

    def factor_bytes(self, layer: str) -> int:
        """The bytes of a layer's factors on disk; 0 where it has none."""
        if layer not in self.layers:
            return 0
        specs = [self.source.specs.get(layer + part) for part in FACTORS]
        return sum(spec.nbytes for spec in specs if spec is not None)

    def factors(
        self,
        layer: str,
        shrink: float | None = 1.0,
        power: float = 1.0,
        damping: float | None = 0.0,
        *,
        balanced: bool = False,
    ) -> Factors:
        """H of a layer with factors, in float64.

        Args:
            shrink: the factor of its off-diagonals; None: 1 less the part of them that is chance.
            power, damping: as in :class:`blr_analysis.merging.Job`.
            balanced: whether H / mean(H) + d 1 is taken. Unless shrink is 0, H is then the mean
                over the outputs.

        Raises:
            PosteriorError: NaN, inf, or eigenvalues below 0.
        """
        joint, mean_of_inputs = self.layers[layer]
        values = self._factor(layer + VALUES)
        rows = self._factor(layer + ROWS)
        right = self._factor(layer + INPUT_VECTORS)
        left = self._factor(layer + OUTPUT_VECTORS)
        assert values is not None
        assert right is not None
        prior = self.prior.get(layer, 0.0)
        rounding = ROUNDING * (prior + float(values.abs().max()))
        are_positive = bool((values >= prior - rounding).all())
        are_finite = all(_is_finite(part) for part in (values, right, left))
        rows_are_sound = rows is None or is_precision(rows)
        if not (are_positive and are_finite and rows_are_sound):
            raise PosteriorError(
                f"the factors of {layer!r} in {self.name!r} are negative, NaN or inf: fit them "
                "again"
            )
        if rows is not None:
            rows = rows * self.scale
        values = (values - prior).clamp_min_(0).mul_(self.scale)
        basis = Basis(joint.weight, joint.bias, joint.layout, right, left, mean_of_inputs)
        if shrink is None:
            shrink = 1.0 - self.chance.get(layer, 0.0)
        factors = Factors(basis, values, shrink, rows).raised(power)
        if not balanced:
            return factors.damped(damping)
        if shrink != 0:
            factors = factors.on_inputs()
        return factors.balanced(damping or 0.0)

    def _factor(self, key: str) -> Tensor | None:
        """One of a layer's factors, in float64 on the CPU; None where it is not stored."""
        if key not in self.source.specs:
            return None
        return self.source.tensor(key).double().cpu()

    def read(
        self, name: str, start: int, stop: int, scratch: Scratch, dtype: torch.dtype
    ) -> Tensor:
        """H of entries ``[start, stop)``.

        It is in ``dtype`` if it had to be computed from S, else in the dtype that is stored.

        Raises:
            PosteriorError: S holds negative numbers, NaN or inf.
        """
        values = self._undamped(name, start, stop, scratch, dtype)
        if not self.reads_twice:
            return values
        h = scratch.array((self, "damped"), values.numel(), dtype, values.device).copy_(values)
        mean = self.tensor_mean(name)
        if not self.balanced:
            return h.add_(self.damping * mean)
        if mean > 0:
            h.div_(mean)
        return h.add_(self.damping)

    def tensor_mean(self, name: str) -> float:
        """The mean of a tensor's Hᵖ; the tensor is read for it once, and the mean is kept."""
        key = self.stored[name]
        with self._lock:
            if key not in self._means:
                self._means[key] = self._measured_mean(name)
            return self._means[key]

    def _measured_mean(self, name: str) -> float:
        """The mean of a tensor's Hᵖ, read block by block."""
        count = self.source.specs[self.stored[name]].numel
        scratch = Scratch()
        total = 0.0
        for start in range(0, count, BLOCK):
            stop = min(start + BLOCK, count)
            h = self._undamped(name, start, stop, scratch, torch.float64)
            total += float(h.double().sum())
        return total / max(count, 1)

    def _undamped(
        self, name: str, start: int, stop: int, scratch: Scratch, dtype: torch.dtype
    ) -> Tensor:
        """Hᵖ of entries ``[start, stop)``."""
        values = self.source.read(self.stored[name], start, stop, scratch)
        if values.numel() and not is_precision(values):
            low, high = map(float, torch.aminmax(values))
            raise PosteriorError(
                f"the precision of {name!r} in {self.name!r} is negative, NaN or inf "
                f"({low:g} to {high:g}): compute it again"
            )
        prior = self.prior.get(self.stored[name], 0.0)  # by the stored name, for tied ones too
        if prior == 0 and self.scale == 1 and self.power == 1:
            return values
        h = scratch.array((self, "H"), values.numel(), dtype, values.device).copy_(values)
        if prior:
            take_off(h, prior, values.dtype, roundings=ROUNDINGS)
        if self.scale != 1:
            h.mul_(self.scale)
        return h if self.power == 1 else h.pow_(self.power)

    def __hash__(self) -> int:
        return id(self)


def _is_finite(values: Tensor | None) -> bool:
    """Whether a tensor holds neither NaN nor inf; True where there is none."""
    return values is None or bool(values.isfinite().all())


def open_precision(
    precision: Any, n_data: int | None = None, *, label: str = "precision"
) -> StoredPrecision:
    """A precision folder or file on disk, a :class:`Posterior`, or tensors H by name.

    Args:
        n_data: the number of examples of averages, by which these are multiplied. Tensors may be
            averages; files without a record are, and need it.
        label: the name of a precision in memory, for messages.

    Raises:
        StorageError: there is no such file, or it is damaged.
        InputError: neither a record nor ``n_data``, or an ``n_data`` that contradicts the record.
        PosteriorError: a posterior of a structure that cannot be merged.
    """
    if isinstance(precision, Posterior):
        return _of_posterior(precision, label)
    if not isinstance(precision, str | os.PathLike):
        count = 1 if n_data is None else n_data
        return replace(_plain(Loaded(label, precision), count), n_data=n_data)
    path = Path(precision).expanduser()
    source = Folder.open(path, stem=storage.STEM)
    record = storage.find_record(path)
    if record is None:
        if n_data is None:
            raise InputError(
                f"n_data is missing for {str(path)!r}, which has no record: give the number of "
                "examples of an average, or 1 for a sum; for the base, pass tensors"
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
    """A precision without a record: averages over ``n_data`` examples, or sums where it is 1."""
    names = {name: name for name in source.specs}
    return StoredPrecision(source, names, scale=n_data_of(n_data), n_data=n_data)


def _of_posterior(posterior: Posterior, label: str) -> StoredPrecision:
    """The precision of a posterior in memory."""
    prior = posterior.prior.numbers(posterior.mean)
    if posterior.structure in FACTORED:
        record = {**posterior.record, **posterior.form.record()}
        record |= {"parameters": list(posterior.mean), "n_data": posterior.n_data}
        precision = _recorded(Loaded(label, posterior.form.tensors()), record, prior)
        return replace(precision, sha256=None, mean=posterior.mean)
    if posterior.structure != "diag":
        raise PosteriorError(
            f"{label} is of structure {posterior.structure!r}: fit 'diag', 'gram' or 'kron'"
        )
    source = Loaded(label, {name: posterior.precision(name) for name in posterior.mean})
    stored = _stored(source, list(posterior.mean), posterior.record.get("tied"))
    frozen = _frozen(posterior.record)
    return StoredPrecision(
        source, stored, prior, frozen=frozen, mean=posterior.mean, n_data=posterior.n_data
    )


def _recorded(
    source: Source, record: Mapping[str, Any], prior: Mapping[str, float]
) -> StoredPrecision:
    """A precision with a record."""
    try:
        blocks = [(Joint.read(entry), entry) for entry in record.get("blocks", ())]
        layers = {joint.key: (joint, entry.get("inputs")) for joint, entry in blocks}
        chance = {joint.key: float(entry.get("chance") or 0.0) for joint, entry in blocks}
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{source.name!r} has malformed layers: {error}") from error
    for layer, (joint, _) in layers.items():
        _check_layer(source, layer, joint)
    in_layers = {name for joint, _ in layers.values() for name in joint.names}
    diagonal = [name for name in record["parameters"] if name not in in_layers]
    return StoredPrecision(
        source,
        _stored(source, diagonal, record.get("tied")),
        prior,
        tied=record.get("tied") or {},
        frozen=_frozen(record),
        kind=record.get("kind") or "",
        layers=layers,
        sha256=_recorded_fingerprint(record),
        adapter=bool(record.get("adapter")),
        n_data=record.get("n_data"),
        chance=chance,
    )


def _recorded_fingerprint(record: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """The fingerprint of the model, and the number of entries of each tensor that it covers.

    The number is None for all entries. Without a recorded fingerprint, None is returned.
    """
    if record.get("sample_sha256"):
        return record["sample_sha256"], SAMPLE
    if record.get("model_sha256"):
        return record["model_sha256"], None
    return None


def _frozen(record: Mapping[str, Any]) -> frozenset[str]:
    """The parameters that were not trained, by all of their names."""
    tied = record.get("tied") or {}
    frozen = record.get("frozen") or ()
    return frozenset(alias for name in frozen for alias in (name, *tied.get(name, ())))


def check_belongs(precision: StoredPrecision, model: Source) -> None:
    """Raise :class:`PosteriorError` where the precision was recorded for other weights."""
    if _has_other_fingerprint(precision, model) or _has_other_mean(precision, model):
        raise PosteriorError(
            f"{precision.name!r} was taken at other weights than {model.name!r}: are precisions or "
            "models swapped? trust=True (--trust) merges all the same"
        )


def _has_other_fingerprint(precision: StoredPrecision, model: Source) -> bool:
    """Whether the files of a model are not those that were recorded."""
    if precision.sha256 is None:
        return False
    files = model.origin if precision.adapter else model.whole or model
    is_on_disk = precision.adapter or isinstance(files, Folder)
    if files is None or not is_on_disk:
        return False
    digest, numbers = precision.sha256
    return fingerprint(files, limit=numbers, progress=False) != digest


def _has_other_mean(precision: StoredPrecision, model: Source) -> bool:
    """Whether a precision in memory belongs to weights that differ by more than rounding."""
    for name, mean in (precision.mean or {}).items():
        if name not in model.specs or model.specs[name].shape != mean.shape:
            continue
        weights = model.tensor(name)
        rounded = mean.to(weights).double()
        distance = float((weights.double() - rounded).norm())
        rounding = ROUNDINGS * torch.finfo(weights.dtype).eps * float(rounded.norm())
        if distance > rounding:
            return True
    return False


def _check_layer(source: Source, layer: str, joint: Joint) -> None:
    """Raise :class:`PosteriorError` where a layer's factors are missing or have other shapes."""
    groups = joint.layout.groups
    outputs = joint.layout.rows
    inputs = 0
    if joint.weight is not None:
        inputs += joint.layout.columns
    if joint.bias is not None:
        inputs += 1
    needed = {
        VALUES: [(groups, outputs, inputs), (groups, 1, inputs)],
        INPUT_VECTORS: [(groups, inputs, inputs)],
    }
    optional = {
        OUTPUT_VECTORS: [(groups, outputs, outputs)],
        ROWS: [(groups, outputs, 1)],
    }
    for part, shapes in (needed | optional).items():
        spec = source.specs.get(layer + part)
        is_missing = spec is None and part in needed
        has_other_shape = spec is not None and spec.shape not in shapes
        if is_missing or has_other_shape:
            raise PosteriorError(
                f"{layer + part!r} of {source.name!r} is not {list(shapes[0])}: factors of another "
                "layer?"
            )


def _stored(source: Source, names: Sequence[str], tied: Any) -> dict[str, str]:
    """By parameter, the name of its precision in the source; tied names are included."""
    missing = [name for name in names if name not in source.specs]
    if missing:
        raise StorageError(f"{source.name!r} lacks the precisions of {some(missing)}.")
    stored = {name: name for name in names}
    for first, aliases in (tied or {}).items():
        group = [first, *aliases]
        present = [name for name in group if name in stored]
        if present:
            stored |= dict.fromkeys(group, stored[present[0]])
    return stored


def check_fits(precision: StoredPrecision, reference: Source) -> None:
    """Raise :class:`PosteriorError` unless every tensor belongs to a weight of the same shape."""
    shapes = {
        name: shape
        for joint, _ in precision.layers.values()
        for name, shape in joint.shapes.items()
    }
    keys_of_weights = {key for name, key in precision.stored.items() if name in reference.specs}
    foreign = [name for name in shapes if name not in reference.specs]
    foreign += [name for name, key in precision.stored.items() if key not in keys_of_weights]
    if foreign:
        raise PosteriorError(
            f"the precision {precision.name!r} belongs to another model than {reference.name!r}, "
            f"which has no {some(sorted(set(foreign)))}"
        )
    specs = {name: precision.source.specs[key] for name, key in precision.stored.items()}
    shapes |= {name: spec.shape for name, spec in specs.items() if name in reference.specs}
    for name, shape in shapes.items():
        if reference.specs[name].shape != shape:
            raise PosteriorError(
                f"the precision of {name!r} in {precision.name!r} is {list(shape)}, the weight "
                f"{list(reference.specs[name].shape)}"
            )
    for name, spec in specs.items():
        if not spec.dtype.is_floating_point:
            raise PosteriorError(f"the precision of {name!r} in {precision.name!r} is {spec.dtype}")
