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
from blr_analysis.posterior.checks import check_prior
from blr_analysis.posterior.means import Model, mean_of, tied_in
from blr_analysis.posterior.rounding import widened
from blr_analysis.posterior.structures import Diagonal, Prior, Structure

Parts = tuple[dict[str, Tensor], Structure, Prior, int, dict[str, Any]]


def load_parts(path: str, model: Model | None, prior_precision: Prior | None) -> Parts:
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
    if bare or record.get("rounded"):
        form = widened(form, mean)
    outside = record.get("prior_outside")
    if prior_precision is not None:
        outside = _given(prior_precision, prior, outside, form, path)
    if outside is not None:
        form, prior = _on(form, mean).plus_prior(outside), outside
    _check_positive(form, prior, path)
    return mean, form, prior, n_data, rest


def _given(given: Prior, inside: Prior, outside: Any, form: Structure, path: str) -> Prior | None:
    """The user's δ, to be added; None where the file's is the same."""
    check_prior(given, form.shapes)
    if not isinstance(form, Diagonal):
        _refuse_prior(given, inside, path)
        return None
    if _is_zero(inside):
        return given
    if _same(given, inside, form):
        return outside
    _refuse_prior(given, inside, path)
    return None


def _refuse_prior(given: Prior, inside: Prior, path: str) -> None:
    raise PosteriorError(
        f"{path!r} holds a precision with the prior precision {_words(inside)} in it, so "
        f"prior_precision={_words(given)} cannot be added; leave it out"
    )


def _words(prior: Prior) -> str:
    return "of each parameter" if isinstance(prior, Mapping) else f"{float(prior):g}"


def _is_zero(prior: Prior) -> bool:
    values = prior.values() if isinstance(prior, Mapping) else [prior]
    return all(not bool(torch.as_tensor(v).any()) for v in values)


def _same(one: Prior, two: Prior, form: Structure) -> bool:
    def of(prior: Prior, name: str) -> Tensor:
        value = prior[name] if isinstance(prior, Mapping) else prior
        return torch.as_tensor(value, dtype=torch.float64).expand(form.shapes[name])

    return all(torch.equal(of(one, n), of(two, n)) for n in form.shapes)


def _on(form: Structure, mean: Mapping[str, Tensor]) -> Diagonal:
    assert isinstance(form, Diagonal)
    return Diagonal({n: s.to(mean[n].device) for n, s in form.values.items()})


def _check_positive(form: Structure, prior: Prior, path: str) -> None:
    if not isinstance(form, Diagonal) or not _is_zero(prior):
        return
    for name, s in form.values.items():
        empty = int((s == 0).sum())
        if empty:
            raise PosteriorError(
                f"{path!r} holds the data's part of a precision, which is 0 in {empty} of "
                f"{s.numel()} entries of {name!r}: a posterior needs a prior there. Pass "
                "prior_precision="
            )
