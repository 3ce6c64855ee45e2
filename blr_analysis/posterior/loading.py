"""From a stored precision to a posterior's parts: the mean and the prior that the file leaves out.

What stands in a file, by its record:

    prior_precision   δ that is inside the stored precision
    prior_outside     δ that is not, and is added on reading (where H = S − δ was stored)

so that the data's part is always "stored − prior_precision".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import PosteriorError
from blr_analysis.files import storage
from blr_analysis.posterior import codec
from blr_analysis.posterior.means import Model, mean_of, tied_in
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures import Diagonal, Structure

Parts = tuple[dict[str, Tensor], Structure, Prior, int, dict[str, Any]]


def load_parts(path: str, model: Model | None, prior_precision: Given | None) -> Parts:
    """Mean, S, δ, n_data and the rest of the record; see :meth:`Posterior.load`."""
    tensors, record = storage.read(path)
    mean, form, prior, n_data, rest = codec.decode(tensors, record, path)
    bare = mean is None
    if mean is None:
        if model is None:
            raise PosteriorError(
                f"{path!r} holds precisions without a mean, to merge models with: pass model=, "
                "the module, its state_dict, or the folder with the weights it belongs to"
            )
        sha256 = record.get("model_sha256")
        tied = tied_in(record)
        mean = mean_of(model, form.shapes, tied=tied, sha256=sha256, path=path)
    elif model is not None:
        raise PosteriorError(f"{path!r} holds its own mean: leave model out")
    form = _placed(form, mean, wide=bare or bool(record.get("rounded")))
    kept = record.get("prior_outside")
    outside = None if kept is None else Prior.of_any(kept)
    if prior_precision is not None:
        given = Prior.read(prior_precision, form.shapes)
        outside = _given(given, prior, outside, form, path)
    if outside is not None:
        form, prior = form.plus_prior(outside), outside
    _check_positive(form, prior, path)
    return mean, form, prior, n_data, rest


def _given(
    given: Prior, inside: Prior, outside: Prior | None, form: Structure, path: str
) -> Prior | None:
    """The user's δ, to be added; None where the file's is the same."""
    if form.per_weight is not None:
        if inside.is_zero:
            return given
        if given.equals(inside, form.shapes):
            return outside
    raise PosteriorError(
        f"{path!r} holds a precision with its prior in it; leave prior_precision out"
    )


def _placed(form: Structure, mean: Mapping[str, Tensor], *, wide: bool) -> Structure:
    """One number per weight beside its mean; ``wide``: in float32, or in the mean's dtype where
    that is wider."""
    if form.per_weight is None:
        return form
    values = {}
    for name, s in form.per_weight.items():
        dtype = torch.promote_types(torch.float32, mean[name].dtype) if wide else s.dtype
        values[name] = s.to(mean[name].device, dtype)
    return Diagonal(values)


def _check_positive(form: Structure, prior: Prior, path: str) -> None:
    if form.per_weight is None or not prior.is_zero:
        return
    for name, s in form.per_weight.items():
        empty = int((s == 0).sum())
        if empty:
            raise PosteriorError(
                f"{path!r} holds the data's part of a precision, which is 0 in {empty} of "
                f"{s.numel()} entries of {name!r}: a posterior needs a prior there. Pass "
                "prior_precision="
            )
