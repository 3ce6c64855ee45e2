"""Which models a recipe merges: each a folder, named once, and whole."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blr_analysis.errors import BLRError, StorageError
from blr_analysis.files import Folder
from blr_analysis.merging.methods import METHODS, Method
from blr_analysis.merging.recipe.layer_weights import Setting, depths
from blr_analysis.merging.recipe.paths import same_place
from blr_analysis.merging.recipe.reading import Reading, Way, levels
from blr_analysis.merging.recipe.schema import Entry, ModelParameters, RecipeText, SliceSource
from blr_analysis.merging.recipe.vocabularies import renumbered

# Methods of mergekit that recipes name and this package has not.
ELSEWHERE = (
    "arcee_fusion", "breadcrumbs", "breadcrumbs_ties", "dare_linear", "dare_ties", "della",
    "della_linear", "karcher", "model_stock", "multislerp", "nearswap", "nuslerp", "passthrough",
    "sce", "slerp", "ties",
)  # fmt: skip


@dataclass(frozen=True)
class Listed:
    """One entry of the recipe, with its folder."""

    way: Way
    entry: Entry
    model: Path
    settings: tuple[Setting, ...]

    @property
    def parameters(self) -> ModelParameters:
        """Its parameters, empty where it has none."""
        return self.entry.parameters or ModelParameters()


def method_of(recipe: RecipeText, reading: Reading) -> Method:
    """The method, which must be one of this package's."""
    name = recipe.merge_method
    if name in METHODS:
        return METHODS[name]
    known = ", ".join(METHODS)
    near = difflib.get_close_matches(name, METHODS, n=1)
    meant = f"did you mean {near[0]!r}? Known" if near else "known"
    what = f"merge_method: unknown method {name!r}; {meant} here: {known}"
    if name in ELSEWHERE:
        what = (
            f"merge_method: {name!r} of mergekit is not here; known here: {known}. "
            "Run this recipe with mergekit, or choose gradient_matching, which weighs every "
            "parameter by its precision instead of trimming or rotating"
        )
    raise reading.wrong(("merge_method",), what)


def base_of(recipe: RecipeText, method: Method, reading: Reading) -> Path | None:
    """θ_0, as the recipe or its only slice names it."""
    way: Way = ("base_model",)
    text = recipe.base_model
    for at, part in enumerate(recipe.slices or ()):
        if part.base_model is not None and text not in (None, part.base_model):
            raise reading.wrong(
                ("slices", at, "base_model"), f"another base_model than {text!r} of the recipe"
            )
        if part.base_model is not None:
            text, way = part.base_model, ("slices", at, "base_model")
    if text is not None:
        return reading.place(way, text)
    if method.needs_base:
        raise reading.wrong(
            ("merge_method",),
            f"{method.name} needs base_model: the model that all the others were fine-tuned from",
        )
    return None


def listed(recipe: RecipeText, method: Method, base: Path | None, reading: Reading) -> list[Listed]:
    """The models that take part, each once; the base only where it is averaged like the others."""
    above = tuple(part.weight for _, part in levels(recipe) if part.weight is not None)
    found: list[Listed] = []
    for way, entry in _entries(recipe, reading):
        model = reading.place((*way, "model"), entry.model, base)
        own = entry.parameters.weight if entry.parameters else None
        one = Listed(way, entry, model, above if own is None else (own, *above))
        twin = next((other for other in found if same_place(other.model, model)), None)
        if twin is not None:
            raise reading.wrong(
                (*way, "model"),
                f"the same model as on line {reading.found.line((*twin.way, 'model'))}: each is "
                "named once; add up the weights (mergekit would count it once, too)",
            )
        found.append(one)
    others = [o for o in found if base is None or not same_place(o.model, base)]
    own = next((o for o in found if o not in others), None)
    if method.uses_base:
        if own is not None:
            _ignore_base(own, method, reading)
        found = others
    elif method.name == "linear" and base is not None and own is None and recipe.models:
        found += _base_too(recipe, base, above, reading)
    if not found:
        raise reading.wrong(("models",), "there is no model beside the base: nothing to merge")
    return found


