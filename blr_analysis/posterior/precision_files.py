"""A posterior as named tensors and a record, and back: with its mean, or as a precision beside a
model, for merging. The format is :mod:`~blr_analysis.files.storage`'s.

A precision beside a model is a folder ``precision/`` or one ``.safetensors`` file, the tensor
``<name>`` holding the diagonal of a precision that is a SUM over ``n_data`` examples, never a mean.
Its record (``precision_config.json``) says

======================  ==========================================================================
``kind``                one of :data:`KINDS`
``definition``          the formula, in words
``n_data``              N, the number of examples summed over
``prior_precision``     δ that is inside the tensors, a number or one per name; 0: the data alone
``prior_outside``       δ that is not in them, which :meth:`Posterior.load` adds
``optimizer``           its class; with ``batch_size`` (examples per step), ``beta2``, ``step``
                        and ``bias_corrected`` where there was one
``tied``, ``frozen``    further names of tied tensors, by the first; names that had no gradient
``model_sha256``        :func:`blr_analysis.files.fingerprint` of the model's folder
``sample_sha256``       the same of every tensor's first 1,024 numbers, which a merge compares
======================  ==========================================================================

so that the data's part is always H = tensor − ``prior_precision`` (δ of the formulas). Bfloat16
keeps 8 bits, so that only H itself is stored in it, never S (H = 0.01 beside δ = 10 would be lost).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import one_of, path_of, some
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, Loaded, Source, fingerprint, storage
from blr_analysis.files.storage import FIELDS, SAMPLE, checked_record
from blr_analysis.posterior.prior import Given, Prior, Shapes, differences, n_data_of, real_tensors
from blr_analysis.posterior.structures import KINDS as STRUCTURES
from blr_analysis.posterior.structures import Diagonal, Structure
from blr_analysis.task import unwrapped

KINDS = ("ivon", "vogn", "adam_v", "rmsprop_v", "adagrad_v", "fisher_mc", "fisher_emp", "ggn")
FACTORED = ("gram", "kron")  # the structures with factors that a merge takes
Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
Parts = tuple[dict[str, Tensor], Structure, Prior, int, dict[str, Any]]
Encoded = tuple[dict[str, Tensor], dict[str, Any]]

DTYPES = (None, torch.float32, torch.bfloat16)
ENTRIES = {  # of a posterior's record, where it has them, and what stands in each
    "stationarity": ("pull", "decrement", "residual", "n_data"),
    "fingerprint": ("outputs", "targets", "losses"),
    "prior_choice": ("delta", "rule"),
    "calibration": ("temperature",),
}
OWN_KEYS = {"structure", "prior_precision", "prior_outside", "n_data", "parameters"}
OWN_KEYS |= {"format", "version", "rounded"}


def check_dtype(dtype: Any) -> torch.dtype | None:
    """None, float32 or bfloat16, or :class:`InputError`.

    Float16 ends at 65,504 and at 6e-8, which precisions pass on both sides.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be torch.float32, torch.bfloat16 or None, got {dtype!r}")
    return dtype


def encode(form: Structure, prior: Prior) -> Encoded:
    """Tensors by name and suffix, and the record that :func:`parts_of` needs."""
    known = {"structure": form.kind, "prior_precision": prior.given}
    return form.tensors(), known | form.record()


