"""A precision beside a model, as merging reads it: the files, and the function that writes them.

The mean of such a precision is the model's weights. Its files have the format of a posterior's, see
:mod:`~blr_analysis.posterior.posterior_files`: a folder ``precision/`` or one ``.safetensors``
file. The tensor ``<name>`` holds the diagonal of a precision that is a SUM over ``n_data``
examples, never a mean. The record (``precision_config.json``) has these entries:

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
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import one_of, path_of
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.files.storage import FIELDS, SAMPLE, checked_record
from blr_analysis.posterior.posterior_files import encode
from blr_analysis.posterior.prior import Given, Prior, n_data_of, real_tensors
from blr_analysis.posterior.structures import Diagonal

KINDS = ("ivon", "vogn", "adam_v", "rmsprop_v", "adagrad_v", "fisher_mc", "fisher_emp", "ggn")
FACTORED = ("gram", "kron")  # the structures with factors that a merge takes

DTYPES = (None, torch.float32, torch.bfloat16)


def check_dtype(dtype: Any) -> torch.dtype | None:
    """Raise :class:`InputError` unless this is None, float32 or bfloat16.

    Float16 ends at 65,504 and at 6e-8, and precisions are larger and smaller than that.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be torch.float32, torch.bfloat16 or None, got {dtype!r}")
    return dtype


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
