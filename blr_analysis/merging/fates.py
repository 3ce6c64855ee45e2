"""What becomes of one tensor in a merge: merged, copied, or refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.files import Source, Spec
from blr_analysis.merging.job import Job, Weight
from blr_analysis.merging.precisions import StoredPrecision
from blr_analysis.merging.sources import MERGEABLE, Reads, same_bytes

MERGED, AVERAGED, COPIED = "merged", "averaged", "copied"
# What stands for the precision of one task in one tensor.
ZERO, OWN, BASE = "zero", "own", "base"
# What BatchNorm counts; it matters only to a running average without momentum.
COUNTER = "num_batches_tracked"
# What BatchNorm measured: no weights, and a variance extrapolated may be negative.
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class OpenModel:
    """One fine-tuned model, opened.

    Attributes:
        source: θ_t.
        precision: H_t, or None.
        weight: α_t, a number or a function of the tensor's name.
        density: the share of θ_t − θ_0 that stays, the same.
        buffers: the names of tensors that are known to be no parameters.
    """

    source: Source
    precision: StoredPrecision | None
    weight: Weight
    density: Weight = 1.0
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Item:
    """One tensor of the result.

    Attributes:
        name, fate: "merged", "averaged" (a running statistic, under every method) or "copied".
        spec: shape and the dtype that is written.
        reads: its name in each model, in order.
        weights: α_t, normalised where the method says so.
        curved: what stands for each H_t: "own", "base" (H_0 + δ) or "zero".
        note: what a reader of the report should know.
        layer: the weight of the layer whose matrix it is part of, where that is solved as one.
        densities, scale: of methods that leave a part of θ_t − θ_0 out: each model's share, and λ.
    """

    name: str
    fate: str
    spec: Spec
    reads: tuple[str, ...]
    weights: tuple[float, ...]
    curved: tuple[str, ...]
    note: str = ""
    layer: str = ""
    densities: tuple[float, ...] = ()
    scale: float = 1.0


def fates(
    reference: Source,
    parts: Sequence[OpenModel],
    reads: Sequence[Reads],
    job: Job,
    *,
    based: bool,
    base_precision: StoredPrecision | None = None,
) -> tuple[Item, ...]:
    """Every tensor of ``reference`` as an item of the plan.

    Raises:
        InputError: weights that are not finite, or sum to 0 where their sum divides.
        ModelError: integers in which the models differ.
        PosteriorError: precisions are missing and ``missing_precision`` is "error".
    """
    items = tuple(
        _item(name, reference, parts, [r[name] for r in reads], job, based)
        for name in reference.specs
    )
    method, missing = job.row, job.missing_precision
    if method.uses_precisions and missing == "error":
        _refuse_missing(items, parts)
    stand_in = BASE if missing == "base" and method.uses_base_precision else ZERO
    items = tuple(_with_stand_in(item, stand_in) for item in items)
    return _in_layers(items, parts, base_precision) if method.uses_precisions else items


def _in_layers(
    items: tuple[Item, ...], parts: Sequence[OpenModel], first: StoredPrecision | None
) -> tuple[Item, ...]:
    """The items with the layers that they are solved in.

    Raises:
        PosteriorError: precisions of different structures in one layer.
        InputError: a weight and its bias that count differently.
    """
    held = [p for p in (first, *(part.precision for part in parts)) if p is not None]
    joints = {key: joint for p in held for key, (joint, _) in p.layers.items()}
    named = {n: joint for joint in joints.values() for n in joint.names}
    by_name = {item.name: item for item in items}
    for key, joint in joints.items():
        group = [by_name[n] for n in joint.names]
        for p in held:
            own = p.layers.get(key, (None, None))[0]
            if own != joint and any(p.covers(n) for n in joint.names):
                raise PosteriorError(
                    f"{p.name!r} has another structure in {key!r} than the other precisions: fit "
                    "all of them alike"
                )
        if any((i.weights, i.curved) != (group[0].weights, group[0].curved) for i in group):
            raise InputError(
                f"{' and '.join(joint.names)} are merged as one matrix: give them the same weights"
            )
    return tuple(
        replace(item, layer=named[item.name].key) if item.name in named else item for item in items
    )


def _item(
    name: str,
    reference: Source,
    parts: Sequence[OpenModel],
    reads: Sequence[str],
    job: Job,
    based: bool,
) -> Item:
    spec, method, out_dtype = reference.specs[name], job.row, job.out_dtype
    alphas = [number(part.weight, name, f"weight of {part.source.name!r}") for part in parts]
    notes = [_provenance(part.source, name, read) for part, read in zip(parts, reads, strict=True)]
    notes = [note for note in notes if note]
    if spec.dtype not in MERGEABLE or spec.numel == 0:
        notes.append(_copied(name, reference, parts, reads))
        return Item(name, COPIED, spec, tuple(reads), tuple(alphas), (), "; ".join(notes))
    out = Spec(spec.shape, spec.dtype if out_dtype is None else out_dtype)
    curved = tuple(_curved(part, name) if method.uses_precisions else ZERO for part in parts)
    bare = not any(curved) and all(part.precision is not None for part in parts)
    if bare and out == spec and not _others(name, reference, parts, reads):
        note = "; ".join([*notes, "the same in all models"])
        return Item(name, COPIED, spec, tuple(reads), tuple(alphas), (), note)
    statistic = name.rpartition(".")[2] in STATISTICS
    if statistic or (bare and any(name in part.buffers for part in parts)):
        zeros = (ZERO,) * len(parts)
        note = "; ".join([*notes, "a running statistic" if statistic else "a buffer"])
        return Item(name, AVERAGED, out, tuple(reads), _of_average(alphas), zeros, note)
    thin: dict[str, Any] = {}
    if method.thinned:  # which divides entry by entry
        shares = [number(p.density, name, f"density of {p.source.name!r}") for p in parts]
        if not all(0 < share <= 1 for share in shares):
            raise InputError(f"densities of {name!r} must be above 0 and at most 1, got {shares}")
        thin = {"densities": tuple(shares), "scale": number(job.scale, name, "scale")}
    elif job.divides or method.divides_by_precisions:
        total = sum(alphas)
        if not abs(total) > 1e-12:
            raise InputError(
                f"the weights of {name!r} sum to {total:g}: change them, or set normalize: false"
            )
        # The Fisher average does not change with a factor of all weights; without a base the
        # average must stand where nobody has a precision.
        divided = job.divides or (method.uses_precisions and not based)
        alphas = [a / total for a in alphas] if divided else alphas
    if method.takes("scale") and not method.thinned:
        factor = number(job.scale, name, "scale")
        alphas = [a * factor for a in alphas]
    return Item(name, MERGED, out, tuple(reads), tuple(alphas), curved, "; ".join(notes), **thin)


def _of_average(alphas: Sequence[float]) -> tuple[float, ...]:
    """The weights divided by their sum; equal ones where some are negative, or all are 0."""
    weights = alphas if min(alphas) >= 0 and sum(alphas) > 0 else [1.0] * len(alphas)
    return tuple(weight / sum(weights) for weight in weights)


def _copied(name: str, reference: Source, parts: Sequence[OpenModel], reads: Sequence[str]) -> str:
    """Why a tensor that is not merged may be copied; an error where it may not."""
    if reference.specs[name].numel == 0:
        return "without entries"
    other = _others(name, reference, parts, reads)
    if not other:
        return "the same in all models"
    if name.endswith(COUNTER):
        return f"a count of batches, {reference.name}'s"
    raise ModelError(
        f"{name!r} is of {reference.specs[name].dtype} and differs between {other[0]!r} and "
        f"{reference.name!r}: merge before quantisation"
    )


def _others(
    name: str, reference: Source, parts: Sequence[OpenModel], reads: Sequence[str]
) -> list[str]:
    """The models whose tensor is not that of the reference."""
    return [
        part.source.name
        for part, read in zip(parts, reads, strict=True)
        if not same_bytes(reference, name, part.source, read)
    ]


def _provenance(source: Source, name: str, read: str) -> str:
    """Where one model's tensor comes from, if that needs saying."""
    words = source.words(read)
    if read != name:
        words = f"tied to {read}" + (f", {words}" if words else "")
    return f"{source.name}: {words}" if words else ""


