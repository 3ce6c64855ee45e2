"""The record beside stored tensors: strict JSON, with the format's name and version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blr_analysis.errors import InputError, StorageError

FORMAT = "blr_analysis.precision"
VERSION = 1
FIELDS = (
    # What every precision beside a model says of itself; None where it does not apply.
    "kind",
    "definition",
    "n_data",
    "optimizer",
    "batch_size",
    "beta2",
    "step",
    "bias_corrected",
    "tied",
    "frozen",
    "model_sha256",
    "sample_sha256",
)
STRUCTURES = ("diag", "gram", "kron")
SAMPLE = 1024  # numbers of every tensor that sample_sha256 looks at
EARLIER_KINDS = {"mc_fisher": "fisher_mc", "empirical_fisher": "fisher_emp"}


def encode(document: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: no NaN, no infinity, nothing that JSON cannot say."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the record cannot be written as JSON ({error}): use plain, finite values."
        ) from error


def checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record, refused unless it is of the format and version that are read here."""
    if record.get("format") != FORMAT:
        raise StorageError(
            f"{str(path)!r} is of format {record.get('format')!r}: expected {FORMAT!r}, which "
            "Posterior.save writes."
        )
    if record.get("version") != VERSION:
        raise StorageError(
            f"{str(path)!r} is of version {record.get('version')!r}, not {VERSION}: upgrade "
            "blr_analysis, or save it again."
        )
    return record


def checked_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The record of precisions for merging, complete: its kind by today's name, δ as floats.

    Raises:
        StorageError: another structure, no names, no ``n_data``, a δ that is none or that has an
            entry per weight.
    """
    again = "Save it again with this release, or write it with write_precision."
    if record.get("structure") not in STRUCTURES:
        raise StorageError(
            f"{where!r} is of structure {record.get('structure')!r}: expected one of {STRUCTURES}."
        )
    names = record.get("parameters")
    if not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
        raise StorageError(f"the record of {where!r} names no parameters. {again}")
    n = record.get("n_data")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise StorageError(
            f"the record of {where!r} has n_data={n!r}: expected a number of examples. {again}"
        )
    tied, frozen = record.get("tied") or {}, record.get("frozen") or []
    if not isinstance(frozen, list) or not (
        isinstance(tied, dict) and all(isinstance(aliases, list) for aliases in tied.values())
    ):
        raise StorageError(f"the record of {where!r} has malformed tied or frozen names. {again}")
    kind = record.get("kind")
    kind = EARLIER_KINDS.get(kind, kind) if isinstance(kind, str) else None
    return {**record, "kind": kind, "prior_precision": _prior(record, names, where)}


def _prior(record: Mapping[str, Any], names: list[str], where: str) -> float | dict[str, float]:
    prior: Any = record.get("prior_precision")
    for value in prior.values() if isinstance(prior, dict) else [prior]:
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (real and math.isfinite(value) and value >= 0):
            raise StorageError(
                f"the record of {where!r} has prior_precision={prior!r}: expected finite "
                "numbers, at least 0."
            )
    if not isinstance(prior, dict):
        return float(prior)
    if set(prior) != set(names):
        raise StorageError(
            f"{where!r} has a prior precision per weight for "
            f"{sorted(set(names) ^ set(prior))[:5]}: save one number per tensor."
        )
    return {name: float(value) for name, value in prior.items()}
