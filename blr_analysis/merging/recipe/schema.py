"""What a recipe may say: its keys and the kind of value of each, and what is wrong with others.

The keys are mergekit's, as far as whole models are merged with the methods that are here, and
this package's own beside them (``precision``, ``base_precision``, ``n_data``, ``delta``,
``missing_precision``).
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blr_analysis.errors import InputError
from blr_analysis.merging.recipe.located import Located, spelled
from blr_analysis.merging.recipe.values import (
    Amount,
    Count,
    Dtype,
    Flag,
    LayerRange,
    Missing,
    Text,
    Unexpected,
    Weight,
)

MOST_COMPLAINTS = 5
# What other methods of mergekit take, and `linear` and `task_arithmetic` pay no heed to there.
FOREIGN = ("density", "epsilon", "gamma", "rescale", "t", "select_topk", "normalize_weights")


class Part(BaseModel):
    """A mapping of the recipe; a key that is not here is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class ModelParameters(Part):
    """``parameters`` of one model."""

    weight: Weight | None = None
    lambda_: Weight | None = Field(default=None, alias="lambda")
    normalize: Flag | None = None
    int8_mask: Any = None
    density: Any = None
    epsilon: Any = None
    gamma: Any = None
    rescale: Any = None
    t: Any = None
    select_topk: Any = None
    normalize_weights: Any = None


class Parameters(ModelParameters):
    """``parameters`` of the whole recipe."""

    delta: Amount | None = None
    missing_precision: Missing | None = None


class Entry(Part):
    """One of ``models``."""

    model: Text
    precision: Text | None = None
    n_data: Count | None = None
    parameters: ModelParameters | None = None


class SliceSource(Entry):
    """One of the ``sources`` of a slice."""

    layer_range: LayerRange


class Slice(Part):
    """One of ``slices``."""

    sources: list[SliceSource]
    base_model: Text | None = None
    residual_weight: Any = None
    parameters: Parameters | None = None


class Tokenizer(Part):
    """``tokenizer``, mergekit's longer form of ``tokenizer_source``."""

    source: Text = "base"
    tokens: Any = None
    pad_to_multiple_of: Any = None


class RecipeText(Part):
    """A recipe as it is written."""

    merge_method: Text
    base_model: Text | None = None
    base_precision: Text | None = None
    models: list[Entry] | None = None
    slices: list[Slice] | None = None
    modules: Any = None
    parameters: Parameters | None = None
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: Text | None = None
    tokenizer: Tokenizer | None = None
    chat_template: Text | None = None
    name: Any = None
    model_name: Any = None


PLACES: dict[tuple[str, ...], type[Part]] = {
    (): RecipeText,
    ("parameters",): Parameters,
    ("models",): Entry,
    ("models", "parameters"): ModelParameters,
    ("slices",): Slice,
    ("slices", "parameters"): Parameters,
    ("slices", "sources"): SliceSource,
    ("slices", "sources", "parameters"): ModelParameters,
    ("tokenizer",): Tokenizer,
}


def check(found: Located) -> RecipeText:
    """A recipe whose every key is known and of the right kind.

    Raises:
        InputError: every wrong key with its line, what was expected, and the nearest valid key.
    """
    if found.data is None:
        raise InputError(
            f"{found.name} is empty: a recipe needs at least merge_method and models, for example\n"
            "merge_method: linear\nmodels: [{model: ./a}, {model: ./b}]"
        )
    if not isinstance(found.data, dict):
        raise InputError(
            f"{found.where(())}: expected keys such as merge_method and models, got "
            f"{'a list' if isinstance(found.data, list) else repr(found.data)[:60]}."
        )
    try:
        return RecipeText.model_validate(found.data)
    except ValidationError as fault:
        complaints = sorted(_complaint(error, found) for error in fault.errors())
    texts = list(dict.fromkeys(text for _, text in complaints))
    more = len(texts) - MOST_COMPLAINTS
    last = [f"… and {more} more"] if more > 0 else []
    raise InputError("\n".join([*texts[:MOST_COMPLAINTS], *last]))


def _complaint(error: Any, found: Located) -> tuple[int, str]:
    """The line of one error of pydantic, and what to say about it."""
    cause = error.get("ctx", {}).get("error")
    path = tuple(error["loc"]) + (cause.at if isinstance(cause, Unexpected) else ())
    match error["type"]:
        case "extra_forbidden":
            text = _unknown(path)
        case "missing":
            text = f"the key {path[-1]!r} is missing"
            path = path[:-1]
        case "list_type":
            text = f"{spelled(path)}: expected a list, each item beginning with '- '"
        case "model_type" | "model_attributes_type":
            keys = ", ".join(_keys(PLACES[_names(path)]))
            text = f"{spelled(path)}: expected keys and values; keys: {keys}"
        case _:
            text = f"{spelled(path)}: {cause or error['msg']}"
    return found.line(path), f"{found.where(path)}: {text}."


def _unknown(path: tuple[str | int, ...]) -> str:
    key = str(path[-1])
    place = _names(path[:-1])
    known = _keys(PLACES[place])
    text = f"unknown key {spelled(path)!r}"
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.7)
    ways = [".".join([*p, key]) for p, part in PLACES.items() if p != place and key in _keys(part)]
    elsewhere = [way for way in ways if not way.startswith("slices")] or ways
    if near:
        return (
            f"{text}: did you mean {' or '.join(map(repr, near))}? Known here: {', '.join(known)}"
        )
    if elsewhere:
        return f"{text}; it belongs to {' or '.join(map(repr, elsewhere))}"
    return f"{text}; known here: {', '.join(known)}"


def _keys(part: type[Part]) -> list[str]:
    return [field.alias or name for name, field in part.model_fields.items()]


def _names(path: tuple[str | int, ...]) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str))
