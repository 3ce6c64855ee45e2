"""The mean for a precision that was stored without one: the weights of a model, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.files import Folder, fingerprint

Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
Shapes = Mapping[str, tuple[int, ...]]


def mean_of(
    model: Model, shapes: Shapes, *, tied: Mapping[str, list[str]], sha256: str | None, path: str
) -> dict[str, Tensor]:
    """One tensor per name of ``shapes``, from ``model``.

    Args:
        model: a module, a state dict, or a Hugging Face folder or ``.safetensors`` file.
        shapes: what the precision has.
        tied: the further names of tied tensors, under any of which they may be stored.
        sha256: the fingerprint of the folder beside which the precision was written; a folder
            that differs is refused. A module or a state dict is taken as it is.
        path: of the precision, for messages.

    Raises:
        InputError: ``model`` is none of these.
        StorageError: the folder cannot be read.
        PosteriorError: names or shapes are missing, or the weights are not those recorded.
    """
    if isinstance(model, nn.Module):
        held = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
        return _take(held, {n: tuple(t.shape) for n, t in held.items()}, shapes, tied, path)
    if isinstance(model, Mapping):
        held = {n: t.detach() for n, t in model.items() if isinstance(t, Tensor)}
        return _take(held, {n: tuple(t.shape) for n, t in held.items()}, shapes, tied, path)
    if not isinstance(model, (str, os.PathLike)):
        raise InputError(
            "model must be a torch.nn.Module, a state dict, or the path of a folder of "
            f"safetensors, got {type(model).__name__}"
        )
    source = Folder.open(Path(model))
    if sha256 is not None and fingerprint(source, progress=False) != sha256:
        raise PosteriorError(
            f"the weights in {os.fspath(model)!r} are not those beside which {path!r} was "
            "written (their sha256 differ): name the right folder. To take these weights all the "
            "same, load them and pass the module or its state_dict"
        )
    keys = _keys({n: s.shape for n, s in source.specs.items()}, shapes, tied, path)
    return {n: source.tensor(key) for n, key in keys.items()}


def _take(
    held: Mapping[str, Tensor],
    found: Shapes,
    shapes: Shapes,
    tied: Mapping[str, list[str]],
    path: str,
) -> dict[str, Tensor]:
    keys = _keys(found, shapes, tied, path)
    empty = [key for key in keys.values() if held[key].is_meta]
    if empty:
        raise PosteriorError(
            f"the model's {some(empty)} are on the meta device, without values: load the weights, "
            "or pass the folder that holds them"
        )
    return {n: held[key].clone() for n, key in keys.items()}


def _keys(
    found: Shapes, shapes: Shapes, tied: Mapping[str, list[str]], path: str
) -> dict[str, str]:
    keys, wrong = {}, []
    for name, shape in shapes.items():
        key = next((n for n in (name, *tied.get(name, [])) if n in found), None)
        if key is None:
            wrong.append(f"{name}: not there")
        elif tuple(found[key]) != tuple(shape):
            wrong.append(f"{name}: {tuple(found[key])}, not {tuple(shape)}")
        else:
            keys[name] = key
    if wrong:
        raise PosteriorError(
            f"the model is not the one whose precision {path!r} holds: {some(wrong)}; its "
            f"tensors are called {some(list(found))}"
        )
    return keys


def tied_in(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """The record's ``tied`` entry, empty where there is none."""
    tied = record.get("tied")
    return {n: list(map(str, v)) for n, v in tied.items()} if isinstance(tied, Mapping) else {}
