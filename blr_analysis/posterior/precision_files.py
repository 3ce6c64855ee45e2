"""Precisions beside a model, for merging: diagonals by the model's own tensor names, no means.

The format is the package's one (:mod:`~blr_analysis.files.storage`): a folder ``precision/``
or one ``.safetensors`` file, the tensor ``<name>`` holding the diagonal of a precision that is a
SUM over ``n_data`` examples, never a mean, and a record (``precision_config.json``) that says

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

so that the data's part is always H = tensor − ``prior_precision`` (δ of the formulas).
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
from blr_analysis.posterior.capture import Captured
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.prior import Prior, n_data_of, real_tensors
from blr_analysis.posterior.stored import encode, renamed
from blr_analysis.posterior.structures import Diagonal

KINDS = (
    "ivon",
    "vogn",
    "adam_v",
    "rmsprop_v",
    "adagrad_v",
    "fisher_mc",
    "fisher_emp",
    "ggn",
    "squared_minibatch",
)
FACTORED = ("gram", "kron")  # the structures with factors that a merge takes
ScalarPrior = float | Mapping[str, float]


def write_precision(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
    definition: str,
    n_data: int,
    prior_precision: ScalarPrior = 0.0,
    prior_outside: ScalarPrior | None = None,
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
        dtype: float32, bfloat16, or None: as the tensors are. Rounding to a narrower dtype first
            takes δ out (it becomes ``prior_outside``), so that small numbers beside it survive.
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
    if not held:
        raise InputError("there is no precision to write: tensors is empty")
    _check_values(held)
    shapes = {name: tuple(t.shape) for name, t in held.items()}
    inside, outside = (Prior.read(p or 0.0, shapes) for p in (prior_precision, prior_outside))
    plain = [inside.numbers(shapes), outside.numbers(shapes)]
    if all(any(numbers.values()) for numbers in plain):
        raise InputError("give prior_precision (inside the tensors) or prior_outside, not both")
    stored, about = encode(Diagonal(held), inside, dtype)
    _check_values(stored)
    if prior_outside is not None:
        about = {"prior_outside": outside.record, **about}
    more = {"kind": kind, "definition": definition, "n_data": n, "parameters": list(held)}
    storage.write(
        place, stored, {**dict.fromkeys(FIELDS), **record, **_hashes(model), **about, **more}
    )


def write_captured(
    path: str | os.PathLike[str],
    captured: Captured,
    *,
    model: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
    **record: Any,
) -> None:
    """:func:`write_precision` for what an optimizer or a training checkpoint gave."""
    about = {**captured.record, **record}
    about.pop("path", None)  # a place on this machine; the file is made to be published
    told = {"n_data": captured.n_data, "prior_precision": captured.prior_precision}
    write_precision(path, captured.precision, model=model, dtype=dtype, **{**about, **told})


def write_factors(
    path: str | os.PathLike[str],
    posterior: Posterior,
    *,
    names: Mapping[str, str],
    n_data: int,
    scale: float = 1.0,
    model: str | os.PathLike[str] | None = None,
    **record: Any,
) -> None:
    """The precision of a posterior with factors, its eigenvalues times ``scale``, without a mean.

    Args:
        path: as of :func:`write_precision`.
        posterior: of structure "gram" or "kron".
        names: the model's own names by the posterior's.
        n_data: N, the examples that the scaled sum stands for.
        scale: of the whole precision.
        model: the model's folder, whose sha256 is recorded.
        record: what else is known, JSON-able.

    Raises:
        StorageError: the place cannot be written; what was there before stays.
    """
    form = posterior.form.zeros().plus(posterior.form, scale)
    tensors, about = renamed(form.tensors(), form.record(), names)
    for block in about["blocks"]:
        block["inputs"] *= scale
    about |= {
        "structure": posterior.structure,
        "prior_precision": scale * float(posterior.prior_precision),
        "n_data": n_data_of(n_data),
        "parameters": [names[n] for n in posterior.mean],
    }
    known = {**dict.fromkeys(FIELDS), "kind": posterior.record["kind"]}
    storage.write(path_of(path), tensors, {**known, **record, **_hashes(model), **about})


def _hashes(model: str | os.PathLike[str] | None) -> dict[str, str]:
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
