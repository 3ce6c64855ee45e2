"""The slices of a recipe: layers that are merged with models and parameters of their own.

A recipe that lists ``models`` is one slice of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blr_analysis.checks import some
from blr_analysis.errors import InputError
from blr_analysis.merging.layer_weights import Rule
from blr_analysis.merging.methods import Method
from blr_analysis.merging.recipe_text import (
    Entry,
    ModelParameters,
    Parameters,
    Slice,
    WrittenRule,
    WrittenWeight,
)

# Parameters that may differ between slices: the others count for the whole recipe.
BY_LAYER = ("weight", "lambda_", "density", "epsilon", "gamma", "t")


@dataclass(frozen=True)
class Part:
    """Some layers of the merge, and what the recipe says about their models.

    Attributes:
        layers: the numbers of the layers; None: all of them.
        entries: the models that are merged there: by folder, what the recipe says about each.
        parameters: those of all these models.
    """

    layers: range | None
    entries: Mapping[Path, Entry]
    parameters: Parameters

    def rules(self, name: str, entry: Entry | None) -> tuple[Rule, ...]:
        """The rules of a parameter in the order in which they decide.

        Those of the model come first, then those of all models. Without an entry, only the latter
        are returned.
        """
        sections: list[ModelParameters] = [self.parameters]
        if entry is not None:
            sections.insert(0, entry.parameters)
        return tuple(rule for section in sections for rule in _read(getattr(section, name)))

    def all_have(self, name: str) -> bool:
        """Whether every model has a parameter."""
        return all(self.rules(name, entry) for entry in self.entries.values())

    def some_have(self, name: str) -> bool:
        """Whether at least one model has a parameter."""
        return any(self.rules(name, entry) for entry in self.entries.values())


def entries_of_slice(part: Slice) -> list[Entry]:
    """The models of a slice, written as under ``models``."""
    return [Entry(model=source.model, parameters=source.parameters) for source in part.sources]


def parameters_of_slice(parameters: Parameters, part: Slice) -> Parameters:
    """The recipe's parameters, and in their place those that a slice sets."""
    names = part.parameters.model_fields_set
    changes = {name: getattr(part.parameters, name) for name in names}
    return parameters.model_copy(update=changes)


def check_ranges(slices: Sequence[Slice], stacks: Mapping[str, int]) -> None:
    """Raise unless slices, one after the other, are all layers of every model.

    Args:
        stacks: the number of layers of each stack of the first model.
    """
    n_layers = max(stacks.values(), default=0)
    if not are_all_layers(slices, n_layers):
        raise InputError(
            f"slices: write layers 0 to {n_layers} of every model, in order; use mergekit "
            "for others"
        )
    if len(slices) > 1 and len(set(stacks.values())) > 1:
        raise InputError(
            f"slices: the model has stacks of {some(sorted(set(stacks.values())))} layers: write "
            "models, with filters"
        )


def are_all_layers(slices: Sequence[Slice], n_layers: int) -> bool:
    """Whether slices, one after the other, are layers 0 to ``n_layers`` of every model."""
    position = 0
    for part in slices:
        ranges = {source.layer_range for source in part.sources}
        first, last = part.sources[0].layer_range
        if len(ranges) > 1 or first != position or last <= first:
            return False
        position = last
    return position == n_layers


def check_parts(parts: Sequence[Part], method: Method) -> None:
    """Raise where slices differ in something that a method takes for the whole model.

    A model that a slice does not list has weight 0 there, which only weighted sums of entries can
    express.
    """
    first = parts[0]
    have_same_models = all(part.entries.keys() == first.entries.keys() for part in parts)
    is_weighted_sum = method.takes("weights") and method.span is None and method.matrix is None
    if not have_same_models and not is_weighted_sum:
        raise InputError(f"slices: {method.name} needs the same models in every slice")
    names = Parameters.model_fields.keys() - set(BY_LAYER)
    different = [
        name
        for name in sorted(names)
        if any(getattr(part.parameters, name) != getattr(first.parameters, name) for part in parts)
    ]
    if different:
        raise InputError(f"slices: {some(different)} must be the same in all slices")


def _read(written: WrittenWeight | None) -> list[Rule]:
    """The rules of a weight in any of its forms; none where it is not written."""
    if written is None:
        return []
    if isinstance(written, tuple):
        return [Rule(written)]
    rules: Sequence[WrittenRule] = written if isinstance(written, list) else [written]
    return [Rule(rule.value, _name_part(rule.filter)) for rule in rules]


def _name_part(written_filter: str | None) -> str:
    """What a tensor's name must contain; "", which is in every name, for ``*`` and no filter."""
    return "" if written_filter in (None, "*") else written_filter
