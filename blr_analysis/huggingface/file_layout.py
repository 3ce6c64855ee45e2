"""How a model's parameters stand in the files of its folder: under other names, and in other
pieces, where transformers converts weights while it loads them.

The reversal is that of ``save_pretrained``. It is run on tensors that are filled with a mark, a
number of its own for every parameter: where the marks arrive, there the parameter stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, told_as
from blr_analysis.files import Spec

GOLDEN = 0.6180339887498949  # whose multiples, modulo 1, are never alike

Tensors = dict[str, Tensor]
Specs = Mapping[str, Spec]


@dataclass(frozen=True)
class FileLayout:
    """Where the parameters of a model stand in its folder's files.

    Attributes:
        model: of transformers.
        folder: where its files are.
        specs: shapes and dtypes of the tensors there.
        names: the tensors in the files that hold a parameter, by its name in the model.
        aliases: the name of a parameter, or of one that is tied to it, that the files hold.
        renamed: the parameters that are whole tensors there, in the same order of numbers.
    """

    model: Any
    folder: Path
    specs: Specs
    names: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str]
    renamed: frozenset[str]

    def tensors(self, values: Mapping[str, Tensor]) -> Tensors:
        """Numbers per weight, by the model's names, as the files hold the weights.

        Raises:
            ModelError: a tensor of the files whose other part belongs to parameters without values.
        """
        converted = {n for n in values if n not in self.renamed}
        stored = {self.names[n][0]: v for n, v in values.items() if n not in converted}
        written = as_written(self.model, {self.aliases[n]: values[n] for n in converted})
        for name, tensor in written.items():
            place = stored_name(self.model, self.specs, name, tensor)
            if place is None:
                raise ModelError(f"{name!r} is trained in part: train all of it, or nothing")
            stored[place] = tensor
        return stored

    @property
    def frozen(self) -> list[str]:
        """The tensors in the files that hold what is not trained."""
        parameters = self.model.named_parameters()
        return [place for n, p in parameters if not p.requires_grad for place in self.names[n]]

    @property
    def tied(self) -> dict[str, list[str]]:
        """The other names of tensors in the files that the model has in several places."""
        others = {}
        for name, aliases in _names_by_parameter(self.model).items():
            if len(aliases) > 1 and name in self.renamed:
                place = self.names[name][0]
                others[place] = [alias for alias in aliases if alias != place]
        return others

    def one_name_each(self, wanted: str) -> dict[str, str]:
        """The name of each parameter in the files.

        Args:
            wanted: what needs it, for the error.

        Raises:
            ModelError: parameters that are no whole tensors there.
        """
        apart = sorted(set(self.names) - self.renamed)
        if apart:
            where = f"{str(self.folder)!r} holds {some(apart)} in other pieces"
            raise ModelError(f"{where} than transformers loads: {wanted}")
        return {name: places[0] for name, places in self.names.items()}


def file_layout(model: Any, specs: Specs, folder: Path) -> FileLayout:
    """Where the parameters of a model stand in its folder's files.

    Raises:
        ModelError: a parameter that is in no file, or was converted beyond return.
    """
    places = _names_by_parameter(model)
    every = [alias for aliases in places.values() for alias in aliases]
    shapes = {alias: model.get_parameter(alias).shape for alias in every}
    marks = {
        alias: torch.tensor((k + 1) * GOLDEN % 1).expand(shapes[alias])
        for k, alias in enumerate(every)
    }
    as_saved = _found(model, specs, marks, as_written(model, marks))
    as_named = _found(model, specs, marks, marks)
    names, chosen, renamed = {}, {}, set()
    for name, aliases in places.items():
        tried = [(a, found) for found in (as_saved, as_named) for a in aliases if a in found]
        if not tried:
            shape = list(shapes[name])
            missing = f"{str(folder)!r} holds no {name!r} {shape}, under no other name"
            raise ModelError(f"{missing}: write it anew with model.save_pretrained")
        alias, found = tried[0]
        chosen[name] = alias
        names[name], whole = found[alias]
        if whole:
            renamed.add(name)
    return FileLayout(model, folder, specs, names, chosen, frozenset(renamed))


def _names_by_parameter(model: Any) -> dict[str, list[str]]:
    """The names of each parameter: its own first, then those of tied places."""
    aliases: dict[int, list[str]] = {}
    for alias, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(alias)
    return {names[0]: names for names in aliases.values()}


def as_written(model: Any, tensors: Tensors) -> Tensors:
    """Tensors by the model's names as ``save_pretrained`` writes them; before its release 5,
    transformers converts none.

    Raises:
        ModelError: a conversion that transformers cannot reverse.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors
    name = type(model).__name__
    with told_as(ModelError, f"transformers cannot put back the weights of {name}"):
        return revert_weight_conversion(model, dict(tensors))


def stored_name(model: Any, specs: Specs, name: str, tensor: Tensor) -> str | None:
    """The name in the files of a tensor of this name and shape: without the prefix of the base
    model, where they were saved without."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    for tried in (name, name.removeprefix(prefix)):
        if tried in specs and specs[tried].shape == tuple(tensor.shape):
            return tried
    return None


def _found(
    model: Any, specs: Specs, marks: Tensors, written: Tensors
) -> dict[str, tuple[tuple[str, ...], bool]]:
    """The tensors in the files that hold each marked one, all of it, and whether it is the whole
    of one as it stands."""
    by_mark = {float(mark.flatten()[0]): name for name, mark in marks.items() if mark.numel()}
    counts = dict.fromkeys(marks, 0)
    places: dict[str, list[str]] = {}
    whole = {}
    for name, tensor in written.items():
        place = stored_name(model, specs, name, tensor)
        if place is None:
            continue
        for mark, count in _marks_in(tensor):
            source = by_mark.get(mark)
            if source is not None:
                counts[source] += count
                places.setdefault(source, []).append(place)
                whole[source] = tensor is marks[source]
    return {
        name: (tuple(held), whole[name])
        for name, held in places.items()
        if counts[name] == marks[name].numel()
    }


def _marks_in(tensor: Tensor) -> list[tuple[float, int]]:
    """The marks of a tensor and how often each stands in it; repeated dimensions are read once."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    values, counts = tensor[once].unique(return_counts=True)
    repeats = tensor.numel() // max(1, tensor[once].numel())
    return [(v, c * repeats) for v, c in zip(values.tolist(), counts.tolist(), strict=True)]