def number(given: Weight, name: str, what: str) -> float:
    """A weight or the like for one tensor.

    Raises:
        InputError: it is no finite number.
    """
    value = given(name) if callable(given) else given
    try:
        checked = float(value)
    except (TypeError, ValueError):
        checked = math.nan
    if not math.isfinite(checked):
        raise InputError(f"the {what} for {name!r} is {value!r}: expected a finite number")
    return checked


def _curved(part: OpenModel, name: str) -> str:
    if part.precision is None:
        return ""
    if part.precision.covers(name):
        return OWN
    return ZERO if name in part.precision.frozen else ""


def _refuse_missing(items: Sequence[Item], parts: Sequence[OpenModel]) -> None:
    for k, part in enumerate(parts):
        lacking = [i.name for i in items if i.fate == MERGED and i.curved[k] == ""]
        if not lacking:
            continue
        what = f"the precision of {part.source.name!r} is missing"
        if part.precision is not None:
            what = f"{part.precision.name!r} has none for {some(lacking)} of {part.source.name!r}"
        raise PosteriorError(
            f"{what}: compute it (`blr-analysis fisher`), or set missing_precision"
        )


def _with_stand_in(item: Item, stand_in: str) -> Item:
    if "" not in item.curved:
        return item
    curved = tuple(c or stand_in for c in item.curved)
    note = "; ".join(filter(None, (item.note, f"precision missing: {stand_in}")))
    return replace(item, curved=curved, note=note)
