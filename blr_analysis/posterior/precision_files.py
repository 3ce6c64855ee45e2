"""How posteriors and precisions become named tensors and a record, and are read back.

A posterior is stored with its mean. A precision for merging lies beside a model, whose weights are
the mean. Both have the format of :mod:`~blr_analysis.files.storage`.

A precision beside a model is a folder ``precision/`` or one ``.safetensors`` file. Its tensor
``<name>`` holds the diagonal of a precision that is a SUM over ``n_data`` examples, never a mean.
Its record (``precision_config.json``) has these entries:

======================  ==========================================================================
``kind``                where the precision comes from, one of :data:`KINDS`
``definition``          its formula, in words
``n_data``              N, the number of examples that it is summed over
``prior_precision``     δ that the tensors contain, a number or one per name; 0 of the data alone
``prior_outside``       δ that they do not contain and that :meth:`Posterior.load` adds
``optimizer``           the class of the optimizer that measured it
``batch_size``          the examples in each of the optimizer's steps
``beta2``, ``step``     the optimizer's decay of old squares, and the number of its steps
``bias_corrected``      whether the start of the optimizer's average was divided out
``tied``                the other names of every tied tensor, by its first name
``frozen``              the names of parameters that had no gradient
``model_sha256``        :func:`blr_analysis.files.fingerprint` of the model's folder
``sample_sha256``       the fingerprint of every tensor's first 1,024 numbers; a merge compares it
======================  ==========================================================================

So the data's part is always H = tensor − ``prior_precision``. Bfloat16 has 8 bits: it stores H
alone, never H + δ, in which H = 0.01 would be lost beside δ = 10.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import one_of, path_of, some
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, Loaded, Source, fingerprint, storage
from blr_analysis.files.storage import FIELDS, SAMPLE, checked_record
from blr_analysis.models import unwrapped
from blr_analysis.posterior.prior import Given, Prior, Shapes, differences, n_data_of, real_tensors
from blr_analysis.posterior.structures import KINDS as STRUCTURES
from blr_analysis.posterior.structures import Diagonal, Structure

KINDS = ("ivon", "vogn", "adam_v", "rmsprop_v", "adagrad_v", "fisher_mc", "fisher_emp", "ggn")
FACTORED = ("gram", "kron")  # the structures with factors that a merge takes
Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
Encoded = tuple[dict[str, Tensor], dict[str, Any]]

DTYPES = (None, torch.float32, torch.bfloat16)
# The keys that an entry of a posterior's record must have, where the record has that entry.
REQUIRED_KEYS = {
    "stationarity": ("pull", "decrement", "residual", "n_data"),
    "fingerprint": ("outputs", "targets", "losses"),
    "input_ranges": ("mean", "spread"),
    "prior_choice": ("delta", "rule"),
    "calibration": ("temperature",),
}
# Entries of a record that become a posterior's own attributes, or that describe the file.
ENTRIES_NOT_PASSED_ON = {
    "structure",
    "prior_precision",
    "prior_outside",
    "n_data",
    "parameters",
    "format",
    "version",
    "rounded",
}


@dataclass(frozen=True)
class Parts:
    """A posterior as a file holds it.

    Attributes:
        mean: m by parameter name.
        form: S, with the prior in it.
        prior: δ and θ₀.
        n_data: N.
        record: the entries that tell where it came from.
    """

    mean: dict[str, Tensor]
    form: Structure
    prior: Prior
    n_data: int
    record: dict[str, Any]


def check_dtype(dtype: Any) -> torch.dtype | None:
    """Raise :class:`InputError` unless this is None, float32 or bfloat16.

    Float16 ends at 65,504 and at 6e-8, and precisions are larger and smaller than that.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be torch.float32, torch.bfloat16 or None, got {dtype!r}")
    return dtype


def encode(form: Structure, prior: Prior) -> Encoded:
    """Tensors by name and suffix, and the record that :func:`parts_of` needs."""
    record = {"structure": form.kind, "prior_precision": prior.given, **form.record()}
    return form.tensors(), record


