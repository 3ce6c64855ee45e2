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
``optimizer``           the class of the optimizer that measured it, with ``batch_size`` (examples
                        per step), ``beta2``, ``step`` and ``bias_corrected``
``tied``                the further names of every tied tensor, by its first name
``frozen``              the names of parameters that had no gradient
``model_sha256``        :func:`blr_analysis.files.fingerprint` of the model's folder
``sample_sha256``       the fingerprint of every tensor's first 1,024 numbers; a merge compares it
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
# Entries that the record of a posterior may have, and the keys that each must then have.
KEYS_OF_ENTRIES = {
    "stationarity": ("pull", "decrement", "residual", "n_data"),
    "fingerprint": ("outputs", "targets", "losses"),
    "input_ranges": ("mean", "spread"),
    "prior_choice": ("delta", "rule"),
    "calibration": ("temperature",),
}
# Keys of a record that are read into the parts, or that describe the file.
KEYS_OF_PARTS = {
    "structure",
    "prior_precision",
    "prior_outside",
    "n_data",
    "parameters",
    "format",
    "version",
    "rounded",
}


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
    """Mean, S, δ, n_data and the rest of the record; see :meth:`Posterior.load`.

    Raises:
        StorageError: a tensor or an entry of the record that a posterior needs is missing.
        PosteriorError: as :meth:`Posterior.load`.
    """
    _check_entries(record, path)
    try:
        names: list[str] = list(record["parameters"])
        # A parameter may itself be called "….mean".
        keys_of_means = {f"{n}.mean" for n in names} - set(names)
        has_mean = not keys_of_means.isdisjoint(tensors)
        form = STRUCTURES[record["structure"]].read(tensors, record, names)
        mean = {n: tensors[f"{n}.mean"] for n in names} if has_mean else None
        initial = {n: tensors[f"{n}.initial"] for n in names if f"{n}.initial" in tensors}
        prior_precision_inside = Prior.of_any(record["prior_precision"]).entries
        prior = Prior(prior_precision_inside, initial or None)
        n_data = int(record["n_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path!r} is no posterior of blr_analysis: {error}") from error
    if mean is None:
        mean = _mean_of(model, form.shapes, record, path)
    elif model is not None:
        raise PosteriorError(f"{path!r} holds its own mean: leave model out")
    if form.per_weight is not None:
        is_whole_posterior = has_mean and record.get("prior_outside") is None
        was_rounded = bool(record.get("rounded"))
        widens = was_rounded or not is_whole_posterior
        form = Diagonal({n: _like_mean(s, mean[n], widens) for n, s in form.per_weight.items()})
    form, prior = _with_prior(form, prior, record.get("prior_outside"), prior_precision, path)
    keys_read = {*KEYS_OF_PARTS, *form.record()}
    others = {key: value for key, value in record.items() if key not in keys_read}
    return mean, form, prior, n_data, others


def _check_entries(record: Mapping[str, Any], path: str) -> None:
    """Raise :class:`StorageError` where an entry of a record lacks what an analysis reads of it."""
    for entry, keys in KEYS_OF_ENTRIES.items():
        content = record.get(entry)
        if content is None:
            continue
        missing = [key for key in keys if not isinstance(content, Mapping) or key not in content]
        if missing:
            raise StorageError(
                f"the record of {path!r} has no {missing[0]!r} in {entry!r}: save it again."
            )


def _like_mean(precision: Tensor, mean: Tensor, widens: bool) -> Tensor:
    """The precision on the mean's device; ``widens``: in float32, or the mean's dtype if wider."""
    if not widens:
        return precision.to(mean.device)
    wider_dtype = torch.promote_types(torch.float32, mean.dtype)
    return precision.to(mean.device, wider_dtype)


def _with_prior(
    form: Structure, inside: Prior, outside: Any, given: Given | None, path: str
) -> tuple[Structure, Prior]:
    """S with the prior that stands outside of the stored tensors, or that the caller gives.

    Raises:
        PosteriorError: the caller's δ contradicts the stored one, or S is 0 somewhere.
    """
    is_data_part = form.per_weight is not None and not any(inside.entries.values())
    if given is not None:
        prior_of_caller = Prior.read(given, form.shapes)
        if is_data_part:
            outside = prior_of_caller.entries
        elif prior_of_caller.numbers(form.shapes) != inside.numbers(form.shapes):
            raise PosteriorError(
                f"{path!r} was saved with its prior in it, not with this one: leave "
                "prior_precision out"
            )
    prior = inside
    if outside is not None:
        prior = Prior(Prior.of_any(outside).entries, inside.mean)
        form = form.plus_prior(prior)
    if form.per_weight is not None and not any(prior.entries.values()):
        _check_positive(form.per_weight, path)
    return form, prior


def _check_positive(precisions: Mapping[str, Tensor], path: str) -> None:
    """Raise :class:`PosteriorError` where a precision without a prior is 0 in some entries."""
    for name, precision in precisions.items():
        zeros = int((precision == 0).sum())
        if zeros:
            raise PosteriorError(
                f"{path!r} holds a precision without a prior, which is 0 in {zeros} of "
                f"{precision.numel()} entries of {name!r}: pass prior_precision="
            )


def _mean_of(
    model: Model | None, shapes: Shapes, record: Mapping[str, Any], path: str
) -> dict[str, Tensor]:
    """The model's tensor for every name of ``shapes``. A tied tensor may have any of its names.

    Raises:
        InputError: ``model`` is no module, state dict or folder, or a tensor has no numbers.
        StorageError: the folder cannot be read.
        PosteriorError: names or shapes are missing, or a folder's weights are not those whose
            fingerprint was recorded.
    """
    source = _opened(model, record.get("model_sha256"), path)
    tied = record.get("tied") or {}
    keys = {}
    for name in shapes:
        aliases = (name, *tied.get(name, ()))
        keys[name] = next((alias for alias in aliases if alias in source.specs), name)
    in_model = {n: source.specs[key].shape for n, key in keys.items() if key in source.specs}
    if misfit := differences(in_model, shapes, ("model", "file")):
        raise PosteriorError(
            f"the model is not the one whose precision {path!r} holds: {misfit}; its tensors are "
            f"called {some(list(source.specs))}"
        )
    return {name: source.tensor(key).clone() for name, key in keys.items()}


def _opened(model: Model | None, sha256: str | None, path: str) -> Source:
    """A model as a source of tensors; the weights of a folder must have the recorded sha256."""
    if model is None:
        raise PosteriorError(f"{path!r} holds precisions without a mean: pass model=")
    if isinstance(model, nn.Module):
        model = dict(unwrapped(model).named_parameters(remove_duplicate=False))
    if isinstance(model, Mapping):
        return Loaded("model", {n: t for n, t in model.items() if isinstance(t, Tensor)})
    if not isinstance(model, (str, os.PathLike)):
        kind = type(model).__name__
        raise InputError(f"model must be a torch.nn.Module, a state dict, or a folder, got {kind}")
    source = Folder.open(model)
    if sha256 is not None and fingerprint(source, progress=False) != sha256:
        raise PosteriorError(
            f"{path!r} belongs to other weights than those in {os.fspath(model)!r} (the sha256 "
            "differs): name the right folder, or pass the module"
        )
    return source


def renamed(tensors: Mapping[str, Tensor], record: Any, names: Mapping[str, str]) -> Encoded:
    """The same tensors and record with other names for the parameters."""
    longest_first = sorted(names, key=len, reverse=True)

    def new_key(key: str) -> str:
        for name in longest_first:
            if key == name or key.startswith(f"{name}."):
                return names[name] + key.removeprefix(name)
        return key

    def new_entry(entry: Any) -> Any:
        if isinstance(entry, Mapping):
            return {names.get(key, key): new_entry(value) for key, value in entry.items()}
        if isinstance(entry, list | tuple):
            return [new_entry(value) for value in entry]
        if isinstance(entry, str):
            return names.get(entry, entry)
        return entry

    return {new_key(key): tensor for key, tensor in tensors.items()}, new_entry(record)


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
        record: further facts, JSON-able: ``optimizer``, ``batch_size``, ``beta2``, ``step``,
            ``bias_corrected``, ``tied``, ``frozen``, or keys of your choice.

    Raises:
        PosteriorError: a tensor that is negative, NaN or infinite (named, with how many entries).
        InputError: an impossible ``n_data``, ``kind``, ``dtype``, δ or record.
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
    document: dict[str, Any] = dict.fromkeys(FIELDS)
    document.update(record)
    document.update(hashes(model))
    if prior_outside is not None:
        document["prior_outside"] = outside.given
    document.update(structure_record)
    document["kind"] = kind
    document["definition"] = definition
    document["n_data"] = n_examples
    document["parameters"] = list(precisions)
    storage.write(place, stored, document)


def _check_priors(inside: Prior, outside: Prior, dtype: torch.dtype | None) -> None:
    """Raise :class:`InputError` where there are two priors, or one that bfloat16 cannot hold."""
    has_prior = any(inside.entries.values())
    if has_prior and any(outside.entries.values()):
        raise InputError("give prior_precision (inside the tensors) or prior_outside, not both")
    if check_dtype(dtype) is torch.bfloat16 and has_prior:
        raise InputError("dtype=bfloat16 would lose the data beside the prior: give prior_outside")


def hashes(model: str | os.PathLike[str] | None) -> dict[str, str]:
    """The two fingerprints of a model's folder, by their keys in a record; none without one."""
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
    place = os.fspath(path_of(path))
    return checked_record(storage.read_record(place), place)


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise PosteriorError(f"the precision of {name!r} is on the meta device, without values")
        bad = ~(tensor.isfinite() & (tensor >= 0))
        if bool(bad.any()):
            example = float(tensor[bad][0])
            raise PosteriorError(
                f"the precision of {name!r} is negative or not finite in {int(bad.sum())} of "
                f"{bad.numel()} entries (such as {example:g})"
            )
