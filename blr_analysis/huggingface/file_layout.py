"""Where a model's parameters stand in the files of its folder.

transformers converts weights while it loads them: parameters then have other names in the files,
or stand there in other pieces. ``save_pretrained`` reverses the conversion. The reversal is run
here on tensors that are filled with marks, a different number for every parameter. A parameter
stands where its mark arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, told_as
from blr_analysis.files import Spec

GOLDEN = 0.6180339887498949  # golden ratio − 1: its multiples modulo 1 all differ

Tensors = dict[str, Tensor]
Specs = Mapping[str, Spec]


@dataclass(frozen=True)
class FileLayout:
    """Where the parameters of a model stand in its folder's files.

    Attributes:
        model: a model of transformers.
        folder: where its files are.
        specs: shapes and dtypes of the tensors in the files.
        names: by parameter, the names of the tensors in the files that hold it.
        aliases: by parameter, the one of its names in the model that is written to the files. A
            tied parameter has several names.
        renamed: the parameters that are one whole tensor in the files, unchanged but for the name.
    """

    model: Any
    folder: Path
    specs: Specs
    names: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str]
    renamed: frozenset[str]

    def tensors(self, values: Mapping[str, Tensor]) -> Tensors:
        """A number for every weight, arranged as the files hold the weights.

        Args:
            values: by the model's names, tensors of the shapes of its parameters.

        Returns:
            By the files' names, tensors of the shapes in the files.

        Raises:
            ModelError: a tensor of the files also holds parameters that have no values.
        """
        stored = {}
        to_convert = {}
        for name, tensor in values.items():
            if name in self.renamed:
                stored[self.names[name][0]] = tensor
            else:
                to_convert[self.aliases[name]] = tensor
        for name, tensor in as_written(self.model, to_convert).items():
            file_name = stored_name(self.model, self.specs, name, tensor)
            if file_name is None:
                raise ModelError(f"{name!r} is trained in part: train all of it, or nothing")
            stored[file_name] = tensor
        return stored

    @property
    def frozen(self) -> list[str]:
        """The names in the files of the tensors that are not trained."""
        return [
            file_name
            for name, parameter in self.model.named_parameters()
            if not parameter.requires_grad
            for file_name in self.names[name]
        ]

    @property
    def tied(self) -> dict[str, list[str]]:
        """By the name in the files of a tied tensor, its further names in the model."""
        further_names = {}
        for name, aliases in _names_by_parameter(self.model).items():
            is_tied = len(aliases) > 1
            if is_tied and name in self.renamed:
                file_name = self.names[name][0]
                further_names[file_name] = [alias for alias in aliases if alias != file_name]
        return further_names

    def one_name_each(self, remedy: str) -> dict[str, str]:
        """By parameter, its name in the files.

        Args:
            remedy: what the user can do instead; the end of the error's message.

        Raises:
            ModelError: a parameter is not one whole tensor in the files.
        """
        converted = sorted(set(self.names) - self.renamed)
        if converted:
            raise ModelError(
                f"{str(self.folder)!r} holds {some(converted)} in other pieces than transformers "
                f"loads: {remedy}"
            )
        return {name: file_names[0] for name, file_names in self.names.items()}


class _Place(NamedTuple):
    """Where one parameter stands in the files.

    Attributes:
        names: the tensors that hold it.
        is_whole_tensor: whether it is one of these tensors as it stands.
    """

    names: tuple[str, ...]
    is_whole_tensor: bool


def file_layout(model: Any, specs: Specs, folder: Path) -> FileLayout:
    """Where the parameters of a model stand in its folder's files.

    Raises:
        ModelError: a parameter that is in no file, or was converted beyond return.
    """
    aliases_of = _names_by_parameter(model)
    marks = _marks(model, [alias for aliases in aliases_of.values() for alias in aliases])
    places_as_saved = _places(model, specs, marks, as_written(model, marks))
    places_by_name = _places(model, specs, marks, marks)
    chosen_aliases = {}
    places = {}
    for name, aliases in aliases_of.items():
        candidates = [
            (alias, places_of_marks[alias])
            for places_of_marks in (places_as_saved, places_by_name)
            for alias in aliases
            if alias in places_of_marks
        ]
        if not candidates:
            shape = list(model.get_parameter(name).shape)
            raise ModelError(
                f"{str(folder)!r} holds no {name!r} {shape}, under no other name: write it anew "
                "with model.save_pretrained"
            )
        chosen_aliases[name], places[name] = candidates[0]
    names = {name: place.names for name, place in places.items()}
    renamed = frozenset(name for name, place in places.items() if place.is_whole_tensor)
    return FileLayout(model, folder, specs, names, chosen_aliases, renamed)


def _marks(model: Any, names: Sequence[str]) -> Tensors:
    """For every parameter a tensor of its shape, filled with a number that no other one has.

    All entries share one place in memory.
    """
    return {
        name: torch.tensor((k + 1) * GOLDEN % 1).expand(model.get_parameter(name).shape)
        for k, name in enumerate(names)
    }


def _names_by_parameter(model: Any) -> dict[str, list[str]]:
    """By parameter, all of its names in the model: a tied one has several; the first is the key."""
    aliases: dict[int, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(alias)
    return {names[0]: names for names in aliases.values()}


def as_written(model: Any, tensors: Tensors) -> Tensors:
    """Tensors of the model's parameters as ``save_pretrained`` writes them, by their names there.

    transformers converts no weights before its release 5: the tensors are returned as they are.

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
    """The name in the files of a tensor of this name and shape; None where it is not there.

    A base model's weights may have been saved without their prefix (``model.``).
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    for candidate in (name, name.removeprefix(prefix)):
        if candidate in specs and specs[candidate].shape == tuple(tensor.shape):
            return candidate
    return None


def _places(model: Any, specs: Specs, marks: Tensors, written: Tensors) -> dict[str, _Place]:
    """Where the marked parameters stand among the tensors that are written.

    Parameters of which an entry is missing there are left out.
    """
    by_mark = {float(mark.flatten()[0]): name for name, mark in marks.items() if mark.numel()}
    n_entries = dict.fromkeys(marks, 0)
    file_names: dict[str, list[str]] = {}
    is_whole_tensor = {}
    for name, tensor in written.items():
        file_name = stored_name(model, specs, name, tensor)
        if file_name is None:
            continue
        for mark, count in _counted_marks(tensor):
            parameter = by_mark.get(mark)
            if parameter is not None:
                n_entries[parameter] += count
                file_names.setdefault(parameter, []).append(file_name)
                is_whole_tensor[parameter] = tensor is marks[parameter]
    return {
        parameter: _Place(tuple(names), is_whole_tensor[parameter])
        for parameter, names in file_names.items()
        if n_entries[parameter] == marks[parameter].numel()
    }


def _counted_marks(tensor: Tensor) -> list[tuple[float, int]]:
    """The different numbers of a tensor, and how often each stands in it."""
    # An expanded dimension (stride 0) repeats its first entry: that one is read alone.
    first_entries = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    distinct = tensor[first_entries]
    repeats = tensor.numel() // max(1, distinct.numel())
    values, counts = distinct.unique(return_counts=True)
    return [
        (value, count * repeats)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    ]
