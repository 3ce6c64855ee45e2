"""A structure as named tensors and a record, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blr_analysis.backprop.matrices import Basis, MatrixShape
from blr_analysis.errors import StorageError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import (
    Diagonal,
    Full,
    Kronecker,
    LowRank,
    Structure,
)

OWN_KEYS = (
    "structure",
    "prior_precision",
    "prior_outside",
    "rounded",
    "blocks",
    "shapes",
    "n_data",
    "parameters",
    "format",
    "version",
)


def encode(form: Structure, prior: Prior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name and suffix, and the record that :func:`decode` needs."""
    tensors = {**form.tensors(), **{f"{n}.prior_precision": t for n, t in prior.tensors.items()}}
    record: dict[str, Any] = {"structure": form.kind, "prior_precision": prior.record}
    if isinstance(form, Kronecker):
        record["blocks"] = [
            {
                "weight": b.weight,
                "bias": b.bias,
                "groups": b.layout.groups,
                "rows": b.layout.rows,
                "columns": b.layout.columns,
                "shape": list(b.layout.shape),
                "transposed": b.layout.transposed,
            }
            for b in form.blocks
        ]
    if not isinstance(form, Diagonal):
        record["shapes"] = {n: list(s) for n, s in form.shapes.items()}
    return tensors, record


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
        form = _form(tensors, record, names)
        suffix = ".prior_precision"
        per_weight = {n: tensors[n + suffix] for n in names if n + suffix in tensors}
        prior = Prior({**Prior.of_any(record["prior_precision"]).entries, **per_weight})
        n_data = int(record["n_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{path!r} is no posterior of blr_analysis: {error} is missing or malformed; it may "
            "hold precisions without a mean, or come from another program"
        ) from error
    rest = {k: v for k, v in record.items() if k not in OWN_KEYS}
    return mean, form, prior, n_data, rest


def _form(tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: list[str]) -> Structure:
    kind = record["structure"]
    if kind == "diag":
        return Diagonal({n: tensors[n] for n in names})
    shapes = {n: tuple(record["shapes"][n]) for n in names}
    if kind == "full":
        return Full(tensors["full.precision"], shapes)
    if kind == "lowrank":
        basis = {n: tensors[f"{n}.basis"] for n in names}
        return LowRank({n: tensors[n] for n in names}, basis, tensors["lowrank.core"])
    if kind != "kron":
        raise ValueError(f"structure {kind!r}")
    blocks = []
    for entry in record["blocks"]:
        layout = MatrixShape(
            entry["groups"],
            entry["rows"],
            entry["columns"],
            tuple(entry["shape"]),
            entry["transposed"],
        )
        key = entry["weight"] or entry["bias"]
        blocks.append(
            Basis(
                entry["weight"],
                entry["bias"],
                layout,
                tensors[f"{key}.input_eigenvectors"],
                tensors[f"{key}.output_eigenvectors"],
            )
        )
    joined = {n for b in blocks for n in b.names}
    plain = {n: s for n, s in shapes.items() if n not in joined}
    values = {n: tensors[n] for n in plain}
    values.update({b.key: tensors[f"{b.key}.eigenvalues"] for b in blocks})
    return Kronecker(tuple(blocks), values, plain, tuple(names))