def parts_of(
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    path: str,
    model: Model | None = None,
    prior_precision: Given | None = None,
) -> Parts:
    """Mean, S, δ, n_data and the rest of the record; see :meth:`Posterior.load`.

    Raises:
        StorageError: a tensor or an entry of the record that a posterior needs is missing.
        PosteriorError: as :meth:`Posterior.load`.
    """
    _check_entries(record, path)
    try:
        names: list[str] = list(record["parameters"])
        bare = not any(f"{n}.mean" in tensors and f"{n}.mean" not in names for n in names)
        form = STRUCTURES[record["structure"]].read(tensors, record, names)
        mean = {} if bare else {n: tensors[f"{n}.mean"] for n in names}
        initial = {n: tensors[f"{n}.initial"] for n in names if f"{n}.initial" in tensors}
        prior = Prior(Prior.of_any(record["prior_precision"]).entries, initial or None)
        n_data = int(record["n_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path!r} is no posterior of blr_analysis: {error}") from error
    if bare:
        mean = _mean_of(model, form.shapes, record, path)
    elif model is not None:
        raise PosteriorError(f"{path!r} holds its own mean: leave model out")
    if form.per_weight is not None:
        wide = bare or record.get("prior_outside") is not None or bool(record.get("rounded"))
        form = Diagonal({n: _beside(s, mean[n], wide) for n, s in form.per_weight.items()})
    form, prior = _with_prior(form, prior, record.get("prior_outside"), prior_precision, path)
    rest = {k: v for k, v in record.items() if k not in {*OWN_KEYS, *form.record()}}
    return mean, form, prior, n_data, rest


def _check_entries(record: Mapping[str, Any], path: str) -> None:
    """Raise :class:`StorageError` where an entry of a record lacks what an analysis reads of it."""
    for entry, keys in ENTRIES.items():
        content = record.get(entry)
        if content is None:
            continue
        missing = [key for key in keys if not isinstance(content, Mapping) or key not in content]
        if missing:
            raise StorageError(
                f"the record of {path!r} has no {missing[0]!r} in {entry!r}: save it again."
            )


def _beside(s: Tensor, mean: Tensor, wide: bool) -> Tensor:
    """On the mean's device; ``wide``: in float32, or in the mean's dtype where that is wider."""
    return s.to(mean.device, torch.promote_types(torch.float32, mean.dtype) if wide else s.dtype)


def _with_prior(
    form: Structure, inside: Prior, outside: Any, given: Given | None, path: str
) -> tuple[Structure, Prior]:
    """S with the prior that stands outside of what was stored, or that is given for it."""
    bare = form.per_weight is not None and not any(inside.entries.values())
    if given is not None:
        told = Prior.read(given, form.shapes)
        if bare:
            outside = told.entries
        elif told.numbers(form.shapes) != inside.numbers(form.shapes):
            raise PosteriorError(f"{path!r} is with its prior in it; leave prior_precision out")
    if outside is not None:
        inside = Prior(Prior.of_any(outside).entries, inside.mean)
        form = form.plus_prior(inside)
    for name, s in (form.per_weight or {}).items() if not any(inside.entries.values()) else ():
        if empty := int((s == 0).sum()):
            said = f"{path!r} holds a precision without prior, 0 in {empty} of {s.numel()} entries"
            raise PosteriorError(f"{said} of {name!r}: pass prior_precision=")
    return form, inside


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
    tied = record.get("tied") or {}
    keys = {n: next((k for k in (n, *tied.get(n, ())) if k in source.specs), n) for n in shapes}
    held = {n: source.specs[k].shape for n, k in keys.items() if k in source.specs}
    if wrong := differences(held, shapes, ("model", "file")):
        said = f"the model is not the one whose precision {path!r} holds: {wrong}"
        raise PosteriorError(f"{said}; its tensors are called {some(list(source.specs))}")
    return {n: source.tensor(key).clone() for n, key in keys.items()}


def _opened(model: Model | None, sha256: str | None, path: str) -> Source:
    if model is None:
        raise PosteriorError(f"{path!r} holds precisions without a mean: pass model=")
    if isinstance(model, nn.Module):
        model = dict(unwrapped(model).named_parameters(remove_duplicate=False))
    if isinstance(model, Mapping):
        return Loaded("model", {n: t for n, t in model.items() if isinstance(t, Tensor)})
    if not isinstance(model, (str, os.PathLike)):
        got = type(model).__name__
        raise InputError(f"model must be a torch.nn.Module, a state dict, or a folder, got {got}")
    source = Folder.open(model)
    if sha256 is not None and fingerprint(source, progress=False) != sha256:
        said = f"{path!r} was written beside other weights than {os.fspath(model)!r} (sha256)"
        raise PosteriorError(f"{said}: name the right folder, or pass the module")
    return source


def renamed(tensors: Mapping[str, Tensor], record: Any, names: Mapping[str, str]) -> Encoded:
    """The same with other names for the parameters."""
    longest = sorted(names, key=len, reverse=True)

    def place(stored: str) -> str:
        own = next((n for n in longest if stored == n or stored.startswith(f"{n}.")), None)
        return stored if own is None else names[own] + stored.removeprefix(own)

    def entry(said: Any) -> Any:
        if isinstance(said, Mapping):
            return {names.get(k, k): entry(v) for k, v in said.items()}
        if isinstance(said, list | tuple):
            return [entry(v) for v in said]
        return names.get(said, said) if isinstance(said, str) else said

    return {place(k): t for k, t in tensors.items()}, entry(record)


def write_precision(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
    definition: str,
    n_data: int,
    prior_precision: Given = 0.0,
    prior_outside: Given | None = None,
    model: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
    **record: Any,
) -> None:
    """Write diagonal precisions that lie beside a model, by the names of the model's tensors.

    Args:
        path: a folder, such as ``model/precision``, or a ``.safetensors`` file.
        tensors: the precision of every weight, summed over ``n_data`` examples; 0 where the data
            say nothing.
        kind: where they come from, one of :data:`KINDS`.
        definition: the formula, in words.
        n_data: N, the number of examples summed over.
        prior_precision: δ that is inside ``tensors``, one number or one per name.
        prior_outside: δ that belongs to the posterior and is not in ``tensors``.
        model: the model's folder, whose sha256 is recorded (``model_sha256``).
        dtype: float32, bfloat16 (of tensors with no prior inside), or None: as the tensors are.
        record: what else is known, JSON-able: ``optimizer``, ``batch_size``, ``beta2``, ``step``,
            ``bias_corrected``, ``tied``, ``frozen``, or words of your own.

    Raises:
        PosteriorError: a tensor that is negative, NaN or infinite (named, with how many entries).
        InputError: ``n_data``, ``kind``, ``dtype``, δ or the record cannot be.
        StorageError: the place cannot be written; what was there before stays.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_precision(f"{folder}/precision", {"w": torch.tensor([4.0, 0.0])},
        ...                     kind="fisher_emp", definition="sum_i g_i^2", n_data=10)
        ...     about = read_precision_record(f"{folder}/precision")
        >>> about["kind"], about["n_data"], about["prior_precision"], about["parameters"]
        ('fisher_emp', 10, 0.0, ['w'])
    """
    place, n = path_of(path), n_data_of(n_data)
    one_of("kind", kind, KINDS)
    if not isinstance(definition, str) or not definition:
        raise InputError(f"definition must say what the numbers are, in words, got {definition!r}")
    held = real_tensors("precision", tensors)
    _check_values(held)
    shapes = {name: tuple(t.shape) for name, t in held.items()}
    inside, outside = (Prior.read(p or 0.0, shapes) for p in (prior_precision, prior_outside))
    if all(any(prior.entries.values()) for prior in (inside, outside)):
        raise InputError("give prior_precision (inside the tensors) or prior_outside, not both")
    if check_dtype(dtype) is torch.bfloat16 and any(inside.entries.values()):
        raise InputError("dtype=bfloat16 would lose the data beside the prior: give prior_outside")
    stored, about = encode(Diagonal(held), inside)
    stored = {name: t if dtype is None else t.to(dtype) for name, t in stored.items()}
    _check_values(stored)
    if prior_outside is not None:
        about = {"prior_outside": outside.given, **about}
    more = {"kind": kind, "definition": definition, "n_data": n, "parameters": list(held)}
    storage.write(
        place, stored, {**dict.fromkeys(FIELDS), **record, **hashes(model), **about, **more}
    )


def hashes(model: str | os.PathLike[str] | None) -> dict[str, str]:
    if model is None:
        return {}
    weights = Folder.open(path_of(model))
    return {
        "model_sha256": fingerprint(weights, progress=False),
        "sample_sha256": fingerprint(weights, most=SAMPLE, progress=False),
    }


def read_precision_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a stored precision for merging, checked; no tensor is read.

    Raises:
        StorageError: nothing there, a foreign or damaged file, another structure than
            "diag", "gram" or "kron", a prior with an entry per weight, or no ``n_data``.
    """
    where = os.fspath(path_of(path))
    return checked_record(storage.read_record(where), where)


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise PosteriorError(f"the precision of {name!r} is on the meta device, without values")
        bad = ~(tensor.isfinite() & (tensor >= 0))
        if bool(bad.any()):
            count = f"{int(bad.sum())} of {bad.numel()} entries (such as {float(tensor[bad][0]):g})"
            raise PosteriorError(f"the precision of {name!r} is negative or not finite in {count}")
