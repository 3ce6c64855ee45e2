"""Retrainings on disk: one ``.safetensors`` file each, its record as JSON in the header.

A file is written beside its target and renamed into place, and carries the hash of the recipe it
was made by: what is whole and of the same recipe is kept, everything else is made again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """Tensors by name and the record that belongs to them."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]


def root() -> Path:
    """The cache: ``$BLR_CACHE``, or ``~/.cache/blr_analysis``."""
    return Path(os.environ.get("BLR_CACHE") or Path.home() / ".cache" / "blr_analysis")


def folder(case: str) -> Path:
    """Where a case is kept."""
    return root() / "truth" / case


def write(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write a file whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    whole = {name: t.detach().contiguous() for name, t in tensors.items()}
    try:
        save_file(whole, beside, metadata={"record": json.dumps(record, sort_keys=True)})
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def record_of(path: Path, recipe_hash: str) -> dict[str, Any] | None:
    """The record of a whole file of this recipe; None where there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get("record", "null"))
    except (OSError, SafetensorError, ValueError):
        return None
    return record if record and record.get("hash") == recipe_hash else None


def read(path: Path, recipe_hash: str, names: tuple[str, ...] | None = None) -> Stored | None:
    """A whole file of this recipe (some of its tensors); None where there is none."""
    record = record_of(path, recipe_hash)
    if record is None:
        return None
    with safe_open(path, framework="pt") as file:
        return Stored({n: file.get_tensor(n) for n in names or file.keys()}, record)
