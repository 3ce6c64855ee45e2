"""A structure as named tensors and a record, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blr_analysis.errors import StorageError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import KINDS, Structure

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


def encode(form: Structure, prior: Prior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name and suffix, and the record that :func:`decode` needs."""
    tensors = {**form.tensors(), **{f"{n}.prior_precision": t for n, t in prior.tensors.items()}}
    record: dict[str, Any] = {"structure": form.kind, "prior_precision": prior.record}
    return tensors, {**record, **form.record()}


def decode(
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
        suffix = ".prior_precision"
        per_weight = {n: tensors[n + suffix] for n in names if n + suffix in tensors}
        prior = Prior({**Prior.of_any(record["prior_precision"]).entries, **per_weight})
        n_data = int(record["n_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{path!r} is no posterior of blr_analysis: {error} is missing or malformed; it may "
            "hold precisions without a mean, or come from another program"
        ) from error
    rest = {k: v for k, v in record.items() if k not in {*OWN_KEYS, *form.record()}}
    return mean, form, prior, n_data, rest
