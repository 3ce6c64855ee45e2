"""A diagonal precision in a narrower dtype: what is rounded, and how it is widened again.

S = H + δ, with H the data's part. Rounding S itself would lose H wherever it is small beside δ
(bfloat16 keeps 8 bits: H = 0.01 beside δ = 10 would be 0 or negative), so H is what is rounded;
δ is kept beside it, exactly, and added again on reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.posterior import codec
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import Structure

DTYPES = (torch.float32, torch.bfloat16)


def check_dtype(dtype: Any) -> torch.dtype | None:
    """None, float32 or bfloat16, or :class:`InputError`.

    Float16 ends at 65,504 and at 6e-8, which precisions pass on both sides.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(
            f"dtype must be torch.float32, torch.bfloat16 or None (as it is), got {dtype!r}; "
            "precisions span more than float16 holds"
        )
    return dtype


def encode_as(
    form: Structure, prior: Prior, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As :func:`codec.encode`, with the precision in ``dtype`` (None: as it is).

    Raises:
        InputError: a dtype for a structure that is not diagonal, or one not in ``DTYPES``.
    """
    if check_dtype(dtype) is None:
        return codec.encode(form, prior)
    assert dtype is not None
    values = form.per_weight
    if values is None:
        raise InputError(
            f"dtype={dtype} rounds a diagonal precision, this one is {form.kind!r}: eigenvectors "
            "and factors are kept as they are; leave dtype out"
        )
    if any(torch.finfo(dtype).eps > torch.finfo(s.dtype).eps for s in values.values()):
        rounded = _data_part(values, prior, dtype)
        if rounded is not None:
            return rounded
    tensors, record = codec.encode(form, prior)
    cast = {n: t.to(dtype) if n in values else t for n, t in tensors.items()}
    return cast, {**record, "rounded": True}


def _data_part(
    values: Mapping[str, Tensor], prior: Prior, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """H = S − δ rounded, with δ as ``prior_outside``.

    None where H is negative somewhere, as IVON allows, or δ has an entry per weight: then S
    itself is to be rounded.
    """
    if prior.tensors:
        return None
    parts: dict[str, Tensor] = {}
    for name, s in values.items():
        delta = float(prior.of(name))
        part = s.double() - delta
        noise = torch.finfo(s.dtype).eps * delta  # δ itself was rounded in S
        part.masked_fill_(part.abs() <= noise, 0.0)
        if bool((part < 0).any()):
            return None
        parts[name] = part.to(dtype)
    record = {"structure": "diag", "prior_precision": 0.0, "prior_outside": prior.record}
    return parts, {**record, "rounded": True}