def parts_of(
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    path: str,
    model: Model | None = None,
    prior_precision: Given | None = None,
) -> Parts:
    """The posterior that :func:`encode` and :meth:`Posterior.save` wrote.

    Args:
        tensors: as the file holds them.
        record: as the file holds it.
        path: the file, for messages.
        model: has the mean, where the file has none.
        prior_precision: δ of the caller, to be added where the tensors contain none.

    Raises:
        StorageError: a tensor or an entry of the record that a posterior needs is missing.
        PosteriorError: as :meth:`Posterior.load`.
    """
    _check_entries(record, path)
    stored = _stored_parts(tensors, record, path)
    form = stored.form
    has_mean = bool(stored.mean)
    mean = stored.mean
    if not has_mean:
        mean = _mean_of(model, form.shapes, record, path)
    elif model is not None:
        raise PosteriorError(f"{path!r} holds its own mean: leave model out")
    prior_outside = record.get("prior_outside")
    if form.per_weight is not None:
        is_whole_posterior = has_mean and prior_outside is None
        was_rounded = bool(record.get("rounded"))
        widens = was_rounded or not is_whole_posterior
        form = Diagonal({n: _like_mean(s, mean[n], widens) for n, s in form.per_weight.items()})
    form, prior = _with_prior(form, stored.prior, prior_outside, prior_precision, path)
    entries_read = {*ENTRIES_NOT_PASSED_ON, *form.record()}
    entries = {key: entry for key, entry in record.items() if key not in entries_read}
    return Parts(mean, form, prior, stored.n_data, entries)


