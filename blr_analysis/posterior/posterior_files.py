"""How a posterior becomes named tensors and a record, and is read back.

Beside the tensors of its structure, such as ``<name>`` for a diagonal, the file of a posterior
holds these tensors:

==========================  ======================================================
``<name>.mean``             m
``<name>.initial``          θ₀, where the prior has a mean
``<name>.buffer``           a buffer of the model
``<tensor>.as_prior``       a tensor of the prior's structure, where the prior has one
==========================  ======================================================

A file without means is a precision beside a model, see
:mod:`~blr_analysis.posterior.precision_files`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, Loaded, Source, fingerprint
from blr_analysis.half import narrow
from blr_analysis.models import unwrapped
from blr_analysis.posterior.prior import FormPrior, Given, Prior, Shapes, differences
from blr_analysis.posterior.structures import KINDS, Diagonal, Structure

Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
Encoded = tuple[dict[str, Tensor], dict[str, Any]]

MEAN = ".mean"
INITIAL = ".initial"
BUFFER = ".buffer"
AS_PRIOR = ".as_prior"
NAMES_LISTED = 4  # in a message
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
        buffers: of the model, by name.
    """

    mean: Mapping[str, Tensor]
    form: Structure
    prior: Prior
    n_data: int
    record: Mapping[str, Any]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def encode(form: Structure, prior: Prior) -> Encoded:
    """The tensors and the record of a precision alone."""
    record = {"structure": form.kind, "prior_precision": prior.given, **form.record()}
    return form.tensors(), record


def encode_posterior(parts: Parts) -> Encoded:
    """The tensors and the record of a posterior, without its earlier ones.

    Raises:
        InputError: parameters have names under which other tensors are stored.
    """
    tensors, encoded = encode(parts.form, parts.prior)
    further = {f"{n}{MEAN}": m for n, m in narrow(parts.mean).items()}
    further |= {f"{n}{INITIAL}": m for n, m in (parts.prior.mean or {}).items()}
    further |= {f"{n}{BUFFER}": b for n, b in parts.buffers.items()}
    if isinstance(parts.prior, FormPrior):
        form_of_prior = parts.prior.form
        tensors_of_prior, encoded["prior_form"] = encode(form_of_prior, Prior({None: 0.0}))
        further |= {f"{n}{AS_PRIOR}": tensor for n, tensor in tensors_of_prior.items()}
    if clash := sorted(set(further) & set(tensors)):
        names = clash[:NAMES_LISTED]
        raise InputError(f"parameters are called {names}, as means are: rename them")
    record = {**parts.record, **encoded}
    record["n_data"] = parts.n_data
    record["parameters"] = list(parts.mean)
    return {**tensors, **further}, record


def decode_posterior(
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    path: str,
    model: Model | None = None,
    prior_precision: Given | None = None,
) -> Parts:
    """The posterior that :func:`encode_posterior` encoded.

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
    return replace(stored, mean=mean, form=form, prior=prior, record=entries)


def _stored_parts(tensors: Mapping[str, Tensor], record: Mapping[str, Any], path: str) -> Parts:
    """The posterior as it stands in the file: its mean is empty where the file has none, and δ is
    that inside the tensors."""
    try:
        names: list[str] = list(record["parameters"])
        mean: dict[str, Tensor] = {}
        if _with_suffix(tensors, names, MEAN):
            mean = {n: tensors[f"{n}{MEAN}"] for n in names}
        initial_values = _with_suffix(tensors, names, INITIAL)
        initial = {n: initial_values[n] for n in names if n in initial_values}
        form = KINDS[record["structure"]].read(tensors, record, names)
        prior = Prior(Prior.of_any(record["prior_precision"]).entries, initial or None)
        record_of_prior = record.get("prior_form")
        if record_of_prior is not None:
            kind_of_prior = KINDS[record_of_prior["structure"]]
            tensors_of_prior = _with_suffix(tensors, names, AS_PRIOR)
            form_of_prior = kind_of_prior.read(tensors_of_prior, record_of_prior, names)
            prior = FormPrior(prior.entries, prior.mean, form_of_prior)
        n_data = int(record["n_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path!r} is no posterior of blr_analysis: {error}") from error
    return Parts(mean, form, prior, n_data, {}, _with_suffix(tensors, names, BUFFER))


def _with_suffix(
    tensors: Mapping[str, Tensor], parameters: list[str], suffix: str
) -> dict[str, Tensor]:
    """The tensors of this suffix, by their names without it.

    A parameter may itself be called "….mean"; the names of parameters are no such tensors.
    """
    names = set(parameters)
    keys = [key for key in tensors if key.endswith(suffix) and key not in names]
    return {key.removesuffix(suffix): tensors[key] for key in keys}


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
