"""What becomes of one tensor in a merge: merged, averaged, copied, or refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.files import Spec
from blr_analysis.merging.items import (
    AVERAGED,
    BASE,
    COPIED,
    MERGED,
    OWN,
    ZERO,
    Item,
    MergePlan,
    OpenModel,
)
from blr_analysis.merging.job import Weight
from blr_analysis.merging.sources import MERGEABLE, same_bytes

# What BatchNorm counts; it matters only to a running average without momentum.
COUNTER = "num_batches_tracked"
# What BatchNorm measured: no weights, and a variance extrapolated may be negative.
STATISTICS = ("running_mean", "running_var")


def fates(plan: MergePlan) -> tuple[Item, ...]:
    """Every tensor of the plan's reference.

    Raises:
        InputError: weights that are not finite, or sum to 0 where their sum divides.
        ModelError: integers in which the models differ.
        PosteriorError: precisions are missing and ``missing_precision`` is "error", or of different
            structures in one layer.
    """
    items = [_item(plan, name) for name in plan.reference.specs]
    missing = plan.job.missing_precision
    if not plan.method.uses_precisions:
        return tuple(items)
    if missing == "error":
        _refuse_missing(plan, items)
    stand_in = BASE if missing == "base" and plan.method.uses_base_precision else ZERO
    for k, item in enumerate(items):
        if "" in item.curved:
            note = "; ".join(filter(None, (item.note, f"precision missing: {stand_in}")))
            curved = tuple(c or stand_in for c in item.curved)
            items[k] = replace(item, curved=curved, note=note)
    return _in_layers(plan, items)


def _item(plan: MergePlan, name: str) -> Item:
    spec, job, parts = plan.reference.specs[name], plan.job, plan.parts
    notes = [_provenance(part, name) for part in parts]
    found = Item(name, COPIED, spec, tuple(part.reads[name] for part in parts))

    def noted(*words: str, **changes: Any) -> Item:
        return replace(found, note="; ".join(filter(None, (*notes, *words))), **changes)

    alphas = [number(part.weight, name, f"weight of {part.source.name!r}") for part in parts]
    if spec.dtype not in MERGEABLE or spec.numel == 0:
        return noted(_copied(plan, name), weights=tuple(alphas))
    out, method = Spec(spec.shape, job.out_dtype or spec.dtype), plan.method
    curved = tuple(_curved(part, name) if method.uses_precisions else ZERO for part in parts)
    bare = not any(curved) and all(part.precision is not None for part in parts)
    if bare and out == spec and not _others(plan, name):
        return noted("the same in all models", weights=tuple(alphas))
    statistic = name.rpartition(".")[2] in STATISTICS
    if statistic or (bare and any(name in part.buffers for part in parts)):
        what = "a running statistic" if statistic else "a buffer"
        shares = alphas if min(alphas) >= 0 and sum(alphas) > 0 else [1.0] * len(alphas)
        mean, zeros = tuple(a / sum(shares) for a in shares), (ZERO,) * len(parts)
        return noted(what, fate=AVERAGED, spec=out, weights=mean, curved=zeros)
    scale = number(job.scale, name, "scale") if method.takes("scale") else 1.0
    if method.thinned:  # which divides entry by entry
        shares = [number(p.density, name, f"density of {p.source.name!r}") for p in parts]
        if not all(0 < share <= 1 for share in shares):
            raise InputError(f"densities of {name!r} must be above 0 and at most 1, got {shares}")
        found = replace(found, densities=tuple(shares), scale=scale)
    else:
        alphas = [a * scale for a in _divided(plan, name, alphas)]
    return noted(fate=MERGED, spec=out, weights=tuple(alphas), curved=curved)


def _divided(plan: MergePlan, name: str, alphas: Sequence[float]) -> Sequence[float]:
    """α_t by their sum, where the method or the user says so. The Fisher average does not change
    with a factor of all; without a base the average must stand where nobody has a precision."""
    job, method, total = plan.job, plan.method, sum(alphas)
    if (job.divides or method.divides_by_precisions) and not abs(total) > 1e-12:
        raise InputError(
            f"the weights of {name!r} sum to {total:g}: change them, or set normalize: false"
        )
    divides = job.divides or (method.divides_by_precisions and plan.base is None)
    return [a / total for a in alphas] if divides else alphas


def _in_layers(plan: MergePlan, items: Sequence[Item]) -> tuple[Item, ...]:
    """The items with the layers that they are solved in."""
    joints = {key: joint for p in plan.held for key, (joint, _) in p.layers.items()}
    named = {n: key for key, joint in joints.items() for n in joint.names}
    by_name = {item.name: item for item in items}
    for key, joint in joints.items():
        group = [by_name[n] for n in joint.names]
        for p in plan.held:
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
    return tuple(replace(item, layer=named.get(item.name, "")) for item in items)


def _copied(plan: MergePlan, name: str) -> str:
    """Why a tensor that is not merged may be copied; an error where it may not."""
    reference, other = plan.reference, _others(plan, name)
    if not other:
        return "the same in all models"
    if name.endswith(COUNTER):
        return f"a count of batches, {reference.name}'s"
    raise ModelError(
        f"{name!r} is of {reference.specs[name].dtype} and differs between {other[0]!r} and "
        f"{reference.name!r}: merge before quantisation"
    )


def _others(plan: MergePlan, name: str) -> list[str]:
    """The models whose tensor is not that of the reference."""
    own, empty = plan.reference, plan.reference.specs[name].numel == 0
    alike = [empty or same_bytes(own, name, p.source, p.reads[name]) for p in plan.parts]
    return [p.source.name for p, same in zip(plan.parts, alike, strict=True) if not same]


def _provenance(part: OpenModel, name: str) -> str:
    """Where one model's tensor comes from, if that needs saying."""
    read, words = part.reads[name], part.source.words(part.reads[name])
    tied = f"tied to {read}" if read != name else ""
    said = ", ".join(filter(None, (tied, words)))
    return f"{part.source.name}: {said}" if said else ""


def number(given: Weight, name: str, what: str) -> float:
    """A weight or the like for one tensor.

    Raises:
        InputError: it is no finite number.
    """
    value: Any = given(name) if callable(given) else given
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


def _refuse_missing(plan: MergePlan, items: Sequence[Item]) -> None:
    for k, part in enumerate(plan.parts):
        lacking = [i.name for i in items if i.fate == MERGED and i.curved[k] == ""]
        what = f"the precision of {part.source.name!r} is missing"
        if part.precision is not None:
            what = f"{part.precision.name!r} has none for {some(lacking)} of {part.source.name!r}"
        if lacking:
            raise PosteriorError(
                f"{what}: compute it (`blr-analysis fisher`), or set missing_precision"
            )
