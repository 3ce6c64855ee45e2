"""A recipe that is being read: where everything stands, and what the user should know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blr_analysis.errors import InputError
from blr_analysis.merging.recipe.located import Located
from blr_analysis.merging.recipe.paths import locate, same_place
from blr_analysis.merging.recipe.schema import Parameters, RecipeText

Way = tuple[str | int, ...]


@dataclass
class Reading:
    """A recipe that is being read: where it stands, and what the user should know of it."""

    found: Located
    folder: Path
    notes: list[str] = field(default_factory=list)

    def wrong(self, way: Way, what: object) -> InputError:
        """An error with file, line and column."""
        return InputError(f"{self.found.where(way)}: {str(what).rstrip('.')}.")

    def note(self, way: Way, what: str) -> None:
        """Something that is no error, with its line."""
        self.notes.append(f"line {self.found.line(way)}: {what}")

    def place(self, way: Way, text: str, base: Path | None = None) -> Path:
        """The folder of a model; ``MODEL+ADAPTER`` where MODEL is the base."""
        try:
            return locate(text, self.folder)
        except InputError as fault:
            model, plus, adapter = text.partition("+")
            if not plus:
                raise self.wrong(way, fault) from None
        try:
            onto, found = locate(model, self.folder), locate(adapter, self.folder)
        except InputError as fault:
            raise self.wrong(way, fault) from None
        if base is None or not same_place(onto, base):
            raise self.wrong(
                way,
                f"{text!r} applies an adapter to {model!r}: adapters are applied to base_model; "
                f"write base_model: {model}, and this among the models",
            )
        return found


def levels(recipe: RecipeText) -> list[tuple[Way, Parameters]]:
    """The parameters that hold for all models, what decides first."""
    found: list[tuple[Way, Parameters]] = []
    for at, part in enumerate(recipe.slices or ()):
        if part.parameters is not None:
            found.append((("slices", at, "parameters"), part.parameters))
    if recipe.parameters is not None:
        found.append((("parameters",), recipe.parameters))
    return found


def first(levels: Sequence[tuple[Way, Parameters]], name: str, default: object = None) -> object:
    """The value of a parameter that decides."""
    values = (getattr(part, name) for _, part in levels)
    return next((value for value in values if value is not None), default)