def _stored_parts(tensors: Mapping[str, Tensor], record: Mapping[str, Any], path: str) -> Parts:
    """The posterior as it stands in the file: its mean is empty where the file has none, and δ is
    that inside the tensors."""
    try:
        names: list[str] = list(record["parameters"])
        # A parameter may itself be called "….mean".
        keys_of_means = {f"{n}.mean" for n in names} - set(names)
        has_mean = not keys_of_means.isdisjoint(tensors)
        form = STRUCTURES[record["structure"]].read(tensors, record, names)
        mean: dict[str, Tensor] = {}
        if has_mean:
            mean = {n: tensors[f"{n}.mean"] for n in names}
        initial = {n: tensors[f"{n}.initial"] for n in names if f"{n}.initial" in tensors}
        entries = Prior.of_any(record["prior_precision"]).entries
        n_data = int(record["n_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path!r} is no posterior of blr_analysis: {error}") from error
    return Parts(mean, form, Prior(entries, initial or None), n_data, {})


def _check_entries(record: Mapping[str, Any], path: str) -> None:
    """Raise :class:`StorageError` where an entry lacks a key that analyses read."""
    for entry, required_keys in REQUIRED_KEYS.items():
        content = record.get(entry)
        if content is None:
            continue
        missing = list(required_keys)
        if isinstance(content, Mapping):
            missing = [key for key in required_keys if key not in content]
        if missing:
            raise StorageError(
                f"the record of {path!r} has no {missing[0]!r} in {entry!r}: save it again."
            )


def _like_mean(precision: Tensor, mean: Tensor, widens: bool) -> Tensor:
    """The precision on the mean's device; with ``widens`` in float32, or in the mean's dtype if
    that is wider."""
    if not widens:
        return precision.to(mean.device)
    wider_dtype = torch.promote_types(torch.float32, mean.dtype)
    return precision.to(mean.device, wider_dtype)


def _with_prior(
    form: Structure, inside: Prior, outside: Any, of_caller: Given | None, path: str
) -> tuple[Structure, Prior]:
    """S with the whole prior in it, and that prior.

    Args:
        form: the stored precision.
        inside: the prior that it contains already.
        outside: δ that the record names beside it; None: no such δ.
        of_caller: δ that the caller passes in its place.

    Raises:
        PosteriorError: the caller's δ contradicts the stored one, or S is 0 somewhere.
    """
    is_of_data_alone = form.per_weight is not None and not any(inside.entries.values())
    if of_caller is not None:
        callers_prior = Prior.read(of_caller, form.shapes)
        if is_of_data_alone:
            outside = callers_prior.entries
        elif callers_prior.numbers(form.shapes) != inside.numbers(form.shapes):
            raise PosteriorError(
                f"{path!r} was saved with its prior in it, not with this one: leave "
                "prior_precision out"
            )
    prior = inside
    if outside is not None:
        prior = Prior(Prior.of_any(outside).entries, inside.mean)
        form = form.plus_prior(prior)
    has_no_prior = not any(prior.entries.values())
    if form.per_weight is not None and has_no_prior:
        _check_positive(form.per_weight, path)
    return form, prior


def _check_positive(precisions: Mapping[str, Tensor], path: str) -> None:
    """Raise :class:`PosteriorError` where a precision without a prior has zeros."""
    for name, precision in precisions.items():
        n_zeros = int((precision == 0).sum())
        if n_zeros:
            raise PosteriorError(
                f"{path!r} holds a precision without a prior, which is 0 in {n_zeros} of "
                f"{precision.numel()} entries of {name!r}: pass prior_precision="
            )


def _mean_of(
    model: Model | None, shapes: Shapes, record: Mapping[str, Any], path: str
) -> dict[str, Tensor]:
    """The model's tensor for every name of ``shapes``. The model may store a tied tensor under any
    of its names.

    Raises:
        InputError: ``model`` is not a module, a state dict or a folder.
        StorageError: the folder cannot be read.
        PosteriorError: names or shapes are missing, or the folder's fingerprint is not the
            recorded one.
    """
    source = _source_of(model, record.get("model_sha256"), path)
    tied = record.get("tied") or {}
    name_in_model = {}
    for name in shapes:
        aliases = (name, *tied.get(name, ()))
        present = [alias for alias in aliases if alias in source.specs]
        name_in_model[name] = present[0] if present else name
    shapes_in_model = {
        name: source.specs[stored_name].shape
        for name, stored_name in name_in_model.items()
        if stored_name in source.specs
    }
    if misfit := differences(shapes_in_model, shapes, ("model", "file")):
        raise PosteriorError(
            f"the model is not the one whose precision {path!r} holds: {misfit}; its tensors are "
            f"called {some(list(source.specs))}"
        )
    return {name: source.tensor(stored).clone() for name, stored in name_in_model.items()}


def _source_of(model: Model | None, sha256: str | None, path: str) -> Source:
    """A module, a state dict or a folder as a source of tensors.

    Args:
        sha256: the recorded fingerprint, which a folder must have; None: none was recorded.
        path: the file of the precision, for messages.
    """
    if model is None:
        raise PosteriorError(f"{path!r} holds precisions without a mean: pass model=")
    if isinstance(model, nn.Module):
        model = dict(unwrapped(model).named_parameters(remove_duplicate=False))
    if isinstance(model, Mapping):
        return Loaded("model", {n: t for n, t in model.items() if isinstance(t, Tensor)})
    if not isinstance(model, (str, os.PathLike)):
        kind = type(model).__name__
        raise InputError(f"model must be a torch.nn.Module, a state dict, or a folder, got {kind}")
    folder = Folder.open(model)
    if sha256 is not None and fingerprint(folder, progress=False) != sha256:
        raise PosteriorError(
            f"{path!r} belongs to other weights than those in {os.fspath(model)!r} (the sha256 "
            "differs): name the right folder, or pass the module"
        )
    return folder


def renamed(tensors: Mapping[str, Tensor], record: Any, names: Mapping[str, str]) -> Encoded:
    """The same tensors and record with other names for the parameters.

    Args:
        names: the new names by the old ones.
    """
    longest_first = sorted(names, key=len, reverse=True)

    def new_key(key: str) -> str:
        for name in longest_first:
            if key == name or key.startswith(f"{name}."):
                suffix = key.removeprefix(name)
                return names[name] + suffix
        return key

    def new_entry(entry: Any) -> Any:
        if isinstance(entry, Mapping):
            return {names.get(key, key): new_entry(value) for key, value in entry.items()}
        if isinstance(entry, list | tuple):
            return [new_entry(value) for value in entry]
        if isinstance(entry, str):
            return names.get(entry, entry)
        return entry

    new_tensors = {new_key(key): tensor for key, tensor in tensors.items()}
    return new_tensors, new_entry(record)


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
        n_data: N, the number of examples that they are summed over.
        prior_precision: δ that ``tensors`` contain, one number or one per name.
        prior_outside: δ that belongs to the posterior and that ``tensors`` do not contain.
        model: the model's folder, whose sha256 is recorded (``model_sha256``).
        dtype: float32, bfloat16 (where ``prior_precision`` is 0), or None: as the tensors are.
        record: further entries of the record, JSON-able: those of the module's table, or keys of
            your choice.

    Raises:
        PosteriorError: a tensor is negative, NaN or infinite somewhere.
        InputError: an impossible ``n_data``, ``kind``, ``dtype``, δ or record.
        StorageError: the file cannot be written; an older file stays as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_precision(f"{folder}/precision", {"w": torch.tensor([4.0, 0.0])},
        ...                     kind="fisher_emp", definition="sum_i g_i^2", n_data=10)
        ...     about = read_precision_record(f"{folder}/precision")
        >>> about["kind"], about["n_data"], about["prior_precision"], about["parameters"]
        ('fisher_emp', 10, 0.0, ['w'])
    """
    place = path_of(path)
    n_examples = n_data_of(n_data)
    one_of("kind", kind, KINDS)
    if not isinstance(definition, str) or not definition:
        raise InputError(f"definition must say what the numbers are, in words, got {definition!r}")
    precisions = real_tensors("precision", tensors)
    _check_values(precisions)
    shapes = {name: tuple(t.shape) for name, t in precisions.items()}
    inside = Prior.read(prior_precision or 0.0, shapes)
    outside = Prior.read(prior_outside or 0.0, shapes)
    _check_priors(inside, outside, dtype)
    stored, structure_record = encode(Diagonal(precisions), inside)
    if dtype is not None:
        stored = {name: t.to(dtype) for name, t in stored.items()}
    _check_values(stored)
    entries: dict[str, Any] = dict.fromkeys(FIELDS)
    entries.update(record)
    entries.update(hashes(model))
    if prior_outside is not None:
        entries["prior_outside"] = outside.given
    entries.update(structure_record)
    entries["kind"] = kind
    entries["definition"] = definition
    entries["n_data"] = n_examples
    entries["parameters"] = list(precisions)
    storage.write(place, stored, entries)


def _check_priors(inside: Prior, outside: Prior, dtype: torch.dtype | None) -> None:
    """Raise :class:`InputError` where δ is given twice, or where bfloat16 cannot store it."""
    has_prior = any(inside.entries.values())
    if has_prior and any(outside.entries.values()):
        raise InputError("give prior_precision (inside the tensors) or prior_outside, not both")
    if check_dtype(dtype) is torch.bfloat16 and has_prior:
        raise InputError("dtype=bfloat16 would lose the data beside the prior: give prior_outside")


def hashes(model: str | os.PathLike[str] | None) -> dict[str, str]:
    """The two fingerprints of a model's folder, by their keys in a record; empty for None."""
    if model is None:
        return {}
    weights = Folder.open(path_of(model))
    return {
        "model_sha256": fingerprint(weights, progress=False),
        "sample_sha256": fingerprint(weights, limit=SAMPLE, progress=False),
    }


def read_precision_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a precision that is stored for merging; no tensor is read.

    Raises:
        StorageError: the path has no such file, or a damaged one; its structure is not "diag",
            "gram" or "kron"; its prior has an entry per weight; or it has no ``n_data``.
    """
    place = os.fspath(path_of(path))
    return checked_record(storage.read_record(place), place)


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise :class:`PosteriorError` unless all numbers are finite and at least 0."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise PosteriorError(f"the precision of {name!r} is on the meta device, without values")
        is_impossible = ~(tensor.isfinite() & (tensor >= 0))
        n_impossible = int(is_impossible.sum())
        if n_impossible:
            example = float(tensor[is_impossible][0])
            raise PosteriorError(
                f"the precision of {name!r} is negative or not finite in {n_impossible} of "
                f"{tensor.numel()} entries (such as {example:g})"
            )
