"""From a stored precision to a posterior's parts: the mean and the prior that the file leaves out.

What stands in a file, by its record:

    prior_precision   δ that is inside the stored precision
    prior_outside     δ that is not, and is added on reading (where H = S − δ was stored)

so that the data's part is always "stored − prior_precision".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.files import Folder, Loaded, Source, fingerprint, storage
from blr_analysis.posterior import codec
from blr_analysis.posterior.prior import Given, Prior, Shapes
from blr_analysis.posterior.structures import Diagonal, Structure

Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
Parts = tuple[dict[str, Tensor], Structure, Prior, int, dict[str, Any]]


def load_parts(path: str, model: Model | None, prior_precision: Given | None) -> Parts:
    """Mean, S, δ, n_data and the rest of the record; see :meth:`Posterior.load`."""
    tensors, record = storage.read(path)
    mean, form, prior, n_data, rest = codec.decode(tensors, record, path)
    if mean is not None and model is not None:
        raise PosteriorError(f"{path!r} holds its own mean: leave model out")
    bare = mean is None
    mean = _mean_of(model, form.shapes, record, path) if mean is None else mean
    form = _placed(form, mean, wide=bare or bool(record.get("rounded")))
    kept = record.get("prior_outside")
    outside = None if kept is None else Prior.of_any(kept)
    if prior_precision is not None:
        given = Prior.read(prior_precision, form.shapes)
        if form.per_weight is not None and prior.is_zero:
            outside = given
        elif form.per_weight is None or not given.equals(prior, form.shapes):
            raise PosteriorError(
                f"{path!r} holds a precision with its prior in it; leave prior_precision out"
            )
    if outside is not None:
        form, prior = form.plus_prior(outside), outside
    _check_positive(form, prior, path)
    return mean, form, prior, n_data, rest


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
                f"{path!r} holds the data's part of a precision, 0 in {empty} of {s.numel()} "
                f"entries of {name!r}: pass prior_precision="
            )


def _mean_of(
    model: Model | None, shapes: Shapes, record: Mapping[str, Any], path: str
) -> dict[str, Tensor]:
    """One tensor per name of ``shapes``; tied tensors may have any of their names in the model.

    Raises:
        InputError: ``model`` is none, or holds no numbers.
        StorageError: the folder cannot be read.
        PosteriorError: names or shapes are missing, or the weights are not those whose
            fingerprint was recorded. A module or a state dict is taken as it is.
    """
    source = _opened(model, record.get("model_sha256"), path)
    tied = record.get("tied")
    aliases = tied if isinstance(tied, dict) else {}
    keys = {n: next((k for k in (n, *aliases.get(n, ())) if k in source.specs), n) for n in shapes}
    held = {n: source.specs[k].shape for n, k in keys.items() if k in source.specs}
    wrong = [
        f"{n}: {f'{held[n]}, not {tuple(shape)}' if n in held else 'not there'}"
        for n, shape in shapes.items()
        if held.get(n) != tuple(shape)
    ]
    if wrong:
        raise PosteriorError(
            f"the model is not the one whose precision {path!r} holds: {some(wrong)}; its "
            f"tensors are called {some(list(source.specs))}"
        )
    return {n: source.tensor(key) for n, key in keys.items()}


def _opened(model: Model | None, sha256: str | None, path: str) -> Source:
    if isinstance(model, nn.Module):
        return Loaded("model", dict(model.named_parameters(remove_duplicate=False)))
    if isinstance(model, Mapping):
        return Loaded("model", {n: t for n, t in model.items() if isinstance(t, Tensor)})
    if model is None:
        raise PosteriorError(
            f"{path!r} holds precisions without a mean: pass model=, the module, its state_dict, "
            "or the folder with the weights it belongs to"
        )
    if not isinstance(model, (str, os.PathLike)):
        raise InputError(
            "model must be a torch.nn.Module, a state dict, or the path of a folder of "
            f"safetensors, got {type(model).__name__}"
        )
    source = Folder.open(model)
    if sha256 is not None and fingerprint(source, progress=False) != sha256:
        raise PosteriorError(
            f"the weights in {os.fspath(model)!r} are not those beside which {path!r} was written "
            "(their sha256 differ): name the right folder, or pass the module or its state_dict"
        )
    return source
