"""Writes the precision of a posterior with Kronecker factors beside a model, for merging."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from blr_analysis.checks import path_of
from blr_analysis.files import storage
from blr_analysis.files.storage import FIELDS
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.posterior_files import encode, renamed
from blr_analysis.posterior.precision_files import hashes
from blr_analysis.posterior.prior import Prior, n_data_of


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
    """Write a posterior's precision times ``scale``, without its mean.

    Args:
        path: as of :func:`~blr_analysis.posterior.precision_files.write_precision`.
        posterior: of structure "gram" or "kron".
        names: the model's own names by the posterior's.
        n_data: N, the number of examples that the scaled precision stands for.
        scale: multiplies S, the prior included.
        model: the model's folder, whose sha256 is recorded.
        record: further entries of the record, JSON-able.

    Raises:
        StorageError: the file cannot be written; an older file stays as it was.
    """
    form = posterior.form.zeros().plus(posterior.form, scale)
    prior = Prior.of_any(scale * posterior.prior_precision)
    tensors, encoded = renamed(*encode(form, prior), names)
    for block in encoded["blocks"]:
        block["inputs"] *= scale
    entries: dict[str, Any] = dict.fromkeys(FIELDS)
    entries["kind"] = posterior.record["kind"]
    entries.update(record)
    entries.update(hashes(model))
    entries.update(encoded)
    entries["n_data"] = n_data_of(n_data)
    entries["parameters"] = [names[n] for n in posterior.mean]
    storage.write(path_of(path), tensors, entries)
