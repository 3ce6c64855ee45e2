"""The record of a stored posterior: strict JSON, with the format's name and version."""

from __future__ import annotations

import json
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
)
AGAIN = "Copy it again from its source, or save the posterior again."


def encode(document: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: no NaN, no infinity, nothing that JSON cannot say."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the record cannot be written as JSON ({error}): use text, finite numbers, "
            "booleans, None, lists and dictionaries."
        ) from error


def decode(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in ``text``, which stood in ``path``."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise StorageError(
            f"{str(path)!r} holds no JSON ({error}): it is truncated or foreign. {AGAIN}"
        ) from error
    if not isinstance(document, dict):
        raise StorageError(f"{str(path)!r} holds a {type(document).__name__}, not a record.")
    return document


def decode_record(text: str, path: Path) -> dict[str, Any]:
    """The same, refused unless it is a record of the format and version that are read here."""
    record = decode(text, path)
    if record.get("format") != FORMAT:
        raise StorageError(
            f"{str(path)!r} is of format {record.get('format')!r}: expected {FORMAT!r}, which "
            "Posterior.save writes."
        )
    if record.get("version") != VERSION:
        raise StorageError(
            f"{str(path)!r} is of version {record.get('version')!r}; this release reads version "
            f"{VERSION}. Upgrade blr_analysis, or save the posterior again with this release."
        )
    return record
