"""Tensors of models under the names that they get in the result: slices of layers put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from blr_analysis.errors import ModelError
from blr_analysis.files import Scratch, Source
from blr_analysis.merging.job import LayerSlice
from blr_analysis.merging.recipe.layer_weights import before_layers, layer_of


@dataclass(frozen=True)
class Place:
    """Where a tensor of the result is read."""

    source: Source
    name: str


class Arranged(Source):
    """Tensors of other sources under new names."""

    def __init__(self, name: str, places: Mapping[str, Place], notes: tuple[str, ...] = ()) -> None:
        self.name, self.notes, self._places = name, notes, places
        self.specs = {n: p.source.specs[p.name] for n, p in places.items()}

    def words(self, name: str) -> str:
        """How a tensor comes about in the source."""
        place = self._places[name]
        return place.source.words(place.name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """The same elements of the tensor that it is."""
        place = self._places[name]
        return place.source.read(place.name, start, stop, scratch)


def in_slices(
    slices: tuple[LayerSlice, ...], sources: Mapping[Path, Source], model: Path, *, base: bool
) -> Source:
    """A model as the slices arrange it. Slices that lack the model hold their first model's layers
    (its weight there is 0), those that lack the base hold its layers of the same numbers. What
    stands before the layers is of the first slice, what stands after them of the last.

    Raises:
        ModelError: the layers do not lie in one stack.
    """
    places: dict[str, Place] = {}
    offset = 0
    for k, part in enumerate(slices):
        first = next(iter(part.starts))
        owner = model if base or model in part.starts else first
        low = part.starts.get(owner, part.starts[first])
        source = sources[owner]
        stacks = {prefix for prefix, at in map(layer_of, source.specs) if at is not None}
        if len(stacks) != 1:
            raise ModelError(
                f"{source.name!r} has layers in {sorted(stacks)}: slices need one stack"
            )
        for name in source.specs:
            prefix, at = layer_of(name)
            if at is None:
                if k == (0 if before_layers(name) else len(slices) - 1):
                    places[name] = Place(source, name)
            elif low <= at < low + part.count:
                tail = name[len(f"{prefix}.{at}") :]
                places[f"{prefix}.{offset + at - low}{tail}"] = Place(source, name)
        has = 1 + max(at for _, at in map(layer_of, source.specs) if at is not None)
        if low + part.count > has:
            raise ModelError(f"{source.name!r} has fewer layers than the slices take")
        offset += part.count
    return Arranged(sources[model].name, places, sources[model].notes)
