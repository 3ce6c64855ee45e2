"""A posterior as named tensors and a record, and back; the format is :mod:`blr_analysis.files`'s.

What stands in a file, by its record:

    prior_precision   δ that is inside the stored precision
    prior_outside     δ that is not, and is added on reading (where H = S − δ was stored)

so that the data's part is always "stored − prior_precision". In a narrower dtype it is H that is
stored: rounding S itself would lose H wherever it is small beside δ (bfloat16 keeps 8 bits:
H = 0.01 beside δ = 10 would be 0 or negative).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, Loaded, Source, fingerprint
from blr_analysis.posterior.prior import Given, Prior, Shapes, take_off
from blr_analysis.posterior.structures import KINDS, Diagonal, Structure
from blr_analysis.task import unwrapped

Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
Parts = tuple[dict[str, Tensor], Structure, Prior, int, dict[str, Any]]
Encoded = tuple[dict[str, Tensor], dict[str, Any]]

DTYPES = (torch.float32, torch.bfloat16)
PER_WEIGHT = ".prior_precision"
OWN_KEYS = (
    "structure",
    "prior_precision",
    "prior_outside",
    "rounded",
    "n_data",
    "parameters",
    "format",
    "version",
)


def check_dtype(dtype: Any) -> torch.dtype | None:
    """None, float32 or bfloat16, or :class:`InputError`.

    Float16 ends at 65,504 and at 6e-8, which precisions pass on both sides.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype must be torch.float32, torch.bfloat16 or None, got {dtype!r}")
    return dtype


def encode(form: Structure, prior: Prior, dtype: torch.dtype | None = None) -> Encoded:
    """Tensors by name and suffix, and the record that :func:`parts_of` needs; the precision in
    ``dtype`` (None: as it is).

    Raises:
        InputError: a dtype for a structure that is not diagonal, or one not in ``DTYPES``.
    """
    values = form.per_weight
    if check_dtype(dtype) is not None and values is None:
        raise InputError(
            f"dtype={dtype} rounds a diagonal precision, this one is {form.kind!r}: leave dtype out"
        )
    if dtype is not None and values is not None:
        narrower = [torch.finfo(dtype).eps > torch.finfo(s.dtype).eps for s in values.values()]
        parts = _data_part(values, prior, dtype) if any(narrower) else None
        if parts is not None:
            record = {"structure": "diag", "prior_precision": 0.0, "prior_outside": prior.record}
            return parts, {**record, "rounded": True}
    tensors = {**form.tensors(), **{f"{n}{PER_WEIGHT}": t for n, t in prior.tensors.items()}}
    record = {"structure": form.kind, "prior_precision": prior.record, **form.record()}
    if dtype is None or values is None:
        return tensors, record
    cast = {n: t.to(dtype) if n in values else t for n, t in tensors.items()}
    return cast, {**record, "rounded": True}


