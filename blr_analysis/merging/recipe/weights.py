"""Weights and precisions of the models of a recipe: numbers, defaults, and what has no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from blr_analysis.errors import InputError
from blr_analysis.merging.job import Member, Weight
from blr_analysis.merging.methods import Method
from blr_analysis.merging.recipe.layer_weights import LayerWeights, Setting, constant, scaled
from blr_analysis.merging.recipe.members import Listed, depths_of
from blr_analysis.merging.recipe.paths import beside_model, precision_path
from blr_analysis.merging.recipe.reading import Reading, Way, first, levels
from blr_analysis.merging.recipe.schema import FOREIGN, Parameters, RecipeText
from blr_analysis.merging.weighting import default_weights


def members(
    recipe: RecipeText,
    method: Method,
    base: Path | None,
    found: Sequence[Listed],
    reading: Reading,
) -> tuple[tuple[Member, ...], bool | None]:
    """The members with their weights and precisions, and whether weights are still to be
    normalized; None where the method decides."""
    parameters = levels(recipe)
    _tell_ignored(method, found, parameters, reading)
    weights, normalize = _weights(method, base, found, parameters, reading)
    missing = first(parameters, "missing_precision", "error")
    precisions = [
        _precision(one, missing, reading) if method.uses_precisions else None for one in found
    ]
    unused = [o.way for o in found if o.entry.precision is not None]
    if unused and not method.uses_precisions:
        reading.note(
            (*unused[0], "precision"), f"{method.name} takes no precisions: they are not read"
        )
    return tuple(
        Member(one.model, precision, weight, one.entry.n_data)
        for one, precision, weight in zip(found, precisions, weights, strict=True)
    ), normalize


def base_precision_of(
    recipe: RecipeText, method: Method, base: Path | None, reading: Reading
) -> Path | None:
    """H_0: as named, or the folder beside the base; ``base_precision: null`` takes none."""
    way = ("base_precision",)
    stands_in = first(levels(recipe), "missing_precision") == "base" and method.uses_precisions
    if not (method.uses_base_precision or stands_in):
        if recipe.base_precision is not None:
            reading.note(way, f"{method.name} takes no base_precision: it is not read")
        return None
    if recipe.base_precision is not None:
        try:
            return precision_path(recipe.base_precision, reading.folder)
        except InputError as fault:
            raise reading.wrong(way, fault) from None
    if "base_precision" in recipe.model_fields_set or base is None:
        return None
    found = beside_model(base)
    if found is not None:
        reading.note(("base_model",), f"base_precision: taken from {str(found)!r}, beside the base")
    return found


def _weights(
    method: Method,
    base: Path | None,
    found: Sequence[Listed],
    parameters: Sequence[tuple[Way, Parameters]],
    reading: Reading,
) -> tuple[Sequence[Weight], bool | None]:
    without = [one for one in found if not one.settings]
    if without and len(without) < len(found) and not method.uses_precisions:
        raise reading.wrong(
            without[0].way,
            "this model has no weight, and others have: write parameters: {weight: …}",
        )
    usual = default_weights(method.name, len(found))
    if method.normalize:
        usual = [1.0] * len(found)
    if without and method.name == "task_arithmetic":
        reading.note(("models",), f"no weights: {usual[0]:g} for each model, one over their number")
    chain = tuple(part.lambda_ for _, part in parameters if part.lambda_ is not None)
    chains = [*(one.settings for one in found), chain]
    around: Mapping[str, int] = {}
    if any(constant(settings) is None for settings in chains):
        around = depths_of(
            base or found[0].model, ("base_model",) if base else ("models",), reading
        )
    weights = [
        _weight(one.settings, default, around) for one, default in zip(found, usual, strict=True)
    ]
    flag = first(parameters, "normalize")
    normalize = None if flag is None else bool(flag)
    factor = _weight(chain, 1.0, around)
    if method.name != "task_arithmetic" or factor == 1.0:
        return weights, normalize
    try:
        return scaled(weights, factor, normalize=bool(normalize)), False
    except InputError as fault:
        raise reading.wrong(("parameters", "normalize"), fault) from None


def _weight(settings: tuple[Setting, ...], default: float, around: Mapping[str, int]) -> Weight:
    plain = constant(settings, default)
    return LayerWeights(settings, around, default) if plain is None else plain


def _precision(one: Listed, missing: object, reading: Reading) -> Path | None:
    """H_t: as named, or the folder ``precision`` of the model."""
    way = (*one.way, "precision")
    if one.entry.precision is not None:
        try:
            return precision_path(one.entry.precision, reading.folder)
        except InputError as fault:
            raise reading.wrong(way, fault) from None
    found = None if "precision" in one.entry.model_fields_set else beside_model(one.model)
    if found is None and missing == "error":
        raise reading.wrong(
            way,
            f"{one.entry.model!r} has no precision: no key 'precision', and no folder "
            f"{str(one.model / 'precision')!r}. `blr-analysis fisher` makes one; or say what "
            "stands for it: parameters: {missing_precision: base} or zero",
        )
    return found


def _tell_ignored(
    method: Method,
    found: Sequence[Listed],
    parameters: Sequence[tuple[Way, Parameters]],
    reading: Reading,
) -> None:
    """Parameters without effect: a note where mergekit ignores them too, else an error."""
    own = [((*one.way, "parameters"), one.parameters, True) for one in found]
    for way, part, of_model in (*((w, p, False) for w, p in parameters), *own):
        names = set(part.model_fields_set) - {"int8_mask", "weight"}
        for name in sorted(names, key=lambda n: reading.found.line((*way, n.rstrip("_")))):
            key = name.rstrip("_")
            said = f"{key} has no effect on {method.name}"
            if name in FOREIGN or (name == "lambda_" and method.name != "task_arithmetic"):
                if method.uses_precisions:
                    raise reading.wrong((*way, key), f"{said}: take it out")
                reading.note((*way, key), f"{said}, here as in mergekit")
            elif of_model:
                reading.note(
                    (*way, key), f"{key} holds for all models: it has an effect only under the "
                    "recipe's own parameters, here as in mergekit"
                )  # fmt: skip
            elif (name == "delta" and not method.uses_base_precision) or (
                name == "missing_precision" and not method.uses_precisions
            ):
                reading.note((*way, key), said)