def _entries(recipe: RecipeText, reading: Reading) -> list[tuple[Way, Entry]]:
    """The models, or the sources of a slice that holds whole models."""
    if recipe.modules is not None:
        raise reading.wrong(
            ("modules",), "modules merge the parts of a model apart: here, whole models are merged"
        )
    if (recipe.models is None) == (recipe.slices is None):
        way = ("slices",) if recipe.slices is not None else ()
        raise reading.wrong(way, "expected models, or slices of whole models: exactly one of them")
    if recipe.models is not None:
        if not recipe.models:
            raise reading.wrong(("models",), "models: the list is empty")
        return [(("models", i), entry) for i, entry in enumerate(recipe.models)]
    slices = recipe.slices or []
    if len(slices) != 1:
        way = ("slices", 1) if slices else ("slices",)
        raise reading.wrong(
            way,
            f"slices: {len(slices)} slices; here, whole models are merged: expected one slice over "
            "all layers, or models. Run recipes that put layers together with mergekit",
        )
    if slices[0].residual_weight is not None:
        raise reading.wrong(("slices", 0, "residual_weight"), "residual_weight is not known here")
    if not slices[0].sources:
        raise reading.wrong(("slices", 0, "sources"), "slices[0].sources: the list is empty")
    return [(("slices", 0, "sources", i), e) for i, e in enumerate(slices[0].sources)]


def check_vocabularies(found: Sequence[Listed], base: Path | None, reading: Reading) -> None:
    """Raise where models number their tokens differently: their rows are other words."""
    first = found[0].model if base is None else base
    for one in found:
        try:
            odd = renumbered(first, one.model)
        except StorageError as fault:
            raise reading.wrong((*one.way, "model"), fault) from fault
        if odd:
            token, (mine, theirs) = next(iter(odd.items()))
            raise reading.wrong(
                (*one.way, "model"),
                f"{one.entry.model!r} and {str(first)!r} number {len(odd):,} tokens differently "
                f"({token!r} is {theirs} and {mine}), so that a row of their embeddings means "
                "another token: rows are merged as they stand, and not put in another order",
            )


def check_whole(found: Sequence[Listed], base: Path | None, reading: Reading) -> None:
    """Raise where a source of the slice is not all layers of its model."""
    for one in found:
        if not isinstance(one.entry, SliceSource):
            continue
        way = (*one.way, "layer_range")
        layers = max(depths_of(base or one.model, way, reading).values(), default=0)
        if one.entry.layer_range != (0, layers):
            raise reading.wrong(
                way,
                f"layer_range {list(one.entry.layer_range)}, but {one.entry.model!r} has layers "
                f"[0, {layers}]: here, whole models are merged. Run recipes that take models apart "
                "with mergekit",
            )


def _ignore_base(own: Listed, method: Method, reading: Reading) -> None:
    """The base among the models, as mergekit's users write it: its step is 0."""
    said = bool(own.entry.precision or own.entry.n_data or own.parameters.weight)
    if said and method.uses_precisions:
        raise reading.wrong(
            (*own.way, "model"),
            "this is base_model itself, which has no step of its own to weigh: take it out of the "
            "models (its precision is base_precision; fisher averages it like the others where "
            "base_model is left out)",
        )
    if said:
        reading.note(own.way, "base_model among the models: its weight has no effect")


def _base_too(
    recipe: RecipeText, base: Path, above: tuple[Setting, ...], reading: Reading
) -> list[Listed]:
    """mergekit's `linear` averages an unlisted base where a weight holds for all models."""
    way = ("base_model",)
    if not above:
        reading.note(way, "base_model gives config and tokenizer, and is not averaged in")
        return []
    reading.note(way, "base_model is averaged in with the weight of all, as mergekit does")
    return [Listed(way, Entry(model=recipe.base_model or ""), base, above)]


def depths_of(model: Path, way: Way, reading: Reading) -> Mapping[str, int]:
    try:
        return depths(Folder.open(model).specs)
    except BLRError as fault:
        raise reading.wrong(way, f"the layers of the model are needed here, and {fault}") from fault