def _data_part(
    values: Mapping[str, Tensor], prior: Prior, dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """H = S − δ rounded; None where H is negative somewhere, as IVON allows, or δ has an entry per
    weight: then S itself is to be rounded."""
    if prior.tensors:
        return None
    parts = {}
    for name, s in values.items():
        h = take_off(s.to(torch.float64, copy=True), float(prior.of(name)), s.dtype)
        if bool((h < 0).any()):
            return None
        parts[name] = h.to(dtype)
    return parts


def parts_of(
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    path: str,
    model: Model | None,
    prior_precision: Given | None,
) -> Parts:
    """Mean, S, δ, n_data and the rest of the record; see :meth:`Posterior.load`."""
    mean, form, prior, n_data, rest = _decode(tensors, record, path)
    if mean is not None and model is not None:
        raise PosteriorError(f"{path!r} holds its own mean: leave model out")
    bare = mean is None
    mean = _mean_of(model, form.shapes, record, path) if mean is None else mean
    form = _placed(form, mean, wide=bare or bool(record.get("rounded")))
    kept = record.get("prior_outside")
    outside = None if kept is None else Prior(Prior.of_any(kept).entries, prior.mean)
    if prior_precision is not None:
        given = Prior.read(prior_precision, form.shapes)
        if form.per_weight is not None and prior.is_zero:
            outside = Prior(given.entries, prior.mean)
        elif form.per_weight is None or not given.equals(prior, form.shapes):
            raise PosteriorError(f"{path!r} is with its prior in it; leave prior_precision out")
    if outside is not None:
        form, prior = form.plus_prior(outside), outside
    for name, s in (form.per_weight or {}).items() if prior.is_zero else ():
        if empty := int((s == 0).sum()):
            said = f"{path!r} holds a precision without prior, 0 in {empty} of {s.numel()} entries"
            raise PosteriorError(f"{said} of {name!r}: pass prior_precision=")
    return mean, form, prior, n_data, rest


def _decode(
    tensors: Mapping[str, Tensor], record: Mapping[str, Any], path: str
) -> tuple[dict[str, Tensor] | None, Structure, Prior, int, dict[str, Any]]:
    """Mean (None where none is stored), structure, prior precision, n_data, rest of the record.

    Raises:
        StorageError: a tensor or an entry of the record that a posterior needs is missing.
    """
    try:
        names: list[str] = list(record["parameters"])
        bare = not any(f"{n}.mean" in tensors and f"{n}.mean" not in names for n in names)
        mean = None if bare else {n: tensors[f"{n}.mean"] for n in names}
        form = KINDS[record["structure"]].read(tensors, record, names)
        per_weight = {n: tensors[n + PER_WEIGHT] for n in names if n + PER_WEIGHT in tensors}
        initial = {n: tensors[f"{n}.initial"] for n in names if f"{n}.initial" in tensors}
        entries = {**Prior.of_any(record["prior_precision"]).entries, **per_weight}
        prior = Prior(entries, initial or None)
        n_data = int(record["n_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path!r} is no posterior of blr_analysis: {error}") from error
    known = {*OWN_KEYS, *form.record()}
    rest = {k: v for k, v in record.items() if k not in known}
    return mean, form, prior, n_data, rest


def _placed(form: Structure, mean: Mapping[str, Tensor], *, wide: bool) -> Structure:
    """One number per weight beside its mean; ``wide``: in float32, or in the mean's dtype where
    that is wider."""
    if form.per_weight is None:
        return form
    values = {}
    for name, s in form.per_weight.items():
        dtype = torch.promote_types(torch.float32, mean[name].dtype) if wide else s.dtype
        values[name] = s.to(mean[name].device, dtype)
    return Diagonal(values)


def _mean_of(
    model: Model | None, shapes: Shapes, record: Mapping[str, Any], path: str
) -> dict[str, Tensor]:
    """One tensor per name of ``shapes``; tied tensors may have any of their names in the model.

    Raises:
        InputError: ``model`` is none, or holds no numbers.
        StorageError: the folder cannot be read.
        PosteriorError: names or shapes are missing, or the weights are not those whose
            fingerprint was recorded. A module or a state dict is taken as it is.
    """
    source = _opened(model, record.get("model_sha256"), path)
    tied = record.get("tied")
    aliases = tied if isinstance(tied, dict) else {}
    keys = {n: next((k for k in (n, *aliases.get(n, ())) if k in source.specs), n) for n in shapes}
    held = {n: source.specs[k].shape for n, k in keys.items() if k in source.specs}
    wrong = [
        f"{n}: {f'{held[n]}, not {tuple(shape)}' if n in held else 'not there'}"
        for n, shape in shapes.items()
        if held.get(n) != tuple(shape)
    ]
    if wrong:
        said = f"the model is not the one whose precision {path!r} holds: {some(wrong)}"
        raise PosteriorError(f"{said}; its tensors are called {some(list(source.specs))}")
    return {n: source.tensor(key) for n, key in keys.items()}


def _opened(model: Model | None, sha256: str | None, path: str) -> Source:
    if isinstance(model, nn.Module):
        return Loaded("model", dict(unwrapped(model).named_parameters(remove_duplicate=False)))
    if isinstance(model, Mapping):
        return Loaded("model", {n: t for n, t in model.items() if isinstance(t, Tensor)})
    if model is None:
        raise PosteriorError(f"{path!r} holds precisions without a mean: pass model=")
    if not isinstance(model, (str, os.PathLike)):
        got = type(model).__name__
        raise InputError(f"model must be a torch.nn.Module, a state dict, or a folder, got {got}")
    source = Folder.open(model)
    if sha256 is not None and fingerprint(source, progress=False) != sha256:
        said = f"{path!r} was written beside other weights than {os.fspath(model)!r} (sha256)"
        raise PosteriorError(f"{said}: name the right folder, or pass the module")
    return source
